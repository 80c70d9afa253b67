//! `laxity sim`: parses the arguments of the simulator and calls `laxity-sim`.

mod advise;
mod args;
mod claims;
mod findings;
mod inputs;
mod results;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use laxity_sim::outcome::Outcome;
use laxity_sim::plan::{Plan, built_in};
use laxity_sim::report::table;
use laxity_sim::requests;
use laxity_sim::run::{self, Simulate};
use laxity_sim::scenario::Scenario;

use crate::exit_code;
use args::{Changes, Execution};
use laxity_cli::output::{put, say};
use laxity_cli::table::table as new_table;
use results::{Destinations, Folder};

/// The commands of the simulator.
#[derive(Subcommand)]
pub(crate) enum SimCommand {
    /// Run a plan: each combination of its axes, with each policy and each seed
    #[command(after_long_help = RUN_HELP)]
    Run(Box<SimRunArgs>),
    /// Run a scenario with fields varied by options, without a plan file
    #[command(after_long_help = SWEEP_HELP)]
    Sweep(Box<SweepArgs>),
    /// Repeat the experiments of a paper about requests, and compare them with its claims
    Reproduce(ReproduceArgs),
    /// Say whether scheduling helps on a cluster, by a short simulation
    #[command(after_long_help = advise::HELP)]
    Advise(Box<advise::AdviseArgs>),
    /// List the built-in plans, or print one
    Plans {
        /// Print this plan, which you can copy and change [default: list all plans]
        #[arg(value_name = "NAME")]
        show: Option<String>,
    },
    /// List the fields of a plan with their defaults and possible values
    Fields {
        /// List only fields whose name contains this, such as serving or requests
        #[arg(value_name = "PART")]
        part: Option<String>,
    },
    /// Show the results in a folder, even if the run was interrupted
    Page(PageArgs),
    /// Fill the tables of a page from results, or check that they are up to date
    #[command(after_long_help = findings::HELP)]
    Findings(findings::FindingsArgs),
    /// List the built-in models, or show one
    Models(inputs::ModelsArgs),
    /// Show the statistics of a workload: lengths, reuse, arrivals
    #[command(after_long_help = WORKLOAD_HELP)]
    Workload(Box<inputs::WorkloadArgs>),
}

const RUN_HELP: &str = "\
A plan is a TOML file with a scenario, the fields to vary, and the policies to compare.
`laxity sim plans` lists the built-in plans, and `laxity sim plans NAME` prints one to start from.
Fields have dotted names, e.g. workload.rate_per_gpu; `laxity sim fields` lists them with their
defaults and, where a field is a word, the words: serving.requests is one of fcfs, edf, srpf,
edf_relegate, qoserve. An unknown name is answered with the known ones.

With --out, DIR/results.jsonl gets each result when its run ends. An interrupted command continues
where it was when it is repeated. It runs again only what changed: the scenario, a file that it
names, or the simulator. DIR also gets plan.toml, report.json, runs.csv, page.md and timing.json.

The same plan and seeds give the same report byte for byte, on any machine and with any --jobs.
The time and memory that the run took go to standard error.

Exit status: 0 if every run succeeded, 1 if some failed; these are listed with their scenario.

Examples:
  laxity sim run smoke
  laxity sim run sweep-agent --out results/sweep
  laxity sim run mfs-figure-10 --set cluster.servers=256 --only fair,karuna,mfs,laxity
  laxity sim run scale-2048 --json -
  laxity sim run my-plan.toml --seeds 10 --jobs 1 --csv runs.csv";

const WORKLOAD_HELP: &str = "\
Examples:
  laxity sim workload --set workload.source=long_agent --seeds 3
  laxity sim workload --set workload.source=mooncake --set workload.file=conversation.jsonl.gz \\
      --set workload.arrivals=recorded
  laxity sim workload mfs-figure-11 --json";

const SWEEP_HELP: &str = "\
Examples:
  laxity sim sweep --axis workload.rate_per_gpu=0.3,0.5,0.7 --policies fair,mfs,laxity
  laxity sim sweep --axis cluster.nic_gbps=50,100,200 --axis workload.rate_per_gpu=0.5,1 \\
      --set cluster.servers=32 --seeds 5 --markdown sweep.md
  laxity sim sweep smoke --axis serving.routing=kv_aware,static_homes";

#[derive(Args)]
pub(crate) struct SimRunArgs {
    /// Name of a built-in plan, or path of a TOML file
    #[arg(value_name = "PLAN")]
    plan: String,
    #[command(flatten)]
    run: RunOfPlan,
}

/// How a plan is changed and run, and what is kept of it.
#[derive(Args)]
struct RunOfPlan {
    #[command(flatten)]
    changes: Changes,
    #[command(flatten)]
    execution: Execution,
    /// Folder for the results. Results that are already there are not computed again
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    destinations: Destinations,
}

#[derive(Args)]
pub(crate) struct SweepArgs {
    /// Plan to start from [default: the default of every field]
    #[arg(value_name = "PLAN")]
    plan: Option<String>,
    #[command(flatten)]
    run: RunOfPlan,
}

#[derive(Args)]
pub(crate) struct ReproduceArgs {
    #[command(subcommand)]
    paper: Paper,
}

