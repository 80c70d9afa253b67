//! Tests of a real laxityd beside processes that take all resources they can. It still serves
//! operators, scrapers and clients of root.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

mod support;

use std::io::Write;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use laxity_client::Mode;
use laxity_shm::registration::{
    Hello, Reason, RegistrationError, Welcome, connect, receive_reply, send_hello, wait_readable,
};
use laxity_wire::ControlClient;
use nix::sys::signal::Signal;
use support::{EXEC, Laxityd, PLAYS, Role, SMALL, SOON, STRANGER, is_root, role, until};

/// Longest time of an answer. The documented limit is a second, on a machine without other load.
const PROMPT: Duration = Duration::from_secs(4);

/// Not a test by itself: plays the hostile processes, and never ends.
#[test]
fn stranger_role() {
    let Some(role) = role() else { return };
    let socket = PathBuf::from(std::env::var_os("SOCKET").unwrap());
    match role.as_str() {
        "refused" => hold_connections(&socket),
        "greedy" => hold_places(&socket),
        other => panic!("no such role: {other}"),
    }
}

/// Connects repeatedly without a greeting, and keeps all connections that it can.
fn hold_connections(socket: &std::path::Path) {
    let mut held = std::collections::VecDeque::new();
    let mut says = Some(PLAYS);
    loop {
        match connect(socket) {
            Ok(connection) => held.push_back(connection),
            Err(_) => std::thread::yield_now(),
        }
        if held.len() > 600 {
            held.pop_front();
            if let Some(text) = says.take() {
                println!("{text}");
            }
        }
    }
}

/// Attaches as often as possible, then goes on as [`hold_connections`].
fn hold_places(socket: &std::path::Path) {
    let mut held = Vec::new();
    let why = loop {
        match attach(socket, "greedy") {
            Ok(place) => held.push(place),
            Err(why) => break why,
        }
    };
    let is_full = matches!(why, RegistrationError::Rejected { reason: Reason::Full, .. });
    assert!(is_full, "{why}");
    hold_connections(socket);
}

/// Attaches without the library. It tries again while the backlog is full, as clients do.
fn attach(socket: &std::path::Path, name: &str) -> Result<(OwnedFd, Welcome), RegistrationError> {
    let end = Instant::now() + SOON;
    let connection = loop {
        match connect(socket) {
            Err(error) if Instant::now() > end => return Err(error),
            Err(_) => std::thread::yield_now(),
            Ok(connection) => break connection,
        }
    };
    send_hello(connection.as_fd(), &Hello::new(name, Mode::Enforce, false))?;
    loop {
        assert!(wait_readable(connection.as_fd(), SOON), "no answer");
        if let Some(welcome) = receive_reply(connection.as_fd())? {
            return Ok((connection, welcome));
        }
    }
}

/// Starts a daemon whose sockets any user can reach.
fn open_to_all(lines: &str, descriptors: Option<u32>) -> Laxityd {
    let limit = descriptors.map_or(String::new(), |limit| format!("ulimit -n {limit}; "));
    let command = ["sh", "-c", &format!("{limit}{EXEC}")];
    let daemon = Laxityd::start_by(&format!("{lines}\n{SMALL}"), &command);
    let all = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(daemon.folder.path(), all).unwrap();
    daemon
}

fn stranger(daemon: &Laxityd, role: &str) -> Role {
    let socket = daemon.socket().display().to_string();
    Role::start("stranger_role", role, &[("SOCKET", socket)])
}

/// Returns the result of `act`, which must be fast.
fn promptly<T>(what: &str, act: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let result = act();
    let took = begin.elapsed();
    assert!(took < PROMPT, "{what} took {took:?}");
    result
}

/// Makes three rounds of `status`, `bypass on` and `off`, and a new client of root.
fn operator_and_root_are_served(daemon: &Laxityd) {
    for round in 0..3 {
        let status = promptly("status", || daemon.status());
        assert!(!status.bypass, "round {round}");
        let client = promptly("a client", || attach(&daemon.socket(), "root's"));
        assert!(client.is_ok(), "round {round}: {:?}", client.err());
        promptly("bypass on", || daemon.control().bypass(true)).unwrap();
        assert!(promptly("status", || daemon.status()).bypass);
        promptly("bypass off", || daemon.control().bypass(false)).unwrap();
    }
}

