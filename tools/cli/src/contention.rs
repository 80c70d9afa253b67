//! `laxity lab contention`: a collective against bulk transfers on real verbs.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use laxity_rig::vm::verbs::contention::{Collective, Contention, ContentionConfig, Load, Programs};
use laxity_rig::vm::{self, Input, Job, NetworkConfig, VmConfig};

use crate::vm::{failed, print};

pub(crate) const HELP: &str = "\
Needs what `laxity lab exec` needs, and beside this program laxityd, liblaxity.so and, in `verbs`, the
test programs of the source tree (built if they are missing). Prefill-to-decode transfers are Mooncake's
if $LAXITY_PYTHON, or python3, can import it (pip install mooncake-transfer-engine-non-cuda).

Examples:
  laxity lab contention
  laxity lab contention --repeat 5 --seed 10 --json contention.json";

/// Arguments of `laxity lab contention`.
#[derive(Args)]
pub(crate) struct ContentionArgs {
    /// Rate of each of the router's ports
    #[arg(long, value_name = "N", default_value_t = ContentionConfig::RATE_MBIT)]
    rate_mbit: u32,
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
    /// Writes of a test program in the place of Mooncake's
    #[arg(long)]
    no_mooncake: bool,
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
    /// Folder of laxityd, liblaxity.so and `verbs` [default: that of this program]
    #[arg(long, value_name = "FOLDER")]
    programs: Option<PathBuf>,
    /// Write the result as JSON; `-` is standard output, without the table
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
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
    let folder = match &args.programs {
        Some(folder) => folder
            .canonicalize()
            .with_context(|| format!("cannot resolve {}", folder.display()))?,
        None => {
            let program = std::env::current_exe().context("cannot tell what runs")?;
            program
                .parent()
                .context("a program lies in a folder")?
                .into()
        }
    };
    let mut programs = Programs::find(&folder)?;
    if args.no_mooncake {
        programs.python = None;
    } else if programs.python.is_none() {
        bail!(
            "no Mooncake: `pip install mooncake-transfer-engine-non-cuda` and name that Python in \
             $LAXITY_PYTHON, or give --no-mooncake"
        );
    }
    let mut config = ContentionConfig::new(programs);
    config.seed = args.seed;
    config.repetitions = args.repeat;
    config.static_marks = !args.no_static;
    config.chunk = args.chunk;
    config.window = args.window;
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
    let config = config(args)?;
    let machine = VmConfig {
        network: NetworkConfig {
            rate_mbit: Some(args.rate_mbit),
            ..NetworkConfig::default()
        },
        ..VmConfig::default()
    };
    let job = Job::Contention(config);
    let report = match vm::run(&machine, &job, Input::Empty, &mut print) {
        Ok(report) => report,
        Err(error) => return Ok(failed(&error)),
    };
    let contention: Contention =
        serde_json::from_value(report.finished.details).context("the guest's report")?;
    let json = serde_json::to_string_pretty(&contention).context("cannot write JSON")?;
    let mut out = io::stdout().lock();
    match &args.json {
        Some(path) if path.as_os_str() == "-" => {
            return writeln!(out, "{json}")
                .map(|()| ExitCode::SUCCESS)
                .context("cannot write to standard output");
        }
        Some(path) => std::fs::write(path, json + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?,
        None => {}
    }
    writeln!(out, "{contention}").context("cannot write to standard output")?;
    Ok(ExitCode::SUCCESS)
}
