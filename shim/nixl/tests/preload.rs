//! The library in a program's process, with a minimal daemon and a stand-in for `libnixl.so`
//! (`standin/nixl.cc`), which has the mangled names of NIXL's C++ interface and logs each post.
//! `tests/tests/nixl.rs` uses released wheels of NIXL.

#[path = "../../client/tests/daemon/mod.rs"]
mod daemon;
#[path = "../../job/tests/preloaded/mod.rs"]
mod preloaded;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::time::Duration;

use daemon::{TestDaemon, completed, eventually, submitted};
use laxity_client::{Direction, Stage};
use preloaded::{Done, Job, a_process_does_not_notice, exported, output};

const SIZE: u64 = 40_000;
const BYTES: u64 = 8 * SIZE;
const LIBRARY: &str = "liblaxity_nixl.so";

/// Returns the folder with the stand-in and the programs. The processes of all tests share it, and
/// the first builds it. Its folder `larger` has those of a release with unknown descriptors.
fn built() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nixl-standin");
        fs::create_dir_all(folder.join("larger")).expect("a folder");
        let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/standin");
        let script = format!(
            "set -e
             build() {{
                 c++ -std=c++20 -O1 -Wall -Wextra -Werror $1 -shared -fPIC -o $2/libnixl.so \
                     {sources}/nixl.cc
                 c++ -std=c++20 -O1 -Wall -Wextra -Werror $1 $3 -o $2/$4 {sources}/mover.cc \
                     -L$2 -lnixl -ldl -Wl,-rpath,$PWD/$2
             }}
             build '' . '-shared -fPIC' mover.so
             build '' . -DMAIN mover
             build -DLARGER larger -DMAIN mover
             cc -O1 -Wall -Wextra -Werror -o loader {sources}/loader.c -ldl"
        );
        let names = ["nixl.cc", "mover.cc", "nixl_facts.h", "loader.c"];
        let read = |name| fs::read_to_string(Path::new(sources).join(name)).expect("a source");
        let wanted = script.clone() + &names.map(read).concat();
        let lock = fs::File::create(folder.join("lock")).expect("a file");
        lock.lock().expect("a lock");
        if fs::read_to_string(folder.join("built")).ok().as_ref() != Some(&wanted) {
            output(Command::new("sh").args(["-c", &script]).current_dir(&folder));
            fs::write(folder.join("built"), wanted).expect("a file");
        }
        folder
    })
}

/// Returns a program that moves bytes, with the library.
fn job_of(program: &str, way: &str) -> Job {
    let mut command = Command::new(built().join(program));
    command.arg(way).arg(built().join("mover.so"));
    Job::of(command).preloaded(LIBRARY)
}

fn job(way: &str) -> Job {
    job_of("mover", way)
}

/// Waits for the end of a program, which must exit with 0 and report success.
fn end(job: Job, child: Child) -> Done {
    let what = format!("{:?}", job.command);
    let done = job.end(child);
    assert!(!done.log.contains("two threads"), "{what}: {}", done.log);
    assert_eq!(done.lines.last().map(String::as_str), Some("over 0"), "{what}");
    done
}

fn run(mut job: Job) -> Done {
    let child = job.start();
    end(job, child)
}

/// Runs a program under a daemon that holds its flows, and permits them later. Nothing may reach
/// NIXL before that.
fn held(job: Job, daemon: &TestDaemon, flows: u64) -> Done {
    daemon.set(&daemon.knobs.hold, true);
    let mut job = job.under(&daemon.socket);
    let child = job.start();
    eventually("it asks for permits", || submitted(daemon) >= flows);
    std::thread::sleep(Duration::from_millis(40));
    assert_eq!(job.log(), "", "nothing is posted without a permit");
    daemon.set(&daemon.knobs.hold, false);
    end(job, child)
}

/// Returns the numbers that a program printed for `what`.
fn said(done: &Done, what: &str) -> Vec<i64> {
    let number = |line: &String| line.strip_prefix(what)?.trim().parse().ok();
    done.lines.iter().filter_map(number).collect()
}

#[test]
fn only_nixls_methods_and_the_exemption_leave_the_library() {
    let exported = exported(LIBRARY);
    assert_eq!(exported.len(), 37, "{exported:?}");
    let others: Vec<_> = exported
        .iter()
        .filter(|name| !name.trim_start_matches("_ZNK").contains("9nixlAgent"))
        .collect();
    assert_eq!(others, ["laxity_nixl_exempt"]);
}

