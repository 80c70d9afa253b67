//! Tables of metrics, and their lines in Prometheus' text format.

use std::borrow::Borrow;
use std::fmt::Write;

/// How a metric's value is read from a `T`. The variant is the kind of the metric.
pub(super) enum Value<T: 'static> {
    /// A value that only grows.
    Counter(fn(&T) -> u64),
    /// A value that grows and shrinks.
    Gauge(fn(&T) -> f64),
}

/// A metric: its name, its help text and its value. The labels are in `docs/metrics.md`.
pub(super) struct Metric<T: 'static> {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) value: Value<T>,
}

/// A table of metrics that are read from the same type and have the same labels.
macro_rules! metrics {
    ($(#[$doc:meta])* $table:ident: $type:ty { $(
        $kind:ident $name:ident $help:literal |$from:ident| $value:expr;
    )* }) => {
        $(#[$doc])*
        const $table: &[$crate::metrics::table::Metric<$type>] =
            &[$($crate::metrics::table::Metric {
            name: stringify!($name),
            help: $help,
            value: $crate::metrics::table::Value::$kind(|$from| $value as _),
        }),*];
    };
}

pub(super) use metrics;

/// Returns the lines of `metrics`, for pairs of labels and the struct with the values.
pub(super) fn table<T>(metrics: &[Metric<T>], rows: &[(String, impl Borrow<T>)]) -> String {
    let mut text = String::new();
    for Metric { name, help, value } in metrics {
        let kind = match value {
            Value::Counter(_) => "counter",
            Value::Gauge(_) => "gauge",
        };
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (labels, from) in rows {
            let value = match value {
                Value::Counter(read) => read(from.borrow()).to_string(),
                Value::Gauge(read) => read(from.borrow()).to_string(),
            };
            let _ = match labels.as_str() {
                "" => writeln!(text, "{name} {value}"),
                labels => writeln!(text, "{name}{{{labels}}} {value}"),
            };
        }
        text.push('\n');
    }
    text
}

/// Returns a value as Prometheus' text format has it. A client chooses its name.
pub(super) fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_ends_no_label_and_no_line() {
        assert_eq!(escaped("a\"} 1\nb\\"), "a\\\"} 1\\nb\\\\");
    }
}
