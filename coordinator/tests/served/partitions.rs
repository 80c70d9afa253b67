//! A leader and etcd, or a leader and its daemons, that don't reach each other.
//!
//! Without root, iproute2 or etcd these tests do nothing, and say so.

use std::time::{Duration, Instant};

use laxity_wire::v1::GoodbyeReason;
use laxity_wire::v1::from_coordinator::Message;

use crate::group::{ELECTED_MAX, Fence, Fenced, Group, TTL_S, ordered};
use crate::netns::{Cut, Link};

/// Whoever leads instead of `old`.
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

/// Gives the stream work for orders all the time, until it is ended.
async fn pressed(stream: &mut Fenced<'_>) -> GoodbyeReason {
    let begun = Instant::now();
    for batch in 100.. {
        stream.report(batch).await;
        let answer = async {
            loop {
                match stream.next().await {
                    Ok(Message::Goodbye(goodbye)) => return Some(goodbye.reason()),
                    Ok(Message::Order(_)) => return None,
                    Ok(_) => {}
                    Err(status) => panic!("it ended without a goodbye: {status}"),
                }
            }
        };
        let quiet = Duration::from_millis(100);
        if let Ok(Some(last)) = tokio::time::timeout(quiet, answer).await {
            return last;
        }
        assert!(begun.elapsed() < ELECTED_MAX, "it never stops");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    unreachable!("batches end")
}

#[tokio::test]
async fn a_leader_that_is_cut_off_from_etcd_makes_no_order_when_another_leads_and_stands_by_later()
{
    let Some(group) = Group::apart(2) else {
        return;
    };
    let fence = Fence::default();
    for cut in [Cut::Near, Cut::Far] {
        let (first, mut old) = ordered(&group, &fence, 1).await;
        let term = fence.largest();
        group.net().cut(first, Link::Etcd, cut);
        // The daemon reaches both, and the old leader is asked for orders the whole time.
        let (last, (second, _new)) = tokio::join!(
            async {
                let before = fence.accepted();
                let last = pressed(&mut old).await;
                assert!(fence.accepted() > before, "it led to the end of its lease");
                last
            },
            another(&group, &fence, first)
        );
        assert_eq!(last, GoodbyeReason::NotLeader, "{cut:?}");
        assert!(fence.largest() > term, "terms grow");
        let then = fence.largest();
        group.net().heal(first, Link::Etcd, cut);
        group.stands_by(first, second).await;
        let (leader, _new) = ordered(&group, &fence, 3).await;
        assert_eq!((leader, fence.largest()), (second, then), "it still leads");
        fence.check();
    }
}

#[tokio::test]
async fn a_leader_that_is_cut_off_from_daemons_leads_on_and_they_come_back_to_it() {
    let Some(group) = Group::apart(2) else {
        return;
    };
    let fence = Fence::default();
    for cut in [Cut::Near, Cut::Far] {
        let (leader, mut stream) = ordered(&group, &fence, 1).await;
        let term = fence.largest();
        stream.rest(Duration::from_millis(200)).await;
        let before = fence.accepted();
        group.net().cut(leader, Link::Hosts, cut);
        stream.report(2).await;
        // What was in force stays (a daemon keeps it to its age limit: daemon/tests/coordinator).
        let last = stream.rest(Duration::from_secs(TTL_S * 2)).await;
        assert_eq!((last, fence.accepted()), (None, before), "{cut:?}");
        group.stands_by(1 - leader, leader).await;
        group.net().heal(leader, Link::Hosts, cut);
        let (again, _stream) = ordered(&group, &fence, 1).await;
        assert_eq!((again, fence.largest()), (leader, term), "{cut:?}");
        fence.check();
    }
}
