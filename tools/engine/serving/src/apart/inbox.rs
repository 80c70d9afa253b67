//! What came from other processes, until the computation gets to it.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::model::{Result, fail};

/// What is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Key {
    /// A layer of KV of a request.
    Reuse(u64, u16),
    /// A process's rows for the experts here, of ranks in step.
    Dispatch(u64, SocketAddr),
    /// What a process's experts made in an exchange.
    Combine(u64, SocketAddr),
}

#[derive(Debug, Default)]
struct State {
    there: HashMap<Key, Vec<u8>>,
    /// What is waited for, or will be; all else that comes is thrown away.
    wanted: HashSet<Key>,
    /// From whom something is expected, by how many keys.
    lost: HashSet<SocketAddr>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Inbox {
    state: Mutex<State>,
    bell: Condvar,
}

impl Inbox {
    fn state(&self) -> MutexGuard<'_, State> {
        // Valid after every statement.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This will be waited for. To be said before it is asked for.
    pub fn expect(&self, key: Key, from: SocketAddr) {
        let mut state = self.state();
        state.wanted.insert(key);
        // Whoever went away may be back; if not, it is lost again soon.
        state.lost.remove(&from);
    }

    /// This will not be waited for any more.
    pub fn forget(&self, keys: impl IntoIterator<Item = Key>) {
        let mut state = self.state();
        for key in keys {
            state.wanted.remove(&key);
            state.there.remove(&key);
        }
    }

    /// Something came. False if nobody wants it.
    pub fn put(&self, key: Key, payload: Vec<u8>) -> bool {
        let mut state = self.state();
        let wanted = state.wanted.contains(&key);
        if wanted {
            state.there.insert(key, payload);
            self.bell.notify_all();
        }
        wanted
    }

    /// Something came that may be waited for only later.
    pub fn keep(&self, key: Key, payload: Vec<u8>) {
        self.state().wanted.insert(key);
        self.put(key, payload);
    }

    /// A process is gone: nothing comes from it.
    pub fn lose(&self, peer: SocketAddr) {
        self.state().lost.insert(peer);
        self.bell.notify_all();
    }

    /// Waits for something and takes it.
    ///
    /// # Errors
    /// Whoever it should come from is gone, or it did not come in time.
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

    /// What is kept or waited for. For tests and metrics: 0 when nothing is under way.
    #[must_use]
    pub fn len(&self) -> usize {
        self.state().wanted.len()
    }

    /// Nothing is kept or waited for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
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
        assert!(inbox.is_empty());
    }
}
