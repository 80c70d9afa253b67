//! The service level of the plugin's queue pairs on InfiniBand, with a minimal daemon and a
//! stand-in for libibverbs (`standin/verbs.c`). The lab's devices are all Ethernet.

#[path = "../../shim/client/tests/daemon/mod.rs"]
mod daemon;
#[path = "../../shim/job/tests/preloaded/mod.rs"]
mod preloaded;
mod standin;

use std::path::Path;
use std::process::Command;

use daemon::TestDaemon;
use laxity_shm::marking::{Marking, Treatments};
use preloaded::{library, output, text};
use standin::built;

/// Returns the service levels of both ends by InfiniBand, and by Ethernet.
fn told(folder: &Path, daemon: &TestDaemon, own: &[(&str, &str)]) -> Vec<String> {
    let seen = output(
        Command::new(folder.join("connector"))
            .arg(library("libnccl_net_laxity.so"))
            .env("LD_LIBRARY_PATH", folder)
            .env("LAXITY_SOCKET", &daemon.socket)
            .envs([("LAXITY_NET", "verbs"), ("NCCL_SOCKET_IFNAME", "lo")])
            .envs(own.iter().copied()),
    );
    text(&seen.stdout).lines().map(str::to_owned).collect()
}

#[test]
fn queue_pairs_of_both_ends_get_the_service_level_of_collectives_unless_nccl_has_one() {
    let folder = tempfile::tempdir().expect("a folder");
    if !built(folder.path()) {
        return;
    }
    let daemon = TestDaemon::start();
    // Without marking there is one queue pair at each end.
    *daemon.knobs.marking.lock().expect("knob") = Some((Marking::Off, Treatments::ALL_ALIKE));
    let told = |own: &[(&str, &str)]| told(folder.path(), &daemon, own);
    assert_eq!(told(&[]), ["00", "00"], "the operator named no service levels");
    *daemon.knobs.service_levels.lock().expect("knob") = Some([1, 2, 3, 4, 6]);
    assert_eq!(told(&[]), ["22", "00"], "Ethernet has none");
    assert_eq!(told(&[("NCCL_IB_SL", "5")]), ["55", "55"], "as NCCL has it");
    assert_eq!(told(&[("NCCL_IB_SL", "0")]), ["00", "00"]);
}
