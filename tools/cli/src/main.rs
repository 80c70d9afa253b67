//! `laxity`: the command line for operators of hosts and clusters.
//!
//! Each command family has a file, and this file parses and dispatches. Exit codes: 0 for success,
//! 1 if the command failed (the message says what to do), 2 for wrong arguments (clap). `run` ends
//! as its program does. Commands of the laboratory belong to another program ([`external`]).
#![forbid(unsafe_code)]

mod class_table;
mod class_variables;
mod cluster;
mod doctor;
mod example_job;
mod explain;
mod external;
mod host;
mod levels;
mod observe;
mod profiles;
mod registration;
mod run;
mod scrape;
mod signals;
mod support_bundle;
mod switch_config;
mod top;
mod trace;
mod verify;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use laxity_cli::manual;

/// Schedules the network traffic of LLM inference: runs programs under the scheduler, shows what a
/// host's daemon and a cluster's coordinator do, and switches scheduling off and on.
#[derive(Parser)]
#[command(name = "laxity", version, arg_required_else_help = true, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a program with its RDMA traffic under the scheduler
    #[command(after_long_help = run::HELP)]
    Run(Box<run::RunArgs>),
    /// Run an example job that sends over loopback, to try a host without RDMA and GPUs
    #[command(after_long_help = example_job::HELP)]
    ExampleJob(example_job::ExampleJobArgs),
    /// Print the class variables that `run` sets for a profile
    #[command(after_long_help = class_variables::HELP)]
    Env(class_variables::EnvArgs),
    /// List the job profiles, or print one
    Profiles(profiles::ProfilesArgs),
    /// Find out why jobs on this host are not scheduled, and what to do about it
    #[command(after_long_help = doctor::HELP)]
    Doctor(doctor::DoctorArgs),
    /// Show what the daemon of this host is doing
    Status(host::StatusArgs),
    /// Stop scheduling on this host at once (`on`), or start it again (`off`)
    Bypass(host::BypassArgs),
    /// Delay and mark transfers (`on`), or only observe them (`off`), until the configured
    /// mode changes
    Enforce(host::EnforceArgs),
    /// Show what enforcing would have done, while the daemon only observes
    #[command(subcommand, after_long_help = observe::HELP)]
    Observe(observe::ObserveCommand),
    /// Ask the daemon to read its configuration again (as SIGHUP does)
    Reload(host::Endpoint),
    /// Show jobs, clients, stages, levels and ports on a live screen, and why their flows wait
    #[command(after_long_help = top::HELP)]
    Top(top::TopArgs),
    /// Explain why a transfer waits: its level, its deadline, what is ahead of it, and what to do
    #[command(after_long_help = explain::HELP)]
    Explain(explain::ExplainFlowArgs),
    /// Compare permitted bytes with the NIC's counters: priorities, pauses, CNPs
    #[command(after_long_help = verify::HELP)]
    Verify(verify::VerifyArgs),
    /// Write an archive, without secrets, for remote support
    #[command(after_long_help = support_bundle::HELP)]
    SupportBundle(support_bundle::SupportBundleArgs),
    /// Print a switch's QoS configuration that agrees with the daemon's levels
    #[command(after_long_help = switch_config::HELP)]
    SwitchConfig(switch_config::SwitchConfigArgs),
    /// Record what the daemon does, as a file for Perfetto that shows why each transfer waited
    #[command(after_long_help = trace::HELP)]
    Trace(trace::TraceArgs),
    /// Show what a cluster's coordinator does, change its policy, and drain hosts
    #[command(subcommand, after_long_help = cluster::HELP)]
    Cluster(cluster::ClusterCommand),
    /// Run hosts in network namespaces on this machine, with real TCP (needs laxity-lab)
    #[command(disable_help_flag = true)]
    Lab(external::ExternalArguments),
    /// Simulate a cluster of thousands of GPUs in virtual time (needs laxity-lab)
    #[command(disable_help_flag = true)]
    Sim(external::ExternalArguments),
    /// Make a CA and certificates to try a coordinator with TLS (needs laxity-lab)
    #[command(disable_help_flag = true)]
    Certs(external::ExternalArguments),
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
    #[command(external_subcommand)]
    External(Vec<OsString>),
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("laxity: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Status(args) => host::status(&args)?,
        Command::Bypass(args) => host::bypass(&args)?,
        Command::Enforce(args) => host::enforce(&args)?,
        Command::Observe(command) => observe::observe(&command)?,
        Command::Reload(endpoint) => host::reload(&endpoint)?,
        Command::Run(args) => return Ok(run::run(&args)),
        Command::ExampleJob(args) => return Ok(example_job::example_job(&args)?),
        Command::Doctor(args) => return Ok(doctor::doctor(&args)?),
        Command::Env(args) => class_variables::env(&args)?,
        Command::Profiles(args) => profiles::profiles(&args)?,
        Command::Cluster(command) => return Ok(cluster::run(&command)?),
        Command::Trace(args) => return Ok(trace::trace(&args)?),
        Command::Explain(args) => explain::explain(&args)?,
        Command::Top(args) => top::top(&args)?,
        Command::Verify(args) => return Ok(verify::verify(&args)?),
        Command::SupportBundle(args) => support_bundle::support_bundle(&args)?,
        Command::SwitchConfig(args) => switch_config::switch_config(&args)?,
        Command::Completions { shell } => manual::completions(Cli::command(), shell)?,
        Command::Man { out } => manual::pages(Cli::command(), out.as_deref())?,
        Command::Lab(arguments) => return Ok(external::lab("lab", &arguments)),
        Command::Sim(arguments) => return Ok(external::lab("sim", &arguments)),
        Command::Certs(arguments) => return Ok(external::lab("certs", &arguments)),
        Command::External(words) => return Ok(external::other::<Cli>(&words)),
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
