//! Reports of a library's counters, written at the process's end to the file that `LAXITY_REPORT`
//! names.
//!
//! A report is one line of JSON per library and process, and is appended. The processes of a job,
//! and several libraries of one process, may therefore share a file.

use core::fmt::{Display, Write as _};
use core::sync::atomic::{AtomicU64, Ordering};
use std::io::Write as _;

/// The variable that names the file.
const REPORT_ENV: &str = "LAXITY_REPORT";

/// A counter that any thread may use. Relaxed, because it is a statistic.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// Returns a counter of 0.
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds `n` to the counter.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Returns the counter's value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Sets the counter to 0.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// Defines the counters of a library: a struct of [`Count`]s, and a static with its value. Its
/// method `reported` returns all of them by name, and `reset` sets them to 0.
#[macro_export]
macro_rules! counters {
    (
        $(#[$of_type:meta])*
        $type:ident, $static:ident { $($(#[$doc:meta])* $counter:ident,)* }
    ) => {
        $(#[$of_type])*
        #[derive(Debug, Default)]
        pub(crate) struct $type {
            $($(#[$doc])* pub(crate) $counter: $crate::report::Count,)*
        }

        pub(crate) static $static: $type =
            $type { $($counter: $crate::report::Count::new(),)* };

        impl $type {
            fn reported(&self) -> impl IntoIterator<Item = (&'static str, u64)> {
                [$((stringify!($counter), self.$counter.get()),)*]
            }

            pub(crate) fn reset(&self) {
                $(self.$counter.reset();)*
            }
        }
    };
}

/// A line of a report that is being built.
#[derive(Debug)]
pub struct ReportLine(String);

impl ReportLine {
    /// Begins a line with the library, the program and the process.
    pub fn of(library: &str) -> Self {
        let program = crate::settings::executable().unwrap_or_default();
        let mut line = Self(String::from("{"));
        let _ = write!(line.0, "\"library\":{}", quoted(library));
        line.text("program", &program);
        line.value("pid", std::process::id());
        line
    }

    /// Adds a member whose displayed value is JSON, such as a number or a list.
    pub fn value(&mut self, name: &str, value: impl Display) {
        let _ = write!(self.0, ",\"{name}\":{value}");
    }

    /// Adds a member that is a string.
    pub fn text(&mut self, name: &str, text: &str) {
        let _ = write!(self.0, ",\"{name}\":{}", quoted(text));
    }

    /// Adds several counters.
    pub fn counts<'a>(&mut self, counts: impl IntoIterator<Item = (&'a str, u64)>) {
        for (name, count) in counts {
            self.value(name, count);
        }
    }

    /// Returns the complete line.
    #[must_use]
    pub fn end(mut self) -> String {
        self.0.push_str("}\n");
        self.0
    }

    /// Appends the line to the file that the environment names, if it names one. Prints an error,
    /// since no caller could handle it.
    pub fn append(self) {
        let Some(path) = std::env::var_os(REPORT_ENV).filter(|path| !path.is_empty()) else {
            return;
        };
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
        // The line is one write, so that lines of several processes don't mix.
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
        assert!(line.ends_with(",\"list\":[1,2],\"some\":7,\"more\":0}\n"), "{line}");
    }
}
