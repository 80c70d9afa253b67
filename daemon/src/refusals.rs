//! Refused registrations, for the log, `status` and metrics.
//!
//! A refused client tries again every few seconds, and so do all processes of its job. So the log
//! has one line per user and [`WARN_EVERY`]. `status` shows the latest users, and the counter
//! counts every refusal.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use laxity_shm::registration::Peer;
use laxity_wire::RefusalStatus;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// The time between two warnings about one user.
const WARN_EVERY: Duration = Duration::from_secs(60);
/// Maximum number of users that warnings name within [`WARN_EVERY`].
const WARNED_MAX: usize = 32;
/// Maximum number of users that `status` shows. The latest refusals stay.
const USERS_MAX: usize = 32;

/// The count and the latest users of refused registrations.
#[derive(Debug, Default)]
pub struct Refusals {
    log: Mutex<RefusalLog>,
    added: Notify,
}

#[derive(Debug, Default)]
struct RefusalLog {
    count: u64,
    users: BTreeMap<u32, User>,
    warned: BTreeMap<u32, Instant>,
}

#[derive(Debug)]
struct User {
    count: u64,
    pid: u32,
    at: Instant,
    why: String,
}

impl Refusals {
    /// Counts a refusal and returns whether to log a warning.
    pub fn add(&self, peer: Peer, why: &str) -> bool {
        let now = Instant::now();
        let mut log = self.log.lock();
        log.count += 1;
        log.note(peer, why, now);
        let is_due = log.is_due(peer.uid, now);
        drop(log);
        self.added.notify_one();
        is_due
    }

    /// Returns after the next refusal since the last call. It supports one caller.
    pub async fn next(&self) {
        self.added.notified().await;
    }

    /// Returns the number of refusals so far.
    pub fn count(&self) -> u64 {
        self.log.lock().count
    }

    /// Returns the users that were refused last, the latest first.
    pub fn latest(&self) -> Vec<RefusalStatus> {
        let now = Instant::now();
        let log = self.log.lock();
        let mut users: Vec<_> = log
            .users
            .iter()
            .map(|(uid, user)| RefusalStatus {
                uid: *uid,
                pid: user.pid,
                count: user.count,
                last_ms: now.saturating_duration_since(user.at).as_millis() as u64,
                why: user.why.clone(),
            })
            .collect();
        users.sort_by_key(|user| user.last_ms);
        users
    }
}

impl RefusalLog {
    fn note(&mut self, peer: Peer, why: &str, now: Instant) {
        if self.users.len() >= USERS_MAX
            && !self.users.contains_key(&peer.uid)
            && let Some(oldest) = self.users.iter().min_by_key(|(_, user)| user.at)
        {
            let oldest = *oldest.0;
            self.users.remove(&oldest);
        }
        let user = self.users.entry(peer.uid).or_insert_with(|| User {
            count: 0,
            pid: 0,
            at: now,
            why: String::new(),
        });
        user.count += 1;
        user.pid = peer.pid;
        user.at = now;
        why.clone_into(&mut user.why);
    }

    /// Reports whether a refusal of `uid` is logged as a warning.
    fn is_due(&mut self, uid: u32, now: Instant) -> bool {
        self.warned.retain(|_, at| now.saturating_duration_since(*at) < WARN_EVERY);
        // Warnings about this many users are enough for the log.
        if self.warned.len() >= WARNED_MAX || self.warned.contains_key(&uid) {
            return false;
        }
        self.warned.insert(uid, now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_of_a_user_are_said_aloud_once_in_a_while() {
        let (mut log, now) = (RefusalLog::default(), Instant::now());
        assert!(log.is_due(1, now) && log.is_due(2, now));
        assert!(!log.is_due(1, now + WARN_EVERY / 2));
        assert!(log.is_due(1, now + WARN_EVERY));
        let loud = (100..10_000).filter(|uid| log.is_due(*uid, now + WARN_EVERY));
        assert_eq!(loud.count(), WARNED_MAX - 1);
    }

    #[test]
    fn the_latest_users_are_kept_and_all_refusals_are_counted() {
        let refusals = Refusals::default();
        let peer = |uid| Peer { pid: 1, uid, gid: 0 };
        for uid in 0..1000 {
            refusals.add(peer(uid), "first");
            refusals.add(peer(uid), "second");
        }
        let latest = refusals.latest();
        assert_eq!((refusals.count(), latest.len()), (2000, USERS_MAX));
        let last = latest.iter().find(|user| user.uid == 999).expect("the last");
        assert_eq!((last.count, last.why.as_str()), (2, "second"));
    }
}
