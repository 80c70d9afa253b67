//! `laxity cluster`: arguments and dispatch. Each command asks `laxity.v1.Operator` ([`client`])
//! and prints the answer as a table ([`tables`]) or as the JSON of `laxity_wire::view`.

pub(crate) mod client;
pub(crate) mod error;
mod policy;
mod show;
pub(crate) mod tables;
mod watch;

use std::process::ExitCode;

use clap::{Args, Subcommand};

use self::client::CoordinatorArgs;
use self::error::ClusterError;
use crate::external;

pub(crate) const HELP: &str = "\
Every command except `load` asks one coordinator: the one that --endpoint or $LAXITY_COORDINATOR \
names, by default http://127.0.0.1:7471. The answer is a table, or JSON with --json. In JSON, ids \
of batches and requests are strings, because they use all 64 bits.

Examples:
  # which hosts are connected, and where do bytes wait?
  laxity cluster hosts
  laxity cluster hosts prefill-3              # its ports, by level and by stage

  # which batches will be late, and why
  laxity cluster batches --in-trouble
  laxity cluster explain 7340032

  # take a host out before maintenance, and back in afterwards
  laxity cluster drain prefill-3 --comment 'new NIC'
  laxity cluster drain prefill-3 --undo

  # a host was removed for good: take it off the list
  laxity cluster forget prefill-3

  # check a change, make it if nobody else changed the policy meanwhile, list all changes
  laxity cluster policy set drop_budget=32 --dry-run
  laxity cluster policy set drop_budget=32 debounce=2ms --expect 4 --comment 'fewer prunes'
  laxity cluster policy history

  # ask a coordinator that uses TLS
  laxity cluster batches --endpoint https://coordinator:7471 --ca ca.pem --cert me.pem --key me.key

Exit status: 0 on success; 1 if the coordinator refused or could not be reached (the message says \
what to do); 2 for wrong arguments.";

/// The commands of `laxity cluster`.
#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// List the hosts: whether they are connected, how many bytes wait, and how many were late
    Hosts(HostsArgs),
    /// List the active batches in the order in which they are served
    Batches(BatchesArgs),
    /// Explain the place of a batch in the order: its deadline, its bottleneck, its pruned requests
    Explain(ExplainArgs),
    /// Show or change the scheduling policy, or list earlier changes
    #[command(subcommand)]
    Policy(policy::PolicyCommand),
    /// Take a host out of the cluster order, so that its daemon uses its own order, or put it back
    Drain(DrainArgs),
    /// Remove a host that no longer exists from the list. It returns if its daemon connects again
    Forget(ForgetArgs),
    /// Print events as they happen, one per line, until interrupted
    Watch(watch::WatchArgs),
    /// Measure a coordinator under the load of thousands of daemons (needs laxity-lab)
    #[command(disable_help_flag = true)]
    Load(external::ExternalArguments),
}

#[derive(Debug, Args)]
pub(crate) struct HostsArgs {
    /// Show only these hosts, with the queues of each port
    hosts: Vec<String>,
    #[command(flatten)]
    coordinator: CoordinatorArgs,
}

#[derive(Debug, Args)]
pub(crate) struct BatchesArgs {
    /// List only batches that this host takes part in
    #[arg(long, value_name = "HOST")]
    host: Option<String>,
    /// List only batches of this tenant
    #[arg(long, value_name = "TENANT")]
    tenant: Option<String>,
    /// List only batches that will be late or have pruned requests
    #[arg(long)]
    in_trouble: bool,
    /// Maximum number of batches, from the head of the order
    #[arg(
        long, value_name = "N", default_value_t = 50,
        value_parser = clap::value_parser!(u32).range(1..=1000)
    )]
    limit: u32,
    #[command(flatten)]
    coordinator: CoordinatorArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// Id of the batch, as `laxity cluster batches` shows it
    batch: u64,
    /// Tenant of the batch, if several tenants use this id
    #[arg(long, value_name = "TENANT")]
    tenant: Option<String>,
    #[command(flatten)]
    coordinator: CoordinatorArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    /// Name of the host, as `laxity cluster hosts` shows it. It need not be connected
    host: String,
    /// Put the host back into the order
    #[arg(long)]
    undo: bool,
    /// Reason, which `laxity cluster hosts` shows
    #[arg(long, value_name = "TEXT")]
    comment: Option<String>,
    #[command(flatten)]
    coordinator: CoordinatorArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ForgetArgs {
    /// Name of the host, as `laxity cluster hosts` shows it. Its daemon must have ended
    host: String,
    #[command(flatten)]
    coordinator: CoordinatorArgs,
}

pub(crate) fn run(command: &ClusterCommand) -> Result<ExitCode, ClusterError> {
    match command {
        ClusterCommand::Hosts(args) => show::hosts(args),
        ClusterCommand::Batches(args) => show::batches(args),
        ClusterCommand::Explain(args) => show::explain(args),
        ClusterCommand::Policy(command) => policy::run(command),
        ClusterCommand::Drain(args) => show::drain(args),
        ClusterCommand::Forget(args) => show::forget(args),
        ClusterCommand::Watch(args) => watch::watch(args),
        ClusterCommand::Load(arguments) => return Ok(external::lab("cluster-load", arguments)),
    }
    .map(|()| ExitCode::SUCCESS)
}
