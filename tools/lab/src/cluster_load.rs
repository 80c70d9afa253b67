//! `laxity cluster load`: the arguments and the output. `laxity_trial::load` makes the load.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use laxity_quantity::Nanos;
use laxity_trial::load::{LoadPlan, run};

use crate::publish;
use laxity_cli::output::{self, put, replace, say};

#[derive(Debug, Args)]
pub(crate) struct LoadArgs {
    /// Number of daemons
    #[arg(long, value_name = "N", default_value_t = 128)]
    daemons: usize,
    /// Number of active batches
    #[arg(long, value_name = "N", default_value_t = 1000)]
    batches: usize,
    /// Arrivals and departures of batches per second
    #[arg(long, value_name = "EVENTS_PER_S", default_value_t = 500.0)]
    rate: f64,
    /// Duration of the measurement, such as 10s
    #[arg(long, default_value = "10s", value_parser = duration)]
    duration: Nanos,
    /// File for the results as JSON; `-` is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn duration(text: &str) -> Result<Nanos, String> {
    let seconds = text.chars().all(|c| c.is_ascii_digit() || c == '.');
    let text = if seconds { format!("{text}s") } else { text.to_owned() };
    text.parse().map_err(|error: laxity_quantity::NotAQuantity| error.to_string())
}

pub(crate) fn load(args: &LoadArgs) -> Result<()> {
    publish::check(&args.json)?;
    let report = run(&LoadPlan {
        daemons: args.daemons,
        batches: args.batches,
        events_per_s: args.rate,
        duration: args.duration.into(),
    })?;
    let json = output::json(&report)? + "\n";
    match args.json.as_deref() {
        Some(path) if publish::is_stdout(path) => return Ok(put(json.as_bytes())?),
        Some(path) => replace(path, json.as_bytes())?,
        None => {}
    }
    let latency = report.order_latency_ms;
    Ok(say(format!(
        "{} daemons, {} batches, {:.0} events/s: event to order p50 {:.1} ms, p99 {:.1} ms, worst \
         {:.1} ms; {}",
        report.daemons,
        report.batches,
        report.events_per_s,
        latency.p50,
        latency.p99,
        latency.max,
        report.usage_text(),
    ))?)
}
