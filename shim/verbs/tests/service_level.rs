//! The service level of queue pairs that connect through InfiniBand, in a process under the library
//! with a minimal daemon and a stand-in for libibverbs (`standin/verbs.c`). The lab's devices are
//! all Ethernet.

#[path = "../../client/tests/daemon/mod.rs"]
mod daemon;
#[path = "../../job/tests/preloaded/mod.rs"]
mod preloaded;
#[path = "../../../nccl-plugin/tests/standin/mod.rs"]
mod standin;

use std::fs;
use std::path::Path;
use std::process::Command;

use daemon::TestDaemon;
use preloaded::{library, output, text};
use standin::built;

/// Returns what the stand-in was told for three changes: by InfiniBand, by Ethernet, and by
/// InfiniBand with the program's own level.
fn told(folder: &Path, daemon: &TestDaemon) -> String {
    for (port, layer) in [(1, "InfiniBand\n"), (2, "Ethernet\n")] {
        let port = folder.join(format!("standin0/ports/{port}"));
        fs::create_dir_all(&port).expect("a folder");
        fs::write(port.join("link_layer"), layer).expect("a file");
    }
    let seen = output(
        Command::new(folder.join("connector"))
            .env("LD_PRELOAD", library("liblaxity.so"))
            .env("LAXITY_SOCKET", &daemon.socket)
            .env("DEVICES", folder),
    );
    text(&seen.stdout)
}

#[test]
fn a_queue_pair_gets_the_service_level_of_its_stage_on_infiniband_unless_it_has_one() {
    let folder = tempfile::tempdir().expect("a folder");
    if !built(folder.path()) {
        return;
    }
    let daemon = TestDaemon::start();
    let none = "state 2 port 1 sl 0\nstate 2 port 2 sl 0\nstate 2 port 1 sl 5\n";
    assert_eq!(told(folder.path(), &daemon), none, "the operator named no service levels");
    // Queue pairs of the default profile carry prefill-to-decode transfers, the third stage.
    *daemon.knobs.service_levels.lock().expect("knob") = Some([1, 2, 3, 4, 6]);
    let named = "state 2 port 1 sl 3\nstate 2 port 2 sl 0\nstate 2 port 1 sl 5\n";
    assert_eq!(told(folder.path(), &daemon), named);
}