#[test]
fn a_process_without_nixl_does_not_notice_it() {
    a_process_does_not_notice(LIBRARY);
}

#[test]
fn without_a_daemon_nixl_gets_every_post_at_once_and_one_warning_says_so() {
    for way in ["order", "prepared", "poll", "arguments", "late", "silent", "notified"] {
        let mut alone = job(way);
        alone.command.env_remove("LD_PRELOAD");
        let alone = run(alone);
        let without = run(job(way));
        assert_eq!((&without.log, &without.lines), (&alone.log, &alone.lines), "{way}");
        assert_eq!(without.errors.lines().count(), 1, "{way}: {}", without.errors);
        assert!(without.errors.contains("nowhere.sock"), "{}", without.errors);
        assert_eq!((without.count("deferred"), without.count("scheduled_bytes")), (0, 0), "{way}");
        let mut off = job(way);
        off.command.env("LAXITY_NIXL", "off");
        let off = run(off);
        assert_eq!((off.log, off.errors.as_str()), (alone.log, ""), "{way}");
    }
}

#[test]
fn a_post_waits_for_its_permit_and_the_daemon_knows_of_its_bytes() {
    for program in ["mover", "loader"] {
        let daemon = TestDaemon::start();
        *daemon.knobs.flows.lock().expect("flows") = Some(Vec::new());
        let done = held(job_of(program, "poll"), &daemon, BYTES);
        assert_eq!(done.log, "post 1\ndestroy 0\n", "{program}");
        assert_eq!((said(&done, "post"), said(&done, "wait")), (vec![1], vec![0, 0]), "{program}");
        assert_eq!(said(&done, "arrived"), [1], "{program}");
        eventually("all is complete", || completed(&daemon) == BYTES);
        assert_eq!((done.count("deferred"), done.count("scheduled_bytes")), (1, BYTES));
        assert!(done.errors.is_empty(), "{program}: {}", done.errors);
        let flows = daemon.knobs.flows.lock().expect("flows").take().expect("kept");
        let [flow] = flows[..] else { panic!("one flow: {flows:?}") };
        assert_eq!((flow.bytes, flow.whole), (BYTES, true));
        assert_eq!((flow.stage, flow.direction), (Stage::P2d, Direction::Egress));
    }
}

#[test]
fn posts_keep_their_order_and_a_second_one_is_refused_as_by_nixl() {
    let daemon = TestDaemon::start();
    let done = held(job("order"), &daemon, 6 * SIZE);
    assert_eq!(said(&done, "post"), [1, 1, 1]);
    assert_eq!((said(&done, "again"), said(&done, "telemetry")), (vec![-7], vec![-1]));
    assert_eq!((said(&done, "wait"), said(&done, "repost")), (vec![0; 4], vec![1]));
    assert_eq!(said(&done, "arrived"), [1]);
    let releases = "release 1\nrelease 2\nrelease 3\ndestroy 0\n";
    assert_eq!(done.log, format!("post 1\npost 2\npost 3\npost 2\n{releases}"));
    eventually("all is complete", || completed(&daemon) == 8 * SIZE);
    assert_eq!(submitted(&daemon), 8 * SIZE, "a repost is a flow of its own");
    assert!(done.count("deferred") >= 3, "{}", done.report);
}

#[test]
fn chosen_blocks_of_prepared_lists_are_flows_of_their_bytes() {
    let daemon = TestDaemon::start();
    *daemon.knobs.flows.lock().expect("flows") = Some(Vec::new());
    let done = run(job("prepared").under(&daemon.socket));
    assert_eq!((said(&done, "wait"), said(&done, "arrived")), (vec![0; 3], vec![1]));
    let flows = daemon.knobs.flows.lock().expect("flows").take().expect("kept");
    let bytes: Vec<_> = flows.iter().map(|flow| flow.bytes).collect();
    assert_eq!(bytes, [3 * SIZE, 3 * SIZE, 2 * SIZE]);
    assert!(flows.iter().all(|flow| flow.direction == Direction::Ingress), "{flows:?}");
    assert!(flows.iter().all(|flow| flow.stage == Stage::KvReuse), "{flows:?}");
    eventually("all is complete", || completed(&daemon) == 8 * SIZE);
}

