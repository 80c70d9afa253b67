//! Tests of what operators see and do, and of the state after a daemon has died.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

mod support;

use std::os::fd::AsFd;
use std::time::Duration;

use laxity_client::{Client, Flow, LEVEL_SCAVENGER, Mode, Options, Stage};
use laxity_shm::registration::{Hello, Reason, RegistrationError, connect};
use nix::sys::signal::Signal;
use support::{
    Laxityd, SMALL, SOON, answer, eventually, flow, goes_scheduled, greet, send, take, until,
};

#[test]
fn a_refusal_is_explained_counted_at_once_and_a_warning() {
    let mut daemon = Laxityd::start(SMALL);
    let mut hello = Hello::new("old", Mode::Enforce, false);
    hello.version += 1;
    let reason = |answer| match answer {
        Err(RegistrationError::Rejected { reason, .. }) => Some(reason),
        _ => None,
    };
    let refused = |daemon: &Laxityd| {
        assert_eq!(reason(greet(daemon, &hello).1), Some(Reason::Version));
    };
    let counted = |daemon: &Laxityd| daemon.metric("laxity_refused_clients_total", "");
    refused(&daemon);
    // The metrics change without any client or request for a status.
    until("the metrics show it", || counted(&daemon) == 1.0);
    let line = daemon.await_log("refused a client");
    assert!(line.contains("WARN") && line.contains("version"), "{line}");
    for _ in 0..5 {
        refused(&daemon);
    }
    // A connection without a greeting is closed.
    let silent = connect(&daemon.socket()).unwrap();
    assert_eq!(reason(answer(silent.as_fd())), Some(Reason::Malformed));
    until("all are counted", || counted(&daemon) == 7.0);
    let line = daemon.await_log("DEBUG refused a client");
    assert!(line.contains("version"), "{line}");
    let totals = daemon.status().totals;
    assert_eq!((totals.refusals, totals.attached_clients), (7, 0));
}

#[test]
fn a_bypass_outlasts_the_death_of_the_daemon_and_is_not_hidden() {
    let mut daemon = Laxityd::start(SMALL);
    let said = daemon.control().bypass(true).unwrap();
    assert!(said.contains("restart"), "{said}");
    daemon.signal(Signal::SIGKILL);
    daemon.end();
    let mut daemon = daemon.again();
    let line = daemon.await_log("bypass is still on");
    assert!(line.contains("WARN"), "{line}");
    assert!(daemon.status().bypass);
    assert!(!daemon.attach("worker").is_scheduled());
    assert_eq!(daemon.metric("laxity_bypass", ""), 1.0);

    daemon.control().bypass(false).unwrap();
    daemon.signal(Signal::SIGKILL);
    daemon.end();
    let daemon = daemon.again();
    assert!(!daemon.status().bypass);
    assert!(daemon.client("worker").is_scheduled());
}

#[test]
fn an_ordered_mode_outlasts_reload_and_death_and_ends_with_the_configured_one() {
    let observe = format!("mode = \"observe\"\n{SMALL}");
    let mut daemon = Laxityd::start(&observe);
    let said = daemon.control().set_mode("enforce").unwrap();
    assert!(said.contains("until the configured mode, observe, changes"), "{said}");
    daemon.control().reload().unwrap();
    for _ in 0..2 {
        let status = daemon.status();
        assert_eq!((&*status.mode, &*status.configured_mode), ("enforce", "observe"));
        assert!(daemon.client("worker").is_scheduled());
        daemon.signal(Signal::SIGKILL);
        daemon.end();
        daemon = daemon.again();
        let problems = daemon.status().problems;
        assert!(problems[0].contains("crashed or was killed"), "{problems:?}");
    }
    daemon.signal(Signal::SIGTERM);
    daemon.end();
    let daemon = daemon.again();
    assert!(daemon.status().problems.is_empty(), "that one ended in order");
    let text = std::fs::read_to_string(daemon.config_file()).unwrap();
    std::fs::write(daemon.config_file(), text.replace("\"observe\"", "\"off\"")).unwrap();
    daemon.control().reload().unwrap();
    let status = daemon.status();
    assert_eq!((&*status.mode, &*status.configured_mode), ("off", ""));
    let [change] = &status.changes[..] else { panic!("{:?}", status.changes) };
    assert_eq!(change.uid, Some(nix::unistd::getuid().as_raw()));
    assert!(change.what.contains("read again"), "{change:?}");
}

