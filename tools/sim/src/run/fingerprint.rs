//! Fingerprints: 128-bit digests of everything that a result depends on. A stored result is reused
//! only if its fingerprint is unchanged.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::compute::Gpu;
use crate::scenario::Scenario;

const FORMAT: u32 = 1;

/// Returns the first 128 bits of a digest in hexadecimal.
fn text(digest: Sha256) -> String {
    let bytes = digest.finalize();
    bytes[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[derive(Debug, Default)]
pub(super) struct Fingerprints {
    files: BTreeMap<PathBuf, Option<String>>,
}

impl Fingerprints {
    /// Returns the fingerprint of everything that the outcome of `scenario` depends on: its fields,
    /// the files that it names, and the code.
    pub(super) fn of(&mut self, scenario: &Scenario) -> String {
        let mut digest = Sha256::new();
        digest.update(FORMAT.to_le_bytes());
        digest.update(env!("CARGO_PKG_VERSION").as_bytes());
        digest.update(env!("LAXITY_SIM_SOURCE").as_bytes());
        digest.update(scenario_id(scenario).as_bytes());
        // Names of built-in GPUs and models are not files and are identified by name.
        let names = [&scenario.cluster.gpu, &scenario.model.name].map(Path::new);
        let coefficients = Gpu::coefficients_file(&scenario.cluster.gpu);
        let files = [scenario.workload.file.as_deref(), coefficients.as_deref()];
        for path in names.into_iter().chain(files.into_iter().flatten()) {
            if let Some(content) = self.content(path) {
                digest.update(content);
            }
        }
        text(digest)
    }

    fn content(&mut self, path: &Path) -> Option<String> {
        let known = self.files.entry(path.to_owned());
        known.or_insert_with(|| content(path)).clone()
    }
}

/// Returns the digest of a file, or `None` if it cannot be read. The simulation reports that error.
fn content(path: &Path) -> Option<String> {
    let mut file = laxity_files::open(path).ok()?;
    let mut digest = Sha256::new();
    io::copy(&mut file, &mut digest).ok()?;
    Some(text(digest))
}

/// Returns an id of a scenario that does not depend on the code.
pub(super) fn scenario_id(scenario: &Scenario) -> String {
    let mut digest = Sha256::new();
    // Fields are in the order of the type, so that equal scenarios have equal texts.
    digest.update(serde_json::to_vec(scenario).expect("a scenario is JSON"));
    text(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_and_the_content_of_files_counts() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("trace.jsonl");
        std::fs::write(&file, "one").expect("written");
        let mut scenario = Scenario::default();
        let before = Fingerprints::default().of(&scenario);
        assert_eq!(before, Fingerprints::default().of(&scenario));
        scenario.seed = 1;
        let seeded = Fingerprints::default().of(&scenario);
        assert_ne!(before, seeded);
        scenario.workload.file = Some(file.clone());
        let one = Fingerprints::default().of(&scenario);
        std::fs::write(&file, "two").expect("written");
        assert_ne!(one, Fingerprints::default().of(&scenario));
    }

    #[test]
    fn coefficients_of_a_gpu_file_count() {
        let dir = tempfile::tempdir().expect("a folder");
        let fit = dir.path().join("mine.toml");
        let gpu = dir.path().join("gpu.toml");
        let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/fits/h100.toml"));
        let text = text.expect("it is there");
        std::fs::write(&fit, &text).expect("written");
        let gpu_text = format!(
            "name = \"x\"\npeak_tflops = 989\nmemory_gbytes = 141\nmemory_gbytes_per_second = \
             4800\n\
             nvlink_gbytes_per_second = 450\nfit = \"{}\"\n",
            fit.display()
        );
        std::fs::write(&gpu, gpu_text).expect("written");
        let mut scenario = Scenario::default();
        scenario.cluster.gpu = gpu.display().to_string();
        crate::compute::Gpu::named(&scenario.cluster.gpu)
            .expect("a GPU with coefficients of its own");
        let before = Fingerprints::default().of(&scenario);
        let other = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/fits/a100.toml"));
        std::fs::write(&fit, other.expect("it is there")).expect("written");
        assert_ne!(Fingerprints::default().of(&scenario), before);
    }
}