/// The papers about requests, whose figures can be repeated. Those of MFS are plans.
#[derive(Subcommand)]
enum Paper {
    /// QoServe: several classes of service on shared replicas
    Qoserve(claims::ClaimsArgs),
    /// HyperFlexis: dispatch of requests to instances by their deadlines, and scaling
    Hyperflexis(claims::ClaimsArgs),
    /// H-MAS: orders by predicted costs, and admission limited by free memory
    Hmas(claims::ClaimsArgs),
    /// Maestro: workflows of several models, whose weights are loaded and evicted
    Maestro(claims::ClaimsArgs),
}

#[derive(Args)]
pub(crate) struct PageArgs {
    /// Folder that was given to a run by --out
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    #[command(flatten)]
    destinations: Destinations,
}

pub(crate) fn simulate(scenario: &Scenario) -> Result<Outcome, String> {
    laxity_sim::simulate(scenario).map_err(|error| error.to_string())
}

/// Runs a command. `simulate` executes each run of a plan.
pub(crate) fn run(command: SimCommand, simulate: &Simulate<'_>) -> Result<ExitCode> {
    match command {
        SimCommand::Run(args) => {
            let mut plan = Plan::load(&args.plan)?;
            args.run.changes.apply(&mut plan)?;
            execute(&plan, simulate, &args.run)
        }
        SimCommand::Sweep(args) => {
            let mut plan = match &args.plan {
                Some(name) => Plan::load(name)?,
                None => Plan::empty("sweep", "Sweep"),
            };
            args.run.changes.apply(&mut plan)?;
            if plan.axes.is_empty() {
                bail!("nothing to vary: give --axis FIELD=VALUE,VALUE,…");
            }
            execute(&plan, simulate, &args.run)
        }
        SimCommand::Reproduce(args) => match args.paper {
            Paper::Qoserve(args) => claims::run(&args, requests::qoserve::reproduce),
            Paper::Hyperflexis(args) => claims::run(&args, requests::hyperflexis::reproduce),
            Paper::Hmas(args) => claims::run(&args, requests::hmas::reproduce),
            Paper::Maestro(args) => claims::run(&args, requests::maestro::reproduce),
        },
        SimCommand::Advise(args) => advise::run(&args, simulate).map(|()| ExitCode::SUCCESS),
        SimCommand::Plans { show } => plans(show.as_deref()).map(|()| ExitCode::SUCCESS),
        SimCommand::Fields { part } => fields(part.as_deref()).map(|()| ExitCode::SUCCESS),
        SimCommand::Page(args) => page(&args),
        SimCommand::Findings(args) => findings::run(&args),
        SimCommand::Models(args) => inputs::models(&args).map(|()| ExitCode::SUCCESS),
        SimCommand::Workload(args) => inputs::workload(&args).map(|()| ExitCode::SUCCESS),
    }
}

fn execute(plan: &Plan, simulate: &Simulate<'_>, run: &RunOfPlan) -> Result<ExitCode> {
    let RunOfPlan { execution, out, destinations, .. } = run;
    if execution.show_plan {
        put(plan.to_toml().as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    // Check all points and destinations before the run takes hours.
    let jobs = plan.jobs()?;
    laxity_sim::check(jobs.iter().map(|job| &job.scenario))?;
    destinations.check()?;
    let out = out.as_deref();
    let folder = out.map(Folder::at);
    if let Some(folder) = &folder {
        folder.begin(plan)?;
    }
    let report = run::run(plan, simulate, &execution.options(out))?;
    if let Some(folder) = &folder {
        folder.finish(&report)?;
        folder.note_timing(&report)?;
    }
    destinations.write(&report)?;
    eprintln!("{}", report.timing);
    Ok(exit_code(report.is_whole()))
}

fn plans(show: Option<&str>) -> Result<()> {
    let Some(name) = show else {
        let mut rows = new_table(&["plan", "runs", "question"]);
        for found in built_in().iter().filter(|plan| !plan.is_part) {
            let plan = Plan::load(found.name)?;
            let runs = plan.points().len() * plan.variants.len() * plan.seeds.len();
            rows.add_row([plan.name, runs.to_string(), plan.question]);
        }
        return Ok(say(&rows)?);
    };
    match built_in().iter().find(|plan| plan.name == name) {
        Some(plan) => Ok(put(plan.text.as_bytes())?),
        // The error of `Plan::load` lists the names that exist.
        None => Ok(put(Plan::load(name)?.to_toml().as_bytes())?),
    }
}

fn fields(part: Option<&str>) -> Result<()> {
    let mut rows = new_table(&["field", "default", "words"]);
    let mut any = false;
    for field in laxity_sim::plan::fields() {
        if part.is_none_or(|part| field.name.contains(part)) {
            rows.add_row([field.name, field.default, field.words.join(", ")]);
            any = true;
        }
    }
    match part {
        Some(part) if !any => {
            bail!("no field's name contains `{part}`; `laxity sim fields` lists all")
        }
        _ => Ok(say(&rows)?),
    }
}

fn page(args: &PageArgs) -> Result<ExitCode> {
    let folder = Folder::at(&args.folder);
    let plan = folder.plan()?;
    let report = run::collect(&plan, &args.folder)?;
    if args.destinations.is_empty() {
        folder.finish(&report)?;
        say(table::table(&report))?;
        say(format!("page: {}", folder.page().display()))?;
    } else {
        args.destinations.check()?;
        args.destinations.write(&report)?;
    }
    Ok(exit_code(report.is_whole()))
}

#[cfg(test)]
mod tests;
