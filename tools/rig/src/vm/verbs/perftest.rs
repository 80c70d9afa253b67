//! Measurements of perftest without the library, with which other results are compared.

use std::time::Duration;

use super::Lab;
use super::program::{Ready, await_ready};
use crate::error::LabError;
use crate::vm::network::{ADDRESSES, DEVICES};

pub(super) struct Measured {
    pub(super) line: &'static str,
    pub(super) column: usize,
}

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

/// Runs perftest until its clock is calibrated. It first measures the rate of the cycle counter. On
/// an emulated processor this fails sometimes, and perftest then continues with a wrong rate.
pub(super) fn measure(lab: &Lab<'_>, measured: &Measured) -> Result<f64, LabError> {
    const ATTEMPTS: usize = 12;
    for _ in 0..ATTEMPTS {
        if let Some(value) = attempt(lab, measured)? {
            return Ok(value);
        }
    }
    Err(LabError::program(measured.line, format!("has no clock in {ATTEMPTS} attempts")))
}

fn attempt(lab: &Lab<'_>, measured: &Measured) -> Result<Option<f64>, LabError> {
    const BAD_CLOCK: &str = "Correlation coefficient";
    const LIMIT: Duration = Duration::from_secs(90);
    let gid = lab.guest.facts.gid_index;
    let line = measured.line;
    let start = |device: usize, to: &str| {
        let line = format!("{line} -d {} -x {gid} -F {to}", DEVICES[device]);
        lab.guest.task(line.split_whitespace(), LIMIT).start()
    };
    let mut server = start(0, "")?;
    await_ready(lab, &mut server, Ready::Port(18515))?;
    let client = start(1, ADDRESSES[0])?.wait();
    let server = server.wait();
    if !client.succeeded() || !server.succeeded() {
        return Err(LabError::Pair { active: client.into(), passive: server.into() });
    }
    if client.stdout.contains(BAD_CLOCK) || client.stderr.contains(BAD_CLOCK) {
        return Ok(None);
    }
    let value = result(&client.stdout, measured.column)
        .ok_or_else(|| LabError::program(line, format!("says no result: {client}")))?;
    Ok(value.is_finite().then_some(value))
}

/// Returns a column of perftest's line of results, which follows the heading.
fn result(stdout: &str, column: usize) -> Option<f64> {
    let is_heading = |line: &str| line.trim_start().starts_with("#bytes");
    let mut lines = stdout.lines().skip_while(|line| !is_heading(line));
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