#[test]
fn every_documented_metric_is_served_and_nothing_else() {
    let daemon = Laxityd::start(SMALL);
    let client = daemon.client("worker");
    send(&mut client.lane(), &flow(Stage::KvReuse, 1000));
    let text = eventually("the first flow shows", || {
        let text = daemon.scrape();
        text.contains("laxity_wait_seconds_count").then_some(text)
    });
    let documented: Vec<&str> = include_str!("../../docs/metrics.md")
        .lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .filter_map(|rest| rest.split_once('`').map(|(name, _)| name))
        .collect();
    assert!(documented.len() > 30);
    for name in &documented {
        assert!(text.contains(&format!("# TYPE {name} ")), "{name} is documented and not served");
        assert!(text.contains(&format!("# HELP {name} ")), "{name} has no help text");
    }
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let name = line.split(' ').next().unwrap();
        assert!(documented.contains(&name), "{name} is served and not documented");
    }
}

#[test]
fn a_rate_that_nobody_knows_and_the_release_of_each_library_have_metrics() {
    let unknown = "[[nic]]\nname = \"nosuch\"\nrate = \"auto\"\n";
    let daemon = Laxityd::start(&format!("{SMALL}{unknown}"));
    let _client = daemon.client("worker");
    let assumed = |nic: &str| {
        let labels = format!("nic=\"{nic}\",direction=\"egress\"");
        daemon.metric("laxity_port_rate_assumed", &labels)
    };
    let libraries =
        |side: &str| daemon.metric("laxity_client_libraries", &format!("library=\"{side}\""));
    until("the client is counted", || libraries("same") >= 1.0);
    assert_eq!((libraries("older"), libraries("newer")), (0.0, 0.0));
    assert_eq!((assumed("eth0"), assumed("nosuch")), (0.0, 1.0));
    let said: Vec<bool> = daemon.status().ports.iter().map(|port| port.rate_assumed).collect();
    assert_eq!(said, [false, false, true, true]);
}

#[test]
fn a_job_keeps_its_sums_when_its_processes_leave_or_attach_anew() {
    let daemon = Laxityd::start(SMALL);
    let uid = nix::unistd::getuid();
    let labels = format!("{{job=\"trainer\",uid=\"{uid}\"}}");
    let sum = |of: &str| daemon.metric(&format!("laxity_job_{of}"), &labels);
    let (first, mut lane) = daemon.worker("trainer");
    let (mut seen, mut sent) = (0.0, 0.0);
    // Most of these attach and leave between two snapshots.
    for _ in 0..40 {
        let client = daemon.client("trainer");
        let late = Flow { deadline_ns: 1, ..flow(Stage::P2d, 1000) };
        send(&mut client.lane(), &late);
        sent += 1000.0;
        let now = sum("permitted_bytes_total");
        assert!(now >= seen, "{now} after {seen}");
        seen = now;
    }
    send(&mut lane, &flow(Stage::KvReuse, 500));
    until("all is counted", || {
        let sums = ["permitted_bytes_total", "completed_bytes_total"].map(sum);
        sums == [sent + 500.0; 2] && sum("deadline_misses_total") == 40.0
    });
    until("one is attached", || sum("clients") == 1.0);
    drop((lane, first));
    until("none is attached", || sum("clients") == 0.0);
    let whole = daemon.metric("laxity_job_permitted_bytes_total", "");
    assert_eq!((sum("permitted_bytes_total"), whole), (sent + 500.0, sent + 500.0));
    let one_of_them = daemon.metric("laxity_client_permitted_bytes_total", "name=\"trainer\"");
    assert_eq!(one_of_them, 0.0, "the metrics of a client end with it");

    // A waiting flow of a client that bypasses is a bypassed one.
    let (_client, mut lane) = daemon.worker("trainer");
    let mut ticket = lane.submit(&flow(Stage::P2d, 1 << 20));
    let got = take(&mut lane, &mut ticket, 256 << 10);
    until("it waits", || sum("waiting_flows") == 1.0);
    daemon.control().bypass(true).unwrap();
    assert!(lane.wait(&mut ticket).bypassed);
    let left = ((1 << 20) - got) as f64;
    until("it is bypassed", || sum("bypassed_bytes_total") == left);
}

