//! Tests of clients that break the rules by mistake or on purpose, and of the other clients.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

mod support;

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use laxity_client::{Client, Flow, Lane, Mode, Options, Stage};
use laxity_shm::record::Record;
use laxity_shm::registration::{Hello, Reason, RegistrationError, connect};
use laxity_wire::{Request, Response};
use nix::sys::signal::Signal;
use support::{
    ByHand, Laxityd, SMALL, SOON, answer, eventually, finish, flow, goes_scheduled, until,
};

const WINDOW: u64 = 256 << 10;

fn set_mode(daemon: &Laxityd, mode: &str) {
    let mode = mode.to_owned();
    let answer = daemon.control().call(&Request::SetMode { mode }).unwrap();
    assert!(matches!(answer, Response::Done { .. }), "{answer:?}");
}

fn in_flight(daemon: &Laxityd) -> u64 {
    daemon.status().ports[0].in_flight_bytes
}

#[test]
fn a_flow_whose_client_went_silent_gets_the_window_once_and_not_chunk_after_chunk() {
    let daemon = Laxityd::start(&format!("[tuning]\ncompletion_timeout = \"200ms\"\n{SMALL}"));
    let (dead, honest) = (daemon.client("dead"), daemon.client("honest"));
    let mut dead_lane = dead.lane();
    // The ticket is dropped, but the process and the heartbeat go on. At one window per timeout,
    // the flow would need a quarter of an hour.
    drop(dead_lane.submit(&flow(Stage::P2d, 1 << 30)));
    until("it holds the window", || in_flight(&daemon) == WINDOW);
    assert!(goes_scheduled(&mut honest.lane(), &flow(Stage::P2d, 1 << 20)));
    let totals = eventually("it is written off", || {
        let totals = daemon.status().totals;
        (totals.written_off_bytes > 0).then_some(totals)
    });
    assert_eq!(totals.written_off_bytes, WINDOW);
    assert_eq!(totals.bypassed_bytes, (1 << 30) - WINDOW);
    assert_eq!((totals.cancelled_flows, totals.withdrawn_bytes), (1, 0));
    let status = daemon.status();
    assert!(status.clients.iter().all(|client| client.flows == 0));
    until("nothing is left of it", || in_flight(&daemon) == 0);
}

#[test]
fn what_a_client_leaves_behind_without_a_permit_counts_as_withdrawn() {
    let daemon = Laxityd::start(SMALL);
    let gone = daemon.client("gone");
    let mut lane = gone.lane();
    drop(lane.submit(&flow(Stage::P2d, 1 << 20)));
    until("it has the window", || in_flight(&daemon) == WINDOW);
    drop((lane, gone));
    until("it is gone", || in_flight(&daemon) == 0);
    let totals = daemon.status().totals;
    assert_eq!(totals.withdrawn_bytes, (1 << 20) - WINDOW);
    let ways = [totals.permitted_bytes, totals.bypassed_bytes, totals.withdrawn_bytes];
    assert_eq!(ways.iter().sum::<u64>(), totals.submitted_bytes);
}

#[test]
fn a_client_that_never_completes_is_not_scheduled_for_a_while() {
    let daemon = Laxityd::start(&format!("[tuning]\ncompletion_timeout = \"1s\"\n{SMALL}"));
    let (_dead, mut lane) = daemon.worker("dead");
    let mut waiting: Vec<_> = (0..8).map(|_| lane.submit(&flow(Stage::P2d, WINDOW))).collect();
    let mut told = 0;
    // All of the client's flows go out at the first loss, not one per timeout.
    while told < 8 * WINDOW {
        told += waiting
            .iter_mut()
            .filter_map(|ticket| lane.poll(ticket))
            .map(|permit| {
                assert!(!permit.bypassed, "the daemon said so");
                permit.bytes
            })
            .sum::<u64>();
        lane.wait_any(Duration::from_millis(5));
    }
    assert!(daemon.status().totals.written_off_bytes <= WINDOW);
    let mut next = lane.submit(&flow(Stage::P2d, 1 << 30));
    let permit = lane.wait(&mut next);
    assert_eq!((permit.bytes, permit.level, permit.last), (1 << 30, 255, true));
    assert_eq!(in_flight(&daemon), 0);
    until("it is trusted again", || {
        let mut ticket = lane.submit(&flow(Stage::P2d, 1));
        let scheduled = lane.wait(&mut ticket).level != 255;
        lane.complete(&ticket, 1);
        std::thread::sleep(Duration::from_millis(20));
        scheduled
    });
}

