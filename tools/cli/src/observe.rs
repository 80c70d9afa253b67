//! `laxity observe report`: what enforcing would have done to what was only observed.
//!
//! The daemon simulates it, by minute and port ([`laxity_wire::WouldStatus`]). This sums it up.

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
times are an estimate; `laxity enforce on` shows the real ones.";

/// What can be done with a daemon that observes.
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
    }
}

fn page(report: &ObserveReport) -> String {
    let minutes = report.minutes;
    if report.ports.is_empty() {
        let next = match report.mode.as_str() {
            "observe" => {
                "Clients attach at their next transfer; `laxity doctor` says what stands \
                          in the way."
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
    use laxity_wire::PortStatus;

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
    fn nothing_observed_and_too_much_are_said_with_a_next_step() {
        assert!(page(&report(&status("observe", vec![]), 5)).contains("laxity doctor"));
        assert!(page(&report(&status("enforce", vec![]), 5)).contains("laxity enforce off"));
        let lost = WouldStatus { flows: 1, lost_flows: 1, ..WouldStatus::default() };
        assert!(page(&report(&status("observe", vec![lost]), 5)).contains("rate of a [[nic]]"));
    }
}
