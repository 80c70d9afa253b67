//! Tests of a leader that is cut off from etcd or from its daemons.
//!
//! Without root, iproute2 or etcd these tests are skipped.

use std::time::{Duration, Instant};

use laxity_wire::v1::GoodbyeReason;
use laxity_wire::v1::from_coordinator::Message;

use crate::group::{ELECTED_MAX, Fence, Fenced, Group, TTL_S, ordered};
use crate::netns::{Cut, Link};

/// Waits until another coordinator leads than `old`. Returns it and a stream with an order.
async fn another<'a>(group: &Group, fence: &'a Fence, old: usize) -> (usize, Fenced<'a>) {
    let begun = Instant::now();
    loop {
        let (leader, _) = group.leader().await;
        if leader != old {
            let (leader, stream) = ordered(group, fence, 2).await;
            if leader != old {
                return (leader, stream);
            }
        }
        assert!(begun.elapsed() < ELECTED_MAX, "nobody else leads");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Reports without end, so that the coordinator has orders to make, until the stream ends. Returns
/// the goodbye, if there was one.
async fn pressed(stream: &mut Fenced<'_>) -> Option<GoodbyeReason> {
    let begun = Instant::now();
    for batch in 100.. {
        stream.report(batch).await;
        let answer = async {
            loop {
                match stream.next().await {
                    Ok(Message::Goodbye(goodbye)) => return Some(Some(goodbye.reason())),
                    Ok(Message::Order(_)) => return None,
                    Ok(_) => {}
                    Err(_) => return Some(None),
                }
            }
        };
        let quiet = Duration::from_millis(100);
        if let Ok(Some(last)) = tokio::time::timeout(quiet, answer).await {
            println!("{} reports, then {last:?}", batch - 99);
            return last;
        }
        assert!(begun.elapsed() < ELECTED_MAX, "it never stops");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    unreachable!("batches end")
}

/// Waits until `old` names another leader, or leads itself with a later term than `then`. Leases
/// may end on a busy machine.
async fn stands_by(group: &Group, fence: &Fence, old: usize, then: u64) {
    let begun = Instant::now();
    loop {
        let (leader, _stream) = ordered(group, fence, 3).await;
        if leader == old {
            assert!(fence.largest() > then, "without an election");
            println!("it was elected again");
            return;
        }
        let said = group.turned_away(old).await;
        if said.as_ref() == Some(&group.members[leader].address) {
            return;
        }
        assert!(begun.elapsed() < ELECTED_MAX, "it says {said:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_leader_that_is_cut_off_from_etcd_makes_no_order_when_another_leads_and_stands_by_later()
{
    let Some(group) = Group::apart(2) else { return };
    let fence = Fence::default();
    for cut in [Cut::Near, Cut::Far] {
        let (first, mut old) = ordered(&group, &fence, 1).await;
        let term = fence.largest();
        group.net().cut(first, Link::Etcd, cut);
        // The daemon reaches both coordinators, and the old leader gets reports the whole time.
        let (last, (_, _new)) = tokio::join!(pressed(&mut old), another(&group, &fence, first));
        // There is no goodbye if it came too late.
        assert!(matches!(last, None | Some(GoodbyeReason::NotLeader)), "{cut:?}: {last:?}");
        assert!(fence.largest() > term, "terms grow");
        let then = fence.largest();
        assert_eq!(
            group.turned_away(first).await.as_deref(),
            Some(""),
            "it knows nobody who leads, and that it does not"
        );
        group.net().heal(first, Link::Etcd, cut);
        stands_by(&group, &fence, first, then).await;
        fence.check();
    }
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
