//! Metrics of an outcome: name, unit, and a function that reads the value.

use crate::outcome::Outcome;

#[derive(Debug)]
pub struct Metric {
    pub key: &'static str,
    pub label: &'static str,
    pub unit: MetricUnit,
    pub of: fn(&Outcome) -> f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricUnit {
    /// A share from 0 to 1, shown in percent.
    Share,
    /// A duration in milliseconds.
    Millis,
    Ratio,
    Count,
    Bytes,
}

impl MetricUnit {
    pub const fn scale(self) -> f64 {
        match self {
            Self::Share => 100.0,
            Self::Bytes => 1e-9,
            Self::Millis | Self::Ratio | Self::Count => 1.0,
        }
    }

    /// Returns the unit's symbol, which may be empty.
    pub const fn symbol(self) -> &'static str {
        match self {
            Self::Share => "%",
            Self::Millis => "ms",
            Self::Bytes => "GB",
            Self::Ratio | Self::Count => "",
        }
    }

    pub fn decimals(self, value: f64) -> usize {
        match self {
            Self::Share => 1,
            Self::Count => 0,
            Self::Ratio => 2,
            Self::Millis | Self::Bytes => match (value * self.scale()).abs() {
                size if size >= 100.0 => 0,
                size if size >= 10.0 => 1,
                size if size >= 0.1 || size == 0.0 => 2,
                _ => 3,
            },
        }
    }

    /// Returns the formatted value without its symbol.
    pub fn shown(self, value: f64) -> String {
        // Replaces minus zero by zero.
        let value = if value == 0.0 { 0.0 } else { value };
        format!("{:.*}", self.decimals(value), value * self.scale())
    }
}

impl Metric {
    pub fn named(key: &str) -> Option<&'static Self> {
        ALL.iter().copied().find(|metric| metric.key == key)
    }

    pub fn names() -> Vec<&'static str> {
        ALL.iter().map(|metric| metric.key).collect()
    }

    /// Returns label and unit, as in `mean TTFT, ms`.
    pub fn title(&self) -> String {
        match self.unit.symbol() {
            "" => self.label.to_owned(),
            symbol => format!("{}, {symbol}", self.label),
        }
    }
}

macro_rules! metrics {
    ($($constant:ident: $key:literal, $label:literal, $unit:ident, $of:expr;)*) => {
        $(
            #[doc = concat!("`", $key, "`: ", $label, ".")]
            pub static $constant: Metric = Metric {
                key: $key,
                label: $label,
                unit: MetricUnit::$unit,
                of: $of,
            };
        )*
        pub static ALL: &[&Metric] = &[$(&$constant),*];
    };
}

metrics! {
    ATTAINMENT: "attainment", "first tokens in time", Share, |o| o.attainment;
    ATTAINMENT_OWN: "attainment_own", "first tokens in time by the request's own TTFT alone",
        Share, |o| o.attainment_own;
    TTFT_MEAN: "ttft_mean_ms", "mean TTFT", Millis, |o| o.ttft_ms.mean;
    TTFT_P50: "ttft_p50_ms", "median TTFT", Millis, |o| o.ttft_ms.percentile(50);
    TTFT_P90: "ttft_p90_ms", "p90 TTFT", Millis, |o| o.ttft_ms.percentile(90);
    TTFT_P99: "ttft_p99_ms", "p99 TTFT", Millis, |o| o.ttft_ms.percentile(99);
    TTFT_OVER_SLO: "ttft_over_slo_mean", "mean TTFT over its objective", Ratio,
        |o| o.ttft_over_slo.mean;
    COLLECTIVE_MEAN: "collective_mean_ms", "mean collective completion time", Millis,
        |o| o.collective_ms.mean;
    COLLECTIVE_P99: "collective_p99_ms", "p99 collective completion time", Millis,
        |o| o.collective_ms.percentile(99);
    COLLECTIVE_STRETCH: "collective_stretch_mean", "collective time over that with ports to itself",
        Ratio, |o| o.collective_stretch.mean;
    EARLINESS_MEAN: "earliness_mean_ms", "mean earliness of requests in time", Millis,
        |o| o.earliness_ms.mean;
    LATENESS_MEAN: "lateness_mean_ms", "mean lateness of the others", Millis,
        |o| o.lateness_ms.mean;
    QUEUE: "queue_ms", "waiting for a batch", Millis, |o| o.waiting_ms.queue;
    KV_REUSE: "kv_reuse_ms", "waiting for reused KV", Millis, |o| o.waiting_ms.kv_reuse;
    COLLECTIVE: "collective_ms", "in collectives", Millis, |o| o.waiting_ms.collective;
    COMPUTE: "compute_ms", "computing", Millis, |o| o.waiting_ms.compute;
    P2D: "p2d_ms", "sending KV to decode", Millis, |o| o.waiting_ms.p2d;
    PRUNED: "pruned", "requests pruned", Count, |o| o.pruned as f64;
    RELEGATED: "relegated", "requests given up by their unit", Count, |o| o.relegated as f64;
    REUSED: "reused", "tokens reused", Share, |o| o.reused;
    FETCHED: "fetched", "of these, fetched from another unit", Share, |o| o.fetched;
    COMPUTE_BUSY: "compute_busy", "prefill units computing", Share, |o| o.compute_busy;
    UNITS_BUSY: "units_busy", "prefill units with a batch", Share, |o| o.units_busy;
    PORT_BUSY_MEAN: "port_busy_mean", "prefill NICs in use, mean", Share, |o| o.port_busy_mean;
    PORT_BUSY_MOST: "port_busy_most", "prefill NICs in use, busiest", Share, |o| o.port_busy_most;
    BATCH_SIZE: "batch_size", "requests per batch", Ratio, |o| o.batch_size;
    KV_REUSE_BYTES: "kv_reuse_bytes", "KV reuse", Bytes, |o| o.bytes.kv_reuse as f64;
    COLLECTIVE_BYTES: "collective_bytes", "collectives", Bytes, |o| o.bytes.collective as f64;
    P2D_BYTES: "p2d_bytes", "prefill to decode", Bytes, |o| o.bytes.p2d as f64;
    REQUESTS: "requests", "requests that count", Count, |o| o.requests as f64;
    REQUESTS_IN_ALL: "requests_in_all", "requests in all", Count, |o| o.requests_in_all as f64;
    VIRTUAL_S: "virtual_s", "virtual seconds", Ratio, |o| o.virtual_s;
    EVENTS: "events", "events handled", Count, |o| o.events as f64;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_has_a_name_of_its_own() {
        for (index, metric) in ALL.iter().enumerate() {
            assert!(ALL[..index].iter().all(|other| other.key != metric.key), "{}", metric.key);
            assert_eq!(Metric::named(metric.key).expect("listed").label, metric.label);
        }
    }

    #[test]
    fn numbers_are_shown_with_the_decimals_that_their_size_deserves() {
        assert_eq!(MetricUnit::Share.shown(0.9123), "91.2");
        assert_eq!(MetricUnit::Millis.shown(1234.5), "1234");
        assert_eq!(MetricUnit::Millis.shown(12.34), "12.3");
        assert_eq!(MetricUnit::Millis.shown(0.0), "0.00");
        assert_eq!(MetricUnit::Millis.shown(-0.0), "0.00");
        assert_eq!(MetricUnit::Millis.shown(0.0123), "0.012");
        assert_eq!(MetricUnit::Bytes.shown(2.5e9), "2.50");
    }
}
