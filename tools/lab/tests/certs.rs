//! `laxity certs` as an operator types it, on a disk that is full.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// Runs `laxity certs` where no file may grow beyond `blocks` of 1024 bytes, as on a disk that is
/// full.
fn certs(blocks: &str, out: &Path, more: &[&str]) -> Output {
    // The kernel answers EFBIG where it would send a signal that ends the process.
    Command::new("bash")
        .args(["-c", "trap '' XFSZ; ulimit -f \"$0\"; exec \"$@\"", blocks])
        .arg(env!("CARGO_BIN_EXE_laxity-lab"))
        .args(["certs", "--out"])
        .arg(out)
        .args(more)
        .output()
        .expect("bash runs")
}

fn listed(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder").flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_full_disk_leaves_the_folder_as_it_was_and_a_second_call_works() {
    let folder = tempfile::tempdir().expect("a folder");
    let new = folder.path().join("new");
    // The first file fails, or the last: a certificate with so many names is longer than a block.
    let many: Vec<String> = (0..80).map(|nth| format!("host{nth}.example")).collect();
    let many = many.join(",");
    for (blocks, whom) in [("0", ["--daemon", "a"]), ("1", ["--coordinator", &many])] {
        for out in [folder.path(), &new] {
            let failed = certs(blocks, out, &whom);
            let said = String::from_utf8_lossy(&failed.stderr);
            assert_eq!(failed.status.code(), Some(1), "{said}");
            for words in ["cannot be written: File too large", "nothing was made"] {
                assert!(said.contains(words), "{words}: {said}");
            }
            assert_eq!(listed(folder.path()), Vec::<String>::new());
        }
    }
    let made = certs("unlimited", folder.path(), &["--daemon", "a"]);
    let said = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success(), "{said}");
    let all = ["ca.crt", "ca.key", "daemon-a.crt", "daemon-a.key"];
    assert_eq!(listed(folder.path()), all);
    // A failed run with the existing CA changes nothing, either.
    let failed = certs("1", folder.path(), &["--coordinator", &many]);
    assert!(!failed.status.success());
    assert_eq!(listed(folder.path()), all);
}
