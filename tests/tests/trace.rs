//! `laxity trace` as an operator types it, while a real process sends under a real daemon.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::process::{Daemon, binary, eventually, wait_bounded};
use crate::sender::{self, Sink};

fn laxity(arguments: &[&str]) -> Output {
    Command::new(binary("laxity"))
        .args(arguments)
        .output()
        .expect("laxity runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_trace_shows_each_flow_of_a_sender_and_why_it_waited() {
    let folder = tempfile::tempdir().expect("a folder");
    // So slow that most of what the sender submits at once has to wait.
    let daemon = Daemon::start(
        folder.path(),
        "[[nic]]\nname = \"eth7\"\nrate = \"80Mbit\"\nchunk = \"64KiB\"\n",
    );
    let control = daemon.control().display().to_string();
    let out = folder.path().join("trace.json");
    let out = out.to_str().expect("UTF-8");
    let arguments = ["trace", "--control", &control, "--for", "60s", "--out", out];

    let nobody = laxity(&[
        "trace",
        "--control",
        &control,
        "--for",
        "200ms",
        "--out",
        out,
    ]);
    assert!(!nobody.status.success());
    assert!(text(&nobody.stderr).contains("saw nothing"), "{nobody:?}");

    // The command that is traced waits for a file, which is there when the sender has ended.
    let done = folder.path().join("done");
    let wait = format!("while [ ! -e {} ]; do sleep 0.05; done", done.display());
    let tracer = Command::new(binary("laxity"))
        .args(arguments)
        .args(["--", "sh", "-c", &wait])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("laxity runs");
    crate::process::eventually("the trace has begun", || {
        // After that of nobody's.
        daemon.log_text().matches("a trace begins").count() > 1
    });
    let again = laxity(&arguments);
    assert!(text(&again.stderr).contains("under way"), "{again:?}");

    let path = folder.path().join("sink");
    let sink = Sink::listen(&path);
    let summary = sender::finish(sender::start("complete", &daemon.socket(), &path));
    assert_eq!(summary.scheduled_bytes, sender::TOTAL_BYTES);
    assert_eq!(sink.bytes(), sender::TOTAL_BYTES);
    std::fs::write(&done, "").expect("written");
    let tracer = tracer.wait_with_output().expect("it ends");
    assert!(tracer.status.success(), "{tracer:?}");

    let json = std::fs::read_to_string(out).expect("a trace");
    let picture: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let events = picture["traceEvents"].as_array().expect("events");
    let with = |key: &str, value: &str| -> Vec<&serde_json::Value> {
        events.iter().filter(|event| event[key] == value).collect()
    };
    let flows = with("cat", "flow");
    assert_eq!(flows.len() as u64, sender::FLOWS);
    let bytes: u64 = flows
        .iter()
        .map(|flow| flow["args"]["bytes"].as_u64().expect("bytes"))
        .sum();
    assert_eq!(bytes, sender::TOTAL_BYTES);
    let permitted: u64 = with("cat", "permit")
        .iter()
        .map(|permit| permit["args"]["bytes"].as_u64().expect("bytes"))
        .sum();
    assert_eq!(permitted, sender::TOTAL_BYTES);
    assert!(
        flows
            .iter()
            .all(|flow| flow["args"]["outcome"] == "complete")
    );
    let why = |flow: &&serde_json::Value| flow["args"]["why"].as_str().map(str::to_owned);
    let waited = flows.iter().filter_map(why);
    assert!(
        waited.filter(|why| why.contains("meanwhile went")).count() > 10,
        "{json}"
    );
    let rows: Vec<_> = with("name", "thread_name")
        .iter()
        .filter_map(|row| row["args"]["name"].as_str().map(str::to_owned))
        .collect();
    assert!(
        rows.iter().any(|row| row.starts_with("p2d · layer ")),
        "{rows:?}"
    );
    assert!(
        rows.iter()
            .any(|row| row.starts_with("collective · layer "))
    );
    let processes = with("name", "process_name");
    assert!(
        processes
            .iter()
            .any(|one| one["args"]["name"] == "eth7 egress")
    );
    assert_eq!(picture["otherData"]["lost_events"], 0);
}

#[test]
fn a_trace_with_too_little_room_says_how_much_is_not_in_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let daemon = Daemon::start(folder.path(), "");
    let mut operator = daemon.operator();
    assert!(operator.trace_read().is_err(), "there is none");
    assert!(operator.trace_start(0, 10).is_err(), "no time");
    assert!(operator.trace_start(10, 0).is_err(), "no room");
    operator.trace_start(60, 10).expect("begins");
    let path = folder.path().join("sink");
    let sink = Sink::listen(&path);
    sender::finish(sender::start("complete", &daemon.socket(), &path));
    sink.bytes();
    operator.trace_stop().expect("ends");
    let page = operator.trace_read().expect("it can still be read");
    assert_eq!(page.events.len(), 10);
    assert!(page.lost > 40 && page.is_over, "{page:?}");
    operator.trace_start(1, 10).expect("another begins");
    operator.trace_stop().expect("ends");
}

