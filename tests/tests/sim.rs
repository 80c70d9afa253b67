//! Tests of the command `laxity sim`: errors that name their place, a model of one's own, and a
//! published trace.

use std::fs;
use std::path::Path;
use std::process::Command;

use laxity_tests::recorded_data;
use serde_json::Value;

use crate::process::{Said, binary, words};

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
fn a_model_of_ones_own_is_simulated() {
    let folder = folder();
    fs::write(folder.path().join("mine.toml"), MODEL).unwrap();
    let run = words("run smoke --only laxity --set model.name=mine.toml");
    let described = good(folder.path(), &["models", "mine.toml", "--json"]);
    assert!(described.contains("\"mine\""), "{described}");
    let sent = |report: Value| -> f64 {
        let runs = report["runs"].as_array().expect("runs").iter();
        runs.map(|run| run["outcome"]["bytes"]["p2d"].as_f64().expect("a number")).sum()
    };
    let mine = sent(json(folder.path(), &run));
    let whole = sent(json(folder.path(), &run[..4]));
    assert_eq!(mine * 2.0, whole, "half the layers, half the KV cache");
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
