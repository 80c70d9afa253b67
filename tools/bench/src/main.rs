//! `laxity-bench` measures the costs of Laxity on whole processes and compares them with the
//! machine's cache-line round trips. docs/performance.md describes the method.
//!
//! All figures of the hot path come from the shipped `laxityd`. It runs as a separate process with
//! a generated configuration, and no daemon code is linked into this program.

mod bench;
mod clock;
mod error;
mod figure;
mod hotpath;
mod idle;
mod instructions;
mod machine;
mod peer;
mod reference;
mod sample;
mod service;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;

use crate::bench::{Bench, Effort};
use crate::clock::Clock;
use crate::figure::{Figure, Outcome, Row, Verdict};
use crate::machine::{Cores, Machine};
use crate::sample::{Percentiles, Summary};
use anyhow::Context;
use clap::{Args, Parser, Subcommand};

/// Measures Laxity against this machine's cache-line round trips.
#[derive(Debug, Parser)]
#[command(version, about, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(flatten)]
    run: RunArguments,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, Args)]
struct RunArguments {
    /// Write all figures as JSON to FILE (`-` for standard output, instead of the table)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure with few and short repetitions, for a first impression
    #[arg(long)]
    quick: bool,
    /// Measure only rows whose name contains NAME; may be given more than once
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// The cores of the measuring side and of the daemon [default: two that share no core]
    #[arg(long, value_name = "NEAR,FAR", value_delimiter = ',')]
    cores: Option<Vec<usize>>,
    /// Exit with 1 if a gate is missed or a measurement fails
    #[arg(long)]
    strict: bool,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Run the other process of a measured pair
    #[command(hide = true)]
    Peer(PeerArguments),
}

#[derive(Debug, Args)]
struct PeerArguments {
    /// The core to run on
    #[arg(long)]
    core: usize,
    /// The role of the peer
    role: String,
    /// The name of the object that the pair shares, if any
    #[arg(long, default_value = "")]
    name: String,
    /// The number of repetitions, for roles that end by themselves
    #[arg(long, default_value_t = 0)]
    count: usize,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match arguments.role {
        Some(Role::Peer(peer)) => serve(&peer).map(|()| true),
        None => run(&arguments.run),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("laxity-bench: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn serve(peer: &PeerArguments) -> anyhow::Result<()> {
    peer::settle(peer.core)?;
    match peer.role.as_str() {
        reference::ANSWER_ROLE => reference::serve()?,
        instructions::CREDIT_ROLE => instructions::serve(&peer.name, peer.count)?,
        other => anyhow::bail!("unknown role `{other}`"),
    }
    Ok(())
}

/// Measures and reports. Returns `false` if `--strict` is set and a figure failed.
fn run(arguments: &RunArguments) -> anyhow::Result<bool> {
    let cores = Cores::choose(arguments.cores.as_deref())?;
    machine::pin_thread(cores.near)?;
    let clock = Clock::calibrate();
    let machine = Machine::probe(clock.describe(), &cores);
    let effort = if arguments.quick { Effort::QUICK } else { Effort::FULL };
    eprintln!("{machine}");
    if cfg!(debug_assertions) {
        eprintln!("this is a debug build: its figures mean nothing; build with --release");
    }
    let mut bench = Bench {
        clock,
        cores,
        effort,
        p: Vec::new(),
        figures: Vec::new(),
        only: arguments.only.clone(),
    };

    for _ in 0..effort.repetitions {
        bench.reference_now()?;
    }
    hotpath::rows(&mut bench);
    instructions::rows(&mut bench);
    idle::rows(&mut bench);

    let mut figures = vec![reference_figure(&bench.p)];
    figures.append(&mut bench.figures);
    report(arguments, &machine, &bench, &figures)?;
    let failed = |of: &Figure| matches!(of.verdict(), Verdict::Missed | Verdict::Failed);
    Ok(!(arguments.strict && figures.iter().any(failed)))
}

fn reference_figure(repetitions: &[Percentiles]) -> Figure {
    Figure {
        row: Row::latency("p", "P: a request line and a reply line"),
        outcome: match repetitions {
            [] => Outcome::Skipped("needs two cores".to_owned()),
            repetitions => Outcome::Measured(Summary::of_latencies(repetitions)),
        },
    }
}

fn report(
    arguments: &RunArguments,
    machine: &Machine,
    bench: &Bench,
    figures: &[Figure],
) -> anyhow::Result<()> {
    if let Some(path) = &arguments.json {
        let document = table::json(machine, &bench.cores, figures)?;
        let text = format!("{document:#}\n");
        if path.as_os_str() == "-" {
            print!("{text}");
            return Ok(());
        }
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    }
    println!("{machine}");
    let (near, repetitions) = (bench.cores.near, bench.effort.repetitions);
    let far = bench.cores.far.map_or_else(|| "the same".to_owned(), |far| far.to_string());
    println!("cores    client on {near}, daemon on {far}; {repetitions} repetitions, medians");
    println!("{}", table::render(figures));
    Ok(())
}