#[test]
fn a_user_that_attaches_under_1000_names_has_16_jobs_and_no_name_breaks_a_line() {
    let daemon = Laxityd::start(SMALL);
    drop(daemon.client("a\\\"} 1\n"));
    for number in 0..1000 {
        let (_held, welcome) =
            greet(&daemon, &Hello::new(&format!("{number}"), Mode::Observe, false));
        welcome.unwrap();
    }
    let attached = || daemon.metric("laxity_attachments_total", "");
    until("all are counted", || attached() == 1001.0);
    let text = daemon.scrape();
    let jobs = text.lines().filter(|line| line.starts_with("laxity_job_clients{"));
    assert_eq!(jobs.count(), 17, "16 jobs, and the others");
    assert!(text.contains(r#"laxity_job_clients{job="a\\\"} 1?",uid="#), "{text}");
    assert!(text.contains("laxity_job_clients{job=\"other\"} "), "{text}");
}

#[test]
fn bypass_lets_everything_out_at_once_and_new_clients_too_until_it_is_switched_off() {
    let daemon = Laxityd::start(SMALL);
    let (_client, mut lane) = daemon.worker("worker");
    let mut ticket = lane.submit(&flow(Stage::P2d, 1 << 20));
    let got = take(&mut lane, &mut ticket, 256 << 10);
    assert!(lane.poll(&mut ticket).is_none());
    let waiter = std::thread::spawn(move || {
        let mut got = 0;
        loop {
            let permit = lane.wait(&mut ticket);
            got += permit.bytes;
            if permit.last {
                return (lane, permit, got);
            }
        }
    });
    let said = daemon.control().bypass(true).unwrap();
    assert!(said.contains("on") && said.contains("1 client"), "{said}");
    let (mut lane, last, rest) = waiter.join().unwrap();
    assert!(last.bypassed);
    assert_eq!(got + rest, 1 << 20);
    assert!(!goes_scheduled(&mut lane, &flow(Stage::P2d, 100)));
    assert!(daemon.status().bypass);
    let other = Client::attach(Options { socket: daemon.socket(), ..Options::default() });
    assert!(!goes_scheduled(&mut other.lane(), &flow(Stage::P2d, 100)));
    until("the withdrawn bytes are counted", || daemon.status().totals.bypassed_bytes == rest);

    daemon.control().bypass(false).unwrap();
    until("flows are scheduled again", || goes_scheduled(&mut lane, &flow(Stage::P2d, 100)));
}

#[test]
fn sighup_changes_what_can_change_and_names_what_cannot() {
    let mut daemon = Laxityd::start(SMALL);
    let old = std::fs::read_to_string(daemon.config_file()).unwrap();
    let new = old
        .replace("rate = \"1Gbit\"", "rate = \"10Gbit\"")
        .replace("control.sock", "elsewhere.sock");
    std::fs::write(daemon.config_file(), format!("policy = \"mfs\"\nmode = \"observe\"\n{new}"))
        .unwrap();
    daemon.signal(Signal::SIGHUP);
    daemon.await_log("takes effect after a restart");
    let status = eventually("the new policy holds", || {
        let status = daemon.status();
        (status.policy == "mfs").then_some(status)
    });
    assert_eq!(status.mode, "observe");
    assert_eq!(status.ports[0].rate_bytes_per_s, 1_250_000_000);

    // With an invalid file, the old configuration stays, and the error names the line.
    std::fs::write(daemon.config_file(), "polciy = \"mfs\"\n").unwrap();
    let error = daemon.control().reload().unwrap_err().to_string();
    assert!(error.contains("laxityd.toml:1") && error.contains("polciy"), "{error}");
    let status = daemon.status();
    assert_eq!(status.policy, "mfs");
    let [problem] = &status.problems[..] else { panic!("{:?}", status.problems) };
    assert!(problem.contains("polciy") && problem.contains("will not start with it"), "{problem}");
    std::fs::write(daemon.config_file(), old).unwrap();
    daemon.control().reload().unwrap();
    assert!(daemon.status().problems.is_empty());
}

#[test]
fn clients_are_told_the_dscp_of_levels_and_stages_and_changed_ones_after_a_reload() {
    let daemon = Laxityd::start(SMALL);
    let client = daemon.client("marks");
    let told = |dscp: [u8; 4]| {
        let levels = [1, 2, LEVEL_SCAVENGER].map(|level| client.dscp(level));
        levels == dscp[..3] && client.dscp_of(Stage::P2d) == dscp[3]
    };
    until("the defaults are told", || told([46, 34, 8, 10]));
    let old = std::fs::read_to_string(daemon.config_file()).unwrap();
    let levels = "[levels]\ndscp = [40, 32, 24, 20, 20, 16, 16, 16]\nscavenger_dscp = 1\n";
    std::fs::write(daemon.config_file(), old + levels).unwrap();
    daemon.signal(Signal::SIGHUP);
    until("the new ones are told", || told([40, 32, 1, 16]));
}

#[test]
fn the_service_manager_is_told_when_it_is_ready_alive_and_stopping() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify.sock");
    let manager = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(SOON)).unwrap();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_laxityd"))
        .arg("--socket")
        .arg(folder.path().join("laxityd.sock"))
        .arg("--control")
        .arg(folder.path().join("control.sock"))
        .args(["--set", "metrics=", "--set", "log=error"])
        .env("NOTIFY_SOCKET", &path)
        .env("WATCHDOG_USEC", "200000")
        .spawn()
        .unwrap();
    let next = |wanted: &str| {
        let mut buffer = [0; 1024];
        loop {
            let length = manager.recv(&mut buffer).unwrap();
            if String::from_utf8_lossy(&buffer[..length]).contains(wanted) {
                return;
            }
        }
    };
    next("FDSTORE=1\nFDNAME=registration");
    next("FDSTORE=1\nFDNAME=control");
    next("READY=1");
    next("WATCHDOG=1");
    next("WATCHDOG=1");
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    nix::sys::signal::kill(pid, Signal::SIGTERM).unwrap();
    next("STOPPING=1");
    assert!(child.wait().unwrap().success());
    assert!(folder.path().join("laxityd.sock").exists(), "the manager keeps its socket");
}

