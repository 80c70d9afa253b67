//! An inbox for payloads of other processes, which holds them until the computation needs them.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::model::{Result, fail};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Key {
    /// KV of a request (number) in a layer.
    Reuse(u64, u16),
    /// Rows of a process for the experts here, in an exchange of ranks in lockstep.
    Dispatch(u64, SocketAddr),
    /// Outputs of a process's experts in an exchange.
    Combine(u64, SocketAddr),
}

#[derive(Debug, Default)]
struct State {
    there: HashMap<Key, Vec<u8>>,
    wanted: HashSet<Key>,
    lost: HashSet<SocketAddr>,
}

/// An inbox that several threads fill and one empties.
#[derive(Debug, Default)]
pub struct Inbox {
    state: Mutex<State>,
    bell: Condvar,
}

impl Inbox {
    fn state(&self) -> MutexGuard<'_, State> {
        // No method leaves the state inconsistent, so a poisoned lock can be used.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Announces that a payload will be awaited. Must be called before the payload is requested.
    pub fn expect(&self, key: Key, from: SocketAddr) {
        let mut state = self.state();
        state.wanted.insert(key);
        // The process may have returned. If not, its next loss is reported soon.
        state.lost.remove(&from);
    }

    /// Announces that payloads will not be awaited any more, and discards them.
    pub fn forget(&self, keys: impl IntoIterator<Item = Key>) {
        let mut state = self.state();
        for key in keys {
            state.wanted.remove(&key);
            state.there.remove(&key);
        }
    }

    /// Stores a payload. Returns false, and discards it, if no caller expects it.
    pub fn put(&self, key: Key, payload: Vec<u8>) -> bool {
        let mut state = self.state();
        let wanted = state.wanted.contains(&key);
        if wanted {
            state.there.insert(key, payload);
            self.bell.notify_all();
        }
        wanted
    }

    /// Stores a payload that a caller may expect only later.
    pub fn keep(&self, key: Key, payload: Vec<u8>) {
        self.state().wanted.insert(key);
        self.put(key, payload);
    }

    /// Announces that a process is gone, so that nothing comes from it.
    pub fn lose(&self, peer: SocketAddr) {
        self.state().lost.insert(peer);
        self.bell.notify_all();
    }

    /// Waits for a payload and removes it from the inbox.
    /// Fails if the sender is gone, or the payload does not come in time.
    pub fn wait(&self, key: Key, from: SocketAddr, patience: Duration) -> Result<Vec<u8>> {
        let end = Instant::now() + patience;
        let mut state = self.state();
        loop {
            if let Some(payload) = state.there.remove(&key) {
                state.wanted.remove(&key);
                return Ok(payload);
            }
            let left = end.saturating_duration_since(Instant::now());
            if state.lost.contains(&from) || left.is_zero() {
                state.wanted.remove(&key);
                if left.is_zero() {
                    fail!("{key:?} did not come from {from} within {patience:?}");
                }
                fail!("{from} is gone, from where {key:?} should come");
            }
            let waited = self.bell.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_with_the_bytes_the_peer_or_the_patience() {
        let inbox = Inbox::default();
        let peer: SocketAddr = "127.0.0.1:9".parse().unwrap();
        let key = Key::Reuse(1, 2);
        assert!(!inbox.put(key, vec![1]), "nobody asked");
        inbox.expect(key, peer);
        assert!(inbox.put(key, vec![2]));
        let patience = Duration::from_millis(20);
        assert_eq!(inbox.wait(key, peer, patience).unwrap(), [2]);
        inbox.expect(key, peer);
        let late = inbox.wait(key, peer, patience).unwrap_err();
        assert!(late.to_string().contains("did not come"));
        inbox.expect(key, peer);
        inbox.lose(peer);
        let lost = inbox.wait(key, peer, Duration::from_secs(600)).unwrap_err();
        assert!(lost.to_string().contains("is gone"));
        assert!(inbox.state().wanted.is_empty());
    }
}
