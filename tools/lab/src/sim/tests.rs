//! Tests of the simulator's commands, with a closed form instead of a simulation.

use std::fs;
use std::path::Path;

use anyhow::{Result, bail};
use clap::Parser;
use laxity_sim::outcome::Distribution;

use super::*;
use crate::{Cli, Command};

/// Above a rate of one per second and GPU, `1 / rate` of the requests are in time.
fn fake(scenario: &Scenario) -> Result<Outcome, String> {
    let rate = scenario.workload.rate_per_gpu;
    if rate > 50.0 {
        return Err("too fast".into());
    }
    Ok(Outcome {
        requests: 100,
        attainment: 1.0 / rate.max(1.0),
        ttft_ms: Distribution::of(vec![100.0 * rate, 200.0 * rate]),
        events: 1000,
        ..Outcome::default()
    })
}

fn laxity(line: &[&str]) -> Result<ExitCode> {
    let line = ["laxity", "sim"].iter().chain(line);
    match Cli::try_parse_from(line).map(|cli| cli.command) {
        Ok(Command::Sim(command)) => run(command, &fake),
        Ok(_) => unreachable!("the line begins with `sim`"),
        Err(error) => bail!("{error}"),
    }
}

fn shown(code: &Result<ExitCode>) -> String {
    match code {
        Ok(code) => format!("{code:?}"),
        Err(error) => format!("{error:#}"),
    }
}

fn place(name: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name).display().to_string();
    (folder, path)
}

#[test]
fn a_run_leaves_its_report_in_files_and_a_folder_that_can_be_shown_again() {
    let (folder, out) = place("out");
    let json = folder.path().join("r.json");
    let json_path = json.display().to_string();
    let run = ["run", "smoke", "--quiet", "--seeds", "3", "--out", &out, "--json", &json_path];
    let code = laxity(&run);
    assert_eq!(shown(&code), shown(&Ok(ExitCode::SUCCESS)));
    let text = fs::read_to_string(&json).expect("a report");
    let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(value["runs"].as_array().expect("a list").len(), 2 * 3 * 3);
    let inside = |name: &str| fs::read_to_string(Path::new(&out).join(name)).expect(name);
    assert_eq!(inside("report.json"), text, "no timing in it");
    assert!(inside("timing.json").contains("events_per_s"));
    assert_eq!(inside("runs.csv").lines().count(), 1 + 18);
    assert!(inside("page.md").contains("Smoke"));
    assert_eq!(inside("results.jsonl").lines().count(), 18);
    let (_folder, page) = place("again.md");
    laxity(&["page", &out, "--markdown", &page]).expect("it is whole");
    assert_eq!(fs::read_to_string(page).expect("a page"), inside("page.md"));
}

#[test]
fn a_run_that_fails_ends_with_a_code_of_its_own() {
    let code = laxity(&["run", "smoke", "-q", "--axis", "workload.rate_per_gpu=1,99"]);
    assert_eq!(shown(&code), shown(&Ok(ExitCode::FAILURE)));
}

#[test]
fn a_sweep_needs_an_axis_and_takes_policies() {
    let error = laxity(&["sweep", "--policies", "mfs"]).expect_err("no axis");
    assert!(error.to_string().contains("--axis"), "{error}");
    let (_folder, csv) = place("runs.csv");
    laxity(&[
        "sweep", "-q", "--axis", "workload.rate_per_gpu=0.5,2", "--axis",
        "cluster.nic_gbps=50,100", "--policies", "mfs,laxity", "--seed", "7", "--set",
        "cluster.servers=16", "--csv", &csv,
    ])
    .expect("it runs");
    let rows = fs::read_to_string(csv).expect("rows");
    assert_eq!(rows.lines().count(), 1 + 8);
    assert!(rows.lines().nth(1).expect("a row").starts_with("0.5,50,mfs,7,"), "{rows}");
}

#[test]
fn a_figure_of_a_folder_is_still_set_beside_what_the_paper_says() {
    let (_folder, out) = place("figure");
    laxity(&["run", "mfs-figure-13", "-q", "--seeds", "1", "--out", &out]).expect("it runs");
    laxity(&["page", &out]).expect("it is whole");
    let page = fs::read_to_string(Path::new(&out).join("page.md")).expect("a page");
    assert!(page.contains("the paper says"));
}

fn mistake(line: &[&str]) -> String {
    format!("{:#}", laxity(line).expect_err("a mistake"))
}

