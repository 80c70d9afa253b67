//! Tests of several coordinators and an etcd, under faults.
//!
//! A daemon attends the leader and accepts an order only if its term is at least the largest that
//! it saw. The tests also look at every order that is sent: after an order of a term, no
//! coordinator may *make* an order of an older term.
//!
//! Meanwhile operators change policy and drains, and saves are delayed. What leaders answer has to
//! be linearizable (`history.rs`).
//!
//! A run makes `LAXITY_HA_FAULTS` faults (default 9). The first has the seed `LAXITY_HA_SEED`
//! (default 1), and each later one the next seed, so a run can continue where another one ended.
//! Partitions need root and iproute2. Without Debian's `etcd-server` the tests are skipped.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use laxity_wire::v1::operator_client::OperatorClient;
use laxity_wire::v1::{GetPolicyRequest, GoodbyeReason, Policy, SetPolicyRequest};
use nix::sys::signal::Signal;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinSet;

use crate::group::{ELECTED_MAX, Fence, Fenced, Group, TTL_S, ordered};
use crate::netns::{Cut, Link};
use crate::operate::Operators;
use crate::proxy;

/// Sets the drop budget at coordinator `nth`. Returns whether it was set and saved.
pub(crate) async fn set_drop_budget(group: &Group, nth: usize, budget: u32) -> bool {
    let Some(channel) = group.channel(nth).await else { return false };
    let asked = SetPolicyRequest {
        change: Some(Policy { drop_budget: Some(budget), ..Policy::default() }),
        ..SetPolicyRequest::default()
    };
    OperatorClient::new(channel).set_policy(asked).await.is_ok()
}

/// Returns the drop budget of coordinator `nth`, and its number of older revisions.
pub(crate) async fn drop_budget(group: &Group, nth: usize) -> (Option<u32>, usize) {
    let channel = group.channel(nth).await.expect("it runs");
    let told = OperatorClient::new(channel).get_policy(GetPolicyRequest { history: 9 }).await;
    let told = told.expect("told").into_inner();
    let policy = told.current.and_then(|current| current.policy);
    let budget = policy.and_then(|policy| policy.drop_budget);
    (budget, told.history.len())
}

#[tokio::test]
async fn one_leads_others_say_who_and_its_successor_knows_policy_and_fences() {
    let Some(mut group) = Group::start(2) else { return };
    let (leader, term) = group.leader().await;
    let other = 1 - leader;
    let mut turned_away = group.members[other].daemon("a").await.expect("answered");
    let goodbye = turned_away.goodbye().await;
    assert_eq!(goodbye.reason(), GoodbyeReason::NotLeader);
    // The other coordinator may not have asked etcd yet.
    assert!(goodbye.leader.is_empty() || goodbye.leader == group.members[leader].address);

    let set = set_drop_budget(&group, other, 13).await;
    assert!(!set, "only the leader changes things");
    assert!(set_drop_budget(&group, leader, 13).await, "set and saved");

    let fence = Fence::default();
    let (_, mut stream) = ordered(&group, &fence, 1).await;
    group.members[leader].child.kill().expect("killed");
    assert_eq!(stream.rest(Duration::from_secs(5)).await, None);
    let (next, _stream) = ordered(&group, &fence, 1).await;
    assert_eq!(next, other);
    assert!(fence.largest() > term, "terms grow");
    fence.check();
    assert_eq!(drop_budget(&group, next).await, (Some(13), 1));
    group.member_again(leader);
}

#[tokio::test]
async fn a_leader_that_was_paused_sends_no_order_when_it_goes_on() {
    let Some(group) = Group::start(2) else { return };
    let fence = Fence::default();
    let (first, mut old) = ordered(&group, &fence, 1).await;
    group.members[first].signal(Signal::SIGSTOP);
    // The paused leader finds this report when it goes on.
    old.report(2).await;
    let waited = Instant::now();
    let (second, _new) = loop {
        let (leader, stream) = ordered(&group, &fence, 1).await;
        if leader != first {
            break (leader, stream);
        }
        assert!(waited.elapsed() < ELECTED_MAX);
    };
    assert_ne!(first, second);
    let before = fence.accepted();
    old.report(3).await;
    group.members[first].signal(Signal::SIGCONT);
    let last = old.rest(Duration::from_secs(5)).await;
    assert_eq!(last, Some(GoodbyeReason::NotLeader));
    assert_eq!(fence.accepted(), before, "nothing of the old leader is in force");
    assert_eq!(fence.refused(), 0, "and nothing was sent");
    fence.check();
}

#[tokio::test]
async fn without_etcd_nobody_leads_for_longer_than_the_lease_and_with_it_somebody_does_again() {
    let Some(group) = Group::start(1) else { return };
    let fence = Fence::default();
    let (_, mut stream) = ordered(&group, &fence, 1).await;
    let term = fence.largest();
    group.etcd.signal(Signal::SIGSTOP);
    let stopped = Instant::now();
    let last = stream.rest(Duration::from_secs(20)).await;
    assert_eq!(last, Some(GoodbyeReason::NotLeader));
    println!("stepped down {:?} after etcd went silent", stopped.elapsed());
    group.etcd.signal(Signal::SIGCONT);
    let (_, _stream) = ordered(&group, &fence, 1).await;
    assert!(fence.largest() > term, "a term of its own");
    fence.check();
}

