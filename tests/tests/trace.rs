//! Tests of the command `laxity trace` while a real process sends under a real daemon.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::process::{Daemon, binary, eventually, laxity, signal, wait_bounded, words};
use crate::sender;

#[test]
fn a_trace_shows_each_flow_of_a_sender_and_why_it_waited() {
    // The rate is so low that most of the sender's flows have to wait.
    let (folder, daemon) =
        Daemon::alone("[[nic]]\nname = \"eth7\"\nrate = \"80Mbit\"\nchunk = \"64KiB\"\n");
    let control = daemon.control().display().to_string();
    let out = folder.path().join("trace.json");
    let out = out.to_str().expect("UTF-8");
    let otlp = folder.path().join("otlp.json");
    let otlp = otlp.to_str().expect("UTF-8");
    let arguments = ["trace", "--control", &control, "--for", "60s", "--out", out, "--otlp", otlp];

    let nobody = format!("trace --control {control} --for 200ms --out {out}");
    let nobody = laxity(&words(&nobody));
    assert!(!nobody.status.success());
    assert!(nobody.stderr.contains("saw no flow"), "{nobody:?}");

    let nowhere = format!("trace --control {control} --out {out} --otlp http://127.0.0.1:9");
    let nowhere = laxity(&words(&nowhere));
    assert!(!nowhere.status.success() && nowhere.stderr.contains("--otlp FILE"), "{nowhere:?}");

    let same = format!("trace --control {control} --out {out} --otlp {out}");
    let same = laxity(&words(&same));
    assert!(same.stderr.contains("name the same file"), "{same:?}");

    // The traced command waits for a file that appears when the sender has ended.
    let done = folder.path().join("done");
    let wait = format!("while [ ! -e {} ]; do sleep 0.05; done", done.display());
    let tracer = Command::new(binary("laxity"))
        .args(arguments)
        .args(["--", "sh", "-c", &wait])
        .stdout(Stdio::piped())
        .spawn()
        .expect("laxity runs");
    eventually("the trace has begun", || {
        // The first match is the trace above, which had no events.
        daemon.log_text().matches("a trace begins").count() > 1
    });
    let again = laxity(&arguments);
    assert!(again.stderr.contains("under way"), "{again:?}");

    sender::complete(&daemon, &folder.path().join("sink"));
    std::fs::write(&done, "").expect("written");
    let tracer = tracer.wait_with_output().expect("it ends");
    assert!(tracer.status.success(), "{tracer:?}");

    let json = std::fs::read_to_string(out).expect("a trace");
    let picture: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let events = picture["traceEvents"].as_array().expect("events");
    let with = |key: &str, value: &str| -> Vec<&serde_json::Value> {
        events.iter().filter(|event| event[key] == value).collect()
    };
    let bytes = |events: &[&serde_json::Value]| -> u64 {
        let bytes = events.iter().map(|event| event["args"]["bytes"].as_u64());
        bytes.map(|bytes| bytes.expect("bytes")).sum()
    };
    let flows = with("cat", "flow");
    assert_eq!(flows.len() as u64, sender::FLOWS);
    assert_eq!(bytes(&flows), sender::TOTAL_BYTES);
    assert_eq!(bytes(&with("cat", "permit")), sender::TOTAL_BYTES);
    let mut outcomes = flows.iter().map(|flow| &flow["args"]["outcome"]);
    assert!(outcomes.all(|outcome| outcome == "complete"));
    let why = |flow: &&serde_json::Value| flow["args"]["why"].as_str().map(str::to_owned);
    let waited = flows.iter().filter_map(why);
    assert!(waited.filter(|why| why.contains("meanwhile went")).count() > 10, "{json}");
    for (kind, start) in [
        ("thread_name", "p2d · layer "),
        ("thread_name", "collective · layer "),
        ("process_name", "eth7 egress"),
    ] {
        let named = with("name", kind);
        let mut names = named.iter().filter_map(|row| row["args"]["name"].as_str());
        assert!(names.any(|name| name.starts_with(start)), "{named:?}");
    }
    assert_eq!(picture["otherData"]["lost_events"], 0);
    let json = std::fs::read_to_string(otlp).expect("spans");
    let spans: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let scope = &spans["resourceSpans"][0]["scopeSpans"][0];
    let spans = scope["spans"].as_array().expect("spans");
    let count = |name: &str| spans.iter().filter(|span| span["name"] == name).count();
    assert_eq!(count("request"), 1, "the request that joined and ended: {json}");
    let flows = ["p2d", "kv_reuse", "collective"].map(count).iter().sum::<usize>();
    assert_eq!(flows, 4, "its flows: {json}");
}

