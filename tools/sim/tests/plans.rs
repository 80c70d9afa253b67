//! Tests of plans from their text to the page, with a fake simulation.

mod fake;

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use laxity_sim::plan::{Plan, built_in};
use laxity_sim::report::metric::TTFT_P99;
use laxity_sim::report::{Report, Verdict, csv, json, page, table};
use laxity_sim::reproduce;
use laxity_sim::run::{RunError, RunOptions, collect, run};

const PLAN: &str = "
title = 'Two rates'
question = 'Is laxity better?'
seeds = 3
policies = ['fair', 'mfs', 'laxity']
[base]
cluster.servers = 16
model.name = 'dbrx'
[[axis]]
field = 'cluster.nic_gbps'
values = [50, 200]
[[axis]]
field = 'workload.rate_per_gpu'
values = [0.4, 0.8, 1.2, 1.6]
[[variant]]
name = 'mfs w/o RED'
policy.kind = 'mfs'
policy.without = ['red']
[[variant]]
name = 'no contention'
policy.no_contention = true
";

fn plan() -> Plan {
    Plan::parse("two", "two.toml", PLAN).expect("a plan")
}

fn options(jobs: usize, out: Option<&Path>) -> RunOptions<'_> {
    RunOptions { jobs: NonZeroUsize::new(jobs).expect("at least one"), out, progress: false }
}

fn report(plan: &Plan) -> Report {
    run(plan, &fake::simulate, &options(2, None)).expect("it runs")
}

fn kept() -> (tempfile::TempDir, Report) {
    let folder = tempfile::tempdir().expect("a folder");
    let report = run(&plan(), &fake::simulate, &options(1, Some(folder.path()))).expect("it runs");
    (folder, report)
}

/// Runs a plan with the journal of a folder. Returns the number of simulations, and the report.
fn resumed(plan: &Plan, folder: &Path) -> (usize, Report) {
    let count = AtomicUsize::new(0);
    let counted = |scenario: &_| {
        count.fetch_add(1, Ordering::Relaxed);
        fake::simulate(scenario)
    };
    let report = run(plan, &counted, &options(2, Some(folder))).expect("it runs");
    (count.into_inner(), report)
}

#[test]
fn the_report_is_the_same_on_one_thread_and_on_two() {
    let on = |jobs| run(&plan(), &fake::simulate, &options(jobs, None)).expect("it runs");
    let (one, two) = (on(1), on(2));
    assert_eq!(one.runs.len(), 2 * 4 * 5 * 3);
    assert!(json::json(&one) == json::json(&two), "the same bytes");
    assert!(csv::csv(&one) == csv::csv(&two));
    assert!(page::page(&one) == page::page(&two));
    assert_eq!(table::table(&one), table::table(&two));
}

#[test]
fn a_run_that_was_cut_off_goes_on_where_it_was() {
    let (folder, whole) = kept();
    let journal = folder.path().join("results.jsonl");
    let bytes = fs::read(&journal).expect("a journal");
    let lines = bytes.iter().filter(|&&b| b == b'\n').count();
    assert_eq!(lines, whole.runs.len());
    let (count, again) = resumed(&plan(), folder.path());
    assert_eq!(count, 0, "nothing is left to do");
    assert!(json::json(&whole) == json::json(&again), "the same bytes");
    // The run was killed while it wrote a line.
    let tenth = bytes.split_inclusive(|&b| b == b'\n').take(10).map(<[u8]>::len).sum::<usize>();
    fs::write(&journal, &bytes[..tenth + 100]).expect("written");
    let (count, again) = resumed(&plan(), folder.path());
    assert_eq!(count, whole.runs.len() - 10);
    assert!(json::json(&whole) == json::json(&again), "the same bytes");
    let (count, _) = resumed(&plan(), folder.path());
    assert_eq!(count, 0, "what followed the torn line was kept, too");
}

#[test]
fn results_of_other_scenarios_or_other_code_are_not_taken_over() {
    let (folder, whole) = kept();
    let mut other = plan();
    other.set("workload.seconds=61").expect("a field");
    assert_eq!(resumed(&other, folder.path()).0, whole.runs.len());
    // Replaces the fingerprints, as if another version had written them.
    let journal = folder.path().join("results.jsonl");
    let text = fs::read_to_string(&journal).expect("a journal");
    let stale = text.replace("{\"fingerprint\":\"", "{\"fingerprint\":\"x");
    fs::write(&journal, stale + "no line of ours\n").expect("written");
    assert_eq!(resumed(&plan(), folder.path()).0, whole.runs.len());
    assert_eq!(resumed(&plan(), folder.path()).0, 0);
}

