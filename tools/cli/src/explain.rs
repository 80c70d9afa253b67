//! `laxity explain`: why flows of this host wait, in sentences.
//!
//! The host's page shows the same sentences ([`laxity_wire::sentences`]).

use clap::Args;
use laxity_cli::output::{OutputError, json, say};
use laxity_wire::ControlError;
use laxity_wire::explain::FlowQuery;
use laxity_wire::sentences::{FlowReport, FlowReports};
use thiserror::Error;

use crate::host::Endpoint;

/// The reason why nothing is explained.
#[derive(Debug, Error)]
pub(crate) enum ExplainError {
    #[error(transparent)]
    Daemon(#[from] ControlError),
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error(
        "no such flow is under way on this host: it has ended, it went out unscheduled, or another \
         host has it. `laxity explain` without arguments shows what waits, and `laxity trace` \
         records why later flows wait"
    )]
    Ended,
}

pub(crate) const HELP: &str = "\
Without arguments, it explains the flows that have waited for longest. It names at most 16 flows. \
The daemon forgets a flow when it ends; `laxity trace` records the lives of later flows. \
`laxity cluster explain BATCH` explains the place of a batch in the coordinator's order.

Examples:
  laxity explain
  laxity explain 1125899906842624
  laxity explain --request 7340032 --json";

#[derive(Args)]
pub(crate) struct ExplainFlowArgs {
    /// Number of a flow, as this command and `laxity trace` show it
    flow: Option<u64>,
    /// Flows of this request
    #[arg(long, value_name = "ID")]
    request: Option<u64>,
    /// Waiting flows of this batch
    #[arg(long, value_name = "ID")]
    batch: Option<u64>,
    /// Flows of this process
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
    /// Print what the daemon knows, and the sentences, as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    endpoint: Endpoint,
}

pub(crate) fn explain(args: &ExplainFlowArgs) -> Result<(), ExplainError> {
    let mut daemon = args.endpoint.connect()?;
    let &ExplainFlowArgs { flow, request, batch, pid, .. } = args;
    let wanted = FlowQuery { flow, request, batch, pid };
    let (told, status) = (daemon.explain(wanted)?, daemon.status()?);
    if told.flows.is_empty() && wanted != FlowQuery::default() {
        return Err(ExplainError::Ended);
    }
    let reports = FlowReports::of(&told, &status);
    if args.json {
        return Ok(say(json(&reports)?)?);
    }
    if reports.flows.is_empty() {
        return Ok(say("No flow waits for a permit.")?);
    }
    let paragraph = |report: &FlowReport<'_>| {
        format!("Flow {}: {}", report.flow.flow.flow, report.text.join("\n  "))
    };
    let mut text: Vec<String> = reports.flows.iter().map(paragraph).collect();
    let more = told.count.saturating_sub(reports.flows.len() as u64);
    if more > 0 {
        text.push(format!("{more} more flows match; name a request, a process or a flow."));
    }
    Ok(say(text.join("\n\n"))?)
}
