//! Embeds a digest of everything that determines an outcome into the crate: the sources of this
//! crate's models, the policy and the request schedulers. So results of other code are recognised.

use std::path::{Path, PathBuf};
use std::{env, fs};

const DECIDES: [&str; 6] =
    ["src", "../../proto/policy/src", "../engine/requests/src", "models", "gpus", "fits"];

/// Folders of `src` that do not affect an outcome: they run plans and show results.
const BESIDES: [&str; 5] = ["advise", "plan", "run", "report", "reproduce"];

fn main() {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let mut files = Vec::new();
    for folder in DECIDES {
        // Cargo would treat a missing folder as changed in every build.
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
