//! Style that a tool can check, so that a reviewer need not: the direction of dependencies, which
//! crates may hold `unsafe`, that each file says what it is, and that files stay files.

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
    ("laxity-listen", &[]),
    ("laxity-policy", &[]),
    ("laxity-quantity", &[]),
    ("laxity-shm", &[]),
    ("laxity-wire", &["laxity-policy"]),
    ("laxity-client", &["laxity-profile", "laxity-shm"]),
    ("laxity-client-c", &["laxity-client"]),
    (
        "laxity-profile",
        &["laxity-files", "laxity-quantity", "laxity-shm"],
    ),
    ("laxity-python", &["laxity-client", "laxity-profile"]),
    (
        "laxity-verbs",
        &[
            "laxity-client",
            "laxity-profile",
            "laxity-quantity",
            "laxity-shm",
        ],
    ),
    ("laxity-mooncake", &["laxity-client", "laxity-profile"]),
    (
        "laxity-nccl",
        &["laxity-client", "laxity-profile", "laxity-shm"],
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
            "laxity-client",
            "laxity-files",
            "laxity-nccl-host",
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
            "laxity-profile",
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
        &["laxity-client", "laxity-files", "laxity-requests"],
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
    assert!(
        packages["laxity-policy"].dependencies.is_empty(),
        "the policy has no dependency"
    );
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

#[test]
fn every_file_says_what_it_is_and_stays_readable() {
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
            let lines = text.lines().count();
            assert!(
                lines <= 800,
                "{shown} has {lines} lines: it is two concepts"
            );
        }
    }
}
