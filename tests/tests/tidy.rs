//! Checks of style that spare a reviewer: the direction of dependencies, the crates that may
//! contain `unsafe`, the size and header of each file, and banned words.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::Said;
use crate::sources::{files, none, root, text};

/// Crates that may contain `unsafe`, with the reasons. `laxity-` is added to each name.
const MAY_BE_UNSAFE: &str = "
    shm: shared memory, futexes, file descriptors over sockets
    client: the C ABI
    job: fork handlers, dlsym, signal masks
    verbs: stands in for C functions, on the program's own structs
    mooncake: stands in for Mooncake's C functions, on the program's own structs
    nixl: stands in for NIXL's C++ methods, on the program's own objects
    nccl: NCCL's C tables, sockets into memory that NCCL owns, ibverbs
    nccl-host: calls a plugin of NCCL's through its table of C functions
    nic: asks drivers for their statistics by ioctl
    bench: time-stamp counters and pinned threads
    lab: defines a function of C
";

/// Workspace crates on which each crate may depend (docs/architecture.md). `laxity-` is added to
/// each name.
const MAY_DEPEND_ON: &str = "
    credentials: files
    files:
    ibverbs:
    listen:
    nic: types
    policy: types
    quantity:
    shm: types
    types:
    wire: quantity types
    client: job nic shm
    client-c: client
    job: files quantity shm
    python: client job
    verbs: client ibverbs job shm
    mooncake: client job
    nixl: client job
    nccl: client ibverbs job shm
    daemon: credentials files listen nic policy quantity shm wire
    coordinator: credentials files listen policy quantity wire
    nccl-host:
    rig: client coordinator daemon files nccl-host policy quantity requests shm wire
    cli: client credentials files job nic quantity shm wire
    lab: cli files quantity rig sim trial
    trial: credentials files wire
    sim: files policy requests
    engine: client files nccl-host requests
    requests: policy
    fuzz: client coordinator daemon job listen nccl policy quantity shm wire
    bench: client
    tests:
";

/// Returns [`MAY_DEPEND_ON`] with the full names of the crates.
fn may_depend_on() -> BTreeMap<String, BTreeSet<String>> {
    let name = |short: &str| format!("laxity-{short}");
    let rows = MAY_DEPEND_ON.lines().filter_map(|line| line.split_once(':'));
    rows.map(|(of, on)| (name(of.trim()), on.split_whitespace().map(name).collect())).collect()
}

struct Package {
    folder: PathBuf,
    dependencies: BTreeSet<String>,
}

fn packages() -> BTreeMap<String, Package> {
    let arguments = "metadata --no-deps --offline --format-version 1";
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(arguments.split(' ')).current_dir(root());
    let metadata = Said::of(&mut cargo).good().json();
    let text = |value: &serde_json::Value| value.as_str().expect("a string").to_owned();
    let package = |it: &serde_json::Value| {
        let manifest = PathBuf::from(text(&it["manifest_path"]));
        let dependencies = it["dependencies"].as_array().expect("dependencies");
        let shipped = dependencies.iter().filter(|d| d["kind"].as_str() != Some("dev"));
        let package = Package {
            folder: manifest.parent().expect("a folder").to_owned(),
            dependencies: shipped.map(|d| text(&d["name"])).collect(),
        };
        (text(&it["name"]), package)
    };
    let packages = metadata["packages"].as_array().expect("packages");
    packages.iter().map(package).collect()
}

/// Returns each Rust file of the workspace with its text.
fn sources() -> impl Iterator<Item = (PathBuf, String)> {
    files(&["rs"]).into_iter().map(|path| (path.clone(), text(path)))
}

#[test]
fn dependencies_between_crates_point_one_way() {
    let packages = packages();
    let allowed = may_depend_on();
    let listed: Vec<_> = allowed.keys().collect();
    let known: Vec<_> = packages.keys().collect();
    assert_eq!(known, listed, "list every crate in MAY_DEPEND_ON");
    for (name, package) in &packages {
        let ours = package.dependencies.iter();
        for dependency in ours.filter(|dependency| packages.contains_key(*dependency)) {
            assert!(
                allowed[name].contains(dependency),
                "{name} may not depend on {dependency}; see docs/architecture.md"
            );
        }
    }
    let leaf = BTreeSet::from(["laxity-types".to_owned()]);
    assert_eq!(packages["laxity-policy"].dependencies, leaf, "of the policy");
    assert!(packages["laxity-types"].dependencies.is_empty());
}