/// Starts `laxity trace` for longer than any test takes, with `more` arguments, and waits until the
/// daemon records.
fn start(daemon: &Daemon, out: &Path, more: &[&str]) -> Child {
    let before = daemon.log_text().matches("a trace begins").count();
    let tracer = Command::new(binary("laxity"))
        .args(["trace", "--for", "600s", "--control"])
        .arg(daemon.control())
        .arg("--out")
        .arg(out)
        .args(more)
        .stdout(Stdio::piped())
        .spawn()
        .expect("laxity runs");
    eventually("the trace has begun", || {
        daemon.log_text().matches("a trace begins").count() > before
    });
    tracer
}

fn send_flows(daemon: &Daemon, sink: &Path) {
    let listening = Sink::listen(sink);
    sender::finish(sender::start("complete", &daemon.socket(), sink));
    assert_eq!(listening.bytes(), sender::TOTAL_BYTES);
}

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(child.id().cast_signed()), signal).expect("sent");
}

/// How many flows a written trace shows.
fn flows_in(trace: &Path) -> u64 {
    let json = std::fs::read_to_string(trace).expect("a trace");
    let picture: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let events = picture["traceEvents"].as_array().expect("events");
    let flows = events.iter().filter(|event| event["cat"] == "flow");
    flows.count() as u64
}

fn assert_no_trace_runs(daemon: &Daemon) {
    let mut operator = daemon.operator();
    operator.trace_start(60, 10).expect("no trace is under way");
    operator.trace_stop().expect("ends");
}

#[test]
fn a_trace_that_is_interrupted_is_written_and_ended() {
    let folder = tempfile::tempdir().expect("a folder");
    let daemon = Daemon::start(folder.path(), "");
    for ending in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let out = folder.path().join(format!("{ending}.json"));
        let tracer = start(&daemon, &out, &[]);
        send_flows(&daemon, &folder.path().join(format!("{ending}.sink")));
        signal(&tracer, ending);
        let (status, said) = wait_bounded(tracer);
        assert!(status.success(), "{ending}: {status}: {said}");
        assert_eq!(flows_in(&out), sender::FLOWS, "{ending}");
        assert_no_trace_runs(&daemon);
    }
}

#[test]
fn a_trace_whose_command_line_is_killed_ends_by_itself() {
    let folder = tempfile::tempdir().expect("a folder");
    let daemon = Daemon::start(folder.path(), "");
    let mut tracer = start(&daemon, &folder.path().join("trace.json"), &[]);
    tracer.kill().expect("SIGKILL");
    tracer.wait().expect("wait");
    eventually("the daemon has ended the trace", || {
        daemon.log_text().contains("whoever began it has left")
    });
    assert_no_trace_runs(&daemon);
}

#[test]
fn a_traced_command_that_outlasts_the_trace_does_not_keep_it_from_being_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let daemon = Daemon::start(folder.path(), "");
    let (out, ended) = (
        folder.path().join("trace.json"),
        folder.path().join("ended"),
    );
    // It ends by itself after a while, whatever becomes of this test.
    let script = format!(
        "trap 'echo TERM >{}; exit 7' TERM; i=0; while [ $i -lt 600 ]; do sleep 0.1; i=$((i+1)); \
         done",
        ended.display()
    );
    let mut tracer = start(&daemon, &out, &["--", "sh", "-c", &script]);
    send_flows(&daemon, &folder.path().join("sink"));
    daemon.operator().trace_stop().expect("ends");
    eventually("the trace is written", || out.exists());
    assert!(tracer.try_wait().expect("wait").is_none(), "it waits");
    let asked = Instant::now();
    signal(&tracer, Signal::SIGTERM);
    let (status, said) = wait_bounded(tracer);
    assert_eq!(status.code(), Some(7), "the code of the command: {said}");
    assert!(asked.elapsed() < Duration::from_secs(30), "by the signal");
    assert_eq!(flows_in(&out), sender::FLOWS);
    let told = std::fs::read_to_string(ended).expect("the command was told");
    assert_eq!(told.trim(), "TERM");
}
