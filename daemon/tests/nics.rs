//! Tests of NICs that come and go while the daemon runs.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use laxity_client::hints::{self, Asked};
use laxity_client::{Flow, Permit, Stage, Ticket};
use laxity_wire::{ClientStatus, PortStatus};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::ForkResult;
use support::host::FakeHost;
use support::{Laxityd, PLAYS, ROLE, Role, eventually, flow, goes_scheduled, send, take, until};

/// The daemon writes no bytes off while a test waits for the daemon's next look at the NICs.
const PATIENT: &str = "[tuning]\ncompletion_timeout = \"10min\"\n";

/// Returns the names of the NICs, those that are gone in parentheses.
fn nics(daemon: &Laxityd) -> String {
    let ports = daemon.status().ports;
    let egress = ports.iter().filter(|port| port.direction == "egress");
    let shown = |port: &PortStatus| match port.absent {
        true => format!("({})", port.name),
        false => port.name.clone(),
    };
    egress.map(shown).collect::<Vec<_>>().join(" ")
}

/// Returns the bytes that were permitted on the egress of a NIC.
fn permitted(daemon: &Laxityd, nic: &str) -> u64 {
    let ports = daemon.status().ports;
    let port = ports.iter().find(|port| port.name == nic && port.direction == "egress").unwrap();
    port.stages.iter().map(|stage| stage.permitted_bytes).sum()
}

fn of(nic: u8, bytes: u64) -> Flow {
    Flow { nic, ..flow(Stage::P2d, bytes) }
}

fn is_scheduled(permits: &[Permit]) -> bool {
    permits.iter().all(|permit| !permit.bypassed && permit.level != 255)
}

#[test]
fn a_nic_that_is_plugged_in_is_scheduled_and_the_flows_of_others_go_on() {
    let Some(host) = FakeHost::new() else { return };
    host.plug("mlx5_1", 100);
    let mut daemon = host.start("");
    assert_eq!(nics(&daemon), "default");
    let (old, mut lane) = daemon.worker("old");
    assert_eq!((old.nic("mlx5_1"), old.nic("mlx5_0")), (0, 0), "it stands for all");
    let ends = Arc::new(AtomicBool::new(false));
    let until_then = Arc::clone(&ends);
    let sender = std::thread::spawn(move || {
        let mut sent = 0;
        while !until_then.load(Ordering::Relaxed) {
            assert!(is_scheduled(&send(&mut lane, &of(0, 1 << 20))));
            sent += 1 << 20;
            std::thread::sleep(Duration::from_millis(5));
        }
        // A client that was there before uses the new NIC, too.
        assert!(is_scheduled(&send(&mut lane, &of(1, 1 << 20))));
        sent
    });
    until("it has sent", || permitted(&daemon, "default") > 0);

    host.plug("mlx5_0", 25);
    until("the NIC is there", || nics(&daemon) == "mlx5_1 mlx5_0 default");
    daemon.await_log("a NIC was added");
    assert_eq!(daemon.status().ports[2].rate_bytes_per_s, 3_125_000_000);
    let rates = || daemon.metric("laxity_port_rate_bytes_per_second", "mlx5_0");
    until("metrics have both ports", || rates() == 2.0 * 3_125_000_000.0);
    let (new, mut lane) = daemon.worker("new");
    let numbers =
        |client: &laxity_client::Client| ["mlx5_1", "mlx5_0", "eth9"].map(|n| client.nic(n));
    assert_eq!((numbers(&new), numbers(&old)), ([0, 1, 2], [0, 1, 2]));
    assert!(is_scheduled(&send(&mut lane, &of(1, 3 << 20))));
    assert!(is_scheduled(&send(&mut lane, &of(2, 5 << 20))));
    let before = permitted(&daemon, "mlx5_1");
    until("the old flows go on", || permitted(&daemon, "mlx5_1") > before);
    ends.store(true, Ordering::Relaxed);
    let sent: u64 = sender.join().unwrap();
    until("each byte counts once", || {
        let all = ["mlx5_1", "mlx5_0", "default"].map(|nic| permitted(&daemon, nic));
        all[1] == 4 << 20 && all.iter().sum::<u64>() == sent + (9 << 20)
    });
    let exported = || daemon.metric("laxity_permitted_bytes_total", "") as u64;
    until("metrics agree, under whatever names", || exported() == sent + (9 << 20));

    let order = |daemon: &Laxityd| daemon.status().ports.into_iter().map(|port| port.name);
    let before: Vec<String> = order(&daemon).collect();
    assert!(!daemon.control().reload().unwrap().contains("restart"));
    assert!(order(&daemon).eq(before), "a reload keeps the NICs and their numbers");
    assert!(is_scheduled(&send(&mut lane, &of(1, 1 << 20))));
}