/// Crates that operators and applications run. They must not link any crate of the laboratory.
const PRODUCT: [&str; 9] = [
    "laxity-cli", "laxity-client-c", "laxity-coordinator", "laxity-daemon", "laxity-mooncake",
    "laxity-nccl", "laxity-nixl", "laxity-python", "laxity-verbs",
];

/// Reports whether a crate measures, simulates, plots or serves models.
fn is_laboratory(name: &str) -> bool {
    const OURS: [&str; 9] = [
        "laxity-bench", "laxity-engine", "laxity-fuzz", "laxity-lab", "laxity-nccl-host",
        "laxity-requests", "laxity-rig", "laxity-sim", "laxity-trial",
    ];
    let theirs = ["candle", "plotters", "rcgen", "smartcore", "rand_distr"];
    OURS.contains(&name) || theirs.iter().any(|start| name.starts_with(start))
}

#[test]
fn the_product_links_nothing_of_the_laboratory() {
    for product in PRODUCT {
        let arguments =
            "tree --edges normal --offline --locked --prefix none --format {p} --package";
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(arguments.split(' ')).arg(product).current_dir(root());
        let tree = Said::of(&mut cargo).good().stdout;
        let names: BTreeSet<&str> =
            (tree.lines()).filter_map(|line| line.split_whitespace().next()).collect();
        for name in &names {
            assert!(!is_laboratory(name), "{product} links {name}");
        }
        // The exporter of metrics needs random numbers, so the services may link `rand`.
        let operators = product == "laxity-cli" && names.contains("rand");
        assert!(!operators, "{product} links rand");
    }
}

