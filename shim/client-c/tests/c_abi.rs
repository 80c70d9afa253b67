//! A C program, compiled with `laxity.h` and linked with the library, with and without a daemon. It
//! is also compiled as C++, which must accept the header.

// The client's module below uses this name.
extern crate client as laxity_client;

#[path = "../../client/tests/daemon/mod.rs"]
mod daemon;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;

use daemon::{TestDaemon, completed, eventually};
use laxity_shm::record::{Hint, Record};

/// Returns the path of `liblaxity_client.a`, which is next to this test's directory or in it.
fn library() -> PathBuf {
    let own = std::env::current_exe().expect("own path");
    let deps = own.parent().expect("deps").to_owned();
    let named = [deps.join("liblaxity_client.a"), deps.join("../liblaxity_client.a")];
    named.into_iter().find(|path| path.exists()).unwrap_or_else(|| {
        // File names have hashes, so take the newest.
        let mut found: Vec<_> = std::fs::read_dir(&deps)
            .expect("deps")
            .flatten()
            .filter(|entry| {
                let name = entry.file_name().to_string_lossy().into_owned();
                name.starts_with("liblaxity_client") && name.ends_with(".a")
            })
            .collect();
        found.sort_by_key(|entry| entry.metadata().and_then(|m| m.modified()).ok());
        found.pop().expect("a static library").path()
    })
}

fn compile(compiler: &str, flags: &[&str], example: &str, into: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let compiled = Command::new(compiler)
        .args(["-Wall", "-Wextra", "-Werror", "-pedantic"])
        .args(flags)
        .arg("-I")
        .arg(root.join("include"))
        .arg(root.join("examples").join(example))
        .args(["-x", "none"])
        .arg(library())
        .args(["-lpthread", "-ldl", "-lm", "-o"])
        .arg(into)
        .output()
        .expect("a C compiler is installed");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}

fn run(program: &Path, socket: &Path) -> Vec<String> {
    let output = Command::new(program)
        .env("LAXITY_SOCKET", socket)
        // A busy machine may answer slowly.
        .env("LAXITY_ATTACH_MS", "10000")
        .output()
        .expect("the program runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text.lines().map(str::to_owned).collect()
}

#[test]
fn a_c_program_sends_under_the_scheduler_and_without_it() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let program = dir.path().join("send");
    compile("cc", &["-std=c99"], "send.c", &program);

    let alone = run(&program, &dir.path().join("none.sock"));
    assert_eq!(alone[0], "sizes 40 48 64 16 64");
    assert_eq!(alone[1], "offsets 32 9 40 11 56");
    assert_eq!(alone[2], "sent 141005 scheduled 0 bypassed 141077");

    let daemon = TestDaemon::start();
    daemon.knobs.chunk.store(1000, Ordering::SeqCst);
    let together = run(&program, &daemon.socket);
    assert!(together[2].starts_with("sent 141005 scheduled 141000 bypassed 0"), "{together:?}");
    eventually("completions arrive", || completed(&daemon) == 141_000);
    eventually("hints arrive in order", || {
        let heard = daemon.knobs.heard.lock().expect("heard");
        let hints: Vec<_> = heard
            .iter()
            .filter(|r| !matches!(r, Record::Cancelled { .. } | Record::LaneReset))
            .collect();
        matches!(
            hints[..],
            [
                Record::Hint(Hint::BatchBegin { batch: 1, layers: 32, layer_time_ns: 2_000_000 }),
                Record::Hint(Hint::RequestJoin { batch: 1, request: 7, .. }),
                Record::Hint(Hint::LayerBegin { batch: 1, layer: 3 }),
                Record::Hint(Hint::ComputeEnd { batch: 1 }),
                Record::Hint(Hint::RequestEnd { request: 7 }),
                Record::Hint(Hint::BatchEnd { batch: 1 }),
            ]
        )
    });
    assert_eq!(daemon.knobs.garbage.load(Ordering::SeqCst), 0);
}

#[test]
fn the_header_is_accepted_by_a_cpp_compiler() {
    if Command::new("c++").arg("--version").output().is_err() {
        return;
    }
    let dir = tempfile::tempdir().expect("temporary directory");
    let flags = ["-std=c++11", "-x", "c++", "-Wno-missing-field-initializers"];
    for example in ["send.c", "hints.c"] {
        compile("c++", &flags, example, &dir.path().join("program"));
    }
}

#[test]
fn a_c_engine_says_what_it_knows_and_hears_what_makes_no_sense() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let program = dir.path().join("hints");
    compile("cc", &["-std=c99"], "hints.c", &program);
    let said = [
        "sizes 32 112",
        "offsets 24 104",
        "number 12638187200555641996",
        "taken 0 0 0 0 0 0 0 0",
        "refused ETIME EALREADY ERANGE EINVAL EINVAL EINVAL",
        "counted hints 10 requests 2 batches 0 ended twice 1 layers unknown 2 deadlines passed 1",
    ];
    assert_eq!(run(&program, &dir.path().join("none.sock")), said);

    let daemon = TestDaemon::start();
    assert_eq!(run(&program, &daemon.socket), said);
    eventually("hints arrive in order", || {
        let heard = daemon.knobs.heard.lock().expect("heard");
        matches!(
            heard[..],
            [
                Record::Hint(Hint::BatchBegin { batch: 1, layers: 32, layer_time_ns: 2_000_000 }),
                Record::Hint(Hint::RequestJoin {
                    batch: 1,
                    request: 0xaf63_dc4c_8601_ec8c,
                    deadline_ns: 1..,
                    bytes: 4096
                }),
                Record::Hint(Hint::RequestTrace {
                    request: 0xaf63_dc4c_8601_ec8c,
                    trace: [0x0af7_6519_16cd_43dd, 0x8448_eb21_1c80_319c],
                    span: 0xb7ad_6b71_6920_3331
                }),
                Record::Hint(Hint::BatchQueued { batch: 1, ahead: 9 }),
                Record::Hint(Hint::LayerBegin { batch: 1, layer: 3 }),
                Record::Hint(Hint::ComputeEnd { batch: 1 }),
                Record::Hint(Hint::RequestEnd { request: 0xaf63_dc4c_8601_ec8c }),
                Record::Hint(Hint::BatchEnd { batch: 1 }),
                ..
            ]
        )
    });
    assert_eq!(daemon.knobs.garbage.load(Ordering::SeqCst), 0);
}