#[test]
fn a_function_has_the_nic_of_its_ports_owner_also_if_it_comes_later_and_after_a_fork() {
    let Some(host) = FakeHost::new() else { return };
    host.plug("mlx5_0", 100);
    host.plug("mlx5_1", 25);
    host.plug_function("mlx5_2", "mlx5_1", 100, "fe80::2");
    host.plug_function("mlx5_5", "mlx5_7", 50, "fe80::5");
    let daemon = host.start("");
    assert_eq!(nics(&daemon), "mlx5_0 mlx5_1 mlx5_5 default", "mlx5_7 is elsewhere");
    host.enter();
    let (client, mut lane) = daemon.worker("engine");
    let numbers = |names: [&str; 4]| names.map(|name| client.nic(name));
    assert_eq!(numbers(["mlx5_1", "mlx5_2", "mlx5_5", "eth9"]), [1, 1, 2, 3]);
    assert!(is_scheduled(&send(&mut lane, &of(client.nic("mlx5_2"), 3 << 20))));
    until("its owner has the bytes", || permitted(&daemon, "mlx5_1") == 3 << 20);

    host.plug_function("mlx5_3", "mlx5_0", 100, "fe80::3");
    assert_eq!(client.nic("mlx5_3"), 0, "at once");
    // SAFETY: the child calls nothing but this library, and ends by _exit.
    match unsafe { nix::unistd::fork() }.unwrap() {
        ForkResult::Child => {
            let mut lane = client.lane();
            let is_attached = (0..2000).any(|_| {
                std::thread::sleep(Duration::from_millis(10));
                send(&mut lane, &of(0, 1)).iter().all(|permit| !permit.bypassed)
            });
            let found = [client.nic("mlx5_2"), client.nic("mlx5_3")];
            // SAFETY: the call accesses no memory.
            unsafe { nix::libc::_exit(i32::from(!is_attached || found != [1, 0])) };
        }
        ForkResult::Parent { child } => {
            assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, 0));
        }
    }
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(nics(&daemon), "mlx5_0 mlx5_1 mlx5_5 default", "nor is it found later");
}

#[test]
fn a_function_with_a_nic_in_the_configuration_has_that_one() {
    let Some(host) = FakeHost::new() else { return };
    host.plug("mlx5_0", 100);
    host.plug_function("mlx5_1", "mlx5_0", 100, "fe80::1");
    host.plug_function("mlx5_2", "mlx5_0", 100, "fe80::2");
    let nic = |name, rate| format!("[[nic]]\nname = {name:?}\nrate = {rate:?}\n");
    let daemon = host.start(&(nic("mlx5_1", "10Gbit") + &nic("mlx5_0", "auto")));
    host.enter();
    let client = daemon.client("engine");
    assert_eq!(["mlx5_0", "mlx5_1", "mlx5_2"].map(|name| client.nic(name)), [1, 0, 1]);
}

/// Plays a process whose library doesn't know the NICs of its transfers.
#[test]
fn transfers_role() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    for _ in 0..6 {
        let asked = Asked { bytes: 1 << 20, whole: true, ..Asked::default() };
        let transfer = hints::submit(&asked);
        assert_eq!(transfer.wait_whole(Duration::from_secs(60)), Some(false), "with a permit");
        transfer.complete(1 << 20).unwrap();
    }
    println!("{PLAYS}");
}

