//! `laxity cluster`: the coordinator, seen from outside. Arguments and dispatch; each command asks
//! `laxity.v1.Operator` once ([`client`]) and shows the answer as a table ([`tables`]) or as the
//! JSON of `laxity_wire::view`.

mod client;
mod policy;
mod show;
mod tables;
mod watch;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Args, Subcommand};

use self::client::Coordinator;
use crate::external;

/// Said after the options of the family.
pub(crate) const HELP: &str = "\
Every command but `load` asks the coordinator that --endpoint or $LAXITY_COORDINATOR names \
(http://127.0.0.1:7471 by default), prints a table, and with --json a document for machines, in \
which the ids of batches \
and requests are strings, since they use all 64 bits.

Examples:
  # is everybody there, and where does it queue?
  laxity cluster hosts
  laxity cluster hosts prefill-3              # its ports, by level and stage

  # what is late, and why
  laxity cluster batches --in-trouble
  laxity cluster explain 7340032

  # before maintenance, and after it
  laxity cluster drain prefill-3 --comment 'new NIC'
  laxity cluster drain prefill-3 --undo

  # try a change, make it unless somebody else was faster, look back
  laxity cluster policy set drop_budget=32 --dry-run
  laxity cluster policy set drop_budget=32 debounce=2ms --expect 4 --comment 'fewer prunes'
  laxity cluster policy history

  # from a terminal of your own, with a certificate
  laxity cluster batches --endpoint https://coordinator:7471 --ca ca.pem --cert me.pem --key me.key

Exit status: 0 done, 1 the coordinator refused or could not be reached (the message says what to \
do), 2 wrong arguments.";

/// What can be done with a cluster.
#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// List the hosts: who is connected, what waits, how much is late
    Hosts(HostsArgs),
    /// List the active batches in their order
    Batches(BatchesArgs),
    /// Say why a batch has its place: its deadline, its bottleneck, who was pruned
    Explain(ExplainArgs),
    /// Look at the policy that holds, change it, or see who changed it
    #[command(subcommand)]
    Policy(policy::PolicyCommand),
    /// Take a host out of the cluster's order, or back in; its daemon goes on by itself
    Drain(DrainArgs),
    /// Show what happens as it happens, a line each, until interrupted
    Watch(watch::WatchArgs),
    /// Put a coordinator under load as thousands of daemons would, and measure how long an order
    /// takes (needs laxity-lab)
    #[command(disable_help_flag = true)]
    Load {
        /// See `laxity cluster load --help`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
}

/// Arguments of `laxity cluster hosts`.
#[derive(Debug, Args)]
pub(crate) struct HostsArgs {
    /// Only these hosts, with each port and its queues
    hosts: Vec<String>,
    #[command(flatten)]
    coordinator: Coordinator,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `laxity cluster batches`.
#[derive(Debug, Args)]
pub(crate) struct BatchesArgs {
    /// Only those that this host takes part in
    #[arg(
        long,
        value_name = "HOST",
        default_value = "",
        hide_default_value = true
    )]
    host: String,
    /// Only those of this tenant
    #[arg(
        long,
        value_name = "TENANT",
        default_value = "",
        hide_default_value = true
    )]
    tenant: String,
    /// Only those that would be late, or have somebody pruned
    #[arg(long)]
    in_trouble: bool,
    /// At most so many, from the head of the order; the coordinator gives 1000 at once
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    #[command(flatten)]
    coordinator: Coordinator,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `laxity cluster explain`.
#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// Its id, as `laxity cluster batches` shows it
    batch: u64,
    /// Whose; only needed where two tenants use the same id
    #[arg(
        long,
        value_name = "TENANT",
        default_value = "",
        hide_default_value = true
    )]
    tenant: String,
    #[command(flatten)]
    coordinator: Coordinator,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `laxity cluster drain`.
#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    /// The host, by the name that `laxity cluster hosts` shows; it need not be there yet
    host: String,
    /// Take it back in
    #[arg(long)]
    undo: bool,
    /// Why, for whoever asks later
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    comment: String,
    #[command(flatten)]
    coordinator: Coordinator,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(command: &ClusterCommand) -> anyhow::Result<ExitCode> {
    match command {
        ClusterCommand::Hosts(args) => show::hosts(args),
        ClusterCommand::Batches(args) => show::batches(args),
        ClusterCommand::Explain(args) => show::explain(args),
        ClusterCommand::Policy(command) => policy::run(command),
        ClusterCommand::Drain(args) => show::drain(args),
        ClusterCommand::Watch(args) => watch::watch(args),
        ClusterCommand::Load { arguments } => {
            let words = [OsString::from("cluster-load")];
            let words: Vec<OsString> = words.into_iter().chain(arguments.iter().cloned()).collect();
            return Ok(external::run(&words));
        }
    }
    .map(|()| ExitCode::SUCCESS)
}
