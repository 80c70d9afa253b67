//! The small state that outlives a leader, and how it is saved.
//!
//! * *Chain.* A save names the term and etcd's revision at which the state was written last
//!   (`mod_revision`). etcd refuses it if either has changed. So of all saves on top of one state
//!   at most one takes place, however late they arrive.
//! * *Order.* A change is saved and then applied, so nobody sees one that the next leader loses.
//! * *Unknown outcome.* etcd may execute a save whose answer does not come. If it did, the next
//!   save is refused, and the leader applies what etcd has before it saves again.
//!   [`Store::settle`] does this without another change: it saves the state in force once more. If
//!   that succeeds, the save of unknown outcome can no longer take place.

use tokio::sync::Mutex;
use tracing::info;

use super::config::EtcdConfig;
use super::etcd::{Etcd, EtcdError, created_at, key_of, pb, put, read, written_at};

/// The part of the coordinator that has the state.
pub(crate) trait LeaderState: Send + Sync + 'static {
    /// Prepares to lead with `term` and the saved state of the leaders before. It runs before
    /// `Lead::begin`. Returns false if the process cannot lead.
    fn inherit(&self, term: u64, state: Option<&[u8]>) -> bool;

    fn state(&self) -> Vec<u8>;

    /// Applies a state that an earlier save of this leadership has left in etcd.
    fn adopt(&self, state: &[u8]);
}

/// The version of the state in etcd that the next save replaces. etcd refuses the save if another
/// one came between.
#[derive(Debug, Default)]
struct Chain {
    term: u64,
    /// etcd's revision at which the state was written last. 0: never.
    revision: i64,
    /// Whether the outcome of the last save is unknown.
    in_doubt: bool,
}

#[derive(Debug)]
pub(crate) struct Store {
    pub(super) etcd: Etcd,
    prefix: String,
    /// The lock serialises changes: from their check to their application.
    chain: Mutex<Chain>,
}

/// An error by which it is unknown whether the state was saved.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SaveError {
    /// Another coordinator leads. etcd may have executed the save before that.
    #[error("another coordinator leads now; ask that one")]
    Fenced,
    #[error("{0}")]
    Etcd(#[from] EtcdError),
}

impl Store {
    pub(crate) fn new(config: &EtcdConfig) -> Result<Self, EtcdError> {
        Ok(Self {
            etcd: Etcd::new(config, config.patience())?,
            prefix: config.prefix.clone(),
            chain: Mutex::default(),
        })
    }

    pub(super) fn leader_key(&self) -> String {
        format!("{}/leader", self.prefix)
    }

    pub(super) fn state_key(&self) -> String {
        format!("{}/state", self.prefix)
    }

    /// Begins a leadership with what the leaders before saved.
    pub(super) async fn inherit(
        &self,
        heir: &impl LeaderState,
        term: u64,
        state: Option<&pb::KeyValue>,
    ) -> bool {
        let mut chain = self.chain.lock().await;
        let revision = state.map_or(0, |key| key.mod_revision);
        *chain = Chain { term, revision, in_doubt: false };
        heir.inherit(term, state.map(|key| key.value.as_slice()))
    }

    /// Makes a change. `prepare` checks it on top of the state in force, and runs again if that has
    /// changed. It returns the state after the change, and what applies the change.
    pub(crate) async fn change<T, A, E>(
        &self,
        heir: &impl LeaderState,
        prepare: impl Fn() -> Result<(Vec<u8>, A), E>,
    ) -> Result<T, E>
    where
        A: FnOnce() -> T,
        E: From<SaveError>,
    {
        let mut chain = self.chain.lock().await;
        loop {
            let (state, apply) = prepare()?;
            if self.save(&mut chain, heir, state).await? {
                return Ok(apply());
            }
        }
    }

    /// Finds out whether a save of unknown outcome took place. If it did not, it never will.
    pub(super) async fn settle(&self, heir: &impl LeaderState) -> Result<(), SaveError> {
        let mut chain = self.chain.lock().await;
        if chain.in_doubt && self.save(&mut chain, heir, heir.state()).await? {
            info!("a change that could not be saved in time was not made");
        }
        Ok(())
    }

    /// Saves `state`. Returns false if an earlier save took place instead, which is in force then.
    async fn save(
        &self,
        chain: &mut Chain,
        heir: &impl LeaderState,
        state: Vec<u8>,
    ) -> Result<bool, SaveError> {
        let asked = pb::TxnRequest {
            compare: vec![
                created_at(self.leader_key(), chain.term as i64),
                written_at(self.state_key(), chain.revision),
            ],
            success: vec![put(self.state_key(), state.clone(), 0)],
            failure: vec![read(self.leader_key()), read(self.state_key())],
        };
        // The doubt remains if no answer comes, or if this call is dropped before the answer.
        chain.in_doubt = true;
        let answer = self.etcd.txn(asked).await?;
        if answer.succeeded {
            let revision = answer.header.as_ref().map_or(0, |header| header.revision);
            *chain = Chain { term: chain.term, revision, in_doubt: false };
            return Ok(true);
        }
        if key_of(&answer, 0).is_none_or(|leader| leader.create_revision != chain.term as i64) {
            return Err(SaveError::Fenced);
        }
        let found = key_of(&answer, 1).cloned().unwrap_or_default();
        *chain = Chain { term: chain.term, revision: found.mod_revision, in_doubt: false };
        // An endpoint that did not answer in time may have executed this very save.
        if found.value == state {
            return Ok(true);
        }
        info!("a change that was not saved in time was made after all");
        heir.adopt(&found.value);
        Ok(false)
    }
}
