//! A coordinator learns of NICs that come and go while the daemon runs.

use laxity_client::{Flow, Stage};
use laxity_wire::v1::event::Event as Kind;

use crate::fake::{Fake, Peer};
use crate::support::host::FakeHost;
use crate::support::{flow, send, until};
use crate::{cluster, in_force, lines, pruning};

fn names(peer: &Peer) -> Vec<&str> {
    peer.hello.ports.iter().step_by(2).map(|port| port.name.as_str()).collect()
}

/// Waits for a report of a port's load. Returns how many flows it says have completed.
fn completed(peer: &Peer, port: u32) -> u64 {
    peer.event("a load", |kind| match kind {
        Kind::PortLoad(load) if load.port == port => Some(load.completed_flows),
        _ => None,
    })
}

#[test]
fn the_addresses_of_a_function_are_those_of_its_ports_owner() {
    let Some(host) = FakeHost::new() else { return };
    host.plug("mlx5_0", 100);
    host.plug("mlx5_1", 100);
    host.plug_function("mlx5_2", "mlx5_1", 100, "fd00::2");
    let fake = Fake::start();
    let _daemon = host.start(&lines(&format!("http://{}", fake.address), "host-a", 600_000));
    let peer = fake.welcomed(5);
    assert_eq!(names(&peer), ["mlx5_0", "mlx5_1", "default"]);
    let address: Vec<u8> = "fd00::2".parse::<std::net::Ipv6Addr>().unwrap().octets().into();
    let tell = |port: &&laxity_wire::v1::PortInfo| port.addresses.contains(&address);
    assert_eq!(peer.hello.ports.iter().find(tell).unwrap().name, "mlx5_1");
}

#[test]
fn a_daemon_with_another_nic_greets_the_coordinator_again_and_keeps_its_order() {
    let Some(host) = FakeHost::new() else { return };
    host.plug("mlx5_0", 100);
    let fake = Fake::start();
    let endpoint = format!("http://{}", fake.address);
    let mut daemon = host.start(&lines(&endpoint, "host-a", 600_000));
    let peer = fake.welcomed(5);
    assert_eq!(names(&peer), ["default"]);
    peer.order(pruning(5, 9, &[70]));
    in_force(&daemon, 9);
    let mut old = daemon.client("old").lane();
    until("a flow is reported", || {
        send(&mut old, &flow(Stage::P2d, 1000));
        completed(&peer, 0) > 0
    });

    host.plug("mlx5_1", 200);
    let again = fake.welcomed(5);
    assert_eq!(names(&again), ["mlx5_0", "mlx5_1", "default"]);
    assert_eq!(completed(&again, 4), 0, "`default` has flows, but the stream before reported them");
    assert_eq!(again.hello.ports[2].rate_bytes_per_s, 25_000_000_000);
    daemon.await_log("connects again");
    until("it is connected", || cluster(&daemon).connected);
    let after = cluster(&daemon);
    assert_eq!((after.failures, after.order.as_str()), (0, "cluster"), "nothing failed");

    // The link of the new NIC has the order that the others had before.
    let mut lane = daemon.client("engine").lane();
    let pruned = Flow { nic: 1, batch: 7, request: 70, ..flow(Stage::P2d, 1000) };
    assert_eq!(send(&mut lane, &pruned)[0].level, laxity_policy::Level::SCAVENGER.0);
}
