//! The lab with released vLLM, which computes on the processors. vLLM takes 6 GB, so these tests
//! run only where `make setup-vllm` was run before.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use laxity_tests::{Need, skip};
use serde_json::Value;

use crate::process::{Said, binary};
use crate::python;
use crate::sources::root;

fn vllm_python() -> Option<PathBuf> {
    let laxityd = binary("laxityd");
    let target = laxityd.ancestors().nth(2).expect("a target folder");
    let python = target.join("vllm/bin/python");
    if python.is_file() {
        return Some(python);
    }
    skip(Need::Vllm, format!("{} is not there: run `make setup-vllm`", python.display()));
    None
}

#[test]
fn vllm_answers_alike_under_every_policy_and_no_byte_of_kv_is_lost() {
    let Some(vllm) = vllm_python() else { return };
    let builder = match python::builder() {
        Ok(builder) => builder,
        Err(reason) => return skip(Need::Machine, reason),
    };
    let folder = tempfile::tempdir().expect("a folder");
    let wheel = python::wheel(&builder, &folder.path().join("wheels"));
    let package = folder.path().join("package");
    let mut install = Command::new(&vllm);
    install.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]);
    Said::of(install.arg(&package).arg(&wheel)).good();

    let output = Command::new(binary("laxity-lab"))
        .args(["lab", "run", "--engine", "vllm", "--policies", "none,laxity_no_hints,laxity"])
        .args(["--units", "1", "--duration", "6", "--requests-per-second", "1.5"])
        .args(["--quiet", "--json", "-"])
        .env("LAXITY_VLLM_PYTHON", &vllm)
        // What stands here comes before the environment's own packages.
        .env("PYTHONPATH", &package)
        .stdin(Stdio::null())
        .output()
        .expect("laxity-lab runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
    assert_eq!(report["engine"], "vllm");
    for run in report["runs"].as_array().expect("runs") {
        assert_eq!(run["completed"], run["requests"], "{run}");
        assert_eq!(run["answers_compared"], run["requests"], "{run}");
        assert_eq!((&run["wrong_answers"], &run["bytes_lost"]), (&0.into(), &0.into()), "{run}");
        let kv = |field: &str| run["kv"][field].as_u64().expect(field);
        assert!(kv("moved_bytes") > 0, "KV moved: {run}");
        let scheduled = run["policy"] != "none";
        let completed = if scheduled { kv("moved_bytes") } else { 0 };
        assert_eq!(kv("completed_bytes"), completed, "{run}");
        assert_eq!(kv("bypassed_bytes"), 0, "{run}");
        // Without hints a read counts as KV reuse. The connector's hints say that it is P2D.
        let stages: Vec<&String> = run["stage_bytes"].as_object().expect("stages").keys().collect();
        match run["policy"].as_str() {
            Some("laxity") => assert_eq!(stages, ["p2d"], "{run}"),
            Some("laxity_no_hints") => assert_eq!(stages, ["kv_reuse"], "{run}"),
            _ => assert!(stages.is_empty(), "{run}"),
        }
    }
}

/// The lab's changes to two modules, on stand-ins of the same names. It needs no vLLM.
#[test]
fn threads_that_wait_for_work_sleep_in_the_lab() {
    const NIXL: &str = "class Config: pthrDelay = 0\n\
        class nixlBind:\n    @staticmethod\n    def nixlAgent(name, config): return name, config\n";
    const QUEUE: &str = "class SpinCondition:\n\
        \x20   def __init__(self, is_reader, busy_loop_s=1): self.busy_loop_s = busy_loop_s\n";
    const ASK: &str = "from nixl_cu12._api import Config, nixlBind\n\
        from vllm.distributed.device_communicators import shm_broadcast as queue\n\
        print(nixlBind.nixlAgent('a', Config())[1].pthrDelay,\n\
        \x20     queue.SpinCondition(is_reader=True).busy_loop_s)";
    let folder = tempfile::tempdir().expect("a folder");
    let customize = root().join("tools/rig/src/vllm/sitecustomize.py");
    fs::copy(customize, folder.path().join("sitecustomize.py")).expect("copied");
    for (package, module, code) in [
        ("nixl_cu12", "_api.py", NIXL),
        ("vllm/distributed/device_communicators", "shm_broadcast.py", QUEUE),
    ] {
        let package = folder.path().join(package);
        fs::create_dir_all(&package).expect("made");
        fs::write(package.join(module), code).expect("written");
    }
    let mut python = Command::new("python3");
    python.args(["-c", ASK]).env("PYTHONPATH", folder.path());
    assert_eq!(Said::of(&mut python).good().stdout.trim(), "1 0.05");
}
