//! Tests of fetch tokens, and of the addresses by which fetches name their victim.

use super::*;

#[test]
fn readers_of_a_hot_port_get_tokens_by_rank() {
    let mut world = World::new();
    let mut victim = world.join("victim");
    let (mut a, mut b, mut c) = (world.join("a"), world.join("b"), world.join("c"));
    let wants = |fetch, batch| match (reads(fetch, batch, batch * 10), batch) {
        // The port's name and its address mean the same port.
        (Kind::FetchWanted(said), 2) => Kind::FetchWanted(FetchWanted {
            victim_host: "victim".into(),
            victim_address: Vec::new(),
            ..said
        }),
        (by_address, _) => by_address,
    };
    for (daemon, batch, due) in [(&mut a, 1, 9000), (&mut b, 2, 5000), (&mut c, 3, 1000)] {
        world.report(daemon, [arrived(batch, [request(batch * 10, due, 0)])]);
    }
    world.settle();
    for (daemon, batch) in [(&mut a, 1), (&mut b, 2), (&mut c, 3)] {
        world.report(daemon, [wants(5, batch)]);
    }
    world.settle_and_read(&mut [&mut a, &mut b, &mut c, &mut victim]);
    let holds = |daemon: &Daemon| daemon.replica.tokens.contains(&5);
    assert_eq!([&a, &b, &c].map(holds), [false, false, true]);
    let waits = |daemon: &Daemon| daemon.replica.held.contains(&5);
    assert_eq!([&a, &b, &c].map(waits), [true, true, false]);
    world.report(&mut c, [fetched(5)]);
    world.settle_and_read(&mut [&mut a, &mut b]);
    assert_eq!([&a, &b].map(holds), [false, true]);
    assert_eq!([&a, &b].map(waits), [true, false]);
    // b never finishes, so a gets a token when b's lease ends.
    world.now = world.now + Span::from_millis(60);
    world.settle_and_read(&mut [&mut a]);
    assert!(holds(&a) && !waits(&a));
    // A more urgent fetch takes the token. A full order contains both changes.
    world.report(&mut c, [wants(6, 3)]);
    world.settle_and_read(&mut [&mut a, &mut c]);
    assert!(waits(&a) && c.replica.tokens.contains(&6));
    world.resync(&a);
    world.settle_and_read(&mut [&mut a]);
    assert!(waits(&a) && !holds(&a));
}

#[test]
fn an_address_that_nobody_named_is_nobodys_and_one_is_the_first_hosts() {
    let mut world = World::new();
    let mut a = world.join("a");
    let want = |fetch| reads(fetch, 1, 0);
    world.report(&mut a, [arrived(1, [request(10, 900, 0)]), want(1)]);
    world.settle_and_read(&mut [&mut a]);
    assert!(a.replica.tokens.is_empty() && a.replica.held.is_empty());
    assert!(a.replica.refusals.is_empty(), "{:?}", a.replica.refusals);
    let mut victim = world.join("victim");
    let mut thief = hello("thief");
    thief.ports[0].addresses = vec![ADDRESS.to_vec()];
    let (thief, _) = world.cluster.attend(world.now, &thief).expect("welcome");
    world.report(&mut a, [want(2), want(3)]);
    world.settle_and_read(&mut [&mut a, &mut victim]);
    assert!(a.replica.tokens.contains(&2) && a.replica.held.contains(&3));
    let first = world.cluster.hosts.addresses[&(0, ADDRESS)];
    assert_eq!(world.cluster.hosts.port_hosts[first.0 as usize], Some(victim.id));
    assert_ne!(victim.id, thief);
    let mut short = hello("short");
    short.ports[0].addresses = vec![vec![1; 4]];
    assert!(world.cluster.attend(world.now, &short).is_err());
}

/// Returns the victim, and a reader with one fetch that holds the only token and others that wait.
fn waiting_reader(world: &mut World, fetches: u64) -> (Daemon, Daemon) {
    let victim = world.join("victim");
    let mut reader = world.join("reader");
    let mut said = vec![arrived(1, [request(10, 9000, 0), request(11, 9000, 0)])];
    said.extend((1..=fetches).map(|fetch| reads(fetch, 1, 10)));
    world.report(&mut reader, said);
    world.settle_and_read(&mut [&mut reader]);
    let waits: Vec<u64> = reader.replica.held.iter().copied().collect();
    assert_eq!(waits, (2..=fetches).collect::<Vec<_>>());
    (victim, reader)
}

