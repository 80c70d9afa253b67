//! The journal `results.jsonl` has one line for each finished run, appended when the run ends. An
//! interrupted plan continues from it. After a crash at most one line is partial.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::outcome::Outcome;
use crate::scenario::Scenario;

const NAME: &str = "results.jsonl";

#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error("cannot keep results in {path}: {cause}")]
    Io { path: PathBuf, cause: io::Error },
    #[error("another run is writing to {path}; wait for it or choose another folder")]
    Busy { path: PathBuf },
}

#[derive(Debug, Serialize)]
pub(super) struct JournalLine<'a> {
    pub(super) fingerprint: &'a str,
    pub(super) scenario_id: &'a str,
    pub(super) at: &'a [(&'a str, &'a str)],
    pub(super) variant: &'a str,
    pub(super) seed: u64,
    pub(super) wall_s: f64,
    pub(super) scenario: &'a Scenario,
    /// JSON text of the outcome. It is copied as text, because parsing and formatting may change
    /// the last digit of a number.
    #[serde(skip)]
    pub(super) outcome: &'a str,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct JournalEntry {
    pub(super) fingerprint: String,
    pub(super) scenario_id: String,
    pub(super) wall_s: f64,
    pub(super) outcome: Outcome,
}

#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Opens the journal of a folder and creates the folder if necessary. Returns the runs by
    /// fingerprint. Later runs replace earlier ones with the same fingerprint.
    pub(super) fn open(
        folder: &Path,
    ) -> Result<(Self, BTreeMap<String, JournalEntry>), JournalError> {
        let path = folder.join(NAME);
        let io = |cause| JournalError::Io { path: path.clone(), cause };
        fs::create_dir_all(folder).map_err(io)?;
        let file = File::options().read(true).append(true).create(true).open(&path).map_err(io)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(JournalError::Busy { path }),
            Err(TryLockError::Error(cause)) => return Err(io(cause)),
        }
        let (entries, complete) = read(&file).map_err(io)?;
        // Removes a partial line, so that the next one starts on a line of its own.
        file.set_len(complete).map_err(io)?;
        let entries = entries.into_iter().map(|entry| (entry.fingerprint.clone(), entry)).collect();
        Ok((Self { path, file }, entries))
    }

    pub(super) fn append(&mut self, line: &JournalLine<'_>) -> Result<(), JournalError> {
        let mut text = serde_json::to_string(line).expect("a result is JSON");
        text.truncate(text.len() - 1);
        text += ",\"outcome\":";
        text += line.outcome;
        text += "}\n";
        self.file
            .write_all(text.as_bytes())
            .map_err(|cause| JournalError::Io { path: self.path.clone(), cause })
    }
}

pub(super) fn by_scenario(folder: &Path) -> Result<BTreeMap<String, JournalEntry>, JournalError> {
    let path = folder.join(NAME);
    let io = |cause| JournalError::Io { path: path.clone(), cause };
    let file = File::open(&path).map_err(io)?;
    let (entries, _) = read(&file).map_err(io)?;
    Ok(entries.into_iter().map(|entry| (entry.scenario_id.clone(), entry)).collect())
}

/// Returns the entries, and the length of the file up to its last complete line. Lines of other
/// versions are ignored and kept.
fn read(file: &File) -> io::Result<(Vec<JournalEntry>, u64)> {
    let mut reader = BufReader::new(file);
    let (mut entries, mut complete, mut line) = (Vec::new(), 0, Vec::new());
    loop {
        line.clear();
        let length = reader.read_until(b'\n', &mut line)?;
        if length == 0 || line.last() != Some(&b'\n') {
            return Ok((entries, complete));
        }
        complete += length as u64;
        if let Ok(entry) = serde_json::from_slice(&line) {
            entries.push(entry);
        }
    }
}
