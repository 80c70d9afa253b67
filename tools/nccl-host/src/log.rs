//! The warnings that plugins log through their host's logger. The interface passes no context, so
//! all plugins of a process share one log of [`LINES_MAX`] lines.

use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_int};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

const LINES_MAX: usize = 256;
const SHOWN_MAX: usize = 3;
const WARN: c_int = 2;

unsafe extern "C" {
    /// The logger of `logger.c`, which formats a line and passes it to [`laxity_nccl_host_note`].
    pub(crate) fn laxity_nccl_host_logger(
        level: c_int,
        subsystems: std::ffi::c_ulong,
        file: *const c_char,
        line: c_int,
        format: *const c_char,
        ...
    );
}

static LINES: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

fn all() -> MutexGuard<'static, VecDeque<String>> {
    LINES.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn warnings() -> String {
    let lines = all();
    let last = lines.iter().skip(lines.len().saturating_sub(SHOWN_MAX));
    last.map(|line| format!("\n  the plugin: {line}")).collect()
}

pub(crate) fn note(line: String) {
    let mut lines = all();
    if lines.len() == LINES_MAX {
        lines.pop_front();
    }
    lines.push_back(line);
}

/// Copies a C string. Returns an empty string for null.
///
/// # Safety
/// `text` is null or a C string.
unsafe fn text_of(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null, so it is a C string, as the caller ensures.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Takes a line from `logger.c`.
///
/// # Safety
/// `file` is null or a C string, and so is `text`.
#[unsafe(no_mangle)]
unsafe extern "C" fn laxity_nccl_host_note(
    level: c_int,
    file: *const c_char,
    line: c_int,
    text: *const c_char,
) {
    if level != WARN {
        return;
    }
    // SAFETY: the plugin passed `file`, which the interface defines as null or a string. `text` is
    // the buffer of `logger.c`.
    let (file, text) = unsafe { (text_of(file), text_of(text)) };
    let text = text.trim_end();
    // Plugins pass the name of a function or a file, possibly with its path.
    let file = Path::new(&file).file_name().unwrap_or_default();
    let place = match (file.to_string_lossy(), line) {
        (file, _) if file.is_empty() => String::new(),
        (file, 0) => format!("{file}: "),
        (file, line) => format!("{file}:{line}: "),
    };
    note(format!("{place}{text}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_formatted_as_printf_does_and_kept_with_its_place_until_newer_ones_need_the_room() {
        let long = std::ffi::CString::new("x".repeat(5000)).unwrap();
        // SAFETY: the arguments fit the formats, and all strings end with a zero.
        unsafe {
            laxity_nccl_host_logger(
                WARN,
                16,
                c"/a/net.rs".as_ptr(),
                7,
                c"device %d of %s: %lu\n".as_ptr(),
                -3_i32,
                c"eth0".as_ptr(),
                9_000_000_000_u64,
            );
            laxity_nccl_host_logger(WARN, 16, std::ptr::null(), 0, c"%s".as_ptr(), long.as_ptr());
            laxity_nccl_host_logger(3, 16, std::ptr::null(), 0, c"no warning".as_ptr());
            laxity_nccl_host_logger(WARN, 16, c"net".as_ptr(), 0, std::ptr::null());
        }
        let lines: Vec<String> = all().iter().cloned().collect();
        assert!(lines.contains(&"net.rs:7: device -3 of eth0: 9000000000".to_owned()), "{lines:?}");
        assert!(lines.iter().any(|line| line.len() == 1023), "cut, not lost");
        assert!(lines.contains(&"net: ".to_owned()), "a null format");
        assert!(!lines.iter().any(|line| line.contains("no warning")));
        assert!(warnings().contains("\n  the plugin: net.rs:7: device -3 of eth0: 9000000000"));
        for number in 0..2 * LINES_MAX {
            note(format!("line {number}"));
        }
        assert_eq!(all().len(), LINES_MAX);
    }
}
