//! Memory that the ranks of a group share, and waiting for them.

use std::net::SocketAddr;
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::{Duration, Instant};

/// Memory that other ranks write.
pub(crate) type Words = Vec<AtomicU64>;

pub(crate) fn words(count: usize) -> Words {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

pub(crate) fn lo() -> SocketAddr {
    "127.0.0.1:0".parse().expect("an address")
}

/// Waits until `step` holds. The watchdog is generous, because machines are slow.
pub(crate) fn until(what: &str, mut step: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !step() {
        assert!(Instant::now() < end, "{what}: it does not come");
        thread::yield_now();
    }
}
