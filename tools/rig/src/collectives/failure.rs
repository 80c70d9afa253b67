//! The first cause of a failed exchange. Other hosts' processes and vLLM fail soon after it, and
//! what they say names only that a connection or a process ended.

use std::fs;
use std::path::{Path, PathBuf};

use laxity_shm::sleep::now_ns;
use serde::{Deserialize, Serialize};

use crate::config::LabConfig;
use crate::error::LabError;

/// The failure of a host's process.
#[derive(Debug, Serialize, Deserialize)]
struct ExchangeFailure {
    /// Time of the failure, as CLOCK_MONOTONIC in ns.
    at_ns: u64,
    why: String,
}

fn file(folder: &Path, host: usize) -> PathBuf {
    folder.join(format!("collectives{host}.failed"))
}

/// Notes why a host's process fails. This must happen before its connections close, because the
/// processes of other hosts fail by that.
pub(super) fn note(folder: &Path, host: usize, error: &LabError) -> Result<(), LabError> {
    let at_ns = now_ns();
    let failure = ExchangeFailure { at_ns, why: error.to_string() };
    let (path, text) = (file(folder, host), serde_json::to_vec(&failure)?);
    fs::write(&path, text).map_err(LabError::file("writing", &path))
}

/// Returns the error of a run, with the first failure of the hosts' processes before it.
pub fn first_cause(config: &LabConfig, folder: &Path, error: LabError) -> LabError {
    let failed = (0..config.prefills()).filter_map(|host| {
        let text = fs::read(file(folder, host)).ok()?;
        Some((host, serde_json::from_slice::<ExchangeFailure>(&text).ok()?))
    });
    let Some((host, first)) = failed.min_by_key(|(_, failure)| failure.at_ns) else { return error };
    let host = config.host_name(host);
    LabError::step(format_args!("first, the collectives of {host} failed ({})", first.why))(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_is_reported_before_what_followed_from_it() {
        let (config, folder) = (LabConfig::vllm(), tempfile::tempdir().unwrap());
        let symptom = || LabError::Request("request 3 was not served".to_owned());
        let alone = first_cause(&config, folder.path(), symptom()).to_string();
        assert_eq!(alone, "request 3 was not served");
        let because = |why: &str| LabError::Request(why.to_owned());
        note(folder.path(), 1, &because("rows are damaged")).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(1));
        note(folder.path(), 0, &because("the peer is gone")).unwrap();
        let said = first_cause(&config, folder.path(), symptom()).to_string();
        assert!(said.starts_with("first, the collectives of unit1.0 failed (rows are"), "{said}");
        assert!(said.ends_with(": request 3 was not served"), "{said}");
    }
}
