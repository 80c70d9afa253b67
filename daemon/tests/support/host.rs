//! A host whose RDMA devices are files, which a test plugs in and out while a daemon runs.

use std::fs;
use std::process::Command;

use laxity_tests::{Need, skip};

use super::{EXEC, Laxityd};

/// A folder that the daemon sees as `/sys`.
pub(crate) struct FakeHost {
    sys: tempfile::TempDir,
}

impl FakeHost {
    /// Makes a host without devices. Returns `None`, and skips the test, if nothing can be mounted.
    #[track_caller]
    pub(crate) fn new() -> Option<Self> {
        let sys = tempfile::tempdir().unwrap();
        let host = Self { sys };
        let probe = Command::new("unshare").args(["-m", "sh", "-c", &host.mount()]).status();
        if !probe.is_ok_and(|status| status.success()) {
            skip(Need::Machine, "only root can mount other devices for the daemon");
            return None;
        }
        Some(host)
    }

    fn mount(&self) -> String {
        format!("mount --bind {} /sys", self.sys.path().display())
    }

    /// Starts a daemon that sees this host's devices.
    pub(crate) fn start(&self, lines: &str) -> Laxityd {
        let script = format!("{} && {EXEC}", self.mount());
        Laxityd::start_by(lines, &["unshare", "-m", "sh", "-c", &script])
    }

    /// Adds a device with an active port.
    pub(crate) fn plug(&self, device: &str, gbit: u32) {
        let made = self.sys.path().join(device).join("ports/1");
        fs::create_dir_all(&made).unwrap();
        fs::write(made.join("state"), "4: ACTIVE\n").unwrap();
        fs::write(made.join("rate"), format!("{gbit} Gb/sec (4X)\n")).unwrap();
        let class = self.sys.path().join("class/infiniband");
        fs::create_dir_all(&class).unwrap();
        // The daemon sees the whole device at once.
        fs::rename(self.sys.path().join(device), class.join(device)).unwrap();
    }

    pub(crate) fn unplug(&self, device: &str) {
        let class = self.sys.path().join("class/infiniband");
        fs::rename(class.join(device), self.sys.path().join(device)).unwrap();
        fs::remove_dir_all(self.sys.path().join(device)).unwrap();
    }
}
