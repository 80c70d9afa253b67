//! Tests of the command `laxity doctor`. The checks have tests beside their code.

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

fn doctor(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_laxity"))
        .args(["doctor", "--root"])
        .arg(folder)
        .args(arguments)
        .env("LAXITY_CONTROL", folder.join("control.sock"))
        .env("LAXITY_SOCKET", folder.join("laxityd.sock"))
        .output()
        .expect("laxity runs")
}

#[test]
fn without_a_daemon_it_fails_and_says_how_to_start_one_on_a_page_without_colours() {
    let folder = tempfile::tempdir().unwrap();
    let seen = doctor(folder.path(), &[]);
    assert_eq!(seen.status.code(), Some(1));
    let page = String::from_utf8(seen.stdout).unwrap();
    assert!(page.contains("ERROR  daemon"), "{page}");
    assert!(page.contains("systemctl enable --now laxityd"), "{page}");
    assert!(!page.contains('\x1b'), "no terminal, no colours");
}

#[test]
fn json_has_every_finding_with_its_severity_reason_and_action() {
    let folder = tempfile::tempdir().unwrap();
    let seen = doctor(folder.path(), &["--json"]);
    let report: serde_json::Value = serde_json::from_slice(&seen.stdout).unwrap();
    assert_eq!(report["worst"], "error");
    let findings = report["findings"].as_array().unwrap();
    for id in ["device", "daemon", "registration", "library", "profile", "coverage", "memlock"] {
        let finding = findings.iter().find(|finding| finding["id"] == id);
        let finding = finding.unwrap_or_else(|| panic!("{id} is missing"));
        for key in ["severity", "subject", "found", "why", "action"] {
            assert!(finding[key].is_string(), "{id}.{key}");
        }
    }
}

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_map_sees_a_running_process_as_what_it_is_by_its_libraries_and_environment() {
    let folder = tempfile::tempdir().unwrap();
    // Any library will do, since only the name of the file counts.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let real = maps.lines().filter_map(|line| line.split_whitespace().last());
    let real = real.into_iter().find(|path| path.contains("libgcc_s")).expect("Rust's runtime");
    let preload =
        ["libibverbs-0a1b.so.1", "libnccl.so.2.27.5", "libtransfer_engine.so"].map(|name| {
            let copy = folder.path().join(name);
            std::fs::copy(real, &copy).unwrap();
            copy.display().to_string()
        });
    let child = Command::new("cat")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .env("LD_PRELOAD", preload.join(":"))
        .env("NCCL_IB_TC", "136")
        .spawn();
    let mut child = Running(child.expect("cat runs"));
    // Once it answers, its libraries are mapped.
    child.0.stdin.as_mut().unwrap().write_all(b".").unwrap();
    child.0.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let seen = Command::new(env!("CARGO_BIN_EXE_laxity"))
        .args(["doctor", "--json"])
        .env("LAXITY_CONTROL", folder.path().join("control.sock"))
        .env("LAXITY_SOCKET", folder.path().join("laxityd.sock"))
        .output()
        .expect("laxity runs");
    let report: serde_json::Value = serde_json::from_slice(&seen.stdout).unwrap();
    let rows = report["processes"].as_array().unwrap();
    let row = rows.iter().find(|row| row["pid"].as_u64() == Some(u64::from(child.0.id())));
    let row = row.unwrap_or_else(|| panic!("no row in {report}"));
    assert_eq!(row["libraries"].as_array().map(Vec::len), Some(3), "{row}");
    assert_eq!(row["devices"].as_array().map(Vec::len), Some(0), "{row}");
    let nccl = &row["paths"][0];
    assert_eq!([&nccl["path"], &nccl["library"], &nccl["laxity"]], ["ncclNet", "NCCL", "idle"]);
    assert_eq!(
        (nccl["traffic_class"].as_u64(), nccl["class_from"].as_str()),
        (Some(136), Some("NCCL_IB_TC"))
    );
    let mooncake = &row["paths"][1];
    assert_eq!([&mooncake["path"], &mooncake["library"]], ["verbs", "Mooncake"]);
    assert_eq!(mooncake["class_from"], "default");
    let own = u64::from(std::process::id());
    assert!(rows.iter().all(|row| row["pid"].as_u64() != Some(own)), "the test uses no RDMA");
}
