//! The counters of an engine, read from `/metrics`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counts {
    pub stage_bytes: BTreeMap<String, BTreeMap<u8, u64>>,
    /// All other counters, summed over their labels, by name without the prefix `laxity_engine_`.
    /// Counters that vLLM exports begin with `vllm:` or `laxity:`, and those of a daemon with
    /// `laxityd_`. A counter with a label `operation` has the label's value behind a dot.
    pub of: BTreeMap<String, f64>,
}

const OURS: &str = "laxity_engine_";

/// Prefixes of the names of counters that vLLM exports, which they keep: its own, and those of
/// Laxity's connector in it.
const VLLM: [&str; 2] = ["vllm:", "laxity:"];

fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    labels.split(',').find_map(|pair| {
        let (key, value) = pair.split_once('=')?;
        (key == name).then(|| value.trim_matches('"'))
    })
}

impl Counts {
    pub fn read(text: &str) -> Self {
        let mut counts = Self::default();
        for line in text.lines() {
            let Some((series, value)) = line.rsplit_once(' ') else { continue };
            let ours = series.strip_prefix(OURS);
            let series = ours
                .or_else(|| VLLM.iter().any(|prefix| series.starts_with(prefix)).then_some(series));
            let (Some(series), Ok(value)) = (series, value.parse::<f64>()) else { continue };
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let labels = labels.trim_end_matches('}');
            // Quantiles cannot be summed.
            if label(labels, "quantile").is_some() {
                continue;
            }
            let operation = label(labels, "operation").map(|operation| format!(".{operation}"));
            *counts.of.entry(name.to_owned() + &operation.unwrap_or_default()).or_default() +=
                value;
            if name == "sent_bytes_total"
                && let (Some(stage), Some(dscp)) = (label(labels, "stage"), label(labels, "dscp"))
                && let Ok(dscp) = dscp.parse()
            {
                let stage = counts.stage_bytes.entry(stage.to_owned()).or_default();
                *stage.entry(dscp).or_default() += value as u64;
            }
        }
        counts
    }

    /// Returns a counter, or 0 if the text does not have it.
    pub fn get(&self, name: &str) -> f64 {
        self.of.get(name).copied().unwrap_or(0.0)
    }

    pub fn mean(&self, histogram: &str) -> f64 {
        let count = self.get(&format!("{histogram}_count"));
        if count > 0.0 { self.get(&format!("{histogram}_sum")) / count } else { 0.0 }
    }

    /// Returns what was counted since `before`. If a process was started again meanwhile, the
    /// caller first adds what its predecessor counted.
    pub fn since(&self, before: &Self) -> Self {
        let mut since = self.clone();
        for (name, value) in &mut since.of {
            *value -= before.get(name);
        }
        for (stage, by_dscp) in &mut since.stage_bytes {
            let then = before.stage_bytes.get(stage);
            for (dscp, bytes) in by_dscp {
                let then = then.and_then(|by_dscp| by_dscp.get(dscp)).unwrap_or(&0);
                *bytes = bytes.saturating_sub(*then);
            }
        }
        since
    }

    pub fn add(&mut self, other: &Self) {
        for (name, value) in &other.of {
            *self.of.entry(name.clone()).or_default() += value;
        }
        for (stage, by_dscp) in &other.stage_bytes {
            let stage = self.stage_bytes.entry(stage.clone()).or_default();
            for (dscp, bytes) in by_dscp {
                *stage.entry(*dscp).or_default() += bytes;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_vllm_keep_their_names_and_those_of_others_are_left_out() {
        let text = "vllm:nixl_bytes_transferred_sum{engine=\"0\"} 3e6\n\
            vllm:nixl_bytes_transferred_bucket{engine=\"0\",le=\"2048.0\"} 4\n\
            vllm:nixl_bytes_transferred_count{engine=\"0\"} 4\nprocess_open_fds 7\n\
            vllm:store_bytes_total{operation=\"load_get\",status=\"ok\"} 5\n\
            vllm:store_bytes_total{operation=\"load_get\",status=\"partial_failure\"} 2\n\
            vllm:store_bytes_total{operation=\"save_put\",status=\"ok\"} 9\n";
        let counts = Counts::read(text);
        assert_eq!(counts.get("vllm:store_bytes_total.load_get"), 7.0);
        assert_eq!(counts.get("vllm:store_bytes_total.save_put"), 9.0);
        assert_eq!(counts.mean("vllm:nixl_bytes_transferred"), 750_000.0);
        assert_eq!(counts.get("process_open_fds"), 0.0);
    }

    #[test]
    fn counters_are_read_by_stage_and_dscp_and_subtracted() {
        let text = "# TYPE laxity_engine_sent_bytes_total counter\n\
            laxity_engine_sent_bytes_total{stage=\"p2d\",dscp=\"10\"} 70\n\
            laxity_engine_sent_bytes_total{stage=\"p2d\",dscp=\"34\"} 5\n\
            laxity_engine_exchange_seconds{quantile=\"0.5\"} 9\n\
            laxity_engine_exchange_seconds_sum 1.5\nlaxity_engine_exchange_seconds_count 3\n\
            process_threads 4\n";
        let before = Counts::read(text);
        assert_eq!(before.stage_bytes["p2d"], [(10, 70), (34, 5)].into());
        assert_eq!(before.get("sent_bytes_total"), 75.0);
        assert_eq!(before.mean("exchange_seconds"), 0.5);
        let after = Counts::read(&text.replace(" 70", " 100"));
        let since = after.since(&before);
        assert_eq!(since.stage_bytes["p2d"], [(10, 30), (34, 0)].into());
        assert_eq!(since.mean("exchange_seconds"), 0.0);
        // Its predecessor counted 2.0 in all, and it has already counted more than `before`.
        let mut again = Counts::read("laxity_engine_exchange_seconds_sum 1.75\n");
        again.add(&Counts::read("laxity_engine_exchange_seconds_sum 2.0\n"));
        assert_eq!(again.since(&before).get("exchange_seconds_sum"), 2.25, "of two processes");
        let mut sum = since;
        sum.add(&before);
        assert_eq!(sum, after);
    }
}
