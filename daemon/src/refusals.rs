//! Refused registrations, for the log, `status` and metrics.
//!
//! A refused client tries again every ten seconds, and so do all processes of its job. So the log
//! has one line per user and [`WARN_EVERY`]. `status` shows the latest users, and the counter
//! counts every refusal.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use laxity_shm::registration::{Peer, Reason};
use laxity_wire::RefusalStatus;
use parking_lot::Mutex;

use crate::config::AccessConfig;

/// The time between two warnings about one user.
const WARN_EVERY: Duration = Duration::from_secs(60);
/// Maximum number of users that warnings name within [`WARN_EVERY`].
const WARNED_MAX: usize = 32;
/// Maximum number of users that `status` shows. The latest refusals stay.
const USERS_MAX: usize = 32;

#[derive(Debug, Default)]
pub struct Refusals {
    log: Mutex<RefusalLog>,
}

#[derive(Debug, Default)]
struct RefusalLog {
    count: u64,
    users: BTreeMap<u32, RefusedUser>,
    warned: BTreeMap<u32, Instant>,
}

#[derive(Debug)]
struct RefusedUser {
    count: u64,
    pid: u32,
    at: Instant,
    why: String,
    reason: Option<Reason>,
}

impl Refusals {
    /// Counts a refusal and returns whether to log a warning.
    pub fn add(&self, peer: Peer, why: &str, reason: Option<Reason>) -> bool {
        let now = Instant::now();
        let mut log = self.log.lock();
        log.count += 1;
        log.note(peer, why, reason, now);
        log.is_due(peer.uid, now)
    }

    pub fn count(&self) -> u64 {
        self.log.lock().count
    }

    /// Forgets the refusals of a user who is now admitted, but not those for another reason.
    pub fn admitted(&self, uid: u32) {
        let forbidden = Some(Reason::Forbidden);
        self.log.lock().users.retain(|of, user| *of != uid || user.reason != forbidden);
    }

    /// Returns the users that were refused last, the latest first, and for those that `access` does
    /// not admit the line that would admit them all.
    pub fn latest(&self, access: &AccessConfig) -> Vec<RefusalStatus> {
        let now = Instant::now();
        let log = self.log.lock();
        let is_out = |uid: u32, user: &RefusedUser| {
            let may = access.anyone || access.uids.contains(&uid);
            user.reason == Some(Reason::Forbidden) && !may
        };
        let out = log.users.iter().filter(|(uid, user)| is_out(**uid, user)).map(|(uid, _)| *uid);
        let uids: BTreeSet<u32> = access.uids.iter().copied().chain(out).collect();
        let uids = Vec::from_iter(uids);
        let line =
            format!("uids = {uids:?}  # uids of [access] in laxityd.toml, then laxity reload");
        let mut users: Vec<_> = log
            .users
            .iter()
            .map(|(uid, user)| RefusalStatus {
                uid: *uid,
                pid: user.pid,
                count: user.count,
                last_ms: now.saturating_duration_since(user.at).as_millis() as u64,
                why: user.why.clone(),
                setting: if is_out(*uid, user) { line.clone() } else { String::new() },
            })
            .collect();
        users.sort_by_key(|user| user.last_ms);
        users
    }
}

impl RefusalLog {
    fn note(&mut self, peer: Peer, why: &str, reason: Option<Reason>, now: Instant) {
        if self.users.len() >= USERS_MAX
            && !self.users.contains_key(&peer.uid)
            && let Some(oldest) = self.users.iter().min_by_key(|(_, user)| user.at)
        {
            let oldest = *oldest.0;
            self.users.remove(&oldest);
        }
        let user = self.users.entry(peer.uid).or_insert_with(|| RefusedUser {
            count: 0,
            pid: 0,
            at: now,
            why: String::new(),
            reason,
        });
        user.count += 1;
        user.pid = peer.pid;
        user.at = now;
        user.reason = reason;
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
            refusals.add(peer(uid), "first", None);
            refusals.add(peer(uid), "second", None);
        }
        let latest = refusals.latest(&AccessConfig::default());
        assert_eq!((refusals.count(), latest.len()), (2000, USERS_MAX));
        let last = latest.iter().find(|user| user.uid == 999).expect("the last");
        assert_eq!((last.count, last.why.as_str()), (2, "second"));
    }

    #[test]
    fn users_who_are_not_admitted_have_one_line_to_paste_that_keeps_those_who_are() {
        let refusals = Refusals::default();
        let of = [(1002, Reason::Forbidden), (1001, Reason::Forbidden), (7, Reason::Full)];
        for (uid, reason) in of {
            refusals.add(Peer { pid: 1, uid, gid: 0 }, "no", Some(reason));
        }
        let lines = |access: &AccessConfig| -> BTreeMap<u32, String> {
            refusals.latest(access).into_iter().map(|user| (user.uid, user.setting)).collect()
        };
        let mut access = AccessConfig { uids: vec![1000], ..AccessConfig::default() };
        let line = &lines(&access)[&1001];
        assert_eq!((&lines(&access)[&1002], &*lines(&access)[&7]), (line, ""));
        let pasted = crate::config::Config::parse(&format!("[access]\n{line}\n"), "x");
        assert_eq!(pasted.expect("right").access.uids, [1000, 1001, 1002]);
        access.uids.push(1001);
        assert_eq!(lines(&access)[&1001], "", "it only has to come again");
        refusals.admitted(1001);
        refusals.admitted(7);
        assert_eq!(lines(&access).into_keys().collect::<Vec<_>>(), [7, 1002]);
    }
}
