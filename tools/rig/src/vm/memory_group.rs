//! A control group of the guest that leaves a process without memory.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::LabError;

pub(super) const GROUPS: &str = "/sys/fs/cgroup";
/// The process may have so much more memory until its group throttles it, and until the kernel
/// kills it.
const HIGH_BYTES: u64 = 64 << 10;
const MAX_BYTES: u64 = 1 << 20;

/// A control group that has no memory left for its process. Ends with the value.
#[derive(Debug)]
pub(crate) struct MemoryGroup {
    folder: PathBuf,
    process: u32,
}

impl MemoryGroup {
    /// Moves a process into such a group. What it has already stays with its former group.
    pub(crate) fn around(process: u32) -> Result<Self, LabError> {
        let folder = Path::new(GROUPS).join(format!("short-of-memory-{process}"));
        fs::create_dir_all(&folder).map_err(LabError::file("creating", &folder))?;
        let group = Self { folder, process };
        for (file, value) in [
            ("memory.high", HIGH_BYTES.to_string()),
            ("memory.max", MAX_BYTES.to_string()),
            ("cgroup.procs", process.to_string()),
        ] {
            let file = group.folder.join(file);
            fs::write(&file, value).map_err(LabError::file("writing", &file))?;
        }
        Ok(group)
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        for file in ["memory.high", "memory.max"] {
            let _ = fs::write(self.folder.join(file), "max");
        }
        // A group with a process can't be removed. The process may have ended.
        let _ = fs::write(Path::new(GROUPS).join("cgroup.procs"), self.process.to_string());
        let _ = fs::remove_dir(&self.folder);
    }
}