#[test]
fn completions_of_nothing_do_not_put_the_write_off_off() {
    let daemon = Laxityd::start(&format!("[tuning]\ncompletion_timeout = \"100ms\"\n{SMALL}"));
    let (_sly, mut lane) = daemon.worker("sly");
    let mut ticket = lane.submit(&flow(Stage::P2d, WINDOW));
    while !lane.wait(&mut ticket).last {}
    until("it is written off", || {
        lane.complete(&ticket, 0);
        lane.complete(&ticket, 1);
        daemon.status().totals.written_off_bytes > 0
    });
}

#[test]
fn a_client_that_only_wants_to_be_observed_does_not_fill_the_window_of_the_others() {
    let daemon = Laxityd::start(SMALL);
    let observed = Client::attach(Options {
        socket: daemon.socket(),
        mode: Mode::Observe,
        attach_timeout: SOON,
        stall_timeout: SOON,
        ..Options::default()
    });
    let mut lane = observed.lane();
    let mut ticket = lane.submit(&flow(Stage::P2d, 100 << 20));
    assert!(lane.wait(&mut ticket).last);
    until("it is booked", || daemon.status().totals.submitted_bytes == 100 << 20);
    assert_eq!(in_flight(&daemon), 0);
    let (_enforced, mut other) = daemon.worker("enforced");
    let mut urgent = other.submit(&flow(Stage::P2d, 64 << 10));
    let permit = other.wait(&mut urgent);
    assert_eq!((permit.bytes, permit.last), (64 << 10, true));
    assert_eq!(in_flight(&daemon), 64 << 10);
    lane.complete(&ticket, 100 << 20);
    until("its completion is booked too", || daemon.status().totals.completed_bytes == 100 << 20);
    assert_eq!(in_flight(&daemon), 64 << 10);
    assert_eq!(daemon.status().totals.garbage_records, 0);
}

#[test]
fn a_client_that_is_to_be_scheduled_cannot_say_that_it_was_only_observed() {
    let daemon = Laxityd::start(SMALL);
    let mut liar = ByHand::attach(&daemon, "liar");
    liar.publish(&[Record::SubmitOnCredit { flow: flow(Stage::P2d, 1 << 40), observed: true }]);
    until("it is released", || liar.is_released());
    let status = daemon.status();
    assert_eq!(status.totals.garbage_records, 1);
    assert_eq!(status.ports[0].in_flight_bytes, 0);
}

#[test]
fn flows_that_wait_when_the_mode_becomes_off_go_out_once_and_are_scheduled_again_later() {
    let daemon = Laxityd::start(SMALL);
    let (client, mut lane) = daemon.worker("worker");
    for round in 0..20 {
        // The number is low enough that the lane has slots for all completions at once.
        let mut tickets: Vec<_> =
            (0..100).map(|_| lane.submit(&flow(Stage::P2d, 16 << 10))).collect();
        until("the window is full and the rest waits", || {
            daemon.status().ports[0].waiting_flows == 100 - 16
        });
        set_mode(&daemon, "off");
        let mut bytes = 0;
        for ticket in &mut tickets {
            while !ticket.is_done() {
                let permit = lane.wait(ticket);
                bytes += permit.bytes;
                lane.complete(ticket, permit.bytes);
            }
        }
        assert_eq!(bytes, 100 * (16 << 10), "round {round}");
        let port = eventually("all bytes are accounted for", || {
            let status = daemon.status();
            (status.clients[0].flows == 0).then(|| status.ports[0].clone())
        });
        assert_eq!((port.in_flight_bytes, port.waiting_flows), (0, 0));
        assert!(!goes_scheduled(&mut lane, &flow(Stage::P2d, 10)));
        set_mode(&daemon, "enforce");
        until("flows are scheduled again", || client.is_scheduled());
        assert!(goes_scheduled(&mut lane, &flow(Stage::P2d, 1 << 20)));
        until("nothing is in flight", || in_flight(&daemon) == 0);
    }
    let stats = client.stats();
    assert_eq!((stats.lane_full, stats.reattaches), (0, 0));
    assert_eq!(daemon.status().totals.garbage_records, 0);
}

