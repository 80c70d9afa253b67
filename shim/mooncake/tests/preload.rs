//! The library in a program's process, with a minimal daemon and a stand-in for Mooncake
//! (`standin/transfer_engine.c`). The stand-in moves bytes over TCP between two processes and logs
//! each call. Mooncake itself isn't used, because its releases for Python have no C library.

#[path = "../../client/tests/daemon/mod.rs"]
mod daemon;
mod peer;
#[path = "../../job/tests/preloaded/mod.rs"]
mod preloaded;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use daemon::{TestDaemon, completed, eventually, submitted};
use laxity_client::{Direction, Stage};
use peer::Peer;
use preloaded::{Done, Job, a_process_does_not_notice, exported, library, output};

const COUNT: usize = 8;
const LENGTH: usize = 40_000;
const BYTES: u64 = (COUNT * LENGTH) as u64;

const LIBRARY: &str = "liblaxity_mooncake.so";

/// Returns the folder with the stand-in and the programs, which are built once.
fn built() -> &'static Path {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    FOLDER
        .get_or_init(|| {
            let folder = tempfile::tempdir().expect("a folder");
            let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/standin");
            let script = format!(
                "cc -O1 -Wall -Wextra -Werror -shared -fPIC -o libtransfer_engine.so \
                 {sources}/transfer_engine.c -lpthread -ldl && \
                 cc -O1 -Wall -Wextra -Werror -o mover {sources}/mover.c -L. -ltransfer_engine \
                 -lpthread -ldl -Wl,-rpath,$PWD && \
                 cc -O1 -Wall -Wextra -Werror -DSAYS -rdynamic -o sayer {sources}/mover.c -L. \
                 -ltransfer_engine -lpthread -ldl \
                    -Wl,-rpath,$PWD"
            );
            output(Command::new("sh").args(["-c", &script]).current_dir(&folder));
            folder
        })
        .path()
}

/// Returns a program that moves bytes, without the library.
fn job_of(program: &str, way: &str, peer: &Peer, protocol: &str, count: usize) -> Job {
    let mut command = Command::new(built().join(program));
    command.args([way, &peer.port, protocol, &count.to_string(), &LENGTH.to_string()]);
    Job::of(command)
}

/// Returns a program that moves bytes under a daemon.
fn under(daemon: &TestDaemon, program: &str, way: &str, peer: &Peer, protocol: &str) -> Job {
    job_of(program, way, peer, protocol, COUNT).preloaded(LIBRARY).under(&daemon.socket)
}

fn checksum(done: &Done) -> &str {
    done.lines.last().expect("its checksum")
}

/// Returns the transfers that the stand-in took, in its order, as it logged them.
fn taken(done: &Done) -> Vec<String> {
    let mut taken = Vec::new();
    let mut is_taken = false;
    for line in done.log.lines() {
        match line.strip_prefix("submit ") {
            Some(call) => is_taken = call.contains("-> 0"),
            None if line.starts_with("  ") && is_taken => taken.push(line.to_owned()),
            None => {}
        }
    }
    taken
}

fn expected(opcode: u8) -> Vec<String> {
    let one = |i| format!("  {opcode} {0} 0 {0} {LENGTH}", i * LENGTH);
    (0..COUNT).map(one).collect()
}

#[test]
fn only_mooncakes_functions_leave_the_library() {
    let interposed = [
        "allocateBatchID", "createTransferEngine", "destroyTransferEngine", "freeBatchID",
        "getTransferStatus", "installTransport", "openSegment", "openSegmentNoCache",
        "registerLocalMemory", "registerLocalMemoryBatch", "submitTransfer",
        "submitTransferWithNotify", "tent_submit", "tent_submit_notif", "uninstallTransport",
        "unregisterLocalMemory", "unregisterLocalMemoryBatch",
    ];
    assert_eq!(exported(LIBRARY), interposed.map(str::to_owned).into());
}

#[test]
fn a_process_without_mooncake_does_not_notice_it() {
    a_process_does_not_notice(LIBRARY);
}

