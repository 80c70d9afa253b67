//! Tests of programs that use Mooncake's C interface, with both preload libraries and the real
//! `laxityd`. Some use Mooncake's own engine of release 0.3.13 behind `real_engine.cc`. They are
//! skipped if PyPI can't be reached. Others need transports that are missing here, and use the
//! stand-in of `shim/mooncake/tests`.

#[path = "../../shim/mooncake/tests/peer/mod.rs"]
mod peer;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use laxity_tests::{Need, skip};
use laxity_wire::Status;
use peer::Peer;

use crate::process::{Daemon, binary, eventually, pip_install, shell, wait_bounded};

const RELEASE: &str = "mooncake-transfer-engine-non-cuda==0.3.13";
const COUNT: u64 = 16;
const LENGTH: u64 = 200_000;
const BYTES: u64 = COUNT * LENGTH;

fn sources() -> &'static str {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../shim/mooncake/tests/standin")
}

fn standin(folder: &Path) {
    let sources = sources();
    let script = format!(
        "cc -O1 -shared -fPIC -o libtransfer_engine.so {sources}/transfer_engine.c -lpthread
         cc -O1 -o mover {sources}/mover.c -L. -ltransfer_engine -lpthread -ldl -Wl,-rpath,$PWD"
    );
    shell(&script, folder).expect("the stand-in builds");
}

/// Builds `mover` with Mooncake's own engine. Returns the reason if that fails.
fn real(folder: &Path) -> Result<(), String> {
    let package = folder.join("package");
    pip_install(&[RELEASE], &package)?;
    let package = package.display();
    // The extension refers to the interpreter's library.
    let asked =
        "import sysconfig as s; print(s.get_config_var('LIBDIR'), s.get_config_var('LDLIBRARY'))";
    let answer = shell(&format!("python3 -c \"{asked}\""), folder)?;
    let (libraries, name) = answer.trim().split_once(' ').ok_or("no libpython is known")?;
    let python = PathBuf::from(libraries).join(name);
    if !name.contains(".so") || !python.is_file() {
        return Err(format!("python3 has no shared library ({})", python.display()));
    }
    let (sources, python) = (sources(), python.display());
    shell(
        &format!(
            "ldd {package}/mooncake/engine.so | grep 'not found' && exit 1
             c++ -std=c++17 -O1 -shared -fPIC -o libtransfer_engine.so {sources}/real_engine.cc \
             -Wl,--no-as-needed \
                {package}/mooncake/engine.so {python} -Wl,-rpath,{package}/mooncake:{libraries}
             cc -O1 -DWITHOUT_TENT -o mover {sources}/mover.c -L. -ltransfer_engine -lpthread -ldl \
             -Wl,-rpath,$PWD \
                -Wl,--allow-shlib-undefined"
        ),
        folder,
    )?;
    Ok(())
}

/// Starts a program that moves bytes to or from the peer, with these libraries preloaded.
fn start(folder: &Path, peer: &Peer, way: &str, protocol: &str, preload: &[&str]) -> Child {
    let preload: Vec<String> =
        preload.iter().map(|library| binary(library).display().to_string()).collect();
    let mut command = Command::new(folder.join("mover"));
    command
        .args([way, &peer.port, protocol, &COUNT.to_string(), &LENGTH.to_string()])
        .env("LD_PRELOAD", preload.join(":"))
        .env("LAXITY_SOCKET", folder.join("laxityd.sock"))
        .env("LAXITY_ATTACH_MS", "20000")
        .env("LAXITY_STALL_MS", "60000")
        .env("STANDIN_LOG", folder.join("log"))
        .stdout(Stdio::piped());
    // Mooncake counts from the address of the peer's memory, and the stand-in from its first byte.
    if folder.join("package").exists() {
        command.env("MOVER_BASE", &peer.base);
    }
    command.spawn().expect("the program starts")
}

const BOTH: [&str; 2] = ["liblaxity.so", "liblaxity_mooncake.so"];

fn end(child: Child) -> Vec<String> {
    let (status, said) = wait_bounded(child);
    assert!(status.success(), "{status}: {said}");
    said.lines().map(str::to_owned).collect()
}

fn last(lines: &[String]) -> &str {
    lines.last().expect("its checksum")
}

/// Waits until `bytes` are completed and no client is attached. Returns the daemon's status.
fn all_is_complete(daemon: &Daemon, bytes: u64) -> Status {
    eventually("the daemon knows that all is complete", || {
        let totals = daemon.status().totals;
        totals.completed_bytes == bytes && totals.attached_clients == 0
    });
    daemon.status()
}

#[test]
fn mooncakes_own_engine_moves_every_byte_once_by_the_daemons_permit_and_without_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    if let Err(reason) = real(folder) {
        return skip(Need::Machine, reason);
    }
    let mut peer = Peer::start(folder, BYTES);
    let without = end(start(folder, &peer, "write", "tcp", &BOTH));
    assert_eq!(last(&without), peer.checksum(), "without a daemon");

    // The rate is so low that some bytes have to wait. shim/mooncake tests the death of a daemon.
    let slow = "[[nic]]\nname = \"default\"\nrate = \"20Mbit\"\nchunk = \"256KiB\"\n";
    let daemon = Daemon::start(folder, slow);
    let mut moved = 0;
    for way in ["write", "read", "threads"] {
        let lines = end(start(folder, &peer, way, "tcp", &BOTH));
        assert_eq!(last(&lines), peer.checksum(), "{way}");
        moved += BYTES;
        // `write` tries one byte too many, which is refused.
        let status = all_is_complete(&daemon, moved);
        assert_eq!(status.totals.permitted_bytes, moved, "{way}");
    }
}

#[test]
fn a_scope_that_the_program_opens_goes_with_what_it_submits() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    standin(folder);
    let daemon = Daemon::start(folder, "");
    let mut peer = Peer::start(folder, BYTES);
    let lines = end(start(folder, &peer, "own", "tcp", &BOTH));
    assert!(lines.contains(&peer.checksum()), "{lines:?}");
    let status = all_is_complete(&daemon, BYTES);
    let stages = status.ports.iter().flat_map(|port| &port.stages);
    let background = stages.filter(|stage| stage.stage == "background");
    assert_eq!(background.map(|stage| stage.completed_bytes).sum::<u64>(), BYTES);
}

#[test]
fn rdma_under_the_verbs_library_is_only_said_whose_it_is() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    standin(folder);
    let daemon = Daemon::start(folder, "");
    let mut peer = Peer::start(folder, BYTES);
    let lines = end(start(folder, &peer, "own", "rdma", &BOTH));
    assert!(lines.contains(&String::from("owner 23")), "{lines:?}");
    assert_eq!(last(&lines), "after 0", "memory that is unregistered is nobody's");
    assert!(lines.contains(&peer.checksum()), "{lines:?}");
    // RDMA work requests would be flows, but the stand-in posts none.
    assert_eq!(daemon.status().totals.flows, 0);
}