#[test]
fn credit_that_is_spent_on_flows_beyond_the_limit_returns_to_the_port() {
    let daemon = Laxityd::start(&format!("[scheduler]\nflows_per_client_max = 1\n{SMALL}"));
    let (_client, mut lane) = daemon.worker("rank");
    let credited = || daemon.status().totals.credited_bytes;
    let mut prime = || {
        until("credit is handed out", || {
            let before = credited();
            goes_scheduled(&mut lane, &flow(Stage::Collective, 100));
            credited() > before
        });
    };
    prime();
    // The first flow uses the only place. All collectives are beyond the limit, and use more credit
    // than exists at a time.
    let mut held = lane.submit(&flow(Stage::P2d, 1000));
    assert!(lane.wait(&mut held).last);
    for _ in 0..1000 {
        let mut ticket = lane.submit(&flow(Stage::Collective, 1000));
        assert!(lane.wait(&mut ticket).last);
        std::thread::sleep(Duration::from_micros(50));
    }
    assert!(daemon.status().totals.overflowed_flows >= 500);
    lane.complete(&held, 1000);
    let before = credited();
    until("there is credit still", || {
        goes_scheduled(&mut lane, &flow(Stage::Collective, 10_000));
        credited() > before + 10 * 10_000
    });
}

#[test]
fn a_client_that_keeps_its_memory_after_it_left_pins_none() {
    let daemon = Laxityd::start(SMALL);
    let ByHand { socket, memfd, .. } = ByHand::attach(&daemon, "leaver");
    let blocks = || nix::sys::stat::fstat(&memfd).unwrap().st_blocks;
    assert!(blocks() > 0);
    drop(socket);
    until("the file is empty", || blocks() == 0);
}

#[test]
fn descriptors_sent_to_the_daemon_do_not_arrive() {
    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
    let daemon = Laxityd::start(SMALL);
    let socket = connect(&daemon.socket()).unwrap();
    let hello = Hello::new("smuggler", Mode::Enforce, false);
    let bytes = [std::io::IoSlice::new(bytemuck::bytes_of(&hello))];
    let rights = [socket.as_raw_fd(); 3];
    let sent = sendmsg::<()>(
        socket.as_raw_fd(),
        &bytes,
        &[ControlMessage::ScmRights(&rights)],
        MsgFlags::empty(),
        None,
    );
    // Kernels with SO_PASSRIGHTS refuse the descriptors already at the sender.
    if let Err(error) = sent {
        assert_eq!(error, nix::Error::EPERM);
        return;
    }
    assert!(matches!(
        answer(socket.as_fd()),
        Err(RegistrationError::Rejected { reason: Reason::Malformed, .. })
    ));
}

#[test]
fn a_second_daemon_keeps_off_though_the_first_does_not_answer_and_has_a_full_backlog() {
    let daemon = Laxityd::start(SMALL);
    daemon.signal(Signal::SIGSTOP);
    let mut backlog = Vec::new();
    while let Ok(socket) = connect(&daemon.socket()) {
        backlog.push(socket);
    }
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_laxityd"))
        .arg("--config")
        .arg(daemon.config_file())
        .args(["--set", "metrics="])
        .output()
        .unwrap();
    daemon.signal(Signal::SIGCONT);
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("another laxityd"), "{said}");
    drop(backlog);
    let client = eventually("the first has worked off its backlog", || {
        let client = daemon.attach("worker");
        client.is_scheduled().then_some(client)
    });
    assert!(goes_scheduled(&mut client.lane(), &flow(Stage::P2d, 10)));
}

#[test]
fn a_daemon_that_ends_removes_its_own_sockets_only() {
    let mut daemon = Laxityd::start(SMALL);
    let control = daemon.folder.path().join("control.sock");
    std::fs::remove_file(&control).unwrap();
    std::fs::write(&control, "another's").unwrap();
    daemon.signal(Signal::SIGTERM);
    assert!(daemon.end().success());
    assert!(!daemon.socket().exists());
    assert_eq!(std::fs::read_to_string(&control).unwrap(), "another's");
}

