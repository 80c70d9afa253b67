//! `laxity observe report`: what enforcing would have done to flows that were only observed.
//!
//! The daemon simulates enforcement, by minute and port ([`laxity_wire::WouldStatus`]). This module
//! adds the minutes up.

use std::collections::BTreeMap;

use clap::{Args, Subcommand};
use laxity_cli::output::{json, say};
use laxity_cli::table::{align_numbers, bytes, table};
use laxity_wire::{Status, WouldStatus};
use serde::Serialize;

use crate::host::{Endpoint, HostError};

pub(crate) const HELP: &str = "\
With mode = \"observe\", the daemon delays nothing. For each port it simulates what its policy \
would have done to the flows that it sees, with the port's rate and window in force. The last \
hour is kept.

The simulation is not exact. Senders would have sent later if they had waited. Receivers and \
switches may be slower than the port. Hints from before the first observed flow are missing. So \
times are estimates. Only a run under `laxity enforce on` has real times.";

/// Maximum number of jobs that the page names.
const JOBS_MAX: usize = 8;

/// The commands of `laxity observe`.
#[derive(Subcommand)]
pub(crate) enum ObserveCommand {
    /// Print what enforcing would have delayed, promoted and pruned
    #[command(after_long_help = HELP)]
    Report(ReportArgs),
}

#[derive(Args)]
pub(crate) struct ReportArgs {
    #[command(flatten)]
    endpoint: Endpoint,
    /// How many minutes to look back
    #[arg(long, value_name = "N", default_value_t = 10,
          value_parser = clap::value_parser!(u64).range(1..=60))]
    minutes: u64,
    /// Print the sums as JSON
    #[arg(long)]
    json: bool,
}

/// The output of `--json`. Fields may be added.
#[derive(Debug, Serialize)]
struct ObserveReport {
    minutes: u64,
    mode: String,
    pruned_requests: u64,
    ports: Vec<PortReport>,
    /// The collectives that would have gone ahead of other stages, the job with the most first.
    collectives_ahead: Vec<AheadReport>,
}

/// The collectives of one job on all ports.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct AheadReport {
    job: String,
    user: String,
    collectives: u64,
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct PortReport {
    port: String,
    direction: String,
    flows: u64,
    bytes: u64,
    delayed_flows: u64,
    delayed_bytes: u64,
    delay_mean_ns: u64,
    collectives_ahead: u64,
    promotions: u64,
    pruned_flows: u64,
    lost_flows: u64,
}

pub(crate) fn observe(command: &ObserveCommand) -> Result<(), HostError> {
    let ObserveCommand::Report(args) = command;
    let report = report(&args.endpoint.connect()?.status()?, args.minutes);
    Ok(say(if args.json { json(&report)? } else { page(&report) })?)
}

fn report(status: &Status, minutes: u64) -> ObserveReport {
    let port = |port: &laxity_wire::PortStatus| {
        let recent: Vec<&WouldStatus> =
            port.would.iter().filter(|minute| minute.minutes_ago < minutes).collect();
        let sum = |value: fn(&WouldStatus) -> u64| recent.iter().map(|it| value(it)).sum::<u64>();
        let delayed_flows = sum(|minute| minute.delayed_flows);
        PortReport {
            port: port.name.clone(),
            direction: port.direction.clone(),
            flows: sum(|minute| minute.flows),
            bytes: sum(|minute| minute.bytes),
            delayed_flows,
            delayed_bytes: sum(|minute| minute.delayed_bytes),
            delay_mean_ns: sum(|minute| minute.delay_ns).checked_div(delayed_flows).unwrap_or(0),
            collectives_ahead: sum(|minute| minute.collectives_ahead),
            promotions: sum(|minute| minute.promotions),
            pruned_flows: sum(|minute| minute.pruned_flows),
            lost_flows: sum(|minute| minute.lost_flows),
        }
    };
    ObserveReport {
        minutes,
        mode: status.mode.clone(),
        pruned_requests: status.totals.pruned_requests,
        ports: status.ports.iter().map(port).filter(|port| port.flows > 0).collect(),
        collectives_ahead: ahead(status, minutes),
    }
}

fn ahead(status: &Status, minutes: u64) -> Vec<AheadReport> {
    let mut jobs = BTreeMap::<(&str, &str), AheadReport>::new();
    let all = status.ports.iter().flat_map(|port| &port.would_ahead);
    for one in all.filter(|one| one.minutes_ago < minutes) {
        let (job, user) = (one.job.clone(), one.user.clone());
        let sum = jobs.entry((&one.job, &one.user)).or_insert(AheadReport {
            job,
            user,
            collectives: 0,
            bytes: 0,
        });
        sum.collectives += one.collectives;
        sum.bytes += one.bytes;
    }
    let mut jobs: Vec<AheadReport> = jobs.into_values().collect();
    jobs.sort_by_key(|job| std::cmp::Reverse(job.collectives));
    jobs
}

/// Says which collectives would have gone ahead, in one line for each of the first jobs.
fn ahead_lines(jobs: &[AheadReport]) -> Vec<String> {
    let line = |job: &AheadReport| {
        let user = if job.user.is_empty() { String::new() } else { format!(" ({})", job.user) };
        let (count, size) = (job.collectives, bytes(job.bytes));
        format!("  {count} collectives ({size}) of {}{user}", job.job)
    };
    let mut lines: Vec<String> = jobs.iter().take(JOBS_MAX).map(line).collect();
    if jobs.len() > JOBS_MAX {
        lines.push(format!("  those of {} more jobs: see --json", jobs.len() - JOBS_MAX));
    }
    lines
}

