//! The result of a load: numbers, and a text with some of them.

use serde::Serialize;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadReport {
    pub seconds: f64,
    /// Time from the sending of an event to the receipt of the order that considers it.
    pub order_latency_ms: Latency,
    /// Resident memory of the coordinator at the end. None if this user can't see its process.
    pub rss_mib: Option<f64>,
    /// Resident memory of the coordinator when the measurement began.
    pub rss_start_mib: Option<f64>,
    pub events_per_s: f64,
    /// CPU time of the coordinator per second, in cores. None if this user can't see its process.
    pub coordinator_cores: Option<f64>,
    pub daemons: usize,
    pub batches: usize,
    pub answered: usize,
    /// Events that no order considered within a second after the end.
    pub unanswered: usize,
    pub orders: u64,
    /// Refused events. There are none unless the coordinator's limits are smaller than the plan.
    pub refusals: u64,
}

impl LoadReport {
    pub fn usage_text(&self) -> String {
        match (self.coordinator_cores, self.rss_mib, self.rss_start_mib) {
            (Some(cores), Some(end), Some(start)) => {
                format!("coordinator {cores:.2} cores, {end:.0} MiB ({start:.0} at the start)")
            }
            _ => "what the coordinator uses cannot be seen from here".to_owned(),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Latency {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Latency {
    pub(super) fn of(mut samples_us: Vec<u32>) -> Self {
        samples_us.sort_unstable();
        let at = |permille: usize| {
            let index = (samples_us.len() * permille).div_ceil(1000).max(1) - 1;
            samples_us.get(index).map_or(0.0, |&us| f64::from(us) / 1e3)
        };
        Self { p50: at(500), p90: at(900), p99: at(990), max: at(1000) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_samples_and_none_gives_zero() {
        assert_eq!(Latency::of(Vec::new()), Latency::default());
        let latency = Latency::of((1..=1000).collect());
        assert_eq!((latency.p50, latency.p99, latency.max), (0.5, 0.99, 1.0));
    }
}