#[test]
fn whatever_ends_a_flow_takes_its_bytes_off_the_wire() {
    const CHUNK: u64 = 64 << 10;
    let daemon = Laxityd::start(SMALL);
    let (client, mut lane) = daemon.worker("client");
    let flying = |bytes| {
        let what = format!("{bytes} bytes in flight");
        until(&what, || in_flight(&daemon) == bytes);
    };
    for stage in [Stage::KvReuse, Stage::Collective, Stage::P2d, Stage::Weights] {
        // The flow is permitted whole, on credit from the second collective on. A part of it
        // completes.
        for _ in 0..2 {
            let mut ticket = lane.submit(&flow(stage, CHUNK / 4));
            assert!(lane.wait(&mut ticket).last);
            flying(CHUNK / 4);
            lane.complete(&ticket, CHUNK / 8);
            flying(CHUNK / 8);
            // The client completes more bytes than are in flight.
            lane.complete(&ticket, CHUNK);
            flying(0);
            let mut ticket = lane.submit(&flow(stage, CHUNK / 4));
            assert!(lane.wait(&mut ticket).last);
            lane.complete(&ticket, 1);
            flying(CHUNK / 4 - 1);
            lane.cancel(ticket);
            flying(0);
        }
        // The flow is sent in chunks: the window is full, and the rest waits.
        let mut ticket = lane.submit(&flow(stage, 2 * WINDOW));
        let permitted = lane.wait(&mut ticket).bytes;
        flying(WINDOW);
        lane.complete(&ticket, permitted);
        lane.cancel(ticket);
        flying(0);
    }
    // First the owner of the lane goes away, then the client.
    let mut ticket = lane.submit(&flow(Stage::P2d, CHUNK));
    assert!(lane.wait(&mut ticket).last);
    flying(CHUNK);
    drop(lane);
    flying(0);
    let mut lane = client.lane();
    let mut ticket = lane.submit(&flow(Stage::KvReuse, CHUNK));
    assert!(lane.wait(&mut ticket).last);
    flying(CHUNK);
    drop((lane, client));
    flying(0);
}

/// Submits two windows of `stage` and completes nothing. So a window stays in flight while the
/// tickets exist.
fn grab(lane: &mut Lane, stage: Stage) -> Vec<laxity_client::Ticket> {
    (0..8).map(|_| lane.submit(&flow(stage, WINDOW / 4))).collect()
}

#[test]
fn a_piece_has_the_time_that_it_needs_on_the_port_while_others_wait() {
    let daemon = Laxityd::start(SMALL);
    let (reader, other) = (daemon.client("reader"), daemon.client("other"));
    let (mut lane, mut others) = (reader.lane(), other.lane());
    // Half a second of the port in one piece, of which nothing completes before its end.
    const PIECE: u64 = 64 << 20;
    let piece = Flow { whole: true, deadline_ns: u64::MAX / 2, ..flow(Stage::P2d, PIECE) };
    let mut ticket = lane.submit(&piece);
    let permit = lane.wait(&mut ticket);
    assert_eq!((permit.bytes, permit.last, permit.bypassed), (PIECE, true, false));
    let mut waiting = others.submit(&flow(Stage::P2d, WINDOW));
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(daemon.status().totals.set_aside_bytes, 0);
    lane.complete(&ticket, PIECE);
    assert!(!others.wait(&mut waiting).bypassed);
    others.complete(&waiting, WINDOW);
    // A piece that takes much longer than pieces did is silence.
    let mut ticket = lane.submit(&piece);
    assert!(lane.wait(&mut ticket).last);
    until("it is set aside", || {
        assert!(goes_scheduled(&mut others, &flow(Stage::P2d, 4 * WINDOW)));
        daemon.status().totals.set_aside_bytes == PIECE
    });
}

#[test]
fn a_silent_client_costs_the_others_its_patience_and_pays_when_it_speaks_again() {
    let mut daemon = Laxityd::start(SMALL);
    let (silent, honest) = (daemon.client("silent"), daemon.client("honest"));
    let (mut silent_lane, mut lane) = (silent.lane(), honest.lane());
    let mut held = grab(&mut silent_lane, Stage::P2d);
    until("it holds the window", || in_flight(&daemon) == WINDOW);
    // The bytes are written off only after ten seconds, the default `completion_timeout`.
    for _ in 0..20 {
        assert!(goes_scheduled(&mut lane, &flow(Stage::P2d, WINDOW)));
    }
    let status = daemon.status();
    let row = |name: &str| status.clients.iter().find(|c| c.name == name).unwrap().clone();
    assert_eq!((row("silent").owed_bytes, row("silent").held), (WINDOW, true));
    assert_eq!((row("honest").owed_bytes, row("honest").held), (0, false));
    assert_eq!(status.totals.set_aside_bytes, WINDOW);
    assert_eq!(status.totals.written_off_bytes, 0);
    until("it is a metric", || daemon.metric("laxity_owed_bytes", "") == WINDOW as f64);
    let warning = daemon.await_log("a client completes nothing while others wait");
    assert!(warning.contains("silent"), "{warning}");
    // The client completes its owed bytes, and the rest of its flows is scheduled.
    let left = held.iter_mut();
    let bytes: u64 = left.map(|ticket| finish(&mut silent_lane, ticket)).sum();
    assert_eq!(bytes, 2 * WINDOW);
    until("nothing is owed or in flight", || {
        let status = daemon.status();
        let owed: u64 = status.clients.iter().map(|client| client.owed_bytes).sum();
        let held = status.clients.iter().any(|client| client.held);
        owed == 0 && !held && status.ports[0].in_flight_bytes == 0
    });
}