fn page(report: &ObserveReport) -> String {
    let minutes = report.minutes;
    if report.ports.is_empty() {
        let next = match report.mode.as_str() {
            "observe" => {
                "Clients attach at their next transfer; if none does, `laxity doctor` says why."
            }
            _ => "`laxity enforce off` observes from now on.",
        };
        let mode = &report.mode;
        return format!("Nothing was observed in the last {minutes} min (mode {mode}). {next}");
    }
    let mut rows = table(&[
        "port", "direction", "flows", "bytes", "delayed", "of them", "mean wait", "promoted",
        "pruned", "ahead",
    ]);
    for port in &report.ports {
        rows.add_row(vec![
            port.port.clone(),
            port.direction.clone(),
            port.flows.to_string(),
            bytes(port.bytes),
            port.delayed_flows.to_string(),
            bytes(port.delayed_bytes),
            format!("{:.1} ms", port.delay_mean_ns as f64 / 1e6),
            port.promotions.to_string(),
            port.pruned_flows.to_string(),
            port.collectives_ahead.to_string(),
        ]);
    }
    align_numbers(&mut rows, 2);
    let sum = |value: fn(&PortReport) -> u64| report.ports.iter().map(value).sum::<u64>();
    let mut lines = vec![
        format!("What enforcing would have done in the last {minutes} min, by simulation:"),
        rows.to_string(),
        format!(
            "{} collectives would have gone ahead of other stages, {} of {} flows would have \
             waited. {} requests are pruned now.",
            sum(|port| port.collectives_ahead),
            sum(|port| port.delayed_flows),
            sum(|port| port.flows),
            report.pruned_requests
        ),
    ];
    if !report.collectives_ahead.is_empty() {
        lines.push("Ahead of other stages would have gone:".to_owned());
        lines.extend(ahead_lines(&report.collectives_ahead));
    }
    let lost = sum(|port| port.lost_flows);
    if lost > 0 {
        lines.push(format!(
            "{lost} flows are not in it, because more waited than are simulated: the rate of a \
             [[nic]] is too low. Correct it in the configuration of laxityd."
        ));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use laxity_wire::{AheadStatus, PortStatus};

    use super::*;

    fn status(mode: &str, would: Vec<WouldStatus>) -> Status {
        let port = PortStatus { name: "mlx5_0".into(), would, ..PortStatus::default() };
        Status { mode: mode.into(), ports: vec![port, PortStatus::default()], ..Status::default() }
    }

    #[test]
    fn only_the_asked_minutes_count_and_means_are_by_delayed_flow() {
        let minute = |minutes_ago| WouldStatus {
            minutes_ago,
            flows: 10,
            delayed_flows: 4,
            delay_ns: 8_000_000,
            collectives_ahead: 3,
            ..WouldStatus::default()
        };
        let status = status("observe", vec![minute(12), minute(9), minute(0)]);
        let ten = report(&status, 10);
        assert_eq!((ten.ports.len(), ten.ports[0].flows, ten.ports[0].delayed_flows), (1, 20, 8));
        assert_eq!(ten.ports[0].delay_mean_ns, 2_000_000);
        let said = page(&ten);
        assert!(said.contains("6 collectives would have gone ahead"), "{said}");
        assert!(said.contains("8 of 20 flows would have waited") && !said.contains("too low"));
        assert_eq!(report(&status, 60).ports[0].flows, 30);
    }

    #[test]
    fn the_jobs_whose_collectives_would_have_gone_ahead_are_named() {
        let ahead = |minutes_ago, job: &str, collectives| AheadStatus {
            minutes_ago,
            job: job.into(),
            user: "uid 1000".into(),
            collectives,
            bytes: collectives << 20,
        };
        let minute = WouldStatus { flows: 9, collectives_ahead: 7, ..WouldStatus::default() };
        let mut status = status("observe", vec![minute]);
        status.ports[0].would_ahead =
            vec![ahead(12, "train", 90), ahead(1, "decode", 2), ahead(0, "train", 3)];
        status.ports[1].would_ahead = vec![ahead(0, "decode", 2)];
        let said = page(&report(&status, 10));
        let expected = "Ahead of other stages would have gone:\n  \
                        4 collectives (4 MiB) of decode (uid 1000)\n  \
                        3 collectives (3 MiB) of train (uid 1000)";
        assert!(said.contains(expected), "{said}");
        status.ports[0].would_ahead =
            (0..12).map(|job| ahead(0, &format!("job-{job}"), 1)).collect();
        assert!(page(&report(&status, 10)).contains("those of 5 more jobs"));
    }

    #[test]
    fn nothing_observed_and_too_much_are_said_with_a_next_step() {
        assert!(page(&report(&status("observe", vec![]), 5)).contains("laxity doctor"));
        assert!(page(&report(&status("enforce", vec![]), 5)).contains("laxity enforce off"));
        let lost = WouldStatus { flows: 1, lost_flows: 1, ..WouldStatus::default() };
        assert!(page(&report(&status("observe", vec![lost]), 5)).contains("rate of a [[nic]]"));
    }
}
