//! Markdown pages with computed tables. Marked blocks are filled from the results of plans, so that
//! a page's numbers can be reproduced and checked.
//!
//! Text around the blocks is not changed. The same results give the same page, byte for byte,
//! except for timings ([`FindingsSection::Speed`]).

mod block;
mod speed;

use std::collections::BTreeMap;

pub use block::{Block, FindingsSection, blocks};

use super::sheet::Sheet;
use super::view::View;
use super::{Report, capacity, sheets};
use crate::plan::Plan;
use crate::run::Timing;

/// An error in a page. The page must be corrected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct PageError {
    /// Line number, counted from 1.
    pub line: usize,
    pub problem: String,
}

impl PageError {
    fn new(line: usize, problem: impl Into<String>) -> Self {
        Self { line, problem: problem.into() }
    }
}

#[derive(Clone, Debug)]
pub struct Results {
    pub report: Report,
    /// Timing of the whole plan, if it was recorded. The report has the timing of each run.
    pub took: Option<Timing>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filled {
    pub text: String,
    pub stale: Vec<Block>,
    /// Plans without results, with instructions to create them. Their blocks were not changed.
    pub missing: BTreeMap<String, String>,
}

/// Fills the blocks of a page. `results` is called once for each plan, and returns instructions if
/// there are no results.
///
/// Fails if a marker is invalid or selects something that its plan does not have.
pub fn fill(
    page: &str,
    results: &mut dyn FnMut(&str) -> Result<Results, String>,
) -> Result<Filled, PageError> {
    let mut filled = Filled { text: String::new(), stale: Vec::new(), missing: BTreeMap::new() };
    let mut known: BTreeMap<String, Result<Results, String>> = BTreeMap::new();
    let mut done = 0;
    for block in blocks(page)? {
        let found = known.entry(block.plan.clone()).or_insert_with(|| results(&block.plan));
        match found {
            Err(advice) => {
                filled.missing.insert(block.plan.clone(), advice.clone());
            }
            Ok(found) => {
                let content = content(&block, found)
                    .map_err(|problem| PageError::new(block.line, problem))?;
                filled.text += &page[done..block.content.start];
                filled.text += &content;
                done = block.content.end;
                if page[block.content.clone()] != content {
                    filled.stale.push(block);
                }
            }
        }
    }
    filled.text += &page[done..];
    Ok(filled)
}

fn content(block: &Block, results: &Results) -> Result<String, String> {
    let view = match &block.panel {
        Some(panel) => View::of_panel(panel, &results.report)?,
        None => View::whole(&results.report),
    };
    let sheets = match block.section {
        FindingsSection::Attainment => sheets::attainment(&view),
        FindingsSection::Sustained => sheets::sustained(&view)?,
        FindingsSection::Ttft => sheets::details(&view, &sheets::TTFT),
        FindingsSection::Collectives => sheets::details(&view, &sheets::COLLECTIVES),
        FindingsSection::Earliness => sheets::details(&view, &sheets::EARLINESS),
        FindingsSection::Capacity => capacity::capacity(&view),
        FindingsSection::Against => vec![sheets::against(&view)?],
        FindingsSection::Paper => vec![sheets::paper(&results.report)?],
        FindingsSection::Speed => vec![speed::speed(&results.report, results.took.as_ref())],
    };
    let text: Vec<String> = sheets.iter().map(Sheet::markdown).collect();
    let text = text.join("\n");
    // Markdown needs blank lines around a table.
    Ok(format!("\n{text}\n{}\n\n", origin(&block.plan, &results.report)))
}

/// Returns the origin of the numbers: plan, seeds, runs, and the command that computes them.
fn origin(name: &str, report: &Report) -> String {
    let plan = &report.plan;
    let count = plan.seeds.len();
    let counted = plan.seeds.iter().copied().eq(1..=count as u64);
    let seeds = match (count, counted) {
        (1, _) => format!("seed {}", plan.seeds[0]),
        (_, true) => format!("seeds 1 to {count}"),
        _ => {
            let seeds: Vec<String> = plan.seeds.iter().map(u64::to_string).collect();
            format!("seeds {}", seeds.join(", "))
        }
    };
    let runs = match report.runs.len() {
        1 => "1 run".to_owned(),
        runs => format!("{runs} runs"),
    };
    let mut command = format!("laxity sim run {name}");
    let mut changed = "";
    if let Ok(mut known) = Plan::load(name) {
        if known.seeds != plan.seeds {
            known.seeds.clone_from(&plan.seeds);
            match (count, counted) {
                (_, true) => command += &format!(" --seeds {count}"),
                (1, _) => command += &format!(" --seed {}", plan.seeds[0]),
                _ => changed = ", with changes to the plan",
            }
        }
        if !same(&known, plan) {
            changed = ", with changes to the plan";
        }
    }
    format!("Plan {name}, {seeds}, {runs}: `{command}`{changed}.")
}

fn same(a: &Plan, b: &Plan) -> bool {
    let jobs = |plan: &Plan| -> Option<Vec<_>> {
        let jobs = plan.jobs().ok()?;
        Some(jobs.into_iter().map(|job| job.scenario).collect())
    };
    jobs(a) == jobs(b)
}