#[tokio::test]
async fn a_leader_that_is_cut_off_from_daemons_leads_on_and_they_come_back_to_it() {
    let Some(group) = Group::apart(2) else { return };
    let fence = Fence::default();
    for cut in [Cut::Near, Cut::Far] {
        // Try again if the lease ended, as may happen on a busy machine.
        let mut tries = 1..=5;
        while tries.next().is_some() {
            let (leader, mut stream) = ordered(&group, &fence, 1).await;
            let term = fence.largest();
            stream.rest(Duration::from_millis(200)).await;
            let before = fence.accepted();
            group.net().cut(leader, Link::Hosts, cut);
            stream.report(2).await;
            // A daemon keeps its order until the age limit (daemon/tests/coordinator).
            let last = stream.rest(Duration::from_secs(TTL_S * 2)).await;
            assert_eq!((last, fence.accepted()), (None, before), "{cut:?}");
            group.net().heal(leader, Link::Hosts, cut);
            let (again, _stream) = ordered(&group, &fence, 1).await;
            fence.check();
            if (again, fence.largest()) == (leader, term) {
                break;
            }
            println!("{cut:?}: {again} was elected meanwhile");
            assert!(!tries.is_empty(), "it never kept its lease");
        }
    }
}

/// Makes a fault at the leader or at etcd, for `wait`. A daemon reports to the leader meanwhile.
async fn fail(
    group: &mut Group,
    kind: u64,
    leader: usize,
    wait: Duration,
    daemon: &mut Fenced<'_>,
) {
    let link = if kind < 7 { Link::Etcd } else { Link::Hosts };
    let cut = if kind.is_multiple_of(2) { Cut::Near } else { Cut::Far };
    match kind {
        0 => group.members[leader].child.kill().expect("killed"),
        1 => group.members[leader].signal(Signal::SIGTERM),
        2 => group.members[leader].signal(Signal::SIGSTOP),
        3 => group.etcd.signal(Signal::SIGSTOP),
        4 => {
            // One of the three members is etcd's own leader.
            for member in 0..3 {
                group.etcd.kill(member);
                tokio::time::sleep(wait).await;
                group.etcd.run(member).expect("started again");
            }
        }
        _ => group.net().cut(leader, link, cut),
    }
    daemon.report(1000).await;
    tokio::time::sleep(wait).await;
    match kind {
        0 | 1 => group.member_again(leader),
        2 => group.members[leader].signal(Signal::SIGCONT),
        3 => group.etcd.signal(Signal::SIGCONT),
        4 => {}
        _ => group.net().heal(leader, link, cut),
    }
}

#[tokio::test]
async fn no_order_of_a_fenced_leader_is_in_force_and_operators_hear_one_story_whatever_fails() {
    let number = |name: &str, default: u64| {
        let text = std::env::var(name).ok();
        text.and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let (faults, seed) = (number("LAXITY_HA_FAULTS", 9), number("LAXITY_HA_SEED", 1));
    let Some(mut group) = Group::delayed(3, 3, &proxy::at_random(seed)) else { return };
    let kinds = if group.net.is_some() { 9 } else { 5 };
    println!("LAXITY_HA_FAULTS={faults}, of {kinds} kinds in turn");
    let (operators, mut operating) = (Operators::new(&group), JoinSet::new());
    for own_seed in 8 * seed..8 * (seed + 1) {
        operating.spawn(Arc::clone(&operators).operate(own_seed));
    }
    let fence = Fence::default();
    let mut streams = Vec::new();
    for fault in 1..=faults {
        let (leader, mut stream) = ordered(&group, &fence, fault).await;
        operators.host.fetch_add(1, Ordering::Relaxed);
        let seed = seed + fault - 1;
        let mut random = SmallRng::seed_from_u64(seed);
        let wait = Duration::from_millis(random.random_range(0..TTL_S * 1500));
        let (kind, term) = (seed % kinds, fence.largest());
        println!("LAXITY_HA_SEED={seed}: kind {kind} at {leader}, {wait:?}, term {term}");
        fail(&mut group, kind, leader, wait, &mut stream).await;
        streams.push(stream);
        // The new leader is read first, and then the remaining orders of earlier streams.
        let (_, stream) = ordered(&group, &fence, fault).await;
        for earlier in &mut streams {
            earlier.report(2000 + fault).await;
            earlier.rest(Duration::from_millis(50)).await;
        }
        streams = vec![stream];
        fence.check();
    }
    operators.over.store(true, Ordering::Relaxed);
    operating.join_all().await;
    let heard = operators.history.lock().expect("no panic").check();
    let heard = heard.unwrap_or_else(|problem| panic!("{problem}"));
    println!(
        "{faults} faults: {heard} answers, {} orders in force, {} refused, last term {}",
        fence.accepted(),
        fence.refused(),
        fence.largest()
    );
}