#[test]
fn a_trace_with_too_little_room_says_how_much_is_not_in_it() {
    let (folder, daemon) = Daemon::alone("");
    let mut operator = daemon.operator();
    assert!(operator.trace_read().is_err(), "there is none");
    assert!(operator.trace_start(0, 10).is_err(), "no time");
    assert!(operator.trace_start(10, 0).is_err(), "no room");
    operator.trace_start(60, 10).expect("begins");
    sender::complete(&daemon, &folder.path().join("sink"));
    operator.trace_stop().expect("ends");
    let page = operator.trace_read().expect("it can still be read");
    assert_eq!(page.events.len(), 10);
    assert!(page.lost > 40 && page.is_over, "{page:?}");
    operator.trace_start(1, 10).expect("another begins");
    operator.trace_stop().expect("ends");
}

/// Starts `laxity trace` with `more` arguments, for longer than any test takes. Waits until the
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
    let (folder, daemon) = Daemon::alone("");
    for ending in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let out = folder.path().join(format!("{ending}.json"));
        let tracer = start(&daemon, &out, &[]);
        sender::complete(&daemon, &folder.path().join(format!("{ending}.sink")));
        signal(tracer.id(), ending);
        let (status, said) = wait_bounded(tracer);
        assert!(status.success(), "{ending}: {status}: {said}");
        assert_eq!(flows_in(&out), sender::FLOWS, "{ending}");
        assert_no_trace_runs(&daemon);
    }
}

#[test]
fn a_traced_command_starts_with_no_signal_blocked() {
    let (folder, daemon) = Daemon::alone("");
    // No shell, since shells clear the mask.
    let command = ["--", "cat", "/proc/self/status"];
    let tracer = start(&daemon, &folder.path().join("trace.json"), &command);
    // The command line fails, since no flow was seen.
    let (_, said) = wait_bounded(tracer);
    let masks = |name: &str| said.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let none = Some("0000000000000000");
    assert_eq!((masks("SigBlk:"), masks("SigCgt:")), (none, none), "{said}");
}

#[test]
fn a_trace_whose_command_line_is_killed_ends_by_itself() {
    let (folder, daemon) = Daemon::alone("");
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
    let (folder, daemon) = Daemon::alone("");
    let (out, ended) = (folder.path().join("trace.json"), folder.path().join("ended"));
    // The script ends by itself after a while, whatever happens to this test.
    let script = format!(
        "trap 'echo TERM >{}; exit 7' TERM; i=0; while [ $i -lt 600 ]; do sleep 0.1; i=$((i+1)); \
         done",
        ended.display()
    );
    let mut tracer = start(&daemon, &out, &["--", "sh", "-c", &script]);
    sender::complete(&daemon, &folder.path().join("sink"));
    daemon.operator().trace_stop().expect("ends");
    eventually("the trace is written", || out.exists());
    assert!(tracer.try_wait().expect("wait").is_none(), "it waits");
    let asked = Instant::now();
    signal(tracer.id(), Signal::SIGTERM);
    let (status, said) = wait_bounded(tracer);
    assert_eq!(status.code(), Some(7), "the code of the command: {said}");
    assert!(asked.elapsed() < Duration::from_secs(30), "by the signal");
    assert_eq!(flows_in(&out), sender::FLOWS);
    let told = std::fs::read_to_string(ended).expect("the command was told");
    assert_eq!(told.trim(), "TERM");
}
