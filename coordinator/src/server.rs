//! The gRPC server around [`Cluster`]. One task runs what is due, and two tasks serve each daemon.
//!
//! All tasks run on one thread. The lock is held for one call into [`Cluster`] and never across an
//! await. There are no internal queues: the task that reads a report also processes it, so a daemon
//! that sends too fast waits in its own connection. An order is built when its stream has room.
//!
//! Only [`access`] decides who a peer is and what it may do. [`listen`] accepts connections and
//! does TLS. With an election (`election.rs`), coordinators that do not lead refuse streams. A new
//! leader starts with an empty cluster, which daemons fill within a heartbeat or two.

pub(crate) mod access;
mod attend;
mod listen;
mod operator;
mod successor;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use laxity_listen::http::HttpEndpoint;
use laxity_policy::config::InvalidConfig;
use laxity_policy::{Span, Time};
use laxity_wire::v1::coordination_server::CoordinationServer;
use laxity_wire::v1::operator_server::OperatorServer;
use laxity_wire::v1::{self, DESCRIPTORS};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tonic::transport::Server;
use tracing::{info, warn};

use self::successor::Successor;
use crate::cluster::Cluster;
use crate::config::Config;
use crate::election::{self, EtcdError, Store};
use crate::lead::Lead;
use crate::metrics;
use crate::nonsense::Nonsense;
use crate::shared::Shared;
use crate::tls::{ServerTls, TlsError};
use crate::web;

/// Interval at which watchers get a summary.
const SUMMARY_EVERY: Duration = Duration::from_secs(1);
/// Longest time to give up leadership during a stop.
const RESIGN_MAX: Duration = Duration::from_secs(2);
/// Longest time for connections to end during a stop.
const FAREWELL_MAX: Duration = Duration::from_secs(3);