#[test]
fn only_the_listed_crates_may_hold_unsafe_code() {
    let rows = MAY_BE_UNSAFE.lines().filter_map(|line| line.split_once(':'));
    let allowed: Vec<_> = rows.map(|(of, _)| format!("laxity-{}", of.trim())).collect();
    for (name, package) in packages() {
        if allowed.contains(&name) || name == "laxity-tests" {
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

/// Maximum number of lines of a file without its tests.
const FILE_LINES_MAX: usize = 500;
/// Maximum number of lines of a function.
const FUNCTION_LINES_MAX: usize = 80;
const COLUMNS_MAX: usize = 100;

pub(crate) fn is_test(path: &Path) -> bool {
    let text = path.to_string_lossy();
    let parts = ["tests/", "benches/", "examples/", "tests.rs"];
    parts.iter().any(|part| text.contains(part))
}

/// Reports whether the header says that the file is generated. Such a file is as long as its source
/// makes it.
pub(crate) fn is_generated(text: &str) -> bool {
    let mut header = text.lines().take_while(|line| line.starts_with("//!"));
    header.any(|line| line.ends_with(" Do not edit."))
}

/// Returns the number of lines before `mod tests` at the end of a file.
fn without_tests(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let tests = lines.iter().rposition(|line| *line == "#[cfg(test)]");
    match tests {
        Some(at) if lines.get(at + 1).is_some_and(|line| line.ends_with('{')) => at,
        _ => lines.len(),
    }
}

/// Returns the functions with their lines. rustfmt aligns the closing brace with the first word.
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
        if words.get(first) != Some(&"fn") || line.ends_with(['}', ';']) {
            continue;
        }
        let end = format!("{}}}", &line[..indent]);
        if let Some(body) = lines[at..].iter().position(|line| *line == end) {
            let name = words.get(first + 1).copied().unwrap_or_default();
            found.push((name.split(['(', '<']).next().unwrap_or(name), body + 1));
        }
    }
    found
}

/// Reports whether a line belongs to a table or a drawing, which can't be broken.
fn is_drawn(line: &str) -> bool {
    let line = line.trim_start();
    line.starts_with("//") && ["| ", "──", "  "].iter().any(|part| line[2..].contains(part))
}

#[test]
fn files_functions_and_lines_fit_a_screen() {
    let (mut files, mut long, mut wide) = (Vec::new(), Vec::new(), Vec::new());
    for (file, text) in sources() {
        let shown = file.display();
        for (at, line) in text.lines().enumerate() {
            if line.chars().count() > COLUMNS_MAX && !is_drawn(line) {
                wide.push(format!("{shown}:{}", at + 1));
            }
        }
        if is_test(&file) || is_generated(&text) {
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
    none("long files", &files);
    none("long functions", &long);
    none("wide lines", &wide);
}

/// Names that docs/glossary.md bans (*Banned words*).
const BANNED: [&str; 13] = [
    "Decree", "Gatherer", "Hope", "Offence", "Papers", "Roster", "decree", "heed", "knock",
    "offence", "once_wrong", "roster", "strawman",
];

#[test]
fn no_name_is_one_that_the_glossary_bans() {
    let mut found = Vec::new();
    for (file, text) in sources().filter(|(file, _)| !file.ends_with("tidy.rs")) {
        let words = text.split(|c: char| !(c.is_alphanumeric() || c == '_'));
        for word in words.filter(|word| BANNED.contains(word)) {
            found.push(format!("{}: {word}", file.display()));
        }
    }
    found.dedup();
    none("words that docs/glossary.md bans", &found);
}

/// A program of the laboratory, which only shows errors to a person.
const SHOWS_ERRORS: &str = "tools/lab/src";

#[test]
fn errors_are_types_outside_of_main() {
    let found: Vec<_> = sources()
        .filter(|(file, text)| {
            let is_main = file.ends_with("main.rs") || file.starts_with(SHOWS_ERRORS);
            text.contains("anyhow::") && !is_main && !file.ends_with("tidy.rs")
        })
        .map(|(file, _)| file.display().to_string())
        .collect();
    none("files with `anyhow`, which is for `main`: use an enum with `thiserror`", &found);
}

#[test]
fn every_file_says_what_it_is() {
    let unsaid = sources().filter(|(_, text)| !text.starts_with("//!"));
    let unsaid: Vec<_> = unsaid.map(|(file, _)| file.display().to_string()).collect();
    none("files whose first line is no `//!` header", &unsaid);
}

/// Whether the documentation in a file has an example, which rustdoc compiles.
fn has_example(text: &str) -> bool {
    let lines = text.lines().filter_map(|line| line.trim_start().strip_prefix("//"));
    let fences =
        lines.filter_map(|line| line.trim_start_matches(['/', '!', ' ']).strip_prefix("```"));
    fences.step_by(2).any(|kind| !["text", "toml"].contains(&kind))
}

#[test]
fn make_test_runs_the_examples_of_each_crate_that_has_some() {
    let makefile = text(root().join("Makefile"));
    let named = makefile.lines().find_map(|line| line.strip_prefix("WITH_EXAMPLES := "));
    let named: BTreeSet<_> = named.expect("a list").split(' ').map(str::to_owned).collect();
    let examples = sources().filter(|(_, text)| has_example(text));
    let files: Vec<_> = examples.map(|(file, _)| root().join(file)).collect();
    let with = packages().into_iter().filter(|(_, package)| {
        files.iter().any(|file| file.starts_with(package.folder.join("src")))
    });
    assert_eq!(with.map(|(name, _)| name).collect::<BTreeSet<_>>(), named);
}

/// A file of tests that no program names is not compiled, and nobody notices.
#[test]
fn every_rust_file_is_part_of_a_program() {
    let sources = files(&["rs"]);
    let manifests: String = files(&["toml"]).iter().map(text).collect();
    // Each file that a module declaration or a text names, by its place.
    let mut named = BTreeSet::new();
    for path in &sources {
        let (folder, inner) = (path.parent().expect("a file"), path.with_extension(""));
        for line in text(path).lines().map(str::trim) {
            let module = line.strip_suffix(';').and_then(|line| line.rsplit_once("mod "));
            if let Some((_, module)) = module {
                let file = format!("{module}.rs");
                named.extend([folder.join(&file), inner.join(&file)]);
            }
            let quoted = line.split('"').skip(1).step_by(2).filter(|name| name.ends_with(".rs"));
            named.extend(quoted.map(|name| folder.join(name)));
        }
    }
    let is_root = |path: &Path| {
        let name = path.file_name().and_then(|name| name.to_str()).expect("UTF-8");
        let parent = path.parent().and_then(Path::file_name);
        let of_cargo = ["tests", "benches", "examples", "bin"];
        ["main.rs", "lib.rs", "mod.rs", "build.rs"].contains(&name)
            || of_cargo.iter().any(|folder| parent == Some(folder.as_ref()))
            || manifests.contains(&format!("{name}\""))
    };
    let lost = sources.iter().filter(|path| !is_root(path) && !named.contains(*path));
    let lost: Vec<String> = lost.map(|path| path.display().to_string()).collect();
    none("no program has these files", &lost);
}
