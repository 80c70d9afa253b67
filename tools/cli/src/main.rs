//! `laxity`: the command line for operators of hosts and clusters.
//!
//! One file per command family; this one only parses and dispatches. Exit codes: 0 done, 1 the
//! command failed (the message says what to do next), 2 the arguments are wrong (clap). `run` ends
//! as the program that it runs. Commands of the laboratory belong to another program
//! ([`external`]).
#![forbid(unsafe_code)]

mod cluster;
mod doctor;
mod external;
mod host;
mod profiles;
mod registration;
mod run;
mod signals;
mod trace;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use laxity_cli::manual;

/// Schedules the network traffic of LLM inference: runs programs under the scheduler, shows what a
/// host's daemon and a cluster's coordinator do, and switches scheduling off and on.
#[derive(Parser)]
#[command(
    name = "laxity",
    version,
    arg_required_else_help = true,
    max_term_width = 100,
    after_help = external::HELP
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a program with its RDMA traffic under the scheduler
    #[command(after_long_help = run::HELP)]
    Run(Box<run::RunArgs>),
    /// List the job profiles, or print one
    Profiles(profiles::ProfilesArgs),
    /// Check what stands between this host's jobs and the scheduler, and say what to do about it
    #[command(after_long_help = doctor::HELP)]
    Doctor(doctor::DoctorArgs),
    /// Show what the daemon of this host is doing
    Status(host::StatusArgs),
    /// Let all traffic of this host go out unscheduled, at once, or schedule it again
    Bypass(host::BypassArgs),
    /// Ask the daemon to read its configuration again (as SIGHUP does)
    Reload(host::Endpoint),
    /// Record what the daemon sees and does for a while, as a picture for Perfetto: why each
    /// transfer waited
    #[command(after_long_help = trace::HELP)]
    Trace(trace::TraceArgs),
    /// A cluster's coordinator: hosts, the order of batches and why, policy, drains
    #[command(subcommand, after_long_help = cluster::HELP)]
    Cluster(cluster::ClusterCommand),
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
    #[command(external_subcommand)]
    External(Vec<OsString>),
}

fn main() -> ExitCode {
    let done = |()| ExitCode::SUCCESS;
    let outcome = match Cli::parse().command {
        Command::Status(args) => host::status(&args).map(done),
        Command::Bypass(args) => host::bypass(&args).map(done),
        Command::Reload(endpoint) => host::reload(&endpoint).map(done),
        Command::Run(args) => return run::run(&args),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::Profiles(args) => profiles::profiles(&args).map(done),
        Command::Cluster(command) => cluster::run(&command),
        Command::Trace(args) => trace::trace(&args),
        Command::Completions { shell } => manual::completions(Cli::command(), shell).map(done),
        Command::Man { out } => manual::pages(Cli::command(), out.as_deref()).map(done),
        Command::External(words) => return external::run(&words),
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