#[test]
fn without_a_daemon_mooncake_gets_every_call_as_the_program_made_it_and_one_warning_says_so() {
    for (way, opcode) in [("write", 1), ("read", 0), ("notify", 1), ("threads", 1), ("free", 1)] {
        let mut peer = Peer::start(built(), BYTES);
        let alone = job_of("mover", way, &peer, "tcp", COUNT).run();
        let without = job_of("mover", way, &peer, "tcp", COUNT).preloaded(LIBRARY).run();
        assert_eq!(without.log, alone.log, "{way}");
        assert_eq!(taken(&without), expected(opcode), "{way}");
        assert_eq!(checksum(&without), peer.checksum(), "{way}");
        let warnings = without.errors.lines().filter(|line| line.starts_with("laxity: "));
        assert_eq!(warnings.count(), 1, "{way}: {}", without.errors);
        assert!(without.errors.contains("nowhere.sock"), "{}", without.errors);
        // The program submits one more transfer of one byte, for which the batch has no room.
        assert_eq!(without.count("bytes"), BYTES + u64::from(way == "write"), "{way}");
        assert_eq!(without.count("bypassed_bytes"), BYTES, "{way}");
    }
}

#[test]
fn bytes_that_waited_for_leave_arrive_once_each_and_the_daemon_knows_of_all_of_them() {
    for (way, opcode) in [("write", 1), ("read", 0), ("threads", 1), ("notify", 1)] {
        let daemon = TestDaemon::holding();
        let mut peer = Peer::start(built(), BYTES);
        let mut job = under(&daemon, "mover", way, &peer, "tcp");
        let child = job.start();
        eventually("it asks for leave", || submitted(&daemon) > 0);
        // The program's calls return although nothing is permitted.
        std::thread::sleep(Duration::from_millis(30));
        assert!(!job.log().contains("submit"), "{way}: {}", job.log());
        daemon.set(&daemon.knobs.hold, false);
        let done = job.end(child);
        assert_eq!(taken(&done), expected(opcode), "{way}");
        assert_eq!(checksum(&done), peer.checksum(), "{way}");
        eventually("all is complete", || completed(&daemon) == BYTES);
        assert_eq!(submitted(&daemon), BYTES, "{way}: nothing is told twice");
        assert!(done.errors.is_empty(), "{way}: {}", done.errors);
        assert_eq!(done.count("deferred"), COUNT as u64, "{way}");
        assert_eq!(done.count("scheduled_bytes"), BYTES, "{way}");
        if way == "notify" {
            // The notification is copied, submitted in one call, and sent after all of the bytes.
            let call = format!("submit {COUNT} -> 0 request-17=arrived\n");
            assert!(done.log.contains(&call), "{}", done.log);
            assert!(done.log.contains("notified request-17=arrived after 8\n"), "{}", done.log);
        }
    }
}

#[test]
fn a_daemon_that_dies_lets_go_of_what_waits() {
    let daemon = TestDaemon::holding();
    let mut peer = Peer::start(built(), BYTES);
    let mut job = under(&daemon, "mover", "write", &peer, "tcp");
    let child = job.start();
    eventually("it asks for leave", || submitted(&daemon) > 0);
    daemon.kill();
    let done = job.end(child);
    assert_eq!(taken(&done), expected(1));
    assert_eq!(checksum(&done), peer.checksum());
    assert_eq!(done.count("scheduled_bytes") + done.count("bypassed_bytes"), BYTES);
}

#[test]
fn a_batch_that_waits_is_busy_and_what_waited_is_handed_on() {
    let daemon = TestDaemon::holding();
    let mut peer = Peer::start(built(), BYTES);
    let done = under(&daemon, "mover", "free", &peer, "tcp").run();
    assert!(done.lines.contains(&String::from("busy 4")), "{:?}", done.lines);
    assert_eq!(taken(&done), expected(1));
    assert_eq!(checksum(&done), peer.checksum());
}

#[test]
fn an_engine_that_goes_takes_nothing_along_that_was_submitted() {
    let daemon = TestDaemon::holding();
    let peer = Peer::start(built(), BYTES);
    let done = under(&daemon, "mover", "unplug", &peer, "tcp").run();
    assert_eq!(taken(&done), expected(1));
    assert!(done.log.ends_with("destroy\n"), "{}", done.log);
}

