//! That what a host is charged for is given back, once, whatever becomes of its batches and requests.

use super::*;

fn leave(world: &mut World, daemons: &[&Daemon]) {
    for daemon in daemons {
        world.cluster.detach(world.now, daemon.id, daemon.stream);
    }
    world.now = world.now + Span::from_millis(200);
    world.settle();
}

#[test]
fn a_request_that_moves_on_leaves_behind_what_hosts_said_that_stay() {
    let mut world = World::new();
    let (mut a, mut b) = (world.join("a"), world.join("b"));
    world.report(&mut a, vec![arrived(2, Vec::new())]);
    // Not the owner, but the first to tell of the request.
    world.report(&mut b, vec![arrived(2, vec![request(1, 500, 9)])]);
    world.report(&mut a, vec![arrived(3, vec![request(1, 500, 0)])]);
    assert_eq!(world.cluster.audit(), Ok(()));
    leave(&mut world, &[&b]);
    assert_eq!(world.cluster.audit(), Ok(()));
    leave(&mut world, &[&a]);
    assert_eq!(world.cluster.audit(), Ok(()));
}

#[test]
fn a_request_that_an_invited_host_moves_is_that_hosts_if_its_own_stays_behind() {
    let mut world = World::new();
    let (mut a, mut b, mut c) = (world.join("a"), world.join("b"), world.join("c"));
    let invite = |batch, host: &str| {
        Kind::BatchArrived(BatchArrived {
            batch,
            hosts: vec![host.into()],
            ..BatchArrived::default()
        })
    };
    world.report(&mut a, vec![arrived(2, Vec::new())]);
    world.report(&mut b, vec![arrived(2, vec![request(1, 500, 9)])]);
    world.report(&mut c, vec![invite(3, "a")]);
    // It owns the batch that the request leaves, and was invited to where it goes.
    world.report(&mut a, vec![arrived(3, vec![request(1, 500, 5)])]);
    assert_eq!(world.cluster.audit(), Ok(()));
    leave(&mut world, &[&b]);
    assert_eq!(world.cluster.counters().0.requests, 1);
    assert_eq!(world.cluster.audit(), Ok(()));
    leave(&mut world, &[&a, &c]);
    assert_eq!(world.cluster.audit(), Ok(()));
}
