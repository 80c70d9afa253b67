//! The search for profiles: the folders in order, then the built-in profiles.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use laxity_files::ReadError;

use crate::{FILE_BYTES_MAX, FOLDER, FOLDER_ENV, Origin, Profile, ProfileError};

/// The built-in profiles, ordered by name.
pub(crate) const BUILTIN: &[(&str, &str)] = &[
    ("default", include_str!("../profiles/default.toml")),
    ("dynamo", include_str!("../profiles/dynamo.toml")),
    ("mooncake", include_str!("../profiles/mooncake.toml")),
    ("nccl", include_str!("../profiles/nccl.toml")),
    ("nixl", include_str!("../profiles/nixl.toml")),
    ("perftest", include_str!("../profiles/perftest.toml")),
    ("ucx", include_str!("../profiles/ucx.toml")),
    ("wide-ep", include_str!("../profiles/wide-ep.toml")),
];

impl Profile {
    /// Loads the profile `name`. The documentation of the module `profile` describes the search.
    ///
    /// # Errors
    /// [`ProfileError`], whose text is meant for the user who started the job.
    pub fn load(name: &str) -> Result<Self, ProfileError> {
        Folders::of_this_process().load(name)
    }

    /// Returns the unparsed text of the profile `name`, and its origin.
    ///
    /// # Errors
    /// Returns the errors of [`Self::load`], except [`ProfileError::Malformed`].
    pub fn text(name: &str) -> Result<(Origin, String), ProfileError> {
        Folders::of_this_process().text(name)
    }

    /// Returns the names of all profiles that [`Self::load`] finds, built-in and in folders, in
    /// alphabetical order.
    pub fn names() -> Vec<String> {
        Folders::of_this_process().names()
    }
}

/// The folders that are searched, in order.
pub(crate) struct Folders(pub(crate) Vec<PathBuf>);

impl Folders {
    pub(crate) fn of_this_process() -> Self {
        let own = std::env::var_os(FOLDER_ENV).filter(|folder| !folder.is_empty());
        Self(own.map(PathBuf::from).into_iter().chain([PathBuf::from(FOLDER)]).collect())
    }

    pub(crate) fn load(&self, name: &str) -> Result<Profile, ProfileError> {
        let (origin, text) = self.text(name)?;
        let stem = match &origin {
            Origin::File(path) if name.contains('/') => {
                path.file_stem().map(|stem| stem.to_string_lossy().into_owned())
            }
            _ => None,
        };
        Profile::parse(stem.as_deref().unwrap_or(name), origin, &text)
    }

    pub(crate) fn text(&self, name: &str) -> Result<(Origin, String), ProfileError> {
        let candidates: Vec<PathBuf> = if name.contains('/') {
            vec![PathBuf::from(name)]
        } else {
            let file = format!("{name}.toml");
            self.0.iter().map(|folder| folder.join(&file)).collect()
        };
        for path in &candidates {
            if let Some(text) = read(path)? {
                return Ok((Origin::File(path.clone()), text));
            }
        }
        match BUILTIN.iter().find(|(builtin, _)| *builtin == name) {
            Some((_, text)) => Ok((Origin::Builtin, (*text).to_owned())),
            None => Err(ProfileError::Unknown {
                name: name.to_owned(),
                looked: listed(candidates.iter().map(|path| path.display().to_string())),
                known: listed(self.names()),
            }),
        }
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let builtin = BUILTIN.iter().map(|(name, _)| (*name).to_owned());
        let mut names: BTreeSet<String> = builtin.collect();
        for folder in &self.0 {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                let path = entry.path();
                if path.extension().is_some_and(|ending| ending == "toml") {
                    names.extend(path.file_stem().and_then(|s| s.to_str()).map(str::to_owned));
                }
            }
        }
        names.into_iter().collect()
    }
}

fn listed(items: impl IntoIterator<Item = String>) -> String {
    let items: Vec<String> = items.into_iter().collect();
    items.join(", ")
}

/// Returns the text of a file, or `None` if there is no such file.
fn read(path: &Path) -> Result<Option<String>, ProfileError> {
    match laxity_files::read_to_string(path, FILE_BYTES_MAX) {
        Ok(text) => Ok(Some(text)),
        Err(ReadError::TooLong { .. }) => Err(ProfileError::TooLarge { path: path.to_owned() }),
        Err(error) if missing(&error) => Ok(None),
        Err(cause) => Err(ProfileError::Unreadable { path: path.to_owned(), cause }),
    }
}

fn missing(error: &ReadError) -> bool {
    matches!(error.io_kind(), Some(ErrorKind::NotFound | ErrorKind::NotADirectory))
}
