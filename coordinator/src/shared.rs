//! State that the tasks of a coordinator share.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use laxity_policy::Time;
use laxity_wire::v1;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, broadcast, watch};

use crate::cluster::Cluster;
use crate::config::Config;
use crate::election::Store;
use crate::lead::Lead;
use crate::metrics::RunTimes;
use crate::tls::ServerTls;

/// Events that a watcher may lag behind before it loses some.
const WATCH_LAG_MAX: usize = 256;

pub(crate) struct Shared {
    cluster: Mutex<Cluster>,
    origin: Instant,
    /// Wakes the driver because something may be due earlier than before.
    pub(crate) changed: Notify,
    /// Wakes the writer of a stream, by stream number, when something waits to be sent.
    writers: Mutex<HashMap<u64, Arc<Notify>>>,
    pub(crate) runs: Mutex<RunTimes>,
    pub(crate) watchers: broadcast::Sender<v1::WatchEvent>,
    pub(crate) lead: Arc<Lead>,
    /// The store in etcd for state that outlives this process, if there is an election.
    pub(crate) store: Option<Arc<Store>>,
    pub(crate) tls: Option<Arc<ServerTls>>,
    pub(crate) stopping: watch::Receiver<bool>,
    config: Mutex<Arc<Config>>,
}

impl Shared {
    pub(crate) fn new(
        cluster: Cluster,
        lead: Lead,
        store: Option<Store>,
        tls: Option<ServerTls>,
        stopping: watch::Receiver<bool>,
        config: Config,
    ) -> Self {
        Self {
            cluster: Mutex::new(cluster),
            origin: Instant::now(),
            changed: Notify::new(),
            writers: Mutex::new(HashMap::new()),
            runs: Mutex::default(),
            watchers: broadcast::channel(WATCH_LAG_MAX).0,
            lead: Arc::new(lead),
            store: store.map(Arc::new),
            tls: tls.map(Arc::new),
            stopping,
            config: Mutex::new(Arc::new(config)),
        }
    }

    pub(crate) fn now(&self) -> Time {
        Time(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX - 1))
    }

    pub(crate) fn cluster(&self) -> MutexGuard<'_, Cluster> {
        self.cluster.lock()
    }

    pub(crate) fn list_hosts(&self) -> v1::ListHostsResponse {
        let mut told = self.cluster().list_hosts(self.now());
        // Read after the hosts, so that the hosts of a former leader are not marked as current.
        told.leading = self.lead.holds();
        told.leader = self.lead.leader();
        told
    }

    pub(crate) fn writers(&self) -> MutexGuard<'_, HashMap<u64, Arc<Notify>>> {
        self.writers.lock()
    }

    pub(crate) fn config(&self) -> Arc<Config> {
        Arc::clone(&self.config.lock())
    }

    pub(crate) fn set_config(&self, config: Config) {
        *self.config.lock() = Arc::new(config);
    }

    /// Wakes the driver because a report or a command may have made something due.
    pub(crate) fn stir(&self) {
        self.changed.notify_one();
    }

    pub(crate) fn tell_watchers(&self, event: v1::watch_event::Event) {
        // Sending fails only if nobody watches.
        let _ = self.watchers.send(v1::WatchEvent { event: Some(event) });
    }
}
