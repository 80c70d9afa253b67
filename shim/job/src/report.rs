//! What a library did in a process, written down at the process's end for whoever asks
//! (`LAXITY_REPORT`).
//!
//! One line of JSON per library and process, appended, so that the processes of a job, and what is
//! loaded in one of them, may share a file.

use core::fmt::{Display, Write as _};
use core::sync::atomic::{AtomicU64, Ordering};
use std::io::Write as _;

/// Names the file.
const REPORT_ENV: &str = "LAXITY_REPORT";

/// A counter for any thread. Relaxed: a statistic.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// Nothing yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Counts `n` more.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// So many.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A line that is being written.
#[derive(Debug)]
pub struct ReportLine(String);

impl ReportLine {
    /// Begins with which library it is, and in which process.
    #[must_use]
    pub fn of(library: &str) -> Self {
        let program = crate::settings::executable().unwrap_or_default();
        let mut line = Self(String::from("{"));
        let _ = write!(line.0, "\"library\":{}", quoted(library));
        line.text("program", &program);
        line.value("pid", std::process::id());
        line
    }

    /// A member that is JSON as it is displayed: a number, or a list that the caller made.
    pub fn value(&mut self, name: &str, value: impl Display) {
        let _ = write!(self.0, ",\"{name}\":{value}");
    }

    /// A member that is a string.
    pub fn text(&mut self, name: &str, text: &str) {
        let _ = write!(self.0, ",\"{name}\":{}", quoted(text));
    }

    /// Several counters.
    pub fn counts<'a>(&mut self, counts: impl IntoIterator<Item = (&'a str, u64)>) {
        for (name, count) in counts {
            self.value(name, count);
        }
    }

    /// The whole line.
    #[must_use]
    pub fn end(mut self) -> String {
        self.0.push_str("}\n");
        self.0
    }

    /// Appends it to the file that the environment names, if it does. There is nobody to return an
    /// error to: it is printed.
    pub fn append(self) {
        let Some(path) = std::env::var_os(REPORT_ENV).filter(|path| !path.is_empty()) else {
            return;
        };
        let file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path);
        // One write, so that lines of several processes don't mix.
        let result = file.and_then(|mut file| file.write_all(self.end().as_bytes()));
        if let Err(error) = result {
            let path = path.to_string_lossy();
            eprintln!("laxity: cannot write {REPORT_ENV}={path}: {error}");
        }
    }
}

fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c < ' ' => {
                let _ = write!(quoted, "\\u{:04x}", c as u32);
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_json() {
        assert_eq!(quoted("a\"b\\c\n"), r#""a\"b\\c\u000a""#);
    }

    #[test]
    fn a_line_says_whose_it_is_and_what_was_counted() {
        let mut line = ReportLine::of("some \"library\"");
        line.value("list", "[1,2]");
        line.counts([("some", 7), ("more", 0)]);
        let line = line.end();
        assert!(line.starts_with(r#"{"library":"some \"library\"","program":"#));
        assert!(
            line.ends_with(",\"list\":[1,2],\"some\":7,\"more\":0}\n"),
            "{line}"
        );
    }
}
