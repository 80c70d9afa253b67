//! Tests that each charge of a host is refunded once, whatever happens to its batches and requests.

use super::*;

fn leave(world: &mut World, daemons: &[&Daemon]) {
    for daemon in daemons {
        world.detach(daemon);
    }
    world.now = world.now + Span::from_millis(200);
    world.settle();
}

#[test]
fn a_request_that_moves_on_leaves_behind_what_hosts_said_that_stay() {
    let (mut world, [mut a, mut b]) = World::of(["a", "b"]);
    world.report(&mut a, [arrived(2, [])]);
    // b is not the owner, but it reports the request first.
    world.report(&mut b, [arrived(2, [request(1, 500, 9)])]);
    world.report(&mut a, [arrived(3, [request(1, 500, 0)])]);
    leave(&mut world, &[&b]);
    leave(&mut world, &[&a]);
}

#[test]
fn loads_that_a_snapshot_does_not_mention_are_gone_from_the_requests_of_others_too() {
    let (mut world, [mut a, mut b]) = World::of(["a", "b"]);
    world.report(&mut a, [arrived(1, [request(11, 900, 10)])]);
    world.report(&mut b, [arrived(1, [request(11, 900, 5000)])]);
    world.detach(&b);
    let mut b = world.attend(&hello("b"));
    world.snapshot(&mut b, [arrived(1, [])]);
    world.settle_and_read(&mut [&mut a, &mut b]);
    let told = world.explain(1);
    assert_eq!((told.bottleneck_bytes, b.replica.sigma()), (10, vec![1]));
}

#[test]
fn a_snapshot_that_begins_again_before_it_has_ended_is_one_with_what_was_said_of_it() {
    let (mut world, [mut a]) = World::of(["a"]);
    let batch = |id: u64| arrived(id, [request(id * 10, 900, 10)]);
    world.report(&mut a, [batch(1), batch(2), batch(3)]);
    world.send(&mut a, SnapshotPiece::Part, [batch(1)]);
    // The daemon starts its snapshot again. The protocol has no sign for that, so the coordinator
    // adds the new pieces to the same snapshot.
    world.send(&mut a, SnapshotPiece::Part, [batch(2)]);
    assert_eq!(world.counters().batches, 3, "nothing is gone yet");
    world.send(&mut a, SnapshotPiece::End, []);
    world.settle_and_read(&mut [&mut a]);
    assert_eq!(a.replica.sigma(), [1, 2]);
    // A daemon that starts a new snapshot first ends the open one.
    world.send(&mut a, SnapshotPiece::Part, [batch(1)]);
    world.send(&mut a, SnapshotPiece::End, []);
    world.send(&mut a, SnapshotPiece::Part, [batch(2)]);
    world.send(&mut a, SnapshotPiece::End, [batch(3)]);
    world.settle_and_read(&mut [&mut a]);
    assert_eq!(a.replica.sigma(), [2, 3]);
    // A stream that breaks within a snapshot is followed by a new snapshot.
    world.send(&mut a, SnapshotPiece::Part, [batch(2)]);
    world.detach(&a);
    let mut a = world.attend(&hello("a"));
    world.snapshot(&mut a, [arrived(3, [])]);
    world.settle_and_read(&mut [&mut a]);
    assert_eq!(a.replica.sigma(), [3]);
    assert_eq!(world.counters().requests, 0, "the batch's request was not mentioned");
    // A host that is drained within a snapshot also sends a new one.
    world.send(&mut a, SnapshotPiece::Part, [batch(4)]);
    assert_eq!(world.drain("a", true), Ok(2));
    assert_eq!(world.drain("a", false), Ok(0));
    world.snapshot(&mut a, [batch(5)]);
    world.settle_and_read(&mut [&mut a]);
    assert_eq!(a.replica.sigma(), [5]);
}

#[test]
fn one_that_leaves_a_batch_is_told_that_its_requests_are_none_of_its_business() {
    let (mut world, [mut a, mut b]) = World::of(["a", "b"]);
    let heavy = request(12, 400, RATE);
    world.report(&mut a, [arrived(1, [request(11, 400, 1000), heavy])]);
    world.report(&mut b, [arrived(1, [])]);
    world.settle_and_read(&mut [&mut a, &mut b]);
    assert!(b.replica.pruned.contains_key(&12));
    // No run has happened yet, but what is sent agrees with itself.
    world.report(&mut b, [finished(1)]);
    world.read(&mut b);
    assert!(b.replica.pruned.is_empty() && b.replica.ranks.is_empty());
    // The request moves to a batch that b takes no part in.
    world.report(&mut b, [arrived(1, [])]);
    world.settle_and_read(&mut [&mut a, &mut b]);
    assert!(b.replica.pruned.contains_key(&12));
    world.report(&mut a, [arrived(2, [request(12, 400, RATE)])]);
    world.settle_and_read(&mut [&mut a, &mut b]);
    assert!(b.replica.pruned.is_empty());
    assert_eq!(b.replica.sigma(), [1]);
}

#[test]
fn what_ends_between_two_runs_is_told_at_once_and_changes_nothing_else() {
    let (mut world, [mut a]) = World::of(["a"]);
    let heavy = request(12, 400, RATE);
    world.report(
        &mut a,
        [
            arrived(1, [request(11, 400, 1000), heavy]),
            arrived(2, [request(21, 300, 10)]),
            arrived(3, [request(31, 900, 10)]),
        ],
    );
    world.settle_and_read(&mut [&mut a]);
    let before = a.replica.clone();
    // No run has happened since. This order has the ranks of the last run without the ended ones.
    world.report(&mut a, [finished(1), arrived(4, [])]);
    world.read(&mut a);
    assert_eq!(a.replica.orders, before.orders + 1);
    let mut left = before.ranks.clone();
    left.remove(&1);
    assert_eq!((&a.replica.ranks, a.replica.pruned.len()), (&left, 0));
    assert_eq!(a.replica.considered, before.considered);
    // A full order says the same.
    world.resync(&a);
    world.read(&mut a);
    assert_eq!((&a.replica.ranks, a.replica.pruned.len()), (&left, 0));
    world.settle_and_read(&mut [&mut a]);
    assert_eq!(a.replica.considered, before.considered + 1);
    assert_eq!(a.replica.sigma(), [2, 3, 4]);
}