#[test]
fn a_deferred_post_is_dropped_with_its_request_or_its_agent() {
    for (way, log) in [("release", "release 1\ndestroy 0\n"), ("destroy", "destroy 0\n")] {
        let daemon = TestDaemon::holding();
        let done = run(job(way).under(&daemon.socket));
        assert_eq!((done.log.as_str(), said(&done, "arrived")), (log, vec![0]), "{way}");
        assert_eq!(done.count("dropped"), 1, "{way}");
        assert_eq!(said(&done, "release"), vec![0; usize::from(way == "release")]);
    }
}

#[test]
fn a_late_refusal_is_the_status_until_the_next_post() {
    let daemon = TestDaemon::start();
    let done = held(job("late"), &daemon, BYTES);
    assert_eq!((said(&done, "post"), said(&done, "wait")), (vec![1], vec![-4, -4]));
    // The repost returns NIXL's error itself, if the daemon answers within the time that a post
    // waits for it. On a busy machine it may not, and then the repost fails late, too.
    assert_eq!(said(&done, "repost"), [-4]);
    assert!((1..=2).contains(&done.count("failed_late")));
    assert_eq!(done.count("failed_late"), done.count("deferred"));
    assert_eq!(done.log, "post 1\npost 1\ndestroy 0\n");
}

#[test]
fn a_program_that_never_asks_for_the_state_does_not_wait_for_ever() {
    for way in ["silent", "notified"] {
        let daemon = TestDaemon::start();
        let done = held(job(way), &daemon, BYTES);
        assert_eq!((said(&done, "arrived"), done.log.as_str()), (vec![1], "post 1\ndestroy 0\n"));
        eventually("its end is known", || completed(&daemon) == BYTES);
        assert_eq!(done.count("deferred"), 1, "{way}");
    }
}

#[test]
fn the_thread_stays_out_of_an_agent_that_a_call_is_in() {
    for way in ["busy", "checking"] {
        let daemon = TestDaemon::start();
        let done = held(job(way), &daemon, BYTES);
        // `end` looks for two threads in the log.
        assert_eq!((said(&done, "arrived"), done.log.as_str()), (vec![1], "post 1\ndestroy 0\n"));
    }
}

#[test]
fn a_post_with_arguments_waits_in_the_call_for_a_moment_only() {
    let daemon = TestDaemon::holding();
    let done = run(job("arguments").under(&daemon.socket));
    assert_eq!(done.log, "post with arguments 1\ndestroy 0\n");
    assert_eq!((done.count("deferred"), done.count("expired")), (0, 1));
    daemon.set(&daemon.knobs.hold, false);
    let done = run(job("arguments").under(&daemon.socket));
    assert_eq!((done.count("expired"), done.count("scheduled_bytes")), (0, BYTES));
}

#[test]
fn a_daemon_that_dies_lets_go_of_what_waits() {
    let daemon = TestDaemon::holding();
    let mut job = job("poll").under(&daemon.socket);
    let child = job.start();
    eventually("it asks for permits", || submitted(&daemon) == BYTES);
    daemon.kill();
    let done = end(job, child);
    assert_eq!((said(&done, "wait"), said(&done, "arrived")), (vec![0, 0], vec![1]));
}

#[test]
fn a_request_whose_owner_asks_for_permits_itself_is_not_asked_for_again() {
    let daemon = TestDaemon::holding();
    let done = run(job("exempt").under(&daemon.socket));
    assert_eq!((said(&done, "wait"), done.log.as_str()), (vec![0, 0], "post 1\ndestroy 0\n"));
    assert_eq!((submitted(&daemon), done.count("exempt"), done.count("posts")), (0, 1, 1));
}

#[test]
fn transfers_to_files_wait_for_no_permit_however_they_are_created() {
    let daemon = TestDaemon::holding();
    let done = run(job("storage").under(&daemon.socket));
    assert_eq!((said(&done, "wait"), said(&done, "arrived")), (vec![0, 0], vec![1]));
    assert_eq!((submitted(&daemon), done.count("unknown"), done.count("posts")), (0, 0, 2));
}

#[test]
fn a_release_that_describes_transfers_otherwise_goes_unscheduled_and_one_line_says_so() {
    let daemon = TestDaemon::holding();
    for way in ["poll", "order", "prepared"] {
        let done = run(job_of("larger/mover", way).under(&daemon.socket));
        assert_eq!(said(&done, "arrived"), [1], "{way}");
        assert_eq!((submitted(&daemon), done.errors.lines().count()), (0, 1), "{}", done.errors);
        assert!(done.errors.contains("are not known"), "{}", done.errors);
        assert!(done.count("unknown") > 0, "{way}");
    }
}
