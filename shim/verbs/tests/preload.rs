//! The library as a file: what it exports, what it needs, and that a process without RDMA does not
//! notice it. What it does to work requests is tested on real devices (`laxity lab verbs`).

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Command, Output};

/// What leaves the library, besides the `lax_*` of `laxity.h`: what stands in front of libibverbs,
/// and the way past it.
const INTERPOSED: [&str; 13] = [
    "ibv_close_device",
    "ibv_cmd_alloc_pd",
    "ibv_cmd_destroy_qp",
    "ibv_cmd_modify_qp",
    "ibv_cmd_modify_qp_ex",
    "ibv_create_qp",
    "ibv_destroy_qp",
    "ibv_import_device",
    "ibv_modify_qp",
    "ibv_open_device",
    "laxity_verbs_exempt",
    "verbs_set_ops",
    "verbs_uninit_context",
];

/// Where cargo put it: next to this test's own directory, or in it.
fn library() -> PathBuf {
    let own = std::env::current_exe().expect("own path");
    let deps = own.parent().expect("deps");
    [deps.join("liblaxity.so"), deps.join("../liblaxity.so")]
        .into_iter()
        .find(|path| path.exists())
        .expect("liblaxity.so is built with its tests")
}

fn output(command: &mut Command) -> Output {
    let output = command.output().expect("the program starts");
    assert!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Functions of `laxity.h`: whatever is followed by an argument list there.
fn declared() -> BTreeSet<String> {
    let header = include_str!("../../client-c/include/laxity.h");
    let name = |text: &str| {
        let start = text
            .rfind(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .map_or(0, |at| at + 1);
        text[start..].to_owned()
    };
    header
        .match_indices('(')
        .map(|(at, _)| name(&header[..at]))
        .filter(|name| name.starts_with("lax_"))
        .collect()
}

#[test]
fn only_what_is_interposed_and_laxity_h_leave_the_library() {
    let symbols = output(
        Command::new("nm")
            .args(["-D", "--defined-only"])
            .arg(library()),
    );
    let exported: BTreeSet<_> = text(&symbols.stdout)
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .map(str::to_owned)
        .collect();
    let interposed: BTreeSet<_> = INTERPOSED.map(str::to_owned).into();
    let declared = declared();
    assert!(declared.contains("lax_scope_push"), "{declared:?}");
    assert_eq!(exported, &interposed | &declared);
}

#[test]
fn it_needs_no_rdma_library() {
    let dynamic = output(Command::new("readelf").arg("-d").arg(library()));
    let needed: Vec<_> = text(&dynamic.stdout)
        .lines()
        .filter(|line| line.contains("NEEDED"))
        .map(str::to_owned)
        .collect();
    assert!(!needed.is_empty());
    assert!(
        needed
            .iter()
            .all(|line| !line.contains("ibverbs") && !line.contains("rdmacm")),
        "{needed:?}"
    );
}

#[test]
fn a_process_without_rdma_does_not_notice_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let report = folder.path().join("report");
    let script = "ls /proc/self/task | wc -l; exec true";
    let alone = output(Command::new("sh").args(["-c", script]));
    let preloaded = output(
        Command::new("sh")
            .args(["-c", script])
            .env("LD_PRELOAD", library())
            .env("LAXITY_REPORT", &report)
            .env("LAXITY_PROFILE", "no-such-profile")
            .env("LAXITY_SOCKET", folder.path().join("none.sock")),
    );
    assert_eq!(text(&preloaded.stdout), text(&alone.stdout));
    // It says nothing, not even of a profile that there isn't: nothing of it has run.
    assert_eq!(text(&preloaded.stderr), text(&alone.stderr));
    assert!(!report.exists());
}