fn lines_of(daemon: &mut Laxityd, text: &str) -> usize {
    // `seen` then holds every line that was logged before this one.
    daemon.control().reload().unwrap();
    daemon.await_log("the configuration was reloaded");
    daemon.seen.iter().filter(|line| line.contains(text)).count()
}

#[test]
fn idle_connections_to_metrics_cost_neither_operators_nor_scrapers_anything() {
    // The limit of descriptors is below the number of connections.
    let mut daemon = open_to_all("", Some(300));
    let idle: Vec<_> = (0..500)
        .map(|_| {
            let mut stream = TcpStream::connect(("127.0.0.1", daemon.metrics)).unwrap();
            // Half of a request's head. The connection may be closed already.
            let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nHost:");
            stream
        })
        .collect();
    operator_and_root_are_served(&daemon);
    let text = promptly("a scrape", || daemon.scrape());
    assert!(text.contains("laxity_attached_clients"), "{text}");
    assert!(lines_of(&mut daemon, "cannot accept") <= 1, "{:?}", daemon.seen);
    drop(idle);
}

#[test]
fn whoever_may_not_attach_keeps_nobody_else_from_attaching() {
    if !is_root() {
        return;
    }
    let daemon = open_to_all("", None);
    let _strangers = [stranger(&daemon, "refused"), stranger(&daemon, "refused")];
    operator_and_root_are_served(&daemon);
    promptly("ten clients, one after the other", || {
        for _ in 0..10 {
            attach(&daemon.socket(), "root's").unwrap();
        }
    });
    // Applications attach with this library, which does not wait for room in the backlog.
    promptly("ten clients of the library", || {
        for _ in 0..10 {
            daemon.client("root's");
        }
    });
    let refused = daemon.status().refused;
    let of_stranger = refused.iter().find(|user| user.uid == STRANGER).unwrap();
    assert!(of_stranger.count > 100 && of_stranger.why.contains("not admitted"));
    assert!(of_stranger.setting.starts_with(&format!("uids = [{STRANGER}]")), "{of_stranger:?}");
}

#[test]
fn a_user_that_attaches_as_often_as_it_may_leaves_places_for_others_and_status_says_who() {
    if !is_root() {
        return;
    }
    let admitted =
        format!("[access]\nuids = [{STRANGER}]\n[scheduler]\nclients_max = 40\nlanes = 1");
    let daemon = open_to_all(&admitted, None);
    let _strangers = [stranger(&daemon, "greedy"), stranger(&daemon, "refused")];
    operator_and_root_are_served(&daemon);
    let status = daemon.status();
    let of_stranger = status.clients.iter().filter(|c| c.uid == STRANGER).count();
    assert_eq!(of_stranger, 20, "half of the places");
    let refused = status.refused.iter().find(|user| user.uid == STRANGER).unwrap();
    assert!(refused.count > 0 && refused.pid > 0, "{refused:?}");
}

#[test]
fn a_refusal_for_lack_of_a_place_says_which_limit_it_was() {
    if !is_root() {
        return;
    }
    let admitted = format!("[access]\nuids = [{STRANGER}]\n[scheduler]\nclients_per_uid_max = 3");
    let mut daemon = open_to_all(&admitted, None);
    let _stranger = stranger(&daemon, "greedy");
    let line = daemon.await_log("refused a client");
    assert!(line.contains("clients_per_uid_max"), "{line}");
    assert_eq!(daemon.status().totals.attached_clients, 3);
}

