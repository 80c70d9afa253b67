//! A predictor of iteration times in a JSON file: the forest and its safety margin. `laxity sim
//! train-latency` writes such files, which also contain the training data's source and the errors.

use serde::Deserialize;

use super::Forest;

/// Value of the file's `format` field.
pub const FORMAT: &str = "laxity-latency";

/// Version of the format. Other versions are refused, because their features could have another
/// meaning.
pub const VERSION: u32 = 1;

/// Largest file that is read, in bytes: a hundred times the size of a trained forest.
pub const BYTES_MAX: u64 = 64 << 20;

/// A forest and the margin of its predictions.
#[derive(Clone, Debug, PartialEq)]
pub struct Trained {
    /// The predictor.
    pub forest: Forest,
    /// Share that is added to each prediction.
    pub margin: f64,
}

/// The fields that are checked first, so that another version has its own error.
#[derive(Deserialize)]
struct Head {
    format: Option<String>,
    version: Option<u32>,
}

#[derive(Deserialize)]
struct Body {
    errors: Errors,
    forest: Forest,
}

#[derive(Deserialize)]
struct Errors {
    margin: f64,
}

/// The reason why a text isn't a valid predictor.
#[derive(Debug, thiserror::Error)]
pub enum TrainedError {
    /// The text isn't JSON, or a field is missing or invalid.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// The `format` field has another value.
    #[error("its format is not {FORMAT}")]
    Format,
    /// The version is another one or is missing.
    #[error("it has {}; this program reads version {VERSION}", .0.map_or("no \
        version".to_owned(), |version| format!("version {version}")))]
    Version(Option<u32>),
    /// The margin is negative or not finite.
    #[error("its margin is {0}; expected a share, 0 or more")]
    Margin(f64),
}

impl Trained {
    /// Parses the contents of a predictor file.
    ///
    /// # Errors
    /// Fails if the text isn't a valid predictor of this version.
    pub fn parse(text: &str) -> Result<Self, TrainedError> {
        let head: Head = serde_json::from_str(text)?;
        if head.format.as_deref() != Some(FORMAT) {
            return Err(TrainedError::Format);
        }
        if head.version != Some(VERSION) {
            return Err(TrainedError::Version(head.version));
        }
        let Body { errors, forest } = serde_json::from_str(text)?;
        let margin = errors.margin;
        if !margin.is_finite() || margin < 0.0 {
            return Err(TrainedError::Margin(margin));
        }
        Ok(Self { forest, margin })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qoserve::{LinearTerms, Node};

    fn forest() -> Forest {
        let line = LinearTerms {
            fixed: 1e6,
            floor: 0.0,
            token: 1e5,
            pair: 0.0,
            context: 0.0,
            request: 0.0,
        };
        Forest::new(line, &[vec![Node::Leaf(0.25)]]).expect("a leaf")
    }

    /// Returns a text as `laxity sim train-latency` writes it.
    fn written() -> String {
        let errors = "{\"iterations\":10,\"mean\":1.0,\"p95\":2.0,\"most\":3.0,\"late\":0.5,\
                      \"margin\":0.07,\"late_with_margin\":0.5}";
        let forest = serde_json::to_string(&forest()).expect("numbers");
        format!(
            "{{\"format\":\"laxity-latency\",\"version\":1,\"trained_on\":\"a \
             test\",\"errors\":{errors},\"forest\":{forest}}}"
        )
    }

    #[test]
    fn what_training_writes_is_read_with_its_margin() {
        let read = Trained::parse(&written()).expect("sound");
        assert_eq!((read.forest, read.margin), (forest(), 0.07));
    }

    #[test]
    fn what_is_no_predictor_or_of_another_version_is_refused_with_the_reason() {
        let sound = written();
        for (text, says) in [
            (String::new(), "EOF"),
            (
                serde_json::to_string(&forest()).expect("numbers"),
                "its format is not laxity-latency",
            ),
            (sound.replace("laxity-latency", "else"), "its format is not"),
            (
                sound.replace("\"version\":1", "\"version\":2"),
                "it has version 2; this program reads version 1",
            ),
            (sound.replace("\"version\":1,", ""), "it has no version"),
            (sound.replace("0.25", "\"x\""), "invalid type"),
            (sound.replace("1000000.0", "-1.0"), "the line under a forest"),
            (sound.replace("\"margin\":0.07", "\"margin\":-1.0"), "its margin is -1"),
            (sound.replace("\"margin\":0.07,", ""), "margin"),
            (sound[..sound.len() / 2].to_owned(), "EOF"),
        ] {
            let error = Trained::parse(&text).expect_err(says).to_string();
            assert!(error.contains(says), "{says}: {error}");
        }
    }
}
