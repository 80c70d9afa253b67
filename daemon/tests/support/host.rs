//! A host whose RDMA devices are files, which a test plugs in and out while a daemon runs.

use std::fs;
use std::process::Command;

use laxity_tests::{Need, skip};
use nix::mount::MsFlags;

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

    /// Adds a virtual function that shares the port of `owner`, with an address.
    pub(crate) fn plug_function(&self, device: &str, owner: &str, gbit: u32, gid: &str) {
        let made = self.sys.path().join(device);
        fs::create_dir_all(made.join("device/physfn/infiniband").join(owner)).unwrap();
        fs::create_dir_all(made.join("ports/1/gids")).unwrap();
        fs::write(made.join("ports/1/gids/0"), gid).unwrap();
        self.plug(device, gbit);
    }

    /// Lets this thread see the host's devices, as the daemon does. Children that it forks see
    /// them, too.
    pub(crate) fn enter(&self) {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
        let none = None::<&str>;
        nix::mount::mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        let sys = self.sys.path();
        nix::mount::mount(Some(sys), "/sys", none, MsFlags::MS_BIND, none).unwrap();
    }

    pub(crate) fn unplug(&self, device: &str) {
        let class = self.sys.path().join("class/infiniband");
        fs::rename(class.join(device), self.sys.path().join(device)).unwrap();
        fs::remove_dir_all(self.sys.path().join(device)).unwrap();
    }
}