#[test]
fn the_limit_of_open_files_bounds_clients_and_leaves_operators_theirs() {
    let mut daemon = open_to_all("[scheduler]\nlanes = 1", Some(280));
    let line = daemon.await_log("leaves room for fewer clients");
    assert!(line.contains("WARN") && line.contains("LimitNOFILE"), "{line}");
    let mut held = Vec::new();
    let why = loop {
        match attach(&daemon.socket(), "one of many") {
            Ok(place) => held.push(place),
            Err(why) => break why,
        }
    };
    assert!(why.to_string().contains("no room"), "{why}");
    assert!((5..100).contains(&held.len()), "{}", held.len());
    for _ in 0..10 {
        daemon.control().bypass(true).unwrap();
        daemon.control().reload().unwrap();
        daemon.control().bypass(false).unwrap();
    }
    let refused = daemon.status().refused;
    assert!(refused[0].why.contains("open files"), "{refused:?}");
    daemon.scrape();
}

#[test]
fn idle_control_connections_make_room_for_a_command() {
    let daemon = open_to_all("", None);
    let path = daemon.folder.path().join("control.sock");
    let idle: Vec<_> = (0..200)
        .map(|_| {
            let mut stream = UnixStream::connect(&path).unwrap();
            let _ = stream.write_all(b"{\"v\":1,");
            stream
        })
        .collect();
    operator_and_root_are_served(&daemon);
    drop(idle);
}

#[test]
fn a_command_whose_operator_gave_up_does_not_take_effect_later() {
    let daemon = Laxityd::start(SMALL);
    let path = daemon.folder.path().join("control.sock");
    daemon.signal(Signal::SIGSTOP);
    let mut control = ControlClient::connect(path, Duration::from_millis(200)).unwrap();
    let error = control.bypass(true).unwrap_err();
    assert!(error.to_string().contains("did not answer"), "{error}");
    drop(control);
    daemon.signal(Signal::SIGCONT);
    // Connections are accepted in order, so this answer comes after the other connection's end.
    for _ in 0..3 {
        assert!(!daemon.status().bypass);
    }
}

#[test]
fn a_command_of_somebody_who_says_no_more_but_listens_is_carried_out() {
    use std::io::Read;
    let daemon = Laxityd::start(SMALL);
    let mut stream = UnixStream::connect(daemon.folder.path().join("control.sock")).unwrap();
    stream.write_all(b"{\"v\":1,\"op\":\"bypass\",\"on\":true}\n").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("done"), "{answer}");
    assert!(daemon.status().bypass);
}

#[test]
fn a_configuration_that_never_ends_or_never_begins_is_refused_and_the_daemon_goes_on() {
    let mut daemon = Laxityd::start(SMALL);
    let path = daemon.config_file();
    let replace = |how: &dyn Fn()| {
        std::fs::remove_file(&path).unwrap();
        how();
        promptly("reload", || daemon.control().reload().unwrap_err().to_string())
    };
    let fifo = || nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let said = replace(&fifo);
    assert!(said.contains("laxityd.toml") && said.contains("FIFO"), "{said}");
    let endless = || std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
    let said = replace(&endless);
    assert!(said.contains("a device"), "{said}");
    let long = || std::fs::write(&path, "#".repeat(2 << 20)).unwrap();
    let said = replace(&long);
    assert!(said.contains("longer than"), "{said}");
    daemon.signal(Signal::SIGHUP);
    operator_and_root_are_served(&daemon);
    daemon.signal(Signal::SIGTERM);
    assert!(daemon.end().success());
}

#[test]
fn clients_that_come_and_go_without_end_do_not_fill_the_log() {
    let mut daemon = Laxityd::start(SMALL);
    for _ in 0..200 {
        drop(attach(&daemon.socket(), "restless").unwrap());
    }
    until("all are gone", || daemon.status().totals.attached_clients == 0);
    let attached = lines_of(&mut daemon, "a client attached");
    let left = daemon.seen.iter().filter(|l| l.contains("a client left")).count();
    assert!((1..150).contains(&attached) && (1..150).contains(&left), "{attached}, {left}");
    let line = daemon.await_log("a client left");
    assert!(line.contains("INFO") && line.contains("lines_left_out=0"), "{line}");
}
