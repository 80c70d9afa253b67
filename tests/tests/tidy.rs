//! Style that a tool can check, so that a reviewer need not: the direction of dependencies, which
//! crates may hold `unsafe`, that each file says what it is and fits a sitting, and words that mean
//! nothing to a reader.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Crates that may contain `unsafe`, and why.
const MAY_BE_UNSAFE: &[(&str, &str)] = &[
    (
        "laxity-shm",
        "shared memory, futexes, file descriptors over sockets",
    ),
    ("laxity-client", "the C ABI"),
    ("laxity-job", "fork handlers, dlsym, signal masks"),
    (
        "laxity-verbs",
        "stands in for C functions, on the program's own structs",
    ),
    (
        "laxity-mooncake",
        "stands in for Mooncake's C functions, on the program's own structs",
    ),
    (
        "laxity-nccl",
        "NCCL's C tables, sockets into memory that NCCL owns, ibverbs",
    ),
    (
        "laxity-nccl-host",
        "calls a plugin of NCCL's through its table of C functions",
    ),
    ("laxity-bench", "time-stamp counters and pinned threads"),
];

/// Which workspace crates each crate may depend on (docs/architecture.md).
const MAY_DEPEND_ON: &[(&str, &[&str])] = &[
    ("laxity-credentials", &["laxity-files"]),
    ("laxity-files", &[]),
    ("laxity-ibverbs", &[]),
    ("laxity-listen", &[]),
    ("laxity-policy", &["laxity-types"]),
    ("laxity-quantity", &[]),
    ("laxity-shm", &["laxity-types"]),
    ("laxity-types", &[]),
    ("laxity-wire", &["laxity-types"]),
    ("laxity-client", &["laxity-job", "laxity-shm"]),
    ("laxity-client-c", &["laxity-client"]),
    (
        "laxity-job",
        &["laxity-files", "laxity-quantity", "laxity-shm"],
    ),
    ("laxity-python", &["laxity-client", "laxity-job"]),
    (
        "laxity-verbs",
        &[
            "laxity-client",
            "laxity-ibverbs",
            "laxity-job",
            "laxity-shm",
        ],
    ),
    ("laxity-mooncake", &["laxity-client", "laxity-job"]),
    (
        "laxity-nccl",
        &[
            "laxity-client",
            "laxity-ibverbs",
            "laxity-job",
            "laxity-shm",
        ],
    ),
    (
        "laxity-daemon",
        &[
            "laxity-credentials",
            "laxity-files",
            "laxity-listen",
            "laxity-policy",
            "laxity-quantity",
            "laxity-shm",
            "laxity-wire",
        ],
    ),
    (
        "laxity-coordinator",
        &[
            "laxity-credentials",
            "laxity-files",
            "laxity-listen",
            "laxity-policy",
            "laxity-quantity",
            "laxity-wire",
        ],
    ),
    ("laxity-nccl-host", &[]),
    (
        "laxity-rig",
        &[
            "laxity-files",
            "laxity-policy",
            "laxity-requests",
            "laxity-wire",
        ],
    ),
    (
        "laxity-cli",
        &[
            "laxity-credentials",
            "laxity-files",
            "laxity-job",
            "laxity-quantity",
            "laxity-shm",
            "laxity-wire",
        ],
    ),
    (
        "laxity-lab",
        &[
            "laxity-cli",
            "laxity-decisions",
            "laxity-files",
            "laxity-quantity",
            "laxity-rig",
            "laxity-sim",
            "laxity-trial",
        ],
    ),
    (
        "laxity-trial",
        &["laxity-credentials", "laxity-files", "laxity-wire"],
    ),
    (
        "laxity-sim",
        &["laxity-files", "laxity-policy", "laxity-requests"],
    ),
    ("laxity-decisions", &["laxity-requests"]),
    (
        "laxity-engine",
        &[
            "laxity-client",
            "laxity-files",
            "laxity-nccl-host",
            "laxity-requests",
        ],
    ),
    ("laxity-requests", &["laxity-policy"]),
    (
        "laxity-fuzz",
        &[
            "laxity-coordinator",
            "laxity-daemon",
            "laxity-nccl",
            "laxity-policy",
            "laxity-shm",
            "laxity-wire",
        ],
    ),
    (
        "laxity-bench",
        &["laxity-policy", "laxity-shm", "laxity-client"],
    ),
    ("laxity-tests", &[]),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("tests/ has a parent")
        .to_owned()
}

struct Package {
    folder: PathBuf,
    dependencies: BTreeSet<String>,
}

