//! The levels and their DSCPs: those of the daemon, of its configuration file, or its defaults.

use std::path::{Path, PathBuf};

use laxity_files::ReadError;
use laxity_wire::Status;
use serde::Deserialize;
use thiserror::Error;

pub(crate) const SCAVENGER: &str = "scavenger";
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The name of a level with its DSCP, or with its service level.
pub(crate) type NamedLevel = (String, u8);

/// Why a configuration file has no usable levels.
#[derive(Debug, Error)]
pub(crate) enum LevelsError {
    #[error("{path}: {cause}", path = .path.display())]
    Read { path: PathBuf, cause: ReadError },
    #[error("{path}: {problem}; `laxityd --check-config --config {path}` says more",
        path = .path.display())]
    Invalid { path: PathBuf, problem: String },
}

/// `[levels]` of the daemon's configuration. Other keys are not read.
#[derive(Deserialize)]
#[serde(default)]
struct LevelsTable {
    dscp: Vec<u8>,
    scavenger_dscp: u8,
    sl: Vec<u8>,
}

impl Default for LevelsTable {
    fn default() -> Self {
        Self { dscp: vec![46, 34, 26, 18, 18, 10, 10, 10], scavenger_dscp: 8, sl: Vec::new() }
    }
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    levels: LevelsTable,
}

impl LevelsTable {
    fn levels(&self) -> Vec<NamedLevel> {
        let named =
            self.dscp.iter().enumerate().map(|(row, dscp)| (format!("P{}", row + 1), *dscp));
        named.chain([(SCAVENGER.to_owned(), self.scavenger_dscp)]).collect()
    }

    /// Returns the levels with their service levels. The scavenger has that of the lowest level.
    fn services(&self) -> Vec<NamedLevel> {
        let given = self.sl.iter().enumerate().map(|(row, sl)| (format!("P{}", row + 1), *sl));
        given.chain(self.sl.last().map(|sl| (SCAVENGER.to_owned(), *sl))).collect()
    }
}

/// Returns the levels of a running daemon, or those of one without a configuration.
pub(crate) fn of_status(status: Option<&Status>) -> Vec<NamedLevel> {
    match status.and_then(|status| status.ports.first()) {
        Some(port) => port.levels.iter().map(|level| (level.level.clone(), level.dscp)).collect(),
        None => LevelsTable::default().levels(),
    }
}

/// Returns the levels of a running daemon that have a service level on InfiniBand.
pub(crate) fn service_of_status(status: Option<&Status>) -> Vec<NamedLevel> {
    let port = status.and_then(|status| status.ports.first());
    let levels = port.into_iter().flat_map(|port| &port.levels);
    levels.filter_map(|level| Some((level.level.clone(), level.sl?))).collect()
}

/// Returns the levels of a configuration with their DSCPs, and those with service levels.
pub(crate) fn of_file(path: &Path) -> Result<(Vec<NamedLevel>, Vec<NamedLevel>), LevelsError> {
    let invalid = |problem| LevelsError::Invalid { path: path.to_owned(), problem };
    let text = laxity_files::read_to_string(path, FILE_BYTES_MAX)
        .map_err(|cause| LevelsError::Read { path: path.to_owned(), cause })?;
    let file: File = toml::from_str(&text).map_err(|error| invalid(error.to_string()))?;
    let levels = file.levels.levels();
    if let Some((level, dscp)) = levels.iter().find(|(_, dscp)| *dscp > 63) {
        return Err(invalid(format!("{dscp}, the DSCP of {level}, is above 63")));
    }
    let again = |(row, (_, dscp)): (usize, &NamedLevel)| {
        levels[..row].iter().rposition(|(_, other)| other == dscp).is_some_and(|at| at + 1 != row)
    };
    if levels.iter().enumerate().any(again) {
        return Err(invalid("only adjacent levels may share a DSCP".to_owned()));
    }
    let services = file.levels.services();
    if let Some((level, sl)) = services.iter().find(|(_, sl)| *sl > 15) {
        return Err(invalid(format!("{sl}, the service level of {level}, is above 15")));
    }
    Ok((levels, services))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_those_of_the_sample_configuration() {
        let sample = concat!(env!("CARGO_MANIFEST_DIR"), "/../../dist/laxityd.toml");
        assert_eq!(of_file(Path::new(sample)).expect("levels"), (of_status(None), Vec::new()));
    }

    #[test]
    fn a_file_that_the_daemon_would_refuse_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("laxityd.toml");
        for (dscp, problem) in [("[46, 64]", "above 63"), ("[46, 34, 46]", "adjacent"), ("7", "7")]
        {
            std::fs::write(&path, format!("[levels]\ndscp = {dscp}\n")).expect("written");
            let error = of_file(&path).expect_err(dscp).to_string();
            assert!(error.contains(problem) && error.contains("--check-config"), "{error}");
        }
        std::fs::write(&path, "mode = \"observe\"\n").expect("written");
        assert_eq!(of_file(&path).expect("levels").0, of_status(None));
    }
}
