//! A trained predictor of iteration times in a JSON file, with its training data's description and
//! its errors. `laxity sim train-latency` writes the file, and `laxity sim reproduce qoserve
//! --latency-model` reads it.

use std::path::{Path, PathBuf};

use laxity_files::ReadError;
use laxity_requests::qoserve::latency_file::{BYTES_MAX, FORMAT, VERSION};
use laxity_requests::qoserve::{Forest, Trained};
use serde::{Deserialize, Serialize};

use super::predictor::Errors;

/// A trained predictor with its description.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatencyFile {
    format: String,
    version: u32,
    /// Description of the training data.
    pub trained_on: String,
    /// Errors on iterations that were not used for training.
    pub errors: Errors,
    /// Trained predictor of iteration times.
    pub forest: Forest,
}

/// A file without a valid predictor.
#[derive(Debug, thiserror::Error)]
pub enum LatencyFileError {
    /// The file cannot be read.
    #[error("{}: {cause}; `laxity sim train-latency` makes one", .file.display())]
    File {
        /// Path of the file.
        file: PathBuf,
        /// Reason why the file cannot be read.
        cause: ReadError,
    },
    /// The file has other content, or was truncated or edited.
    #[error("{}: {wrong}; make it anew with `laxity sim train-latency`", .file.display())]
    Wrong {
        /// Path of the file.
        file: PathBuf,
        /// What is wrong with the content.
        wrong: String,
    },
}

impl LatencyFile {
    /// Creates the content of a file.
    #[must_use]
    pub fn new(trained_on: String, errors: Errors, forest: Forest) -> Self {
        Self { format: FORMAT.to_owned(), version: VERSION, trained_on, errors, forest }
    }

    /// Reads a file.
    ///
    /// # Errors
    /// Returns an error if the file has no valid predictor.
    pub fn read(file: &Path) -> Result<Self, LatencyFileError> {
        let wrong = |wrong: String| LatencyFileError::Wrong { file: file.to_owned(), wrong };
        let text = laxity_files::read_to_string(file, BYTES_MAX)
            .map_err(|cause| LatencyFileError::File { file: file.to_owned(), cause })?;
        // Schedulers parse the file in the same way.
        Trained::parse(&text).map_err(|error| wrong(error.to_string()))?;
        serde_json::from_str(&text).map_err(|cause| wrong(cause.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use laxity_requests::qoserve::{LinearTerms, Node};

    use super::*;

    fn sound() -> LatencyFile {
        let line = LinearTerms {
            fixed: 1e6,
            floor: 0.0,
            token: 1e5,
            pair: 0.0,
            context: 0.0,
            request: 0.0,
        };
        let forest = Forest::new(line, &[vec![Node::Leaf(0.25)]]).expect("a leaf");
        let errors = Errors {
            iterations: 10,
            mean: 1.0,
            p95: 2.0,
            most: 3.0,
            late: 0.5,
            margin: 0.05,
            late_with_margin: 0.5,
        };
        LatencyFile::new("a test".to_owned(), errors, forest)
    }

    #[test]
    fn a_predictor_goes_through_its_file_unchanged() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        let text = serde_json::to_string(&sound()).expect("numbers");
        std::fs::write(file.path(), text).expect("written");
        assert_eq!(LatencyFile::read(file.path()).expect("sound"), sound());
        let text = std::fs::read_to_string(file.path()).expect("there");
        let engines = Trained::parse(&text).expect("what the engine reads, too");
        assert_eq!((engines.forest, engines.margin), (sound().forest, 0.05));
    }

    #[test]
    fn what_is_no_predictor_or_of_another_version_is_refused_with_what_to_do() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        let sound = serde_json::to_string(&sound()).expect("numbers");
        for (text, says) in [
            (String::new(), "EOF"),
            (sound.replace("laxity-latency", "else"), "its format is not"),
            (
                sound.replace("\"version\":1", "\"version\":2"),
                "version 2; this program reads version 1",
            ),
            (sound.replace("\"version\":1,", ""), "it has no version"),
            (sound.replace("0.25", "\"x\""), "invalid type"),
            (sound.replace("1000000.0", "-1.0"), "the line under a forest"),
            (sound.replace("\"margin\":0.05", "\"margin\":-1.0"), "its margin is -1"),
            (sound[..sound.len() / 2].to_owned(), "EOF"),
        ] {
            std::fs::write(file.path(), text).expect("written");
            let error = LatencyFile::read(file.path()).expect_err(says).to_string();
            assert!(error.contains(says) && error.contains("train-latency"), "{error}");
        }
        let missing = LatencyFile::read(Path::new("/no/such/model.json")).expect_err("none");
        assert!(missing.to_string().starts_with("/no/such/model.json: "));
    }
}