#[test]
fn transfers_of_unknown_nic_take_turns_on_those_of_the_process_or_of_the_host() {
    let Some(host) = FakeHost::new() else { return };
    host.plug("mlx5_0", 100);
    host.plug("mlx5_1", 100);
    let daemon = host.start("");
    let mut before = [0; 3];
    let mut play = |variable: &str, value: &str| {
        let socket = daemon.socket().display().to_string();
        let mut environment = vec![("LAXITY_SOCKET", socket), ("LAXITY_ATTACH_MS", "60000".into())];
        environment.push((variable, value.into()));
        let _ended = Role::start("transfers_role", "sender", &environment);
        let all = || ["mlx5_0", "mlx5_1", "default"].map(|nic| permitted(&daemon, nic) >> 20);
        let sum = before.iter().sum::<u64>() + 6;
        until("the daemon counted all", || all().iter().sum::<u64>() == sum);
        let more = core::array::from_fn::<_, 3, _>(|nic| all()[nic] - before[nic]);
        before = all();
        more
    };
    assert_eq!(play("UCX_NET_DEVICES", ""), [3, 3, 0]);
    assert_eq!(play("UCX_NET_DEVICES", "all"), [3, 3, 0]);
    assert_eq!(play("UCX_NET_DEVICES", "mlx5_0:1"), [6, 0, 0]);
    assert_eq!(play("LAXITY_NIC", "mlx5_1"), [0, 6, 0]);
    assert_eq!(play("LAXITY_NIC", "default"), [0, 0, 6]);
}

#[test]
fn a_nic_that_is_gone_holds_no_flow_and_is_scheduled_when_it_returns() {
    let Some(host) = FakeHost::new() else { return };
    host.plug("mlx5_0", 100);
    host.plug("mlx5_1", 100);
    let mut daemon = host.start(PATIENT);
    assert_eq!(nics(&daemon), "mlx5_0 mlx5_1 default");
    let (_client, mut lane) = daemon.worker("engine");
    let window = daemon.status().ports[2].window_bytes;
    // The window is full of bytes that never complete.
    let mut ticket: Ticket = lane.submit(&of(1, 1 << 30));
    assert!(take(&mut lane, &mut ticket, window) < 1 << 30);
    assert_eq!(lane.poll(&mut ticket), None, "the rest waits");
    // The client owes these bytes once they keep another client waiting.
    let (_other, mut waiting) = daemon.worker("other");
    let mut second = waiting.submit(&of(1, 1 << 30));
    take(&mut waiting, &mut second, 1);
    until("the first one is held", || daemon.status().clients.iter().any(|client| client.held));

    host.unplug("mlx5_1");
    let rest = eventually("the rest goes out", || lane.poll(&mut ticket));
    assert_eq!((rest.level, rest.last), (255, true));
    until("and that of the other", || waiting.poll(&mut second).is_some_and(|rest| rest.last));
    daemon.await_log("a NIC is gone");
    assert_eq!(nics(&daemon), "mlx5_0 (mlx5_1) default");
    until("metrics say so", || {
        daemon.metric("laxity_port_present", "mlx5_1") == 0.0
            && daemon.metric("laxity_port_present", "mlx5_0") == 2.0
    });
    let unscheduled = send(&mut lane, &of(1, 1 << 20));
    assert!(!is_scheduled(&unscheduled) && unscheduled.len() == 1, "{unscheduled:?}");
    until("it is counted", || daemon.status().totals.unknown_nic_flows == 1);
    assert!(goes_scheduled(&mut lane, &of(0, 1 << 20)), "other NICs are scheduled");
    until("nothing is held or in flight", || {
        let status = daemon.status();
        status.clients.iter().all(|client| !client.held && client.owed_bytes == 0)
            && status.ports[2].in_flight_bytes == 0
    });

    host.plug("mlx5_1", 50);
    until("it is back", || nics(&daemon) == "mlx5_0 mlx5_1 default");
    daemon.await_log("a NIC is back");
    assert_eq!(daemon.status().ports[2].rate_bytes_per_s, 6_250_000_000);
    assert!(is_scheduled(&send(&mut lane, &of(1, 64 << 20))));
    let status = daemon.status();
    let distrusted = |client: &ClientStatus| client.distrusted;
    assert!(status.distrusted.is_empty() && !status.clients.iter().any(distrusted), "{status:?}");
}