fn packages() -> BTreeMap<String, Package> {
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--no-deps",
            "--offline",
            "--format-version",
            "1",
        ])
        .current_dir(root())
        .output()
        .expect("cargo metadata runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let text = |value: &serde_json::Value| value.as_str().expect("a string").to_owned();
    metadata["packages"]
        .as_array()
        .expect("packages")
        .iter()
        .map(|package| {
            let dependencies = package["dependencies"].as_array().expect("dependencies");
            let manifest = PathBuf::from(text(&package["manifest_path"]));
            (
                text(&package["name"]),
                Package {
                    folder: manifest.parent().expect("a folder").to_owned(),
                    dependencies: dependencies
                        .iter()
                        .filter(|d| d["kind"].as_str() != Some("dev"))
                        .map(|d| text(&d["name"]))
                        .collect(),
                },
            )
        })
        .collect()
}

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a readable folder").flatten() {
        let path = entry.path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

fn sources(package: &Package) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for part in ["src", "tests", "benches", "examples"] {
        if package.folder.join(part).is_dir() {
            rust_files(&package.folder.join(part), &mut found);
        }
    }
    found.sort();
    found
}

#[test]
fn dependencies_between_crates_point_one_way() {
    let packages = packages();
    let allowed: BTreeMap<_, _> = MAY_DEPEND_ON.iter().copied().collect();
    let known: BTreeSet<&str> = packages.keys().map(String::as_str).collect();
    assert_eq!(
        known,
        allowed.keys().copied().collect(),
        "list every crate in MAY_DEPEND_ON"
    );
    for (name, package) in &packages {
        for dependency in package
            .dependencies
            .iter()
            .filter(|d| known.contains(d.as_str()))
        {
            assert!(
                allowed[name.as_str()].contains(&dependency.as_str()),
                "{name} may not depend on {dependency}; see docs/architecture.md"
            );
        }
    }
    let leaf = BTreeSet::from(["laxity-types".to_owned()]);
    assert_eq!(
        packages["laxity-policy"].dependencies, leaf,
        "of the policy"
    );
    assert!(packages["laxity-types"].dependencies.is_empty());
}

/// What operators and applications run. Nothing of the laboratory may be linked into it.
const PRODUCT: [&str; 8] = [
    "laxity-cli",
    "laxity-client-c",
    "laxity-coordinator",
    "laxity-daemon",
    "laxity-mooncake",
    "laxity-nccl",
    "laxity-python",
    "laxity-verbs",
];

/// Crates that measure, simulate, plot, or serve models.
fn is_laboratory(name: &str) -> bool {
    const OURS: [&str; 10] = [
        "laxity-bench",
        "laxity-decisions",
        "laxity-engine",
        "laxity-fuzz",
        "laxity-lab",
        "laxity-nccl-host",
        "laxity-requests",
        "laxity-rig",
        "laxity-sim",
        "laxity-trial",
    ];
    let theirs = ["candle", "plotters", "rcgen", "smartcore", "rand_distr"];
    OURS.contains(&name) || theirs.iter().any(|start| name.starts_with(start))
}

#[test]
fn the_product_links_nothing_of_the_laboratory() {
    for product in PRODUCT {
        let output = Command::new(env!("CARGO"))
            .args([
                "tree",
                "--package",
                product,
                "--edges",
                "normal",
                "--offline",
            ])
            .args(["--locked", "--prefix", "none", "--format", "{p}"])
            .current_dir(root())
            .output()
            .expect("cargo tree runs");
        let text = String::from_utf8_lossy(&output.stdout);
        let names: BTreeSet<&str> = (text.lines())
            .filter_map(|line| line.split_whitespace().next())
            .collect();
        assert!(
            names.contains(product),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        for name in &names {
            assert!(!is_laboratory(name), "{product} links {name}");
        }
        // The exporter of metrics brings random numbers into the services.
        let operators = product == "laxity-cli" && names.contains("rand");
        assert!(!operators, "{product} links rand");
    }
}

#[test]
fn only_the_listed_crates_may_hold_unsafe_code() {
    let allowed: BTreeMap<_, _> = MAY_BE_UNSAFE.iter().copied().collect();
    for (name, package) in packages() {
        if allowed.contains_key(name.as_str()) || name == "laxity-tests" {
            continue;
        }
        for root in ["lib.rs", "main.rs"] {
            let file = package.folder.join("src").join(root);
            if let Ok(text) = fs::read_to_string(&file) {
                assert!(
                    text.contains("#![forbid(unsafe_code)]"),
                    "{} must forbid unsafe code, or its crate be listed with a reason",
                    file.display()
                );
            }
        }
    }
}

/// A file without its tests has at most so many lines.
const FILE_LINES_MAX: usize = 500;
/// A function has at most so many.
const FUNCTION_LINES_MAX: usize = 80;
const COLUMNS_MAX: usize = 100;

/// Files, functions and lines that are longer than they may be. These numbers only shrink.
const LONG_FILES: usize = 45;
const LONG_FUNCTIONS: usize = 40;
const WIDE_LINES: usize = 95;

fn is_test(path: &Path) -> bool {
    let text = path.to_string_lossy();
    [
        "/tests/",
        "/benches/",
        "/examples/",
        "tests.rs",
        "_tests.rs",
    ]
    .iter()
    .any(|part| text.contains(part))
}

/// The lines before `mod tests` at the end of a file.
fn without_tests(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let tests = lines.iter().rposition(|line| *line == "#[cfg(test)]");
    match tests {
        Some(at) if lines.get(at + 1).is_some_and(|line| line.ends_with('{')) => at,
        _ => lines.len(),
    }
}

/// Functions by name, with their lines. rustfmt puts the closing brace below the first word.
fn functions(text: &str) -> Vec<(&str, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let indent = line.len() - line.trim_start().len();
        let words: Vec<&str> = line.split_whitespace().collect();
        let modifiers = ["pub", "const", "async", "unsafe", "extern", "default"];
        let is_modifier = |word: &&&str| {
            modifiers.iter().any(|start| word.starts_with(start)) || word.starts_with('"')
        };
        let first = words.iter().take_while(is_modifier).count();
        if words.get(first) != Some(&"fn") || line.ends_with('}') {
            continue;
        }
        let end = format!("{}}}", &line[..indent]);
        let body = lines[at..].iter().position(|line| *line == end);
        let declared = lines[at..].iter().position(|line| line.ends_with(';'));
        if let Some(body) = body
            && !(line.ends_with(';') || declared.is_some_and(|at| at == 0))
        {
            let name = words.get(first + 1).copied().unwrap_or_default();
            found.push((name.split(['(', '<']).next().unwrap_or(name), body + 1));
        }
    }
    found
}

