//! Leader election by a lease in etcd, and the small state that outlives a leader.
//!
//! ```text
//! PREFIX/leader   the leader's address, under its lease; its create revision is the term
//! PREFIX/state    policy and drains (`store.rs`)
//! ```
//!
//! * *Terms.* The coordinator that creates the leader's key, in a transaction, leads. etcd's
//!   revisions only grow, so the terms of successive leaders grow. Daemons refuse an order of an
//!   older term.
//! * *Lease.* etcd counts the TTL from when it *receives* a keep-alive, which is after this process
//!   read its clock. At `sent + TTL` the key still exists, if both clocks run alike. The leader
//!   uses seven eighths of the TTL ([`hold`]), so the rates of the two clocks may differ by 12 %
//!   (NTP changes a clock's rate by 0.05 % at most). The process reads a clock that runs while the
//!   machine is suspended ([`boottime`]). A late answer extends the lease from when the keep-alive
//!   was sent.
//! * *Old orders.* Every order passes `Lead::holds` when it goes onto the connection. A process
//!   that is stopped right after that may send an order after another leads. A daemon that got an
//!   order of a later term refuses it. For any other daemon the order does no harm.
//! * *etcd fails.* The leader leads until its lease ends. Then nobody leads, and daemons apply the
//!   last order until its age limit, and then their own. No daemon waits for etcd.

pub(crate) mod config;
mod etcd;
mod store;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tracing::{info, warn};

use self::config::EtcdConfig;
pub(crate) use self::etcd::EtcdError;
use self::etcd::{created_at, key_of, pb, put, read};
pub(crate) use self::store::{LeaderState, SaveError, Store};
use crate::lead::{Lead, boottime};

/// Longest TTL that is accepted from etcd. [`EtcdConfig::check`] allows a minute.
const TTL_MAX_S: u64 = 3600;

/// Returns the part of a TTL for which this process leads.
fn hold(ttl_s: i64) -> Duration {
    // etcd's answer comes from another machine, so its value is bounded. A negative one means that
    // the lease has ended.
    let ttl_s = u64::try_from(ttl_s).unwrap_or(0).min(TTL_MAX_S);
    Duration::from_secs(ttl_s) * 7 / 8
}

struct Won {
    lease: i64,
    term: u64,
    state: Option<pb::KeyValue>,
    until: Duration,
}

/// Runs for election, leads and follows until `stopping`.
pub(crate) async fn keep(
    config: EtcdConfig,
    store: Arc<Store>,
    lead: Arc<Lead>,
    heir: impl LeaderState,
    mut stopping: watch::Receiver<bool>,
) {
    let pause = Duration::from_nanos(config.ttl.0) / 8;
    let mut troubled = false;
    while !*stopping.borrow() {
        match campaign(&config, &store, &lead).await {
            Ok(Some(won)) => {
                troubled = false;
                if store.inherit(&heir, won.term, won.state.as_ref()).await {
                    lead.begin(won.until);
                    info!(term = won.term, "this coordinator leads");
                    let why = reign(&config, &store, &heir, &lead, &won, &mut stopping).await;
                    lead.follow("");
                    warn!(term = won.term, why, "this coordinator no longer leads");
                }
                // If the lease has not ended, the next leader need not wait for its end.
                let _ = tokio::time::timeout(pause, store.etcd.revoke(won.lease)).await;
            }
            Ok(None) => troubled = false,
            Err(error) => {
                lead.follow("");
                if !core::mem::replace(&mut troubled, true) {
                    warn!(%error, "no leader can be elected");
                }
            }
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = stopping.wait_for(|stop| *stop) => {}
        }
    }
}

/// Tries once to become the leader. Returns `None` if another coordinator leads.
async fn campaign(
    config: &EtcdConfig,
    store: &Store,
    lead: &Lead,
) -> Result<Option<Won>, EtcdError> {
    if let Some(key) = store.etcd.get(&store.leader_key()).await? {
        lead.follow(&String::from_utf8_lossy(&key.value));
        return Ok(None);
    }
    let asked_at = boottime();
    let (lease, ttl_s) = store.etcd.grant(config.ttl_s()).await?;
    let asked = pb::TxnRequest {
        compare: vec![created_at(store.leader_key(), 0)],
        success: vec![
            put(store.leader_key(), config.advertise.clone().into(), lease),
            read(store.state_key()),
        ],
        failure: vec![read(store.leader_key())],
    };
    let answer = match store.etcd.txn(asked).await {
        Ok(answer) => answer,
        // etcd may have committed the transaction, so the key must not stay until the lease ends.
        Err(error) => {
            let _ = store.etcd.revoke(lease).await;
            return Err(error);
        }
    };
    if !answer.succeeded {
        let leader = key_of(&answer, 0).map(|key| key.value.as_slice());
        lead.follow(&String::from_utf8_lossy(leader.unwrap_or_default()));
        let _ = store.etcd.revoke(lease).await;
        return Ok(None);
    }
    let revision = answer.header.as_ref().map_or(0, |header| header.revision);
    Ok(Some(Won {
        lease,
        term: revision.unsigned_abs(),
        state: key_of(&answer, 1).cloned(),
        until: asked_at + hold(ttl_s),
    }))
}

/// Leads until the lease is lost or the process stops. Returns the reason.
async fn reign(
    config: &EtcdConfig,
    store: &Store,
    heir: &impl LeaderState,
    lead: &Lead,
    won: &Won,
    stopping: &mut watch::Receiver<bool>,
) -> &'static str {
    let period = Duration::from_nanos(config.ttl.0) / 4;
    let mut until = won.until;
    loop {
        let left = until.saturating_sub(boottime());
        tokio::select! {
            () = tokio::time::sleep(period.min(left)) => {}
            _ = stopping.wait_for(|stop| *stop) => return "it stops",
        }
        let asked_at = boottime();
        let left = until.saturating_sub(asked_at);
        if left.is_zero() {
            return "etcd did not renew its lease in time";
        }
        let renewed = tokio::time::timeout(left, async {
            let ttl_s = store.etcd.keep_alive(won.lease).await?;
            let key = store.etcd.get(&store.leader_key()).await?;
            let ours = key.is_some_and(|key| key.create_revision == won.term as i64);
            Ok::<_, EtcdError>(ttl_s.filter(|_| ours))
        });
        match renewed.await {
            Ok(Ok(Some(ttl_s))) => {
                until = asked_at + hold(ttl_s);
                lead.extend(until);
                // etcd answers again, so this may succeed now.
                let settled = tokio::time::timeout(config.patience(), store.settle(heir));
                if !matches!(settled.await, Ok(Ok(()))) {
                    warn!("it is still unknown whether a change was saved; trying again");
                }
            }
            Ok(Ok(None)) => return "its lease is over, or another leads",
            Ok(Err(error)) => warn!(%error, "the lease was not renewed; trying again"),
            Err(_) => return "etcd did not renew its lease in time",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn less_than_the_ttl_is_taken_and_keep_alives_fit_in_it() {
        let config = EtcdConfig::test("http://127.0.0.1:2379");
        assert_eq!(config.check(), Ok(()));
        let ttl = Duration::from_nanos(config.ttl.0);
        assert!(hold(config.ttl_s()) < ttl);
        assert_eq!(hold(-5), Duration::ZERO);
        assert!(hold(i64::MAX) < Duration::from_secs(2 * TTL_MAX_S));
        assert!(ttl / 4 + 3 * config.patience() < hold(config.ttl_s()));
    }
}
