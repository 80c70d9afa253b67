//! Tests of fetches, and of the addresses by which they name their victim.

use super::*;

fn reads(fetch: u64, batch: u64, request: u64) -> Kind {
    Kind::FetchWanted(FetchWanted {
        fetch,
        batch,
        request,
        victim_address: ADDRESS.to_vec(),
        bytes: RATE,
    })
}

/// Returns a cluster with a victim, and a reader with one fetch from it, which makes its request
/// late.
fn victim_and_reader() -> (World, Daemon, Daemon) {
    let (mut world, [victim, mut reader]) = World::of(["victim", "reader"]);
    let batch = arrived(1, [request(10, 500, 0), request(11, 500, 0)]);
    world.report(&mut reader, [batch, reads(1, 1, 10)]);
    world.settle_and_read(&mut [&mut reader]);
    assert!(reader.replica.pruned.contains_key(&10), "a second of bytes is due in half a second");
    (world, victim, reader)
}

#[test]
fn a_fetch_loads_the_port_that_it_reads_from_until_it_ends() {
    let (mut world, _victim, mut reader) = victim_and_reader();
    assert!(!reader.replica.pruned.contains_key(&11));
    assert_eq!(world.cluster.list_hosts(world.now).hosts[0].fetches, 1);
    // Said again, nothing changes.
    world.report(&mut reader, [reads(1, 1, 10)]);
    assert_eq!(world.cluster.list_hosts(world.now).hosts[0].fetches, 1);
    world.report(&mut reader, [fetched(1)]);
    assert_eq!(world.cluster.list_hosts(world.now).hosts[0].fetches, 0);
    assert!(reader.replica.refusals.is_empty(), "{:?}", reader.replica.refusals);
}

#[test]
fn a_victim_that_is_drained_or_gone_has_no_fetches() {
    let (mut world, _victim, reader) = victim_and_reader();
    world.drain("victim", true).expect("known");
    assert_eq!(world.cluster.fetches.of_host(reader.id).count(), 0);
}

#[test]
fn an_address_that_nobody_named_is_nobodys_and_one_is_the_first_hosts() {
    let (mut world, [mut a]) = World::of(["a"]);
    world.report(&mut a, [arrived(1, [request(10, 900, 0)]), reads(1, 1, 0)]);
    world.settle_and_read(&mut [&mut a]);
    assert_eq!(world.cluster.fetches.0.len(), 0);
    assert!(a.replica.refusals.is_empty(), "{:?}", a.replica.refusals);
    let victim = world.join("victim");
    let mut thief = hello("thief");
    thief.ports[0].addresses = vec![ADDRESS.to_vec()];
    let (thief, _) = world.cluster.attend(world.now, &thief).expect("welcome");
    world.report(&mut a, [reads(2, 1, 0)]);
    assert_eq!(world.cluster.fetches.0.len(), 1);
    let first = world.cluster.hosts.addresses[&(0, ADDRESS)][0];
    assert_eq!(world.cluster.hosts.port_hosts[first.0 as usize], Some(victim.id));
    assert_ne!(victim.id, thief);
    let mut short = hello("short");
    short.ports[0].addresses = vec![vec![1; 4]];
    assert!(world.cluster.attend(world.now, &short).is_err());
}

#[test]
fn the_fetches_of_a_daemon_that_was_restarted_are_not_those_of_the_one_before() {
    let (mut world, _victim, reader) = victim_and_reader();
    world.detach(&reader);
    let mut reader = world.attend(&hello("reader"));
    // The same number now names a fetch of another request.
    world.snapshot(&mut reader, [arrived(3, [request(30, 9000, 0)]), reads(1, 3, 30)]);
    let open: Vec<_> = world.cluster.fetches.of_host(reader.id).map(|(_, it)| it.request).collect();
    assert_eq!(open, [30]);
}

#[test]
fn a_fetch_that_crosses_the_end_of_its_batch_is_no_offence() {
    let (mut world, _victim, mut reader) = victim_and_reader();
    world.report(&mut reader, [finished(1), reads(9, 1, 10)]);
    world.settle_and_read(&mut [&mut reader]);
    assert!(reader.replica.refusals.is_empty(), "{:?}", reader.replica.refusals);
}

#[test]
fn addresses_come_and_go_without_the_rest_of_what_a_host_said() {
    let (mut world, victim, reader) = victim_and_reader();
    // The victim's successor has another name and attends before the victim is forgotten.
    let mut successor = hello("successor");
    successor.ports[0].addresses = vec![ADDRESS.to_vec()];
    let successor = world.attend(&successor);
    let owner = |world: &World| {
        let port = world.cluster.hosts.addresses.get(&(0, ADDRESS));
        port.and_then(|ports| world.cluster.hosts.port_hosts[ports[0].0 as usize])
    };
    assert_eq!(owner(&world), Some(victim.id));
    let mut moved = hello("victim");
    moved.ports[0].addresses = vec![vec![0xcd; 16]];
    let again = world.attend(&moved);
    assert_eq!((again.id, owner(&world)), (victim.id, Some(successor.id)));
    assert_eq!(world.cluster.hosts.addresses.len(), 2);
    // Whoever names it again comes after those who named it meanwhile.
    let mut back = hello("victim");
    back.ports[0].addresses = vec![ADDRESS.to_vec()];
    world.attend(&back);
    assert_eq!(owner(&world), Some(successor.id));
    assert_eq!(world.cluster.hosts.addresses.len(), 1);
    // The victim's earlier reports hold, and so do reports of reads from it.
    assert_eq!(world.cluster.fetches.of_host(reader.id).count(), 1);
}
