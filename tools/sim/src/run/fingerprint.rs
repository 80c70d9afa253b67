//! What a result depends on, in 128 bits: a finished run is taken over only if none of it changed.

use std::collections::BTreeMap;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use crate::compute::Gpu;
use crate::scenario::Scenario;

/// Changes when the form of results does.
const FORMAT: u32 = 1;

/// FNV-1a over 128 bits. Not against malice: nobody gains by two scenarios that collide.
#[derive(Clone, Copy, Debug)]
struct Digest(u128);

impl Digest {
    fn new() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }

    fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 =
                (self.0 ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }

    fn text(self) -> String {
        format!("{:032x}", self.0)
    }
}

/// Fingerprints of one plan's runs. Remembers the files that it has read.
#[derive(Debug, Default)]
pub(super) struct Fingerprints {
    files: BTreeMap<PathBuf, Option<u128>>,
}

impl Fingerprints {
    /// Of everything that the outcome of `scenario` depends on: its fields, the files that it
    /// names, and the code.
    pub(super) fn of(&mut self, scenario: &Scenario) -> String {
        let mut digest = Digest::new();
        digest.add(&FORMAT.to_le_bytes());
        digest.add(env!("CARGO_PKG_VERSION").as_bytes());
        digest.add(env!("LAXITY_SIM_SOURCE").as_bytes());
        digest.add(scenario_id(scenario).as_bytes());
        // Names of built-in GPUs and models are no files, and then stand for themselves.
        let names = [&scenario.cluster.gpu, &scenario.model.name].map(Path::new);
        let coefficients = Gpu::coefficients_file(&scenario.cluster.gpu);
        let files = [scenario.workload.file.as_deref(), coefficients.as_deref()];
        for path in names.into_iter().chain(files.into_iter().flatten()) {
            if let Some(content) = self.content(path) {
                digest.add(&content.to_le_bytes());
            }
        }
        digest.text()
    }

    fn content(&mut self, path: &Path) -> Option<u128> {
        *self
            .files
            .entry(path.to_owned())
            .or_insert_with(|| content(path))
    }
}

/// Of a file; `None` if there is none that can be read, which the simulation will complain about.
fn content(path: &Path) -> Option<u128> {
    let mut file = BufReader::new(laxity_files::open(path).ok()?);
    let (mut digest, mut buffer) = (Digest::new(), vec![0; 1 << 16]);
    loop {
        match file.read(&mut buffer).ok()? {
            0 => return Some(digest.0),
            count => digest.add(&buffer[..count]),
        }
    }
}

/// Names a scenario, whatever code runs it.
pub(super) fn scenario_id(scenario: &Scenario) -> String {
    let mut digest = Digest::new();
    // Fields in the order of the type: the same scenario is the same text.
    digest.add(&serde_json::to_vec(scenario).expect("a scenario is JSON"));
    digest.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_is_that_of_the_specification() {
        let of = |text: &str| {
            let mut digest = Digest::new();
            digest.add(text.as_bytes());
            digest.text()
        };
        assert_eq!(of(""), "6c62272e07bb014262b821756295c58d");
        assert_eq!(of("a"), "d228cb696f1a8caf78912b704e4a8964");
        assert_eq!(of("foobar"), "343e1662793c64bf6f0d3597ba446f18");
    }

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
