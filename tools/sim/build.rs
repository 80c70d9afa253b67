//! Puts a digest of what decides an outcome (this crate's models of serving, GPUs and network, the
//! policy, and the schedulers of requests) into the crate, so that results of other code are not
//! taken for this one's.

use std::path::{Path, PathBuf};
use std::{env, fs};

/// Sources, and the files of models and GPUs that are built in.
const DECIDES: [&str; 6] = [
    "src",
    "../../proto/policy/src",
    "../engine/requests/src",
    "models",
    "gpus",
    "fits",
];

/// Folders of `src` in which nothing decides an outcome: what is run, and how it is shown.
const BESIDES: [&str; 4] = ["plan", "run", "report", "reproduce"];

fn main() {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let mut files = Vec::new();
    for folder in DECIDES {
        // A folder that is not there would count as changed in every build.
        if here.join(folder).is_dir() {
            println!("cargo:rerun-if-changed={folder}");
            collect(&here.join(folder), &mut files);
        }
    }
    files.sort();
    let mut digest = 0xcbf2_9ce4_8422_2325_u64;
    for file in files {
        for byte in fs::read(&file).expect("a source can be read") {
            digest = (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    println!("cargo:rustc-env=LAXITY_SIM_SOURCE={digest:016x}");
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of sources").flatten() {
        let path = entry.path();
        let name = entry.file_name();
        if path.is_dir() {
            if !BESIDES.iter().any(|besides| name == *besides) {
                collect(&path, files);
            }
        } else {
            files.push(path);
        }
    }
}