#[test]
fn an_idle_daemon_with_clients_attached_uses_next_to_no_processor_time() {
    let daemon = Laxityd::start(SMALL);
    let clients: Vec<_> = (0..4).map(|i| daemon.client(&format!("idle-{i}"))).collect();
    let mut lanes: Vec<_> = clients.iter().map(Client::lane).collect();
    for lane in &mut lanes {
        send(lane, &flow(Stage::P2d, 10));
    }
    std::thread::sleep(Duration::from_millis(300));
    let ticks = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", daemon.child.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    // A tick is 10 ms. Two ticks are 1 % of a core over this time, ten times the budget. The daemon
    // reads counters more often while others use the interface, so one quiet time is enough.
    let used = || {
        let before = ticks();
        std::thread::sleep(Duration::from_secs(2));
        ticks() - before
    };
    assert!((0..3).any(|_| used() <= 2), "an idle daemon used more than 2 ticks in 2 s, thrice");
}

#[test]
fn status_is_answered_whenever_it_is_asked_for() {
    let daemon = Laxityd::start(SMALL);
    // The reader sleeps after 1 s without a new snapshot, so after these pauses it may have just
    // stopped polling.
    for pause in [1020, 1050, 1080, 1100] {
        std::thread::sleep(Duration::from_millis(pause));
        assert_eq!(daemon.status().mode, "enforce", "after {pause} ms");
    }
}
