//! `laxity lab contention`: a collective competes with bulk transfers on real verbs.

use std::process::ExitCode;

use clap::Args;
use laxity_rig::vm::verbs::VerbsConfig;
use laxity_rig::vm::verbs::contention::ContentionConfig;

use crate::error::CommandError;
use crate::verbs::LabArgs;

pub(crate) const HELP: &str = "\
Each repetition plays the same arrivals three times: without the scheduler, with two static traffic
classes, and under Laxity. The collective alone is measured before and after. A repetition succeeds
if the collective takes at most 1.3 times as long under Laxity as alone, if it takes at least twice
as long without Laxity, and if no transfer is late that could be in time. A repetition that fails is
repeated up to three times, because other work on the machine can disturb it.

Exit status: 0 if each seed has a repetition that succeeded or that was disturbed, 1 if not, 125 if
the lab failed.

Examples:
  laxity lab contention
  laxity lab contention --repeat 5 --seed 10 --json contention.json";

/// Arguments of `laxity lab contention`.
#[derive(Args)]
pub(crate) struct ContentionArgs {
    #[command(flatten)]
    lab: LabArgs,
    /// Rate of each port of the router, in Mbit/s [default: 8]
    #[arg(long, value_name = "N")]
    rate_mbit: Option<u32>,
    /// Seed of the arrivals, to which each repetition adds 1
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of repetitions
    #[arg(long, value_name = "N", default_value_t = 1)]
    repeat: u32,
    /// Duration of a phase in seconds
    #[arg(long, value_name = "S")]
    seconds: Option<f64>,
    /// Send the collective through the NCCL plugin
    #[arg(long)]
    plugin: bool,
}

fn config(args: &ContentionArgs) -> Result<ContentionConfig, CommandError> {
    let config = ContentionConfig::default();
    let seconds = args.seconds.unwrap_or(config.seconds);
    if !(1.0..=600.0).contains(&seconds) {
        return Err(CommandError::Usage("--seconds: from 1 to 600".to_owned()));
    }
    Ok(ContentionConfig {
        rate_mbit: args.rate_mbit.unwrap_or(config.rate_mbit),
        seed: args.seed,
        repetitions: args.repeat,
        seconds,
        plugin: args.plugin,
    })
}

pub(crate) fn run(args: &ContentionArgs) -> Result<ExitCode, CommandError> {
    let contention = Some(config(args)?);
    args.lab.run(|programs| Ok(VerbsConfig { programs, contention, ..VerbsConfig::default() }))
}
