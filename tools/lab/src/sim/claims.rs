//! `laxity sim reproduce` for papers about requests: compares their claims with results of runs.

use std::io::{self, IsTerminal as _};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use laxity_sim::requests::PaperError;
use laxity_sim::requests::reproduction::{Options, Reproduction};

use crate::publish::{self, is_stdout};
use laxity_cli::output::{self, say};

/// Arguments of `laxity sim reproduce` for a paper about requests.
#[derive(Args)]
pub(crate) struct ClaimsArgs {
    /// Number of seeds
    #[arg(
        long, value_name = "N", default_value_t = 3,
        value_parser = clap::value_parser!(u64).range(1..=1000)
    )]
    seeds: u64,
    /// The first seed. Take another one than 1 for requests that nothing was tuned on
    #[arg(
        long, value_name = "S", default_value_t = 1,
        value_parser = clap::value_parser!(u64).range(..1 << 62)
    )]
    first_seed: u64,
    /// Run fewer points for a shorter time. This takes seconds, and proves nothing
    #[arg(long)]
    quick: bool,
    /// Folder with recorded traces (qoserve only) [default: workloads with the traces' statistics]
    #[arg(long, value_name = "DIR", env = "LAXITY_DATA")]
    data: Option<PathBuf>,
    /// Number of threads [default: number of processors]
    #[arg(long, short, value_name = "N")]
    jobs: Option<NonZeroUsize>,
    /// Show no progress
    #[arg(long, short)]
    quiet: bool,
    /// Write all results as JSON. With `-` they go to standard output, instead of the tables
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// File for the tables as Markdown
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

/// Runs the points that check a paper's claims, and writes the results.
pub(super) fn run(
    args: &ClaimsArgs,
    reproduce: impl FnOnce(&Options) -> Result<Reproduction, PaperError>,
) -> Result<ExitCode> {
    if let Some(data) = &args.data
        && !data.is_dir()
    {
        bail!(
            "{}: no such folder; leave out --data (and LAXITY_DATA) for workloads that are made up",
            data.display()
        );
    }
    publish::check(args.json.iter().chain(&args.markdown))?;
    let processors = std::thread::available_parallelism();
    let found = reproduce(&Options {
        seeds: (args.first_seed..args.first_seed + args.seeds).collect(),
        quick: args.quick,
        jobs: args.jobs.or(processors.ok()).unwrap_or(NonZeroUsize::MIN),
        data: args.data.clone(),
        progress: !args.quiet && io::stderr().is_terminal(),
    })?;
    if let Some(path) = &args.json {
        publish::write(path, &(output::json(&found)? + "\n"))?;
    }
    if let Some(path) = &args.markdown {
        output::replace(path, found.markdown().as_bytes())?;
    }
    if !args.json.as_deref().is_some_and(is_stdout) {
        say(found.table())?;
    }
    Ok(ExitCode::SUCCESS)
}
