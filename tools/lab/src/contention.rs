//! `laxity lab contention`: a collective against bulk transfers on real verbs.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use laxity_rig::vm::verbs::VerbsConfig;
use laxity_rig::vm::verbs::contention::{Collective, ContentionConfig, Load};

use crate::verbs::LabArgs;

pub(crate) const HELP: &str = "\
Each repetition plays the same arrivals without the scheduler, with two static classes, and under \
Laxity, and
the collective alone before and after. It holds if under Laxity the collective takes at most 1.3 \
times what it
takes alone, where unscheduled it takes at least twice as long, and nothing is late that could be \
in time.
What does not hold is played again, three times at most: other work of the machine spoils one \
attempt.

Exit code: 0 if of each seed an attempt holds or cannot tell (the machine was busy), 1 if not, 125 \
if the lab failed.

Examples:
  laxity lab contention
  laxity lab contention --repeat 5 --seed 10 --json contention.json";

/// Arguments of `laxity lab contention`.
#[derive(Args)]
pub(crate) struct ContentionArgs {
    #[command(flatten)]
    lab: LabArgs,
    /// Rate of each of the router's ports [default: 8]
    #[arg(long, value_name = "N")]
    rate_mbit: Option<u32>,
    /// Seed of the arrivals; each repetition adds 1
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How often to play all phases
    #[arg(long, value_name = "N", default_value_t = 1)]
    repeat: u32,
    /// Seconds of a phase
    #[arg(long, value_name = "S")]
    seconds: Option<f64>,
    /// Leave out the phase with static marks
    #[arg(long)]
    no_static: bool,
    /// Bytes, messages and period (µs) of the collective
    #[arg(long, value_name = "BYTES,N,US", value_delimiter = ',')]
    collective: Option<Vec<u64>>,
    /// Bytes, period and deadline (µs) of prefill-to-decode transfers
    #[arg(long, value_name = "BYTES,US,US", value_delimiter = ',')]
    p2d: Option<Vec<u64>>,
    /// Bytes, period and deadline (µs) of reads
    #[arg(long, value_name = "BYTES,US,US", value_delimiter = ',')]
    reads: Option<Vec<u64>>,
    /// Bytes permitted at once [default: the daemon's]
    #[arg(long, value_name = "BYTES")]
    chunk: Option<u64>,
    /// Bytes in flight at most [default: the daemon's]
    #[arg(long, value_name = "BYTES")]
    window: Option<u64>,
    /// The collective goes through the NCCL plugin
    #[arg(long)]
    plugin: bool,
}

fn three(option: &str, given: &[u64]) -> Result<[u64; 3]> {
    match <[u64; 3]>::try_from(given) {
        Ok(numbers) if numbers.iter().all(|&n| n > 0) => Ok(numbers),
        _ => bail!("--{option} wants three numbers above 0, separated by commas"),
    }
}

fn load(option: &str, given: &[u64]) -> Result<Load> {
    let [bytes, period_us, deadline_us] = three(option, given)?;
    Ok(Load {
        bytes,
        period_us,
        deadline_us,
    })
}

fn config(args: &ContentionArgs) -> Result<ContentionConfig> {
    let mut config = ContentionConfig::default();
    if let Some(rate_mbit) = args.rate_mbit {
        config.rate_mbit = rate_mbit;
    }
    config.seed = args.seed;
    config.repetitions = args.repeat;
    config.static_marks = !args.no_static;
    config.chunk = args.chunk;
    config.window = args.window;
    config.plugin = args.plugin;
    if let Some(seconds) = args.seconds {
        if !(1.0..=600.0).contains(&seconds) {
            bail!("--seconds: from 1 to 600");
        }
        config.seconds = seconds;
    }
    if let Some(given) = &args.collective {
        let [bytes, messages, period_us] = three("collective", given)?;
        config.collective = Collective {
            bytes,
            messages,
            period_us,
        };
    }
    if let Some(given) = &args.p2d {
        config.p2d = load("p2d", given)?;
    }
    if let Some(given) = &args.reads {
        config.reads = load("reads", given)?;
    }
    Ok(config)
}

pub(crate) fn run(args: &ContentionArgs) -> Result<ExitCode> {
    let contention = Some(config(args)?);
    args.lab.run(|programs| {
        Ok(VerbsConfig {
            programs,
            contention,
            ..VerbsConfig::default()
        })
    })
}
