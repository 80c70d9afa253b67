//! `laxity-lab`: hosts on one machine, simulated clusters, and tools for a trial of the
//! coordinator.
//!
//! `laxity lab …`, `laxity sim …`, `laxity certs` and `laxity cluster load` start this program.
//! Each command family has one file, and this file only parses and dispatches. Exit codes are those
//! of `laxity`, except that `lab exec` returns the exit code of its command.

#[cfg(feature = "clusters")]
mod certs;
#[cfg(feature = "clusters")]
mod cluster_load;
mod faults;
mod lab;
mod publish;
#[cfg(feature = "clusters")]
mod sim;
mod verbs;
mod vm;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use laxity_cli::manual;

/// Laxity's laboratory: measures the scheduler on one machine or in simulation, and makes
/// certificates and load to try a coordinator.
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
    /// Run hosts in network namespaces on this machine, with real TCP and a shaped fabric
    #[command(subcommand)]
    Lab(lab::LabCommand),
    #[cfg(feature = "clusters")]
    /// Simulate a cluster of thousands of GPUs in virtual time, with the daemon's decision code
    #[command(subcommand)]
    Sim(sim::SimCommand),
    #[cfg(feature = "clusters")]
    /// Make a CA and certificates to try a coordinator with TLS
    #[command(after_long_help = certs::HELP)]
    Certs(certs::CertsArgs),
    #[cfg(feature = "clusters")]
    /// Measure how long a coordinator takes for an order under the load of thousands of daemons
    #[command(override_usage = "laxity cluster load [OPTIONS]")]
    ClusterLoad(cluster_load::LoadArgs),
    /// Print a shell's completion script
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the main manual page, or write a page for each command into a folder
    Man {
        /// Write a page for each command into this folder
        #[arg(long, value_name = "FOLDER")]
        out: Option<PathBuf>,
    },
}

/// Replaces glibc's `hypot` for the crates that call it. Since 2.35, glibc's has a new symbol
/// version, with which hosts with an older glibc could not start this program.
// SAFETY: it has the signature and the meaning of C's `hypot`.
#[unsafe(no_mangle)]
extern "C" fn hypot(x: f64, y: f64) -> f64 {
    libm::hypot(x, y)
}

fn own_command() -> clap::Command {
    Cli::command().bin_name("laxity-lab")
}

/// Prints the main manual page, or writes those of the commands, which begin with `laxity`.
fn manual_pages(folder: Option<&Path>) -> anyhow::Result<()> {
    if folder.is_none() {
        return Ok(manual::pages(own_command(), None)?);
    }
    let mut command = Cli::command().name("laxity");
    command.build();
    let commands = command.get_subcommands();
    let mut own = commands.filter(|it| !matches!(it.get_name(), "completions" | "man" | "help"));
    Ok(own.try_for_each(|it| manual::pages(it.clone(), folder))?)
}

fn main() -> ExitCode {
    // The lab starts this program again inside its namespaces. Those calls are internal.
    if let Some(code) = laxity_rig::lab::internal_call() {
        return code;
    }
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("laxity: {error:#}");
            ExitCode::FAILURE
        }
    }
}

pub(crate) fn exit_code(is_good: bool) -> ExitCode {
    if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Lab(command) => return lab::run(command),
        #[cfg(feature = "clusters")]
        Command::Sim(command) => return sim::run(command, &sim::simulate),
        #[cfg(feature = "clusters")]
        Command::Certs(args) => certs::certs(&args)?,
        #[cfg(feature = "clusters")]
        Command::ClusterLoad(args) => cluster_load::load(&args)?,
        Command::Completions { shell } => manual::completions(own_command(), shell)?,
        Command::Man { out } => manual_pages(out.as_deref())?,
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
