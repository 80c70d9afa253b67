//! `laxity`: the command line for host operators, and the lab.
//!
//! One file per command family; this one only parses and dispatches. Exit codes: 0 done, 1 the
//! command failed (the message says what to do next), 2 the arguments are wrong (clap);
//! `run`, `lab exec` and `lab shell` end as the command that they run.
#![forbid(unsafe_code)]

mod certs;
mod cluster;
mod contention;
mod doctor;
mod host;
mod lab;
mod library;
mod manual;
mod output;
mod profiles;
mod program;
mod registration;
mod run;
mod signals;
mod sim;
mod trace;
mod verbs;
mod vm;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Schedules the network traffic of LLM inference: runs programs under the scheduler, looks at a host's
/// daemon, switches scheduling off and on, runs the lab and simulates clusters.
#[derive(Parser)]
#[command(
    name = "laxity",
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
    /// Record what the daemon sees and does for a while, as a picture for Perfetto: why each transfer waited
    #[command(after_long_help = trace::HELP)]
    Trace(trace::TraceArgs),
    /// Real hosts on one machine: network namespaces, real TCP, a shaped fabric
    #[command(subcommand)]
    Lab(lab::LabCommand),
    /// A cluster's coordinator: hosts, the order of batches and why, policy, drains
    #[command(subcommand, after_long_help = cluster::HELP)]
    Cluster(cluster::ClusterCommand),
    /// Make a CA and certificates for a trial of the coordinator with TLS
    #[command(after_long_help = certs::HELP)]
    Certs(certs::CertsArgs),
    /// A cluster of thousands of GPUs in virtual time, under the scheduler's own decision code
    #[command(subcommand)]
    Sim(sim::SimCommand),
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

fn main() -> ExitCode {
    // The lab runs this same binary again inside its namespaces; those calls are not for people.
    if let Some(code) = lab::internal_call() {
        return code;
    }
    let done = |()| ExitCode::SUCCESS;
    let outcome = match Cli::parse().command {
        Command::Status(args) => host::status(&args).map(done),
        Command::Bypass(args) => host::bypass(&args).map(done),
        Command::Reload(endpoint) => host::reload(&endpoint).map(done),
        Command::Run(args) => return run::run(&args),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::Profiles(args) => profiles::profiles(&args).map(done),
        Command::Cluster(command) => cluster::run(&command).map(done),
        Command::Certs(args) => certs::certs(&args).map(done),
        Command::Trace(args) => trace::trace(&args),
        Command::Lab(command) => lab::run(command),
        Command::Sim(command) => sim::run(command, &sim::simulate),
        Command::Completions { shell } => manual::completions(shell).map(done),
        Command::Man { out } => manual::pages(out.as_deref()).map(done),
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
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
