//! Tests of what leaders and their successors know when saves reach etcd late, or its answers come
//! late.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::daemon::in_time;
use crate::elections::{drop_budget, set_drop_budget};
use crate::group::Group;
use crate::proxy::Delays;

/// Longer than a coordinator waits for the answers of two endpoints, in milliseconds.
const LATE_MS: u64 = 3000;

/// Starts a coordinator whose first saves are delayed: on their way to etcd, and on the way back.
async fn leader(delays_ms: &'static [[u64; 2]]) -> Option<Group> {
    let mut left = delays_ms.iter().copied();
    let next = move || left.next().unwrap_or_default().map(Duration::from_millis);
    let group = Group::delayed(1, 1, &(Arc::new(Mutex::new(next)) as Delays))?;
    group.leader().await;
    Some(group)
}

/// Waits until nothing is under way any more. Returns what another leader knows.
async fn inherited(mut group: Group) -> (Option<u32>, usize) {
    tokio::time::sleep(Duration::from_millis(LATE_MS + 500)).await;
    group.member_again(0);
    group.leader().await;
    drop_budget(&group, 0).await
}

#[tokio::test]
async fn a_save_that_arrives_late_does_not_undo_a_later_one() {
    let Some(group) = leader(&[[LATE_MS, 0]]).await else { return };
    assert!(set_drop_budget(&group, 0, 11).await, "the second endpoint answers");
    assert!(set_drop_budget(&group, 0, 12).await);
    assert_eq!(inherited(group).await, (Some(12), 2));
}

#[tokio::test]
async fn a_change_that_was_not_saved_in_time_is_never_in_force() {
    let Some(group) = leader(&[[LATE_MS, 0], [LATE_MS, 0]]).await else { return };
    let before = drop_budget(&group, 0).await.0;
    assert!(!set_drop_budget(&group, 0, 11).await);
    assert_eq!(drop_budget(&group, 0).await, (before, 0));
    assert_eq!(inherited(group).await, (before, 0));
}

#[tokio::test]
async fn a_change_that_was_saved_without_an_answer_comes_into_force() {
    let Some(group) = leader(&[[0, LATE_MS], [0, LATE_MS]]).await else { return };
    assert!(!set_drop_budget(&group, 0, 11).await);
    let known = async {
        while drop_budget(&group, 0).await != (Some(11), 1) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    in_time(known, "the leader looks what etcd has").await;
    assert!(set_drop_budget(&group, 0, 12).await, "on top of that");
    assert_eq!(inherited(group).await, (Some(12), 2));
}
