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

/// Mixtral 8x7B with half the layers.
const MODEL: &str = "name = \"mine\"\nlayers = 16\nhidden = 4096\nheads = 32\nkv_heads = 8\n\
    head_dim = 128\nffn = 14336\nexperts = 8\ntop_k = 2\nvocab = 32000\n";

const RECORD: &str = "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 5, \
    \"hash_ids\": [1, 2]}\n";

/// Runs `laxity sim` in `folder`, so that relative paths work.
fn sim(folder: &Path, arguments: &[&str]) -> Said {
    let mut laxity = Command::new(binary("laxity"));
    Said::of(laxity.arg("sim").args(arguments).current_dir(folder))
}

/// Returns the standard output of a command that must succeed.
fn good(folder: &Path, arguments: &[&str]) -> String {
    sim(folder, arguments).good().stdout
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

fn with_trace(folder: &Path, command: &[&str], source: &str, file: &str) -> Said {
    let options = format!("--set workload.source={source} --set workload.file={file}");
    sim(folder, &[command, &words(&options)].concat())
}

/// The library's tests have the mistakes. This is what a user sees of one in each kind of file.
#[test]
fn a_mistake_in_a_file_is_said_once_with_its_place() {
    let folder = folder();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write("plan.toml", "title = \"T\"\nquestion = \"Q\"\nseeds = 1\n[base]\nmodel.tpp = 2\n");
    write("trace.jsonl", &(RECORD.to_owned() + &RECORD.replace("600", "\"many\"")));
    write("model.toml", &MODEL.replace("kv_heads = 8", "kv_heads = 7"));
    let trace = words("workload --set workload.source=mooncake --set workload.file=trace.jsonl");
    let model = words("run smoke --set model.name=model.toml");
    for (arguments, place) in [
        (&["run", "plan.toml"][..], "plan.toml:5:7: model.tpp"),
        (&trace, "trace.jsonl, line 2: `input_length` is \"many\""),
        (&model, "model.toml, line 5: `kv_heads`"),
        (&["models", "./model.toml"], "model.toml, line 5: `kv_heads`"),
        (&["run", "nowhere.toml"], "nowhere.toml"),
    ] {
        let said = sim(folder.path(), arguments);
        assert_eq!(said.status.code(), Some(1), "{arguments:?}");
        let said = said.all();
        assert_eq!(said.matches(place).count(), 1, "{arguments:?}: {said}");
    }
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

#[test]
fn a_model_of_ones_own_is_simulated() {
    let folder = folder();
    fs::write(folder.path().join("mine.toml"), MODEL).unwrap();
    let run = words("run smoke --only laxity --set model.name=mine.toml");
    let described = good(folder.path(), &["models", "mine.toml", "--json"]);
    assert!(described.contains("\"mine\""), "{described}");
    let sent = |report: &Value| mean(report, "laxity", |outcome| &outcome["bytes"]["p2d"]);
    let mine = sent(&json(folder.path(), &run));
    let whole = sent(&json(folder.path(), &run[..4]));
    assert_eq!(mine * 2.0, whole, "half the layers, half the KV cache");
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
    let Some(data) = recorded_data() else { return };
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
