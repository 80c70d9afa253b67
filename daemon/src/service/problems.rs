//! What is wrong with the daemon itself, for the first lines of `laxity status`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use tracing::warn;

use crate::sockets::beside;

/// A part of the daemon that may have a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DaemonPart {
    /// The previous daemon, which was killed.
    Before,
    Configuration,
    Metrics,
    Page,
}

/// The problems that last, each with what to do.
#[derive(Debug, Default)]
pub struct Problems(Mutex<BTreeMap<DaemonPart, String>>);

impl Problems {
    /// Sets the problem of a part, or says that it has none now.
    pub fn set(&self, part: DaemonPart, problem: Option<String>) {
        let mut problems = self.0.lock();
        match problem {
            Some(problem) => problems.insert(part, problem),
            None => problems.remove(&part),
        };
    }

    pub fn all(&self) -> Vec<String> {
        self.0.lock().values().cloned().collect()
    }
}

/// A file that exists while a daemon runs. If the next daemon finds it, this one was killed. The
/// file is beside the control socket, where no file survives a reboot.
#[derive(Debug)]
pub struct RunningMarker(PathBuf);

impl RunningMarker {
    /// Makes the file of a daemon with the control socket `control`. Sets a problem if the previous
    /// daemon left the file behind.
    pub fn make(control: &Path, problems: &Problems) -> Self {
        let (marker, was_there) = Self::make_file(control);
        problems.set(DaemonPart::Before, was_there.then(|| KILLED.to_owned()));
        marker
    }

    fn make_file(control: &Path) -> (Self, bool) {
        let marker = Self(beside(control, ".running"));
        // `create_new` does not follow a symbolic link.
        let was_there = match File::create_new(&marker.0) {
            Ok(_) => false,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => true,
            Err(error) => {
                warn!(file = %marker.0.display(), %error, "a crash of laxityd will not be noticed");
                false
            }
        };
        (marker, was_there)
    }

    /// Removes the file at the end of the daemon, unless its scheduler died.
    pub fn remove_unless(self, died: bool) {
        if !died {
            let _ = std::fs::remove_file(self.0);
        }
    }
}

/// What `laxity status` says of a daemon whose predecessor was killed.
const KILLED: &str = "the laxityd before this one crashed or was killed, and what it had counted \
    is lost; `journalctl -u laxityd` says why";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_lasts_until_it_is_gone_and_each_part_has_one() {
        let problems = Problems::default();
        problems.set(DaemonPart::Metrics, Some("taken".into()));
        problems.set(DaemonPart::Configuration, Some("broken".into()));
        problems.set(DaemonPart::Configuration, Some("still broken".into()));
        assert_eq!(problems.all(), ["still broken", "taken"]);
        problems.set(DaemonPart::Configuration, None);
        assert_eq!(problems.all(), ["taken"]);
    }

    #[test]
    fn the_marker_tells_a_daemon_that_ended_in_order_from_one_that_did_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let control = folder.path().join("control.sock");
        let (first, was_killed) = RunningMarker::make_file(&control);
        assert!(!was_killed);
        drop(first);
        let (second, was_killed) = RunningMarker::make_file(&control);
        assert!(was_killed);
        second.remove_unless(false);
        assert!(!RunningMarker::make_file(&control).1);
    }
}