/// A row of a table, or a line of a picture: it can't be broken.
fn is_drawn(line: &str) -> bool {
    let line = line.trim_start();
    line.starts_with("//")
        && ["| ", "──", "  "]
            .iter()
            .any(|part| line[2..].contains(part))
}

/// What is longer than it may be, against the number that is known.
fn judge(what: &str, found: &[String], known: usize) {
    assert!(
        found.len() <= known,
        "{} {what}, and {known} are known:\n{}",
        found.len(),
        found.join("\n")
    );
    assert_eq!(
        found.len(),
        known,
        "fewer {what}: lower the number in tidy.rs"
    );
}

#[test]
fn files_functions_and_lines_fit_a_screen() {
    let (mut files, mut long, mut wide) = (Vec::new(), Vec::new(), Vec::new());
    for package in packages().values() {
        for file in sources(package) {
            let text = fs::read_to_string(&file).expect("a readable file");
            let shown = file.strip_prefix(root()).unwrap_or(&file).display();
            for (at, line) in text.lines().enumerate() {
                if line.chars().count() > COLUMNS_MAX && !is_drawn(line) {
                    wide.push(format!("{shown}:{}", at + 1));
                }
            }
            if is_test(&file) {
                continue;
            }
            let lines = without_tests(&text);
            if lines > FILE_LINES_MAX {
                files.push(format!("{shown}: {lines} lines"));
            }
            for (name, lines) in functions(&text) {
                if lines > FUNCTION_LINES_MAX {
                    long.push(format!("{shown}: {name} has {lines} lines"));
                }
            }
        }
    }
    judge("long files", &files, LONG_FILES);
    judge("long functions", &long, LONG_FUNCTIONS);
    judge("wide lines", &wide, WIDE_LINES);
}

/// Names that need their author to explain them (docs/glossary.md, *Banned words*).
const BANNED: [&str; 13] = [
    "Decree",
    "Gatherer",
    "Hope",
    "Offence",
    "Papers",
    "Roster",
    "decree",
    "heed",
    "knock",
    "offence",
    "once_wrong",
    "roster",
    "strawman",
];

#[test]
fn no_name_is_one_that_the_glossary_bans() {
    let mut found = Vec::new();
    for package in packages().values() {
        for file in sources(package) {
            let text = fs::read_to_string(&file).expect("a readable file");
            let shown = file.strip_prefix(root()).unwrap_or(&file).display();
            if shown.to_string().ends_with("tidy.rs") {
                continue;
            }
            let words = text.split(|c: char| !(c.is_alphanumeric() || c == '_'));
            for word in words.filter(|word| BANNED.contains(word)) {
                found.push(format!("{shown}: {word}"));
            }
        }
    }
    found.dedup();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn every_file_says_what_it_is() {
    for package in packages().values() {
        for file in sources(package) {
            let text = fs::read_to_string(&file).expect("a readable file");
            let shown = file
                .strip_prefix(root())
                .unwrap_or(&file)
                .display()
                .to_string();
            assert!(
                text.starts_with("//!"),
                "{shown}: the first line must be a `//!` header"
            );
        }
    }
}
