//! The messages between the lab's processes: JSON, one object a line.

use serde::Serialize;

/// Returns a message as a line.
///
/// # Panics
/// Never: messages of the lab have a JSON form.
pub fn line<T: Serialize>(message: &T) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).expect("messages have a JSON form");
    line.push(b'\n');
    line
}
