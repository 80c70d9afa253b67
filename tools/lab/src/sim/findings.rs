//! `laxity sim findings`: fills the tables of a page from folders of results.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Args;
use laxity_sim::plan::Plan;
use laxity_sim::report::findings::{self, FindingsSection, Results};
use laxity_sim::run;

use super::results::Folder;
use laxity_cli::output::{self, say};

pub(super) const HELP: &str = "\
A page is Markdown with marked blocks. Each block holds a table made from the results of one plan:

  <!-- laxity sim: PLAN SECTION [panel=PANEL] -->
  <!-- end -->

SECTION is one of
  attainment   first tokens in time, by variant and horizontal axis
  sustained    request rates at 90 % and at 50 % in time
  ttft         time to first token: mean, median, p99
  collectives  collective completion times
  earliness    how early requests in time are, and how late the others
  capacity     the same at every rate, and how busy units are
  against      laxity (or the plan's reference) minus the others
  paper        what the paper says about its figure, and the result
  speed        time and memory of the simulation
PANEL is the name of a panel, or a part of it that has no space. Sections from ttft to earliness
show the point of each panel where variants differ most.

A block whose plan has no results stays as it is, and the command says which plan to run.

Exit status: 0 if all blocks were filled, 1 if results are missing; with --check also 1 if a block
is out of date. The section speed is never out of date, because it depends on the machine.

Examples:
  laxity sim run mfs-figure-13 --out target/reproduction/mfs-figure-13
  laxity sim findings
  laxity sim findings --results target/reproduction --page docs/reproduction-tables.md --check";

#[derive(Args)]
pub(crate) struct FindingsArgs {
    /// Folder with one folder of results for each plan, named like the plan
    #[arg(long, value_name = "DIR", default_value = "target/reproduction")]
    results: PathBuf,
    /// Page to fill
    #[arg(long, value_name = "FILE", default_value = "docs/reproduction-tables.md")]
    page: PathBuf,
    /// Change nothing, and print which blocks would change
    #[arg(long)]
    check: bool,
    /// Print the plans that the page needs, one per line, and exit
    #[arg(long, conflicts_with = "check")]
    plans: bool,
}

pub(super) fn run(args: &FindingsArgs) -> Result<ExitCode> {
    let shown = args.page.display();
    let page = fs::read_to_string(&args.page).with_context(|| format!("cannot read {}", shown))?;
    if args.plans {
        return plans(&page).with_context(|| shown.to_string());
    }
    let filled = findings::fill(&page, &mut |plan| results(&args.results, plan))
        .with_context(|| shown.to_string())?;
    let mut whole = filled.missing.is_empty();
    for block in &filled.stale {
        let (line, asked) = (block.line, &block.asked);
        let what = if !args.check {
            "filled"
        } else if block.section == FindingsSection::Speed {
            "not what this machine took"
        } else {
            whole = false;
            "stale"
        };
        say(format!("{shown}:{line}: {what}: {asked}"))?;
    }
    for (plan, advice) in &filled.missing {
        eprintln!("{plan}: {advice}");
    }
    if !args.check && !filled.stale.is_empty() {
        output::replace(&args.page, filled.text.as_bytes())?;
    }
    Ok(crate::exit_code(whole))
}

/// Prints the plans of a page, each once, in the order of the page.
fn plans(page: &str) -> Result<ExitCode> {
    let mut plans: Vec<String> = Vec::new();
    for block in findings::blocks(page)? {
        if !plans.contains(&block.plan) {
            plans.push(block.plan);
        }
    }
    for plan in plans {
        say(plan)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the results of a plan, or an error that says how to get them.
pub(super) fn results(all: &Path, plan: &str) -> Result<Results, String> {
    let path = all.join(plan);
    let folder = Folder::at(&path);
    let command = format!("laxity sim run {plan} --out {}", path.display());
    if !folder.has_plan() {
        // If the name is wrong, this error lists the names that exist.
        Plan::load(plan).map_err(|error| error.to_string())?;
        return Err(format!("no results; run it: {command}"));
    }
    let load = || -> Result<Results> {
        let report = run::collect(&folder.plan()?, &path)?;
        let took = folder.timing()?;
        Ok(Results { report, took })
    };
    let results = load().map_err(|error| format!("{error:#}"))?;
    let (missing, there) = (results.report.missing, results.report.runs.len());
    if missing > 0 {
        return Err(format!(
            "{missing} of {} runs are missing; go on with: {command}",
            missing + there
        ));
    }
    Ok(results)
}
