//! Tests of the command `laxity sim`: plans and traces in files, reproducible results, and errors
//! that name their place.

use std::fs;
use std::path::Path;
use std::process::Command;

use laxity_tests::recorded_data;
use serde_json::Value;

use crate::process::{Said, binary, words};

/// A plan in which policies differ: units have two servers, so collectives cross slow links.
const CONTENDED: &str = r#"
title = "Contended"
question = "Is a collective protected from KV cache?"
seeds = 2
policies = ["fair", "laxity"]

[base]
cluster.servers = 8
cluster.nic_gbps = 25
model.name = "mixtral-8x7b"
model.tp = 2
model.ep = 8
workload.source = "agent"
workload.rate_per_gpu = 1.0
workload.seconds = 6
"#;

/// Runs `laxity sim` in `folder`, so that relative paths work.
fn sim(folder: &Path, arguments: &[&str]) -> Said {
    let mut laxity = Command::new(binary("laxity"));
    Said::of(laxity.arg("sim").args(arguments).current_dir(folder))
}

/// Returns the standard output of a command that must succeed.
fn good(folder: &Path, arguments: &[&str]) -> String {
    sim(folder, arguments).good().stdout
}

/// Returns the output of a command that must fail.
fn bad(folder: &Path, arguments: &[&str]) -> String {
    let output = sim(folder, arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    output.all()
}

fn json(folder: &Path, arguments: &[&str]) -> Value {
    sim(folder, &[arguments, &["--json", "-"]].concat()).good().json()
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

fn contended() -> tempfile::TempDir {
    let folder = folder();
    fs::write(folder.path().join("plan.toml"), CONTENDED).expect("written");
    folder
}

fn mean(report: &Value, variant: &str, of: impl Fn(&Value) -> &Value) -> f64 {
    let found: Vec<f64> = report["runs"]
        .as_array()
        .expect("runs")
        .iter()
        .filter(|run| run["variant"] == variant)
        .map(|run| of(&run["outcome"]).as_f64().expect("a number"))
        .collect();
    assert!(!found.is_empty(), "no run of {variant}");
    found.iter().sum::<f64>() / found.len() as f64
}

#[test]
fn the_same_plan_gives_the_same_bytes_on_any_number_of_threads() {
    let folder = contended();
    for plan in ["smoke", "plan.toml"] {
        let run = |jobs| {
            let of = |form| good(folder.path(), &["run", plan, "--jobs", jobs, form, "-"]);
            (of("--json"), of("--csv"))
        };
        let first = run("1");
        assert!(first == run("1"), "{plan} twice");
        assert!(first == run("2"), "{plan} on two threads");
        let runs: Value = serde_json::from_str(&first.0).expect("JSON");
        let runs = runs["runs"].as_array().expect("runs").len();
        assert_eq!(first.1.lines().count(), runs + 1, "{plan}");
    }
}

#[test]
fn an_interrupted_plan_goes_on_and_ends_with_the_same_report() {
    let folder = contended();
    let run = || sim(folder.path(), &["run", "plan.toml", "--out", "kept"]);
    let kept = |name: &str| fs::read_to_string(folder.path().join("kept").join(name)).unwrap();
    let files = ["report.json", "runs.csv", "page.md", "plan.toml"];
    assert!(run().status.success());
    let whole = files.map(kept);

    let journal = kept("results.jsonl");
    let lines: Vec<&str> = journal.lines().collect();
    assert_eq!(lines.len(), 4, "two policies, two seeds");
    // A crash leaves some complete runs and one incomplete line.
    let torn = format!("{}\n{}\n{}", lines[0], lines[1], &lines[2][..40]);
    fs::write(folder.path().join("kept/results.jsonl"), torn).unwrap();
    let shown = sim(folder.path(), &["page", "kept", "--csv", "-"]);
    assert_eq!(shown.status.code(), Some(1), "it is not whole");
    assert_eq!(shown.stdout.lines().count(), 3);

    let again = run();
    assert!(again.status.success(), "{}", again.stderr);
    let timing: Value = serde_json::from_str(&kept("timing.json")).unwrap();
    assert_eq!((timing["simulated"].as_u64(), timing["resumed"].as_u64()), (Some(2), Some(2)));
    for (name, before) in files.iter().zip(&whole) {
        assert!(kept(name) == *before, "{name} differs");
    }
}

#[test]
fn a_wrong_plan_is_answered_with_file_line_field_and_what_is_expected() {
    let folder = folder();
    for (line, words) in [
        ("cluster.nic_gbps = \"fast\"", ["plan.toml:5:20: cluster.nic_gbps", "expected f64"]),
        ("cluster.nic_gpbs = 50", ["plan.toml:5:9: cluster.nic_gpbs", "nic_gbps"]),
        ("cluster.nic_gbps = -50", ["plan.toml:5:20: cluster.nic_gbps", "is not in 0.001..="]),
        ("policy.kind = \"laxly\"", ["plan.toml:5:", "two_class"]),
        ("model.name = \"gpt\"", ["model.name", "mixtral-8x7b"]),
    ] {
        let plan = format!("title = \"T\"\nquestion = \"Q\"\nseeds = 1\n[base]\n{line}\n");
        fs::write(folder.path().join("plan.toml"), plan).unwrap();
        let said = bad(folder.path(), &["run", "plan.toml"]);
        for word in words {
            assert!(said.contains(word), "{line}: no `{word}` in {said}");
        }
    }
    let said = bad(folder.path(), &["run", "nowhere.toml"]);
    assert!(said.contains("nowhere.toml"), "{said}");
}

fn with_trace(folder: &Path, command: &[&str], source: &str, file: &str) -> Said {
    let options = format!("--set workload.source={source} --set workload.file={file}");
    sim(folder, &[command, &words(&options)].concat())
}

#[test]
fn a_line_of_a_trace_that_is_wrong_is_named_with_its_field() {
    let folder = folder();
    let line = |at: u32, length: &str| {
        format!(
            "{{\"timestamp\": {at}, \"input_length\": {length}, \"output_length\": \
             5, \"hash_ids\": [1, {at}]}}\n"
        )
    };
    let lines = line(0, "600") + &line(100, "700") + &line(200, "\"many\"") + &line(300, "600");
    fs::write(folder.path().join("bad.jsonl"), lines).unwrap();
    for command in [&["workload"][..], &["run", "smoke"]] {
        let output = with_trace(folder.path(), command, "mooncake", "bad.jsonl");
        assert_eq!(output.status.code(), Some(1), "{command:?}");
        let said = output.all();
        for word in ["bad.jsonl, line 3", "`input_length`", "many", "a whole number"] {
            assert!(said.contains(word), "{command:?}: no `{word}` in {said}");
        }
        let times = said.matches("line 3").count();
        assert_eq!(times, 1, "{command:?}: said {times} times: {said}");
    }
    let output = with_trace(folder.path(), &["workload"], "mooncake", "none.jsonl");
    assert!(output.stderr.contains("none.jsonl"));
}

#[test]
fn every_format_of_traces_is_read_and_served() {
    let folder = folder();
    let mut mooncake = String::new();
    let mut qwen = String::new();
    let mut azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n".to_owned();
    let mut burstgpt =
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n".to_owned();
    for n in 0..40_u32 {
        let (ms, tokens) = (n * 100, 600 + n);
        // All requests share the first blocks.
        mooncake += &format!(
            "{{\"timestamp\": {ms}, \"input_length\": {tokens}, \"output_length\": \
             9, \"hash_ids\": [0, {}]}}\n",
            n + 1
        );
        let ids: Vec<u32> =
            (0..tokens.div_ceil(16)).map(|b| if b < 10 { b } else { 1000 * n + b }).collect();
        qwen += &format!(
            "{{\"chat_id\": {n}, \"parent_chat_id\": -1, \"timestamp\": {}.{}, \"input_length\": \
             {tokens}, \"output_length\": 9, \"type\": \"text\", \"turn\": 1, \"hash_ids\": \
             {ids:?}}}\n",
            ms / 1000,
            ms % 1000 / 100
        );
        azure += &format!("2023-11-16 18:17:{:02}.{:03}0000,{tokens},9\n", ms / 1000, ms % 1000);
        burstgpt += &format!("{},ChatGPT,{tokens},9,{},API log\n", ms / 1000, tokens + 9);
    }
    for (source, content) in
        [("mooncake", mooncake), ("qwen", qwen), ("azure", azure), ("burstgpt", burstgpt)]
    {
        fs::write(folder.path().join(source), content).unwrap();
        let command = words("run smoke --only laxity --seeds 1 --csv -");
        let rows = with_trace(folder.path(), &command, source, source).good().stdout;
        assert_eq!(rows.lines().count(), 3, "{source}: {rows}");
    }
}

fn model(line: &str, by: &str) -> String {
    let text = "name = \"mine\"\nlayers = 32\nhidden = 4096\nheads = 32\nkv_heads = 8\nhead_dim = \
        128\n\
                ffn = 14336\nexperts = 8\ntop_k = 2\nvocab = 32000\n";
    assert!(text.contains(line));
    text.replace(line, by)
}

#[test]
fn a_model_of_ones_own_is_simulated_and_a_wrong_one_says_which_field() {
    let folder = folder();
    let file = folder.path().join("mine.toml");
    let run = words("run smoke --only laxity --set model.name=mine.toml");
    fs::write(&file, model("layers = 32", "layers = 16")).unwrap();
    let described = good(folder.path(), &["models", "mine.toml", "--json"]);
    assert!(described.contains("\"mine\""), "{described}");
    let sent = |report: &Value| mean(report, "laxity", |outcome| &outcome["bytes"]["p2d"]);
    let mine = sent(&json(folder.path(), &run));
    let whole = sent(&json(folder.path(), &run[..4]));
    assert_eq!(mine * 2.0, whole, "half the layers, half the KV cache");

    for (line, by, place) in [
        ("kv_heads = 8", "kv_heads = 7", "mine.toml, line 5: `kv_heads`"),
        ("kv_heads = 8", "kv_haeds = 8", "mine.toml, line 5: unknown field `kv_haeds`"),
        ("vocab = 32000\n", "", "missing field `vocab`"),
        ("top_k = 2", "top_k = 9", "mine.toml, line 9: `top_k`"),
    ] {
        fs::write(&file, model(line, by)).unwrap();
        for arguments in [&["models", "./mine.toml"][..], &run] {
            let said = bad(folder.path(), arguments);
            assert!(said.contains(place), "no `{place}` in {said}");
        }
    }
}

#[test]
fn scheduling_pays_where_links_are_contended() {
    let folder = contended();
    let options = ["--seeds", "3", "--policies", "fair,laxity"];
    let report = json(folder.path(), &[&["run", "plan.toml"][..], &options].concat());
    let ttft = |variant| mean(&report, variant, |outcome| &outcome["ttft_ms"]["mean"]);
    let stretch =
        |variant| mean(&report, variant, |outcome| &outcome["collective_stretch"]["mean"]);
    let (fair, laxity) = (ttft("fair"), ttft("laxity"));
    assert!(laxity < 0.93 * fair, "mean TTFT: laxity {laxity} ms, fair {fair} ms");
    assert!(stretch("fair") > 1.1 && stretch("laxity") < 1.02);
    let in_time = |variant| mean(&report, variant, |outcome| &outcome["attainment"]);
    assert!(in_time("laxity") > in_time("fair"));
}

#[test]
fn the_published_mooncake_trace_is_replayed_with_its_reuse() {
    let Some(data) = recorded_data() else {
        return;
    };
    let file = data.join("traces/mooncake_conversation.jsonl.gz");
    let file = format!("workload.file={}", file.display());
    let folder = folder();
    let common = format!(
        "--set cluster.servers=32 --set workload.source=mooncake --set {file} --set \
         workload.arrivals=recorded"
    );
    let common = words(&common);
    // The 12 031 requests of an hour come within a minute.
    let all = ["workload", "--set", "workload.rate_per_gpu=1.6"];
    let said = sim(folder.path(), &[&all[..], &common, &["--json"]].concat());
    let said = said.good().json();
    let summary = &said[0]["summary"];
    assert!(summary["requests"].as_u64() > Some(12_000), "{summary}");
    let reuse = summary["reuse"].as_f64().expect("a number");
    assert!((0.3..0.45).contains(&reuse), "reuse {reuse}");
    let few = "run smoke --policies laxity --seeds 1 --set workload.rate_per_gpu=0.1 --set \
               workload.seconds=5";
    let few = words(few);
    let report = json(folder.path(), &[&few[..], &common].concat());
    let outcome = &report["runs"][0]["outcome"];
    assert!(outcome["requests_in_all"].as_u64() > Some(30), "{outcome}");
    assert!(outcome["attainment"].as_f64() > Some(0.3), "{outcome}");
}