#[test]
fn a_folder_is_shown_again_without_running_anything() {
    let (folder, whole) = kept();
    let again = collect(&plan(), folder.path()).expect("results");
    assert!(json::json(&whole) == json::json(&again), "the same bytes");
    let journal = folder.path().join("results.jsonl");
    let text = fs::read_to_string(&journal).expect("a journal");
    let half: String = text.lines().take(20).map(|l| format!("{l}\n")).collect();
    fs::write(&journal, half).expect("written");
    let partial = collect(&plan(), folder.path()).expect("results");
    assert_eq!(partial.missing, whole.runs.len() - 20);
    assert!(!partial.is_whole());
    assert!(page::page(&partial).contains("have not been run"));
}

#[test]
fn two_runs_do_not_write_into_the_same_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let meanwhile = |scenario: &_| {
        let second = run(&plan(), &fake::simulate, &options(1, Some(folder.path())));
        assert!(matches!(second, Err(RunError::Journal(_))), "{second:?}");
        fake::simulate(scenario)
    };
    let mut small = plan();
    small.only(&["fair".into()]).expect("a variant");
    let report = run(&small, &meanwhile, &options(1, Some(folder.path()))).expect("it runs");
    assert!(report.is_whole(), "{:?}", report.failures);
}

#[test]
fn what_fails_is_reported_with_its_scenario_and_stops_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut plan = plan();
    plan.vary("workload.rate_per_gpu=0.4,99,1000").expect("rates");
    let report = run(&plan, &fake::simulate, &options(2, Some(folder.path()))).expect("it runs");
    assert_eq!(report.runs.len(), 2 * 5 * 3);
    assert_eq!(report.failures.len(), 2 * 2 * 5 * 3);
    assert!(!report.is_whole());
    let failure = &report.failures[0];
    assert_eq!(failure.scenario.workload.rate_per_gpu, 99.0);
    assert!(failure.problem.contains("beyond belief"));
    let panicked = report.failures.iter().any(|f| f.problem == "panicked: nobody asks so much");
    assert!(panicked, "a panic is a failure of one run");
    assert!(table::table(&report).contains("\"rate_per_gpu\":99.0"));
    assert!(page::page(&report).contains("60 runs failed"));
    let again = run(&plan, &fake::simulate, &options(2, Some(folder.path()))).expect("it runs");
    assert_eq!(again.timing.simulated, 60, "failures are tried again");
}

#[test]
fn an_outcome_that_holds_no_number_is_a_failure() {
    let odd = |scenario: &_| {
        let mut outcome = fake::simulate(scenario)?;
        outcome.attainment = f64::NAN;
        Ok(outcome)
    };
    let report = run(&plan(), &odd, &options(1, None)).expect("it runs");
    assert!(report.runs.is_empty());
    assert!(report.failures[0].problem.contains("no number"));
}

#[test]
fn the_json_holds_every_run_its_summary_and_the_plan() {
    let report = report(&plan());
    let text = json::json(&report);
    assert!(!text.contains("wall_s"), "times of this machine are elsewhere");
    assert!(report.timing.to_string().contains("peak memory"));
    let value: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
    assert_eq!(value["runs"].as_array().expect("a list").len(), 120);
    let first = &value["summary"][0];
    assert_eq!(first["variant"], "fair");
    assert_eq!(first["at"]["cluster.nic_gbps"], 50.0);
    assert_eq!(first["metrics"]["attainment"]["count"], 3);
    assert_eq!(value["sustained"].as_array().expect("a list").len(), 10);
    assert_eq!(value["compared"].as_array().expect("a list").len(), 8 * 3);
    let toml = value["plan"]["toml"].as_str().expect("a text");
    Plan::parse("again", "again.toml", toml).expect("the plan can be read back");
}

#[test]
fn csv_has_a_row_for_each_run_and_a_column_for_each_axis() {
    let text = csv::csv(&report(&plan()));
    assert_eq!(text.lines().count(), 1 + 120);
    let heading = text.lines().next().expect("a heading");
    assert!(
        heading.starts_with("cluster.nic_gbps,workload.rate_per_gpu,variant,seed,attainment,"),
        "{heading}"
    );
}

