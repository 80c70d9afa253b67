//! `laxity lab faults`: a fault campaign on this machine.

use std::io::{self, IsTerminal as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use laxity_cli::output;
use laxity_rig::error::LabError;
use laxity_rig::faults::{self, Campaign, Failure, PATHS, Plant, Player, Setting, SoakPlan};
use laxity_rig::vm::verbs::prepare;
use serde::Serialize;

use crate::lab::named;
use crate::{exit_code, publish};

/// Times that `--replay` plays a schedule before it says that nothing is wrong any more.
const REPLAYS: u32 = 10;

pub(crate) const HELP: &str = "\
Each round starts a laxityd with a private socket, and workers that send numbered transfers whose
bytes are known: on the client library, on the C interface, on the NCCL plugin over TCP, on
Mooncake's Transfer Engine over TCP, by its Python interface (mooncake) and by its C interface under
liblaxity_mooncake.so (mooncake_c), and on three laxity-engine, whose answers are known. Faults of
the seed then happen to the daemon and the workers, many at a time. An oracle outside of them checks
that each transfer completes once, in its order and with its bytes, or with the error that the fault
must give, and that no permit takes longer than 500 ms, or 1 s beside Mooncake or engines. After a
round, the daemon must have no client, no flow, no byte and no more descriptors than at its start.
No privileges, namespaces or RDMA devices are needed. Paths that lack a program are left out, with a
message. Run --prepare once to get Mooncake.

If something is wrong, the command prints the seed and the round, drops faults while the rest still
fails, and writes what is left into --failures. A schedule names times, and processes don't run
alike twice, so --replay plays it up to ten times.

With --virtual, the scheduler, its clients and a port run in one thread and in virtual time, without
processes. A seed gives the same events each time, so a schedule that fails does so in a debugger.

With --soak, one daemon and some workers stay for the whole time and send as fast as they can, and
other workers come and go. It fails if the memory, the descriptors or the threads of those that stay
keep growing, or if the daemon's counters don't agree.

Exit status: 0 if nothing was wrong, 1 if something was or the campaign could not run.

Examples:
  laxity lab faults
  laxity lab faults --paths mooncake,client
  laxity lab faults --paths mooncake_c
  laxity lab faults --laxityd old/laxityd --then new/laxityd
  laxity lab faults --virtual --faults 100000 --json report.json
  laxity lab faults --faults 100000 --seed 7 --state target/faults.json --json report.json
  laxity lab faults --soak 4h --json soak.json
  laxity lab faults --replay target/faults/faults-7-12.json";

#[derive(Args)]
pub(crate) struct FaultsArgs {
    /// Number of faults
    #[arg(long, value_name = "N", default_value_t = 1000)]
    faults: u64,
    /// Seed of all rounds
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Rounds at the same time, each with a daemon of its own
    #[arg(long, value_name = "N", default_value_t = 2)]
    jobs: usize,
    /// Paths that each round uses, all of which have to work [default: three of those that can]
    #[arg(long, value_name = "PATH,…", value_delimiter = ',', value_parser = PATHS)]
    paths: Vec<String>,
    /// Only get Mooncake's Transfer Engine from PyPI into the lab's cache, and build a library with
    /// its C interface (needs c++)
    #[arg(long)]
    prepare: bool,
    /// Remember finished rounds in this file, and go on from it
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// Folder for the schedule of a round that went wrong
    #[arg(long, value_name = "FOLDER", default_value = "target/faults")]
    failures: PathBuf,
    /// Number of smaller schedules to try if a round went wrong; with 0 its schedule stays whole
    #[arg(long, value_name = "N", default_value_t = 60)]
    shrink: u32,
    /// Run all of it in one thread and in virtual time: thousands of faults a minute, and each seed
    /// gives the same events again
    #[arg(long = "virtual", conflicts_with_all = ["laxityd", "then", "paths", "plant_on"])]
    in_virtual_time: bool,
    /// Keep one daemon under full load for this long instead, such as 4h, and find what grows
    #[arg(long, value_name = "TIME", value_parser = SoakPlan::length, conflicts_with_all = [
        "faults", "jobs", "state", "failures", "shrink", "in_virtual_time", "replay", "then",
    ])]
    soak: Option<Duration>,
    /// Play the schedule in this file, which --failures kept, instead of a campaign
    #[arg(long, value_name = "FILE", conflicts_with_all = ["faults", "seed", "state", "shrink"])]
    replay: Option<PathBuf>,
    /// Daemon to run [default: the one beside this program, or in PATH]
    #[arg(long, value_name = "PATH")]
    laxityd: Option<PathBuf>,
    /// Daemon that takes turns with --laxityd at each restart, such as another release's
    #[arg(long, value_name = "PATH")]
    then: Option<PathBuf>,
    /// Write the report as JSON. With `-` it goes to standard output, the table to standard error
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the report as a page in Markdown
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Show no progress
    #[arg(long, short)]
    quiet: bool,
    /// Plant a bug, to test the oracle: twice, drop, swap, leak or leak_lane; or leak_memory or
    /// leak_descriptor with --soak
    #[arg(long, hide = true, value_parser = named::<Plant>)]
    plant: Option<Plant>,
    /// Path that has the bug, unless it is a leak
    #[arg(long, hide = true, default_value = "client", value_parser = PATHS)]
    plant_on: String,
}

