//! What the library costs where nothing contends: perftest with and without it, interleaved in one
//! boot, under a daemon with the default configuration.

use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

use super::Programs;
use super::pair::{await_ready, task};
use super::program::{Posted, Ready, Side, Through};
use crate::vm::guest::Guest;
use crate::vm::network::{ADDRESSES, DEVICES};

/// All measurements.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Overhead {
    /// Whether every run worked. What is too much is for the reader: see `spread_percent`.
    pub passed: bool,
    /// One per program and size.
    pub rows: Vec<Row>,
}

/// One program at one size.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Row {
    /// Program and size.
    pub name: String,
    /// Of the values.
    pub unit: String,
    /// Runs with and without.
    pub pairs: usize,
    /// Without the library, in the order in which they ran.
    pub without: Vec<f64>,
    /// With it.
    pub with: Vec<f64>,
    /// Median without.
    pub without_median: f64,
    /// Median with.
    pub with_median: f64,
    /// Median of the changes within pairs, per cent; positive is more of the unit.
    pub change_percent: f64,
    /// Half the distance between the quartiles of the runs without, per cent of their median: the
    /// noise.
    pub spread_percent: f64,
}

/// A run of perftest that is measured.
pub(super) struct Measured {
    pub(super) name: &'static str,
    pub(super) line: &'static str,
    /// Column of the result's line, and what it is.
    pub(super) column: usize,
    pub(super) unit: &'static str,
}

const MEASURED: [Measured; 4] = [
    Measured {
        name: "ib_write_bw 65536",
        line: "ib_write_bw -s 65536 -n 3000",
        column: 3,
        unit: "MB/s",
    },
    Measured {
        name: "ib_write_bw 4096",
        line: "ib_write_bw -s 4096 -n 12000",
        column: 3,
        unit: "MB/s",
    },
    Measured {
        name: "ib_write_lat 8",
        line: "ib_write_lat -s 8 -n 4000",
        column: 4,
        unit: "µs",
    },
    Measured {
        name: "ib_write_lat 4096",
        line: "ib_write_lat -s 4096 -n 4000",
        column: 4,
        unit: "µs",
    },
];

/// Measures all.
pub(super) fn run(guest: &Guest, programs: &Programs, pairs: usize) -> anyhow::Result<Overhead> {
    let mut rows = Vec::new();
    for measured in &MEASURED {
        let mut row = Row {
            name: measured.name.into(),
            unit: measured.unit.into(),
            pairs,
            ..Row::default()
        };
        for pair in 0..pairs {
            // Which comes first changes, so that what drifts hits both.
            for with in [pair % 2 == 0, pair % 2 != 0] {
                let value = measure(guest, programs, measured, with)?;
                if with {
                    &mut row.with
                } else {
                    &mut row.without
                }
                .push(value);
            }
            guest.say(&format!("{} pair {}", measured.name, pair + 1))?;
        }
        row.without_median = quantile(&row.without, 0.5);
        row.with_median = quantile(&row.with, 0.5);
        let changes: Vec<f64> = (row.with.iter().zip(&row.without))
            .map(|(with, without)| (with / without - 1.0) * 100.0)
            .collect();
        row.change_percent = quantile(&changes, 0.5);
        let half = (quantile(&row.without, 0.75) - quantile(&row.without, 0.25)) / 2.0;
        row.spread_percent = half / row.without_median * 100.0;
        rows.push(row);
    }
    Ok(Overhead { passed: true, rows })
}

/// A quantile of some values, between neighbours in proportion.
pub(super) fn quantile(values: &[f64], at: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = at * sorted.len().saturating_sub(1) as f64;
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    match (sorted.get(below), sorted.get(above)) {
        (Some(low), Some(high)) => low + (high - low) * (place - below as f64),
        _ => f64::NAN,
    }
}

/// Runs perftest until its clock is one: it measures the cycle counter's rate first, which on an
/// emulated processor fails now and then, and goes on with whatever came of it.
pub(super) fn measure(
    guest: &Guest,
    programs: &Programs,
    measured: &Measured,
    with: bool,
) -> anyhow::Result<f64> {
    const ATTEMPTS: usize = 12;
    for _ in 0..ATTEMPTS {
        if let Some(value) = attempt(guest, programs, measured, with)? {
            return Ok(value);
        }
    }
    bail!("{}: no clock in {ATTEMPTS} attempts", measured.name)
}

fn attempt(
    guest: &Guest,
    programs: &Programs,
    measured: &Measured,
    with: bool,
) -> anyhow::Result<Option<f64>> {
    const BAD_CLOCK: &str = "Correlation coefficient";
    const LIMIT: Duration = Duration::from_secs(90);
    let gid = guest.facts.gid_index;
    let start = |device: usize, to: &str| {
        let line = format!("{} -d {} -x {gid} -F {to}", measured.line, DEVICES[device]);
        let side = Side::new(&line, Posted::Wire);
        let through = Through::Preload;
        let mut task = task(
            guest,
            programs,
            &side,
            through,
            "perftest",
            scratch!("report"),
            LIMIT,
        );
        // Reports are off, as in production.
        task.env.retain(|(name, _)| match name.as_str() {
            "LD_PRELOAD" | "LAXITY_PROFILE" => with,
            "LAXITY_REPORT" | "LAXITY_STALL_MS" | "LAXITY_ATTACH_MS" => false,
            _ => true,
        });
        task.start()
    };
    let mut server = start(0, "")?;
    await_ready(guest, &mut server, Ready::Port(18515)).map_err(anyhow::Error::msg)?;
    let client = start(1, ADDRESSES[0])?.wait();
    let server = server.wait();
    if !client.succeeded() || !server.succeeded() {
        bail!("{}: {client}; {server}", measured.name);
    }
    if client.stdout.contains(BAD_CLOCK) || client.stderr.contains(BAD_CLOCK) {
        return Ok(None);
    }
    let value = result(&client.stdout, measured.column)
        .with_context(|| format!("{} says no result: {client}", measured.name))?;
    Ok(value.is_finite().then_some(value))
}

/// A column of perftest's line of results: the one after its heading.
fn result(stdout: &str, column: usize) -> Option<f64> {
    let mut lines = stdout
        .lines()
        .skip_while(|line| !line.trim_start().starts_with("#bytes"));
    let line = lines.nth(1)?;
    line.split_whitespace().nth(column)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_quartiles_lie_between_the_values() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert!((quantile(&values, 0.5) - 2.5).abs() < 1e-9);
        assert!((quantile(&values, 0.0) - 1.0).abs() < 1e-9);
        assert!(quantile(&[], 0.5).is_nan());
    }

    #[test]
    fn a_result_is_the_line_after_its_heading() {
        let said =
            "x\n #bytes #iterations BW peak[MB/sec]\n 65536  300  14.25  9.06  0.000145\n---";
        assert_eq!(result(said, 3), Some(9.06));
        assert_eq!(result("nothing", 3), None);
    }
}
