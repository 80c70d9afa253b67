//! Flags that several commands of the simulator share: changes of a plan, and how to run it.

use std::io::{self, IsTerminal};
use std::num::NonZeroUsize;
use std::path::Path;

use anyhow::Result;
use clap::Args;
use laxity_sim::plan::Plan;
use laxity_sim::run::RunOptions;

/// Changes of a plan.
#[derive(Args, Debug, Default)]
pub(super) struct Changes {
    /// Set a field to one value. If the plan varies the field, it no longer does
    #[arg(long, value_name = "FIELD=VALUE")]
    set: Vec<String>,
    /// Vary a field over these values, instead of those of the plan
    #[arg(long, value_name = "FIELD=VALUE,…")]
    axis: Vec<String>,
    /// Compare these policies, instead of the plan's variants
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    policies: Vec<String>,
    /// Run only these variants of the plan
    #[arg(long, value_delimiter = ',', value_name = "NAME,…", conflicts_with = "policies")]
    only: Vec<String>,
    /// Number of seeds, which are 1, 2, …
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    seeds: Option<u64>,
    /// The only seed
    #[arg(
        long, value_name = "S", conflicts_with = "seeds",
        value_parser = clap::value_parser!(u64).range(..1 << 62)
    )]
    seed: Option<u64>,
}

impl Changes {
    pub(super) fn apply(&self, plan: &mut Plan) -> Result<()> {
        if !self.policies.is_empty() {
            plan.compare(&self.policies)?;
        }
        for axis in &self.axis {
            plan.vary(axis)?;
        }
        for assignment in &self.set {
            plan.set(assignment)?;
        }
        if !self.only.is_empty() {
            plan.only(&self.only)?;
        }
        if let Some(count) = self.seeds {
            plan.seeds = (1..=count).collect();
        }
        if let Some(seed) = self.seed {
            plan.seeds = vec![seed];
        }
        Ok(())
    }
}

/// Options of how to run a plan.
#[derive(Args, Debug, Default)]
pub(super) struct Execution {
    /// Number of threads [default: number of processors]
    #[arg(long, short, value_name = "N")]
    jobs: Option<NonZeroUsize>,
    /// Print the complete plan and exit
    #[arg(long)]
    pub(super) show_plan: bool,
    /// Show no progress
    #[arg(long, short)]
    quiet: bool,
}

impl Execution {
    /// Returns the options of a run whose results are kept in `out`.
    pub(super) fn options<'a>(&self, out: Option<&'a Path>) -> RunOptions<'a> {
        let default = RunOptions::default();
        RunOptions {
            jobs: self.jobs.unwrap_or(default.jobs),
            out,
            progress: !self.quiet && io::stderr().is_terminal(),
        }
    }
}
