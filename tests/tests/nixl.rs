//! Released wheels of NIXL under `liblaxity_nixl.so` and a real daemon: programs in Python and C
//! (`shim/nixl/tests/wheel`) move bytes between two agents over UCX's TCP transport. The tests of
//! `shim/nixl` use a stand-in for NIXL. Skipped if PyPI or UCX's TCP can't be used.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use laxity_tests::{Need, skip};

use crate::process::{Daemon, Said, binary, eventually, pip_install, wait_bounded};
use crate::sources::root;

/// The oldest and the newest release with which this was tested.
const RELEASES: [&str; 2] = ["nixl-cu12==1.0.0", "nixl-cu12==1.5.1"];

/// Bytes that each program moves, and its posts.
const PYTHON: (u64, u64) = (8 << 20, 9);
const C: (u64, u64) = (5 << 20, 6);

fn sources() -> PathBuf {
    root().join("shim/nixl/tests/wheel")
}

struct Mover<'a> {
    folder: &'a Path,
    package: &'a Path,
}

impl Mover<'_> {
    fn python(&self) -> Command {
        let mut command = Command::new("python3");
        command.arg(sources().join("mover.py"));
        command
    }

    fn c(&self) -> Command {
        let program = self.folder.join("mover");
        if !program.exists() {
            let mut cc = Command::new("cc");
            cc.args(["-O1", "-o"]).arg(&program).arg(sources().join("mover.c")).arg("-ldl");
            Said::of(&mut cc).good();
        }
        let mut command = Command::new(program);
        command.arg(self.package.join(".nixl_cu12.mesonpy.libs/libnixl_capi.so"));
        command
    }

    fn run(&self, mut command: Command) -> (ExitStatus, String) {
        command
            .env("PYTHONPATH", self.package)
            .env("UCX_TLS", "tcp,self")
            .env("LAXITY_SOCKET", self.folder.join("laxityd.sock"))
            .env("LAXITY_REPORT", self.folder.join("report"))
            .env("LAXITY_ATTACH_MS", "20000")
            .env("LAXITY_STALL_MS", "60000")
            .stdout(Stdio::piped());
        wait_bounded(command.spawn().expect("the program starts"))
    }

    fn preloaded(&self, mut command: Command) -> (ExitStatus, String) {
        command.env("LD_PRELOAD", binary("liblaxity_nixl.so"));
        let _ = std::fs::remove_file(self.folder.join("report"));
        self.run(command)
    }

    fn counted(&self, name: &str) -> u64 {
        let report = std::fs::read_to_string(self.folder.join("report")).expect("a report");
        let line = report.lines().find(|line| line.contains("liblaxity_nixl")).expect("a line");
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        line[name].as_u64().expect("a number")
    }
}

#[test]
fn released_wheels_move_every_byte_by_the_daemons_permit_in_python_and_in_c() {
    for release in RELEASES {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        let package = folder.join("package");
        if let Err(reason) = pip_install(&[release, "numpy"], &package) {
            return skip(Need::Machine, format!("{release}: {reason}"));
        }
        let mover = Mover { folder, package: &package };
        // The wheels' libnl crashes when a process ends, with Laxity and without it. So what the
        // program printed decides, and its status is that of a process without Laxity.
        let alone = [mover.run(mover.python()), mover.run(mover.c())];
        if alone.iter().any(|(_, said)| !said.ends_with("destroyed\n")) {
            return skip(Need::Machine, format!("{release} does not work here: {alone:?}"));
        }

        // So low a rate that some posts have to wait.
        let slow = "[[nic]]\nname = \"default\"\nrate = \"20Mbit\"\nchunk = \"256KiB\"\n";
        let daemon = Daemon::start(folder, slow);
        let (mut bytes, mut flows, mut deferred) = (0, 0, 0);
        for (alone, (moves, posts)) in alone.into_iter().zip([PYTHON, C]) {
            let is_python = (moves, posts) == PYTHON;
            let with = mover.preloaded(if is_python { mover.python() } else { mover.c() });
            assert_eq!(with, alone, "{release}");
            assert_eq!(mover.counted("bytes"), moves, "{release}");
            for never in ["unknown", "failed_late", "exempt"] {
                assert_eq!(mover.counted(never), 0, "{release}: {never}");
            }
            // On a busy machine, the one post with arguments may not have its permit in time.
            assert!(mover.counted("passed") <= 1, "{release}");
            deferred += mover.counted("deferred");
            bytes += moves;
            flows += posts;
            eventually("the daemon knows of all", || {
                let totals = daemon.status().totals;
                totals.submitted_bytes == bytes && totals.attached_clients == 0
            });
            assert_eq!(daemon.status().totals.flows, flows, "{release}");
        }
        assert!(deferred > 0, "{release}: some posts wait");
    }
}
