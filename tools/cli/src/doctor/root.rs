//! Read access to `/sys`, `/proc` and `/etc`, below a folder that tests can make up.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Most that is read of one file. The largest, `/proc/PID/maps` of a serving engine, is about 2
/// MiB.
const FILE_BYTES_MAX: u64 = 32 << 20;

/// The folder that stands for `/`.
#[derive(Clone, Debug)]
pub(crate) struct Root(PathBuf);

impl Root {
    pub(crate) fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    /// The file's text without the white space around it; `None` if it can't be read.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        let bytes = self.bytes(path)?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    pub(crate) fn bytes(&self, path: &str) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        let file = laxity_files::open(&self.at(path)).ok()?;
        file.take(FILE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }

    /// Names in a folder, in order; none if there is no such folder.
    pub(crate) fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.at(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort_by_key(|name| (name.parse::<u64>().ok(), name.clone()));
        names
    }

    /// Where a link points, or `None`.
    pub(crate) fn link(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.at(path)).ok()?;
        Some(target.to_string_lossy().into_owned())
    }

    /// Whether the folder can be read at all.
    pub(crate) fn has(&self, path: &str) -> bool {
        self.at(path).exists()
    }

    /// The folder itself, to tell a made-up tree from the real one.
    pub(crate) fn is_real(&self) -> bool {
        self.0 == Path::new("/")
    }
}