#[test]
fn laxity_is_compared_seed_by_seed_with_every_policy_but_not_with_the_bound() {
    let report = report(&plan());
    let comparisons = report.comparisons();
    let bound = report.plan.variants.len() - 1;
    assert!(report.is_bound(bound));
    assert!(comparisons.iter().all(|c| c.other != bound));
    // Far beyond the knee of fair sharing the difference is significant.
    let plain =
        comparisons.iter().find(|c| report.point_name(c.point) == "200, 1.2" && c.other == 0);
    assert_eq!(plain.expect("it is there").standing, Verdict::Above);
    let text = table::table(&report);
    assert!(text.contains("laxity less the others"), "{text}");
    assert!(text.contains("equal"), "{text}");
}

#[test]
fn the_page_shows_every_variant_and_where_the_time_goes() {
    let mut plan = plan();
    plan.plot.metrics.push(&TTFT_P99);
    let report = report(&plan);
    let page = page::page(&report);
    for variant in &report.plan.variants {
        assert!(page.matches(&variant.name).count() > 5, "{}", variant.name);
    }
    let sections = ["## Where the time goes", "## p99 TTFT, ms", "## Numbers"];
    for said in sections.iter().chain(&["**NIC rate 50 Gb/s**", "at 90 %", "```toml\n"]) {
        assert!(page.contains(said), "no {said} in {page}");
    }
}

#[test]
fn every_built_in_plan_reads_validates_and_can_be_shown() {
    let pages = Path::new(env!("CARGO_TARGET_TMPDIR")).join("pages");
    fs::create_dir_all(&pages).expect("a folder");
    for built_in in built_in() {
        let mut plan = Plan::load(built_in.name).unwrap_or_else(|error| panic!("{error}"));
        // Seeds differ in nothing else, and two are enough for an interval.
        plan.seeds.truncate(2);
        if built_in.is_part {
            plan.jobs().unwrap_or_else(|error| panic!("{error}"));
            continue;
        }
        assert!(plan.question.ends_with('?'), "{}", plan.name);
        let written = Plan::parse(&plan.name, "again", &plan.to_toml());
        let written = written.unwrap_or_else(|error| panic!("{error}\n{}", plan.to_toml()));
        let scenarios = |plan: &Plan| -> Vec<_> {
            let jobs = plan.jobs().expect("it makes sense");
            jobs.into_iter().map(|job| job.scenario).collect()
        };
        assert_eq!(scenarios(&plan), scenarios(&written), "{}", plan.name);
        let report = report(&plan);
        let page = page::page(&report);
        let text = table::table(&report);
        assert!(text.contains(&plan.title));
        // The files are kept for manual inspection.
        fs::write(pages.join(format!("{}.md", plan.name)), page).expect("written");
        fs::write(pages.join(format!("{}.txt", plan.name)), text).expect("written");
    }
}

#[test]
fn every_file_of_plans_is_built_in() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("plans");
    let mut files: Vec<String> = fs::read_dir(folder)
        .expect("plans")
        .map(|entry| entry.expect("an entry").path())
        .map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned())
        .collect();
    files.sort();
    let mut names: Vec<&str> = built_in().iter().map(|plan| plan.name).collect();
    names.sort_unstable();
    assert_eq!(files, names);
}

#[test]
fn a_figure_of_the_paper_is_set_beside_what_the_paper_says() {
    for figure in ["5", "9", "10", "11", "12", "13", "14"] {
        let mut plan = Plan::load(&format!("mfs-figure-{figure}")).expect("built in");
        plan.seeds.truncate(2);
        let report = report(&plan);
        let findings = reproduce::check(&report);
        assert!(!findings.is_empty(), "{figure}");
        let measured = findings.iter().filter(|f| f.here.is_some()).count();
        assert!(measured > 0, "{figure}: {findings:?}");
        assert!(table::table(&report).contains("the paper says"));
    }
    assert!(reproduce::check(&report(&plan())).is_empty(), "no figure");
}

#[test]
fn a_single_point_is_shown_without_axes() {
    let plan = Plan::parse("one", "one.toml", "policies = ['mfs']").expect("a plan");
    let report = report(&plan);
    assert_eq!(report.runs.len(), 1);
    let text = table::table(&report);
    assert!(text.contains("mfs") && !text.contains("less the others"), "{text}");
    assert!(page::page(&report).contains("| mfs |"));
}