/// Why a coordinator did not start, or ended.
#[derive(Debug, Error)]
pub enum ServerError {
    /// The address is in use or not this host's. Change the setting.
    #[error("cannot listen on {address} (`listen`): {cause}")]
    Listen { address: SocketAddr, cause: io::Error },
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Election(#[from] EtcdError),
    /// The configuration is invalid. Its check finds this first.
    #[error(transparent)]
    Nonsense(#[from] Nonsense),
    #[error("{0:?}: fix the policy or the limits in the configuration")]
    Invalid(InvalidConfig),
    #[error("serving failed: {0}; report this with the log")]
    Serve(#[from] tonic::transport::Error),
    #[error("the service descriptions are broken: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// A coordinator that has bound its addresses and does not serve yet.
pub struct Coordinator {
    shared: Arc<Shared>,
    stop: watch::Sender<bool>,
    listener: TcpListener,
    exporter: Option<HttpEndpoint>,
    web: Option<HttpEndpoint>,
}

#[derive(Clone)]
pub struct CoordinatorHandle {
    shared: Arc<Shared>,
    stop: watch::Sender<bool>,
}

impl CoordinatorHandle {
    /// Says goodbye to all daemons and ends [`Coordinator::run`].
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// Applies a new configuration and reads the certificates again. Returns the changed keys that
    /// need a restart.
    ///
    /// # Errors
    /// Returns [`TlsError`] if the certificates cannot be used. Nothing has changed then.
    pub fn reload(&self, config: Config) -> Result<Vec<&'static str>, TlsError> {
        let running = self.shared.config();
        let needs_restart = config.needs_restart(&running);
        if let (Some(tls), Some(files)) = (&self.shared.tls, &config.tls) {
            tls.reload(files, &config.tls_names())?;
        }
        let span = |nanos: laxity_quantity::Nanos| Span(nanos.0);
        self.shared.cluster().set_spans(
            span(config.heartbeat),
            span(config.host_grace),
            span(config.order_age_max),
        );
        let effective = Config {
            heartbeat: config.heartbeat,
            host_grace: config.host_grace,
            order_age_max: config.order_age_max,
            log: config.log,
            tls: config.tls,
            ..Config::clone(&running)
        };
        self.shared.set_config(effective);
        Ok(needs_restart)
    }
}

impl Coordinator {
    /// Binds all addresses, inside a tokio runtime. `term` fences this coordinator's orders.
    ///
    /// # Errors
    /// Returns [`ServerError`]. All addresses are free again then.
    pub async fn bind(config: Config, term: u64) -> Result<Self, ServerError> {
        config.check()?;
        let policy = config.cluster_policy()?;
        let cluster = Cluster::new(Time::ZERO, config.settings(), policy, term)
            .map_err(ServerError::Invalid)?;
        let exporter = config.metrics_address();
        let exporter = exporter.map(|it| HttpEndpoint::bind("metrics", "metrics", it));
        let tls = config.tls.as_ref().map(ServerTls::new).transpose()?;
        let store = config.etcd.as_ref().map(Store::new).transpose()?;
        let lead = match &store {
            Some(_) => Lead::follower(),
            None => Lead::alone(),
        };
        let address = config.listen;
        let listener = TcpListener::bind(address);
        let listener = listener.await.map_err(|cause| ServerError::Listen { address, cause })?;
        let web = config.web.address();
        let web = web.map(|address| HttpEndpoint::bind("pages", "web.listen", address));
        let (stop, stopping) = watch::channel(false);
        let shared = Arc::new(Shared::new(cluster, lead, store, tls, stopping, config));
        Ok(Self { shared, stop, listener, exporter, web })
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    pub fn web_address(&self) -> Option<SocketAddr> {
        self.web.as_ref()?.local_addr()
    }

    pub fn handle(&self) -> CoordinatorHandle {
        CoordinatorHandle { shared: Arc::clone(&self.shared), stop: self.stop.clone() }
    }

    /// Serves until [`CoordinatorHandle::stop`].
    pub async fn run(self) -> Result<(), ServerError> {
        let shared = self.shared;
        let config = shared.config();
        warn_of_open_addresses(&config);
        let bytes_max = config.limits.message_bytes_max;
        let service = attend::CoordinationService { shared: Arc::clone(&shared) };
        let coordination = CoordinationServer::new(service).max_decoding_message_size(bytes_max);
        let service = operator::OperatorService { shared: Arc::clone(&shared) };
        let operator = OperatorServer::new(service).max_decoding_message_size(bytes_max);
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<CoordinationServer<attend::CoordinationService>>().await;
        health.set_serving::<OperatorServer<operator::OperatorService>>().await;
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .build_v1()?;
        let electing = match (&config.etcd, &shared.store) {
            (Some(etcd), Some(store)) => Some(tokio::spawn(election::keep(
                etcd.clone(),
                Arc::clone(store),
                Arc::clone(&shared.lead),
                Successor(Arc::clone(&shared)),
                shared.stopping.clone(),
            ))),
            _ => None,
        };
        let tasks = [
            tokio::spawn(run_what_is_due(Arc::clone(&shared))),
            tokio::spawn(summarize(Arc::clone(&shared))),
        ];
        let exporter = self.exporter.map(|exporter| {
            let shared = Arc::clone(&shared);
            let render = move || metrics::page(&shared.cluster().counters(), &shared.runs.lock());
            tokio::spawn(metrics::serve(exporter, render))
        });
        let page = self.web.map(|web| {
            let shared = Arc::clone(&shared);
            tokio::spawn(async move { web::serve(web.listener().await, shared).await })
        });
        let mut stopping = shared.stopping.clone();
        let mut stopped = shared.stopping.clone();
        let serving = Server::builder()
            .max_concurrent_streams(Some(16))
            .http2_keepalive_interval(Some(Duration::from_secs(20)))
            .add_service(coordination)
            .add_service(operator)
            .add_service(health_service)
            .add_service(reflection)
            .serve_with_incoming_shutdown(
                listen::accept(self.listener, shared.tls.clone(), config.limits.clone()),
                async move {
                    let _ = stopping.wait_for(|stop| *stop).await;
                },
            );
        let served = tokio::select! {
            served = serving => served,
            // A peer that reads nothing, or never sent anything, could delay the stop without
            // limit.
            () = async {
                let _ = stopped.wait_for(|stop| *stop).await;
                tokio::time::sleep(FAREWELL_MAX).await;
            } => Ok(()),
        };
        for task in tasks.into_iter().chain(exporter).chain(page) {
            task.abort();
        }
        if let Some(electing) = electing {
            // The task gives the lease back, so that the next leader need not wait.
            let _ = tokio::time::timeout(RESIGN_MAX, electing).await;
        }
        info!("the coordinator has stopped");
        Ok(served?)
    }
}

/// Warns about addresses that other hosts reach without TLS.
fn warn_of_open_addresses(config: &Config) {
    if !config.listen.ip().is_loopback() && config.tls.is_none() {
        warn!(
            listen = %config.listen,
            "serving other hosts WITHOUT TLS (insecure = true): whoever reaches this address \
             can report and operate"
        );
    }
    if let Some(address) = config.web.address()
        && !address.ip().is_loopback()
    {
        warn!(%address, "the page is served to other hosts WITHOUT TLS or passwords \
            (web.insecure = true)");
    }
}

/// Drives the cluster: it reads the clock, runs what is due, and wakes the writers of streams with
/// messages.
async fn run_what_is_due(shared: Arc<Shared>) {
    loop {
        let (due, ready) = {
            let mut cluster = shared.cluster();
            let begun = shared.now();
            if cluster.poll(begun) {
                let ended = shared.now();
                let took = ended.since(begun);
                cluster.rest(ended, took);
                shared.runs.lock().add(Duration::from_nanos(took.0));
            }
            let mut ready = Vec::new();
            while let Some((_, stream)) = cluster.poll_ready() {
                ready.push(stream);
            }
            (cluster.next_deadline(), ready)
        };
        {
            let writers = shared.writers();
            for writer in ready.iter().filter_map(|stream| writers.get(stream)) {
                writer.notify_one();
            }
        }
        match due {
            None => shared.changed.notified().await,
            Some(due) => {
                let left = Duration::from_nanos(due.since(shared.now()).0);
                tokio::select! {
                    () = tokio::time::sleep(left) => {}
                    () = shared.changed.notified() => {}
                }
            }
        }
    }
}

async fn summarize(shared: Arc<Shared>) {
    let mut ticks = tokio::time::interval(SUMMARY_EVERY);
    loop {
        ticks.tick().await;
        let summary = shared.cluster().summary();
        shared.tell_watchers(v1::watch_event::Event::Run(summary));
    }
}
