//! Timings of runs on a machine, separate from outcomes, which do not depend on it.

use std::fs;

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Timing {
    /// Name of the processor. Empty if unknown.
    pub processor: String,
    pub jobs: usize,
    /// Wall-clock seconds from start to end.
    pub wall_s: f64,
    pub simulated: usize,
    pub resumed: usize,
    pub events: u64,
    /// Events per second of all threads together.
    pub events_per_s: f64,
    /// Peak memory of the process, in bytes. 0 if unknown.
    pub peak_rss_bytes: u64,
    pub runs: Vec<RunTiming>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunTiming {
    pub point: usize,
    pub variant: String,
    pub seed: u64,
    /// Wall-clock seconds of the run on one thread.
    pub wall_s: f64,
    /// Events per second of the run.
    pub events_per_s: f64,
    pub resumed: bool,
}

impl std::fmt::Display for Timing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} runs in {:.1} s", self.simulated, self.wall_s)?;
        if self.jobs > 1 {
            write!(f, " on {} threads", self.jobs)?;
        }
        write!(
            f,
            ": {} events, {}/s",
            thousands(self.events as f64),
            thousands(self.events_per_s)
        )?;
        if self.peak_rss_bytes > 0 {
            write!(f, ", peak memory {} MB", self.peak_rss_bytes / 1_000_000)?;
        }
        if self.resumed > 0 {
            write!(f, "; {} more taken over from before", self.resumed)?;
        }
        Ok(())
    }
}

/// Formats a count with three digits, such as `1.25 M`.
pub(crate) fn thousands(count: f64) -> String {
    match count {
        c if c >= 1e9 => format!("{:.2} G", c / 1e9),
        c if c >= 1e6 => format!("{:.2} M", c / 1e6),
        c if c >= 1e4 => format!("{:.0} k", c / 1e3),
        c => format!("{c:.0}"),
    }
}

pub(super) fn peak_rss_bytes() -> u64 {
    fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|status| kilobytes(&status, "VmHWM:"))
        .map_or(0, |kilobytes| kilobytes * 1024)
}

pub(super) fn processor() -> String {
    fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| model_name(&text)).unwrap_or_default()
}

fn model_name(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|l| l.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn kilobytes(status: &str, key: &str) -> Option<u64> {
    let line = status.lines().find(|line| line.starts_with(key))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_read_from_the_kernel_s_text() {
        let status = "Name:\tlaxity\nVmHWM:\t    2048 kB\nVmRSS:\t 10 kB\n";
        assert_eq!(kilobytes(status, "VmHWM:"), Some(2048));
        assert_eq!(kilobytes("", "VmHWM:"), None);
        assert!(peak_rss_bytes() > 0, "Linux tells");
    }

    #[test]
    fn the_processor_is_the_first_that_is_listed() {
        let two = "processor\t: 0\nmodel name\t: One\nprocessor\t: 1\nmodel name\t: Two\n";
        assert_eq!(model_name(two).as_deref(), Some("One"));
        assert_eq!(model_name("Features : fp\n"), None);
    }

    #[test]
    fn counts_are_short() {
        assert_eq!(thousands(950.0), "950");
        assert_eq!(thousands(12_345.0), "12 k");
        assert_eq!(thousands(1_250_000.0), "1.25 M");
    }
}