#[test]
fn one_slow_moment_on_all_ports_does_not_make_an_owner_suspect() {
    // A job has one process for each NIC, and none of them runs for a while.
    let nics = ["eth0", "eth1", "eth2", "eth3"];
    let config: String = nics.iter().map(|nic| SMALL.replace("eth0", nic)).collect();
    let daemon = Laxityd::start(&config);
    let (_honest, mut lane) = daemon.worker("honest");
    let on = |nic: u8, bytes| Flow { nic, ..flow(Stage::P2d, bytes) };
    let slow: Vec<_> = nics.iter().map(|nic| daemon.client(nic)).collect();
    let mut lanes: Vec<_> = slow.iter().map(laxity_client::Client::lane).collect();
    let mut tickets: Vec<_> = (lanes.iter_mut().enumerate())
        .map(|(nic, lane)| lane.submit(&on(nic as u8, 2 * WINDOW)))
        .collect();
    until("each holds the window of its port", || {
        let ports = daemon.status().ports;
        let full = ports.iter().filter(|port| port.in_flight_bytes == WINDOW);
        full.count() == nics.len()
    });
    // Others wait on each port for several times the time limit of a silent client.
    let begun = std::time::Instant::now();
    while begun.elapsed() < Duration::from_millis(600) {
        for nic in 0..nics.len() {
            assert!(goes_scheduled(&mut lane, &on(nic as u8, WINDOW)));
        }
    }
    let owed: u64 = daemon.status().clients.iter().map(|c| c.owed_bytes).sum();
    assert_eq!(owed, nics.len() as u64 * WINDOW);
    for (lane, ticket) in lanes.iter_mut().zip(&mut tickets) {
        assert_eq!(finish(lane, ticket), 2 * WINDOW);
    }
}

#[test]
fn what_attaches_anew_after_it_held_the_window_goes_unscheduled() {
    let mut daemon = Laxityd::start(SMALL);
    let (_honest, mut lane) = daemon.worker("honest");
    let hostile = daemon.attach("hostile");
    let mut hostile_lane = hostile.lane();
    let held = grab(&mut hostile_lane, Stage::Collective);
    // The honest client sends on credit until the daemon sees that another flow waits. Until then,
    // the hostile client keeps nobody waiting and does no harm.
    until("it holds the window", || in_flight(&daemon) == WINDOW);
    assert!(goes_scheduled(&mut lane, &flow(Stage::P2d, WINDOW)));
    drop((held, hostile_lane, hostile));
    until("its owner is distrusted", || !daemon.status().distrusted.is_empty());
    let status = daemon.status();
    let own = nix::unistd::geteuid().as_raw();
    assert_eq!(status.distrusted.len(), 1, "{:?}", status.distrusted);
    assert_eq!(status.distrusted[0].uid, own);
    daemon.await_log("distrusts an owner");
    // A new client of the owner is unscheduled. An attached one that completes its bytes is
    // scheduled.
    let hostile = daemon.attach("hostile");
    let mut hostile_lane = hostile.lane();
    let mut ticket = hostile_lane.submit(&flow(Stage::Collective, 8 * WINDOW));
    let permit = hostile_lane.wait(&mut ticket);
    assert_eq!((permit.bytes, permit.level), (8 * WINDOW, 255));
    assert_eq!(in_flight(&daemon), 0);
    let mut scheduled = lane.submit(&flow(Stage::P2d, WINDOW / 4));
    assert_ne!(lane.wait(&mut scheduled).level, 255);
    lane.complete(&scheduled, WINDOW / 4);
}

#[test]
fn processes_that_are_killed_while_nobody_else_waits_leave_their_owner_in_good_standing() {
    let daemon = Laxityd::start(SMALL);
    for _ in 0..6 {
        let mut killed = ByHand::attach(&daemon, "killed");
        killed.publish(&[Record::Submit(flow(Stage::P2d, 4 * WINDOW))]);
        until("it holds the window", || in_flight(&daemon) == WINDOW);
        drop(killed);
        until("it is gone", || in_flight(&daemon) == 0);
    }
    assert_eq!(daemon.status().distrusted, []);
}
