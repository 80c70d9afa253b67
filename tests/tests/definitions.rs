//! Files in other languages repeat what `proto/types` defines: the C header, and the Python module
//! of stages. They must agree with it.

use std::fs;
use std::path::Path;

use laxity_types::{Level, Stage};

/// The text of a file, by its path from the root of the repository.
fn text(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The `(name, number)` of each line `PREFIX name = number`, with lower-case names.
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
