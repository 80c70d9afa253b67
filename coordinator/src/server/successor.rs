//! How a leader begins with the saved state of the leader before, and saves its own for the next.

use std::sync::Arc;

use laxity_policy::Time;
use tracing::error;

use crate::cluster::Cluster;
use crate::cluster::change::Change;
use crate::cluster::durable::Durable;
use crate::election::LeaderState;
use crate::shared::Shared;

/// Starts to lead: with an empty cluster, the new term, and the saved state of the leader before.
pub(super) struct Successor(pub(super) Arc<Shared>);

impl LeaderState for Successor {
    fn inherit(&self, term: u64, state: Option<&[u8]>) -> bool {
        let shared = &self.0;
        let config = shared.config();
        let now = shared.now();
        let made =
            config.cluster_policy().map_err(|nonsense| nonsense.to_string()).and_then(|policy| {
                Cluster::new(now, config.settings(), policy, term)
                    .map_err(|invalid| format!("{invalid:?}"))
            });
        let mut next = match made {
            Ok(next) => next,
            // The same configuration was valid when this process started.
            Err(problem) => {
                error!(problem, "cannot begin to lead");
                return false;
            }
        };
        if let Some(state) = state {
            restore(&mut next, now, state);
        }
        let mut cluster = shared.cluster();
        next.succeed(&cluster);
        *cluster = next;
        drop(cluster);
        shared.stir();
        true
    }

    fn state(&self) -> Vec<u8> {
        saved(&self.0.cluster(), self.0.now(), None)
    }

    fn adopt(&self, state: &[u8]) {
        restore(&mut self.0.cluster(), self.0.now(), state);
        self.0.stir();
    }
}

/// Returns the state to save so that it includes `change`.
pub(super) fn saved(cluster: &Cluster, now: Time, change: Option<&Change>) -> Vec<u8> {
    serde_json::to_vec(&cluster.durable(now, change)).unwrap_or_default()
}

fn restore(cluster: &mut Cluster, now: Time, state: &[u8]) {
    let saved = serde_json::from_slice::<Durable>(state).map_err(|error| error.to_string());
    if let Err(problem) = saved.and_then(|saved| cluster.restore(now, saved)) {
        error!(problem, "the policy and drains in etcd are invalid and are not used");
    }
}