fn reads(fetch: u64, batch: u64, request: u64) -> Kind {
    Kind::FetchWanted(FetchWanted {
        fetch,
        batch,
        request,
        victim_address: ADDRESS.to_vec(),
        bytes: 1000,
        ..FetchWanted::default()
    })
}

#[test]
fn a_fetch_that_nothing_keeps_any_more_is_let_go() {
    let mut world = World::new();
    let (_victim, mut reader) = waiting_reader(&mut world, 3);
    world.report(&mut reader, [fetched(2)]);
    world.settle_and_read(&mut [&mut reader]);
    assert!(!reader.replica.held.contains(&2) && reader.replica.held.contains(&3));
    world.drain("victim", true).expect("known");
    world.settle_and_read(&mut [&mut reader]);
    assert!(reader.replica.held.is_empty(), "{:?}", reader.replica.held);
}

#[test]
fn a_token_whose_lease_ended_before_its_host_read_of_it_lets_go_all_the_same() {
    let mut world = World::new();
    let (_victim, mut reader) = waiting_reader(&mut world, 2);
    for _ in 0..3 {
        world.now = world.now + Span::from_millis(60);
        world.settle();
    }
    world.settle_and_read(&mut [&mut reader]);
    assert!(reader.replica.held.is_empty(), "{:?}", reader.replica.held);
}

#[test]
fn the_fetches_of_a_daemon_that_was_restarted_are_not_those_of_the_one_before() {
    let mut world = World::new();
    let (_victim, mut reader) = waiting_reader(&mut world, 2);
    let mut other = world.join("other");
    world.report(&mut other, [arrived(2, [request(20, 100, 0)]), reads(7, 2, 20)]);
    world.settle_and_read(&mut [&mut reader, &mut other]);
    assert!(other.replica.tokens.contains(&7) && reader.replica.held.contains(&1));
    // The same number now names a fetch of another request, whose batch runs.
    world.detach(&reader);
    let mut reader = world.attend(&hello("reader"));
    let mut batch = arrived(3, [request(30, 9000, 0)]);
    if let Kind::BatchArrived(said) = &mut batch {
        said.started = true;
    }
    world.snapshot(&mut reader, [batch, reads(1, 3, 30)]);
    world.settle_and_read(&mut [&mut reader]);
    assert!(!reader.replica.held.contains(&1), "it blocks a GPU");
}

#[test]
fn a_fetch_that_crosses_the_end_of_its_batch_is_no_offence() {
    let mut world = World::new();
    let (_victim, mut reader) = waiting_reader(&mut world, 1);
    world.report(&mut reader, [finished(1), reads(9, 1, 10)]);
    world.settle_and_read(&mut [&mut reader]);
    assert!(reader.replica.refusals.is_empty(), "{:?}", reader.replica.refusals);
}

#[test]
fn addresses_come_and_go_without_the_rest_of_what_a_host_said() {
    let mut world = World::new();
    let (victim, mut reader) = waiting_reader(&mut world, 2);
    // The victim's successor has another name and attends before the victim is forgotten.
    let mut successor = hello("successor");
    successor.ports[0].addresses = vec![ADDRESS.to_vec()];
    let successor = world.attend(&successor);
    let owner = |world: &World| {
        let port = world.cluster.hosts.addresses.get(&(0, ADDRESS));
        port.and_then(|port| world.cluster.hosts.port_hosts[port.0 as usize])
    };
    assert_eq!(owner(&world), Some(victim.id));
    let mut moved = hello("victim");
    moved.ports[0].addresses = vec![vec![0xcd; 16]];
    let again = world.attend(&moved);
    assert_eq!((again.id, owner(&world)), (victim.id, Some(successor.id)));
    assert_eq!(world.cluster.hosts.addresses.len(), 2);
    // The victim's earlier reports hold: the reader's fetch still waits at its port.
    world.settle_and_read(&mut [&mut reader]);
    assert!(reader.replica.held.contains(&2));
}
