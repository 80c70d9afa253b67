//! TOML files of the catalogue (models, GPUs, coefficients). Errors name the file, the line, the
//! field and the expected value.

use std::path::{Path, PathBuf};

use laxity_files::{CONFIG_BYTES_MAX, ReadError};
use serde::de::DeserializeOwned;

#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("no {what} `{name}`: built in are {known}; or give the path of a TOML file")]
    Unknown { what: &'static str, name: String, known: String },
    #[error("cannot read {path}: {cause}")]
    Read { path: PathBuf, cause: ReadError },
    #[error("{file}{}: {problem}", .line.map(|line| format!(", line {line}")).unwrap_or_default())]
    Content { file: String, line: Option<usize>, problem: String },
}

pub(crate) struct Document {
    name: String,
    text: String,
}

impl Document {
    /// Returns the built-in text `name`, or reads a file if `name` is a path (has a `/` or ends in
    /// `.toml`).
    pub(crate) fn named(
        what: &'static str,
        name: &str,
        built_in: &[(&str, &str)],
    ) -> Result<Self, FileError> {
        let text = match built_in.iter().find(|(known, _)| *known == name) {
            Some((_, text)) => (*text).to_owned(),
            None if Self::is_path(name) => {
                laxity_files::read_to_string(Path::new(name), CONFIG_BYTES_MAX)
                    .map_err(|cause| FileError::Read { path: name.into(), cause })?
            }
            None => {
                let known: Vec<&str> = built_in.iter().map(|(known, _)| *known).collect();
                return Err(FileError::Unknown {
                    what,
                    name: name.to_owned(),
                    known: known.join(", "),
                });
            }
        };
        Ok(Self { name: name.to_owned(), text })
    }

    pub(crate) fn is_path(name: &str) -> bool {
        name.contains(['/', '\\']) || name.ends_with(".toml")
    }

    pub(crate) fn parse<T: DeserializeOwned>(&self) -> Result<T, FileError> {
        toml::from_str(&self.text).map_err(|error| {
            let message = error.message().trim_end().to_owned();
            // A missing field has no line.
            let line = error
                .span()
                .filter(|_| !message.starts_with("missing"))
                .map(|span| self.text[..span.start].matches('\n').count() + 1);
            let field = line.and_then(|line| self.key_on(line));
            let problem = match field {
                Some(field) if !message.contains(&format!("`{field}`")) => {
                    format!("`{field}`: {message}")
                }
                _ => message,
            };
            self.wrong_at(line, problem)
        })
    }

    pub(crate) fn wrong(&self, field: &str, expected: &str) -> FileError {
        self.wrong_at(self.line_of(field), format!("`{field}`: expected {expected}"))
    }

    fn wrong_at(&self, line: Option<usize>, problem: String) -> FileError {
        FileError::Content { file: self.name.clone(), line, problem }
    }

    fn key_on(&self, line: usize) -> Option<&str> {
        let (key, _) = self.text.lines().nth(line - 1)?.split_once('=')?;
        Some(key.trim()).filter(|key| !key.is_empty() && !key.starts_with('#'))
    }

    fn line_of(&self, field: &str) -> Option<usize> {
        let (table, key) = field.rsplit_once('.').unwrap_or(("", field));
        let mut here = "";
        for (index, line) in self.text.lines().enumerate() {
            let line = line.trim();
            if let Some(header) = line.strip_prefix('[') {
                here = header.split(']').next().unwrap_or_default().trim();
            } else if here == table && self.key_on(index + 1) == Some(key) {
                return Some(index + 1);
            }
        }
        None
    }
}
