//! `laxity cluster`: the coordinator, seen from outside.

mod load;

use clap::Subcommand;

/// What can be done with a cluster.
#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// Put a coordinator under load as thousands of daemons would, and measure how long an order takes
    Load(load::LoadArgs),
}

/// Runs the command.
pub(crate) fn run(command: &ClusterCommand) -> anyhow::Result<()> {
    match command {
        ClusterCommand::Load(args) => load::load(args),
    }
}