#[test]
fn mistakes_are_found_before_anything_runs() {
    for (line, complaint) in [
        ("run smok", "built-in plan; those are smoke"),
        ("run smoke --set model.tp=3", "--set: model.tp: groups of 3"),
        ("run smoke --only sjf", "there are fair, mfs, laxity"),
        ("run smoke --json - --csv -", "only one of"),
        ("run smoke --markdown /nowhere/page.md", "cannot write"),
        ("page /nowhere", "holds no results"),
        ("run smoke --only mfs --policies mfs", "cannot be used"),
    ] {
        let said = mistake(&line.split(' ').collect::<Vec<_>>());
        assert!(said.contains(complaint), "{said}");
    }
}

#[test]
fn an_order_of_requests_that_does_not_exist_is_answered_with_those_that_do() {
    let set = mistake(&["run", "smoke", "--set", "serving.requests=lifo"]);
    let axis = mistake(&["sweep", "--axis", "serving.requests=fcfs,lifo"]);
    for order in ["fcfs", "edf", "srpf", "edf_relegate", "qoserve"] {
        assert!(set.contains(order), "{set}");
        assert!(axis.contains(order), "{axis}");
        assert!(RUN_HELP.contains(order), "{order}");
    }
    laxity(&["fields"]).expect("a list");
    laxity(&["fields", "serving.requests"]).expect("one");
    assert!(mistake(&["fields", "colour"]).contains("`colour`"));
}

#[test]
fn every_paper_can_be_reproduced_quickly_and_mistakes_are_told_before() {
    for paper in ["qoserve", "hyperflexis", "hmas", "maestro"] {
        let error = |option, value| mistake(&["reproduce", paper, option, value]);
        assert!(error("--data", "/nowhere").contains("no such folder"));
        assert!(error("--json", "/nowhere/a.json").contains("cannot write"));
        assert!(error("--seeds", "0").contains("--seeds"));
    }
}

#[test]
fn plans_are_listed_and_printed() {
    laxity(&["plans"]).expect("a list");
    laxity(&["plans", "nic-rates"]).expect("a plan");
    laxity(&["plans", "mfs-common"]).expect("also what others inherit from");
    laxity(&["run", "mfs-figure-11", "--show-plan", "--set", "cluster.servers=256"])
        .expect("shown");
    laxity(&["plans", "nothing"]).expect_err("no plan");
}

#[test]
fn a_page_is_filled_from_folders_and_checked_and_says_what_to_run() {
    let (folder, results) = place("results");
    let page = folder.path().join("page.md");
    let read = || fs::read_to_string(&page).expect("a page");
    let block = "<!-- laxity sim: smoke attainment -->\n<!-- end -->\n";
    let speed = "<!-- laxity sim: smoke speed -->\n<!-- end -->\n";
    fs::write(&page, [block, speed].concat()).expect("written");
    let shown_page = page.display().to_string();
    let findings = |more: &[&str]| {
        let line = ["findings", "--results", &results, "--page", &shown_page];
        shown(&laxity(&[&line, more].concat()))
    };
    let (good, bad) = (shown(&Ok(ExitCode::SUCCESS)), shown(&Ok(ExitCode::FAILURE)));
    let out = Path::new(&results).join("smoke").display().to_string();
    let said = super::findings::results(Path::new(&results), "smoke").expect_err("none");
    assert!(said.ends_with(&format!("laxity sim run smoke --out {out}")), "{said}");
    assert_eq!(findings(&["--plans"]), good);
    assert_eq!(findings(&[]), bad, "nothing was run");
    let run = ["run", "smoke", "-q", "--out", &out];
    laxity(&run).expect("it runs");
    assert_eq!(findings(&["--check"]), bad, "it is empty");
    assert_eq!(read(), [block, speed].concat(), "a check changes nothing");
    assert_eq!(findings(&[]), good);
    assert_eq!(findings(&["--check"]), good);
    let whole = read();
    // A run with nothing left to simulate keeps the timing of the run before.
    laxity(&run).expect("it runs");
    assert_eq!(findings(&[]), good);
    assert_eq!(read(), whole);
    // Timings of another machine are accepted, other numbers are not.
    fs::write(Path::new(&out).join("timing.json"), "{}").expect("written");
    assert_eq!(findings(&["--check"]), good);
    fs::write(&page, whole.replacen("| laxity | ", "| laxity | 1", 1)).expect("written");
    assert_eq!(findings(&["--check"]), bad);
    let journal = Path::new(&out).join("results.jsonl");
    let lines = fs::read_to_string(&journal).expect("a journal");
    let half: String = lines.lines().take(9).map(|l| format!("{l}\n")).collect();
    fs::write(&journal, half).expect("written");
    assert_eq!(findings(&[]), bad, "3 of 12 runs are missing");
    let error = laxity(&["findings", "--page", "/nowhere.md"]).expect_err("no page");
    assert!(error.to_string().contains("cannot read /nowhere.md"));
}