#[test]
fn what_mooncake_refuses_late_fails_when_it_is_asked_after() {
    let daemon = TestDaemon::holding();
    let peer = Peer::start(built(), BYTES);
    let mut job = under(&daemon, "mover", "refused", &peer, "tcp");
    let child = job.start();
    eventually("it asks for leave", || submitted(&daemon) > 0);
    std::thread::sleep(Duration::from_millis(30));
    daemon.set(&daemon.knobs.hold, false);
    let done = job.end(child);
    assert_eq!(taken(&done), expected(1)[..COUNT / 2]);
    let is = |i, status| done.lines.contains(&format!("{i}: 0 {status}"));
    assert!((0..COUNT / 2).all(|i| is(i, 4)), "{:?}", done.lines);
    assert!((COUNT / 2..COUNT).all(|i| is(i, 6)), "{:?}", done.lines);
    assert!(done.errors.contains("refused a transfer (1)"), "{}", done.errors);
    // Where nothing waits, the call returns the error at once, as without the library.
    let without = job_of("mover", "refused", &peer, "tcp", COUNT).preloaded(LIBRARY).run();
    assert!(without.lines.contains(&String::from("refused 1")), "{:?}", without.lines);
}

#[test]
fn what_the_engine_says_of_the_memory_goes_with_the_flow() {
    let daemon = TestDaemon::start();
    *daemon.knobs.flows.lock().expect("flows") = Some(Vec::new());
    let mut peer = Peer::start(built(), BYTES);
    let done = under(&daemon, "sayer", "read", &peer, "tcp").run();
    assert_eq!(checksum(&done), peer.checksum());
    eventually("all is complete", || completed(&daemon) == BYTES);
    let flows = daemon.knobs.flows.lock().expect("flows").take().expect("kept");
    assert_eq!(flows.len(), 8, "a flow for each layer: {flows:?}");
    for (layer, flow) in flows.iter().enumerate() {
        let stage = if layer < 4 { Stage::KvReuse } else { Stage::Background };
        assert_eq!((usize::from(flow.layer), flow.stage), (layer, stage));
        assert_eq!((flow.request, flow.direction, flow.whole), (17, Direction::Ingress, true));
        assert_ne!(flow.peer, 0);
    }
}

#[test]
fn what_no_port_carries_passes_and_rdma_that_no_library_sees_waits_here() {
    for (protocol, hold, waits) in [("nvlink", true, 0), ("rdma", false, BYTES)] {
        let daemon = TestDaemon::start();
        daemon.set(&daemon.knobs.hold, hold);
        let mut peer = Peer::start(built(), BYTES);
        let done = under(&daemon, "mover", "write", &peer, protocol).run();
        assert_eq!(checksum(&done), peer.checksum(), "{protocol}");
        assert_eq!(submitted(&daemon), waits, "{protocol}");
    }
}

#[test]
fn batch_after_batch_nothing_grows() {
    let daemon = TestDaemon::start();
    let peer = Peer::start(built(), BYTES);
    let done =
        job_of("mover", "many", &peer, "tcp", 2).preloaded(LIBRARY).under(&daemon.socket).run();
    let grew = done.lines.iter().find_map(|line| line.strip_prefix("grew "));
    let grew: i64 = grew.expect("a line").parse().expect("a number");
    assert!(grew < 1 << 20, "{grew} bytes in 2500 batches");
    assert_eq!(taken(&done).len(), 6000);
    eventually("all is complete", || completed(&daemon) == 6000 * LENGTH as u64);
}

#[test]
fn tents_requests_get_a_priority_where_the_engine_says_the_stage() {
    let run = |program: &str, preload: bool| {
        let folder = tempfile::tempdir().expect("a folder");
        let log = folder.path().join("log");
        let mut command = Command::new(built().join(program));
        command.arg("tent").env("STANDIN_LOG", &log);
        if preload {
            command.env("LD_PRELOAD", library(LIBRARY));
        }
        output(&mut command);
        let log = fs::read_to_string(log).expect("a log");
        let priorities = log.lines().filter_map(|line| line.split("priority ").nth(1));
        (log.lines().count(), priorities.map(str::to_owned).collect::<Vec<_>>())
    };
    let as_given = ["0 hint 7", "0 hint 0", "1 hint 0", "0 hint 7", "0 hint 0"];
    let filled = ["0 hint 7", "2 hint 0", "1 hint 0", "0 hint 7", "2 hint 0"];
    assert_eq!(run("sayer", false).1, as_given);
    assert_eq!(run("mover", true).1, as_given);
    assert_eq!(run("sayer", true).1, filled);
}