pub(crate) fn run(args: &FaultsArgs) -> Result<ExitCode> {
    if args.prepare {
        prepare::c_interface()?;
        return Ok(ExitCode::SUCCESS);
    }
    publish::check([&args.json, &args.report].into_iter().flatten())?;
    let progress = !args.quiet && io::stderr().is_terminal();
    if let Some(length) = args.soak {
        let plan = SoakPlan { seed: args.seed, length, setting: setting(args, &args.paths)? };
        let report = faults::soak(&plan, progress, |line| eprintln!("{line}"))?;
        write(args, &report, [faults::soak_table, faults::soak_page])?;
        return Ok(exit_code(report.violations.is_empty()));
    }
    let report = match &args.replay {
        Some(file) => {
            let failure = Failure::read(file)?;
            let paths = if args.paths.is_empty() { &failure.paths } else { &args.paths };
            let player = player(args, paths, failure.in_virtual_time)?;
            let times = if failure.in_virtual_time { 1 } else { REPLAYS };
            faults::replay(&player, file, failure, times)?
        }
        None => {
            let campaign = Campaign {
                seed: args.seed,
                faults: args.faults,
                jobs: args.jobs,
                player: player(args, &args.paths, args.in_virtual_time)?,
                state: args.state.clone(),
                failures: args.failures.clone(),
                shrink: args.shrink,
            };
            faults::run(&campaign, progress, |line| eprintln!("{line}"))?
        }
    };
    write(args, &report, [faults::table, faults::page])?;
    Ok(exit_code(report.violations == 0))
}

/// Finds the programs. Names the paths whose programs are missing.
fn setting(args: &FaultsArgs, paths: &[String]) -> Result<Setting> {
    let plant = (args.plant, args.plant_on.as_str());
    let setting = Setting::find(args.laxityd.as_ref(), args.then.as_ref(), paths, plant)
        .map_err(LabError::CannotRun)?;
    for path in &setting.left_out {
        eprintln!("laxity: left out: {path}");
    }
    Ok(setting)
}

/// Returns what plays the rounds: a virtual world, or processes of the programs that it finds.
fn player(args: &FaultsArgs, paths: &[String], in_virtual_time: bool) -> Result<Player> {
    if in_virtual_time {
        return Ok(Player::VirtualTime(args.plant));
    }
    Ok(Player::Processes(Box::new(setting(args, paths)?)))
}

/// Writes a report where the arguments ask for it, as a table and as a page.
fn write<R: Serialize>(
    args: &FaultsArgs,
    report: &R,
    [table, page]: [fn(&R) -> String; 2],
) -> Result<()> {
    if let Some(path) = &args.report {
        output::replace(path, page(report).as_bytes())?;
    }
    publish::publish(args.json.as_deref(), report, &table(report))
}
