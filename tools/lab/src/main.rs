//! `laxity-lab`: the laboratory. Hosts on one machine, simulated clusters, and what a trial of the
//! coordinator needs.
//!
//! `laxity lab …`, `laxity sim …`, `laxity certs` and `laxity cluster load` start this program. One
//! file per command family; this one only parses and dispatches. Exit codes are those of `laxity`;
//! `lab exec` and `lab shell` end as the command that they run.
#![forbid(unsafe_code)]

mod certs;
mod cluster_load;
mod contention;
mod lab;
mod sim;
mod verbs;
mod vm;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use laxity_cli::manual;

/// Laxity's laboratory: measures the scheduler with real hosts on one machine and with simulated
/// clusters, and makes what a trial of the coordinator needs.
#[derive(Parser)]
#[command(
    name = "laxity-lab",
    bin_name = "laxity",
    version,
    arg_required_else_help = true,
    max_term_width = 100
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Real hosts on one machine: network namespaces, real TCP, a shaped fabric
    #[command(subcommand)]
    Lab(lab::LabCommand),
    /// A cluster of thousands of GPUs in virtual time, under the scheduler's own decision code
    #[command(subcommand)]
    Sim(sim::SimCommand),
    /// Make a CA and certificates for a trial of the coordinator with TLS
    #[command(after_long_help = certs::HELP)]
    Certs(certs::CertsArgs),
    /// Put a coordinator under load as thousands of daemons would, and measure how long an order
    /// takes
    #[command(override_usage = "laxity cluster load [OPTIONS]")]
    ClusterLoad(cluster_load::LoadArgs),
    /// Print a shell's completion script
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or write one page per command into a folder
    Man {
        /// Folder for the pages; without it the main page goes to standard output
        #[arg(long, value_name = "FOLDER")]
        out: Option<PathBuf>,
    },
}

/// The program by its own name, for its manual and its completions.
fn own_command() -> clap::Command {
    Cli::command().bin_name("laxity-lab")
}

fn main() -> ExitCode {
    // The lab runs this same program again inside its namespaces; those calls are not for people.
    if let Some(code) = lab::internal_call() {
        return code;
    }
    let done = |()| ExitCode::SUCCESS;
    let outcome = match Cli::parse().command {
        Command::Lab(command) => lab::run(command),
        Command::Sim(command) => sim::run(command, &sim::simulate),
        Command::Certs(args) => certs::certs(&args).map(done),
        Command::ClusterLoad(args) => cluster_load::load(&args).map(done),
        Command::Completions { shell } => manual::completions(own_command(), shell).map(done),
        Command::Man { out } => manual::pages(own_command(), out.as_deref()).map(done),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("laxity: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
