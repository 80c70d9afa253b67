//! Checks that files in other languages agree with Rust. The C header and the Python module repeat
//! the stages of `proto/types`, and a page lists the settings of jobs.

use std::collections::BTreeSet;
use std::path::PathBuf;

use laxity_types::{Level, Stage};

use crate::sources::{files, text};

/// Returns the `(name, number)` of each line `PREFIX name = number`, in lower case.
fn constants(text: &str, prefix: &str) -> Vec<(String, u8)> {
    let constant = |line: &str| {
        let (name, rest) = line.trim().strip_prefix(prefix)?.split_once(" = ")?;
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        let plain = name.chars().all(|c| c == '_' || c.is_ascii_alphanumeric());
        Some((name.to_lowercase(), digits.parse().ok()?)).filter(|_| plain)
    };
    text.lines().filter_map(constant).collect()
}

#[test]
fn stages_of_c_and_python_are_those_of_rust() {
    let stages = Stage::ALL.map(|stage| (stage.name().to_owned(), stage as u8));
    let header = text("shim/client-c/include/laxity.h");
    assert_eq!(constants(&header, "LAX_STAGE_"), stages, "laxity.h");
    let python = text("mooncake-adapter/python/laxity/_stage.py");
    assert_eq!(constants(&python, ""), stages, "_stage.py");
}

#[test]
fn the_scavenger_of_c_is_that_of_rust() {
    let header = text("shim/client-c/include/laxity.h");
    let line = format!("#define LAX_LEVEL_SCAVENGER {}\n", Level::SCAVENGER.0);
    assert!(header.contains(&line), "laxity.h: {line}");
}

fn settings(text: &str) -> BTreeSet<String> {
    let is_setting = |word: &&str| {
        let plain = |c: char| c == '_' || c.is_ascii_uppercase();
        word.starts_with("LAXITY_") && word.chars().all(plain)
    };
    let words = text.split('"').filter(is_setting);
    words.map(str::to_owned).collect()
}

#[test]
fn the_page_about_jobs_lists_every_setting_that_jobs_read_and_no_other() {
    let read = [
        "mooncake-adapter/python", "mooncake-adapter/src", "nccl-plugin/src", "proto/shm/src",
        "shim", "tools/cli/src/library.rs",
    ];
    let sources = files(&["rs", "py"]).into_iter();
    let is_read = |path: &PathBuf| read.iter().any(|start| path.starts_with(start));
    let code: String = sources.filter(is_read).map(text).collect();
    let page = text("docs/running-jobs.md");
    let rows = page.lines().filter(|line| line.starts_with("| `LAXITY_"));
    let listed: BTreeSet<_> = rows.filter_map(|row| row.split('`').nth(1)).collect();
    let listed: BTreeSet<_> = listed.into_iter().map(str::to_owned).collect();
    assert_eq!(listed, settings(&code));
}
