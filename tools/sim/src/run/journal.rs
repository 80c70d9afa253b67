//! `results.jsonl`: each finished run, one line each, appended as it ends. A run that was cut off
//! continues from it: killed at any moment, it holds all finished runs and at most one torn line.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::outcome::Outcome;
use crate::scenario::Scenario;

/// The file's name.
const NAME: &str = "results.jsonl";

/// A journal that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The folder cannot be made, or the file not read or written: check the path and the disk.
    #[error("cannot keep results in {path}: {cause}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why. Not a source: the text says it.
        cause: io::Error,
    },
    /// Another run writes into the folder: wait for it, or choose another.
    #[error("another run is writing to {path}; wait for it or choose another folder")]
    Busy {
        /// Which file.
        path: PathBuf,
    },
}

/// A finished run.
#[derive(Debug, Serialize)]
pub(super) struct JournalLine<'a> {
    pub(super) fingerprint: &'a str,
    pub(super) scenario_id: &'a str,
    pub(super) at: &'a [(&'a str, &'a str)],
    pub(super) variant: &'a str,
    pub(super) seed: u64,
    pub(super) wall_s: f64,
    pub(super) scenario: &'a Scenario,
    /// The outcome's JSON text. Written as it is, and not by way of numbers: reading may round
    /// their last digit, and then the same text must come to the same number.
    #[serde(skip)]
    pub(super) outcome: &'a str,
}

/// What is read back of it.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Entry {
    pub(super) fingerprint: String,
    pub(super) scenario_id: String,
    pub(super) wall_s: f64,
    pub(super) outcome: Outcome,
}

/// The finished runs in a folder, open to add more. No other run can open it meanwhile.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Opens the journal of a folder, which is made if need be. Returns the runs in it by
    /// fingerprint; of several with the same, the last.
    pub(super) fn open(folder: &Path) -> Result<(Self, BTreeMap<String, Entry>), JournalError> {
        let path = folder.join(NAME);
        let io = |cause| JournalError::Io {
            path: path.clone(),
            cause,
        };
        fs::create_dir_all(folder).map_err(io)?;
        let file = File::options()
            .read(true)
            .append(true)
            .create(true)
            .open(&path)
            .map_err(io)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(JournalError::Busy { path }),
            Err(TryLockError::Error(cause)) => return Err(io(cause)),
        }
        let (entries, complete) = read(&file).map_err(io)?;
        // A torn line was never finished. Without it, the next one starts a line of its own.
        file.set_len(complete).map_err(io)?;
        let entries = entries
            .into_iter()
            .map(|entry| (entry.fingerprint.clone(), entry))
            .collect();
        Ok((Self { path, file }, entries))
    }

    /// Adds a run, in one write.
    pub(super) fn append(&mut self, line: &JournalLine<'_>) -> Result<(), JournalError> {
        let mut text = serde_json::to_string(line).expect("a result is JSON");
        text.truncate(text.len() - 1);
        text += ",\"outcome\":";
        text += line.outcome;
        text += "}\n";
        self.file
            .write_all(text.as_bytes())
            .map_err(|cause| JournalError::Io {
                path: self.path.clone(),
                cause,
            })
    }
}

/// The runs in a folder by scenario, whatever code made them; of several, the last.
pub(super) fn by_scenario(folder: &Path) -> Result<BTreeMap<String, Entry>, JournalError> {
    let path = folder.join(NAME);
    let io = |cause| JournalError::Io {
        path: path.clone(),
        cause,
    };
    let file = File::open(&path).map_err(io)?;
    let (entries, _) = read(&file).map_err(io)?;
    Ok(entries
        .into_iter()
        .map(|entry| (entry.scenario_id.clone(), entry))
        .collect())
}

/// The entries, and the length of the file up to its last whole line. Lines that are none of ours
/// (of another version, say) are left where they are.
fn read(file: &File) -> io::Result<(Vec<Entry>, u64)> {
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
