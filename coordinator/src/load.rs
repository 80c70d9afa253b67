//! A coordinator under load: speaks the real API as thousands of daemons and measures how long an event
//! takes to come back as an order.
//!
//! Batch `i` is owned by daemon `i mod N`, and daemon `i + 1` takes part in it; each of its requests loads four
//! ports of each. After all batches have been announced, events come at a constant rate, and each is the departure of
//! the oldest batch or the arrival of a new one, in turns, so the number of batches stays. Deadlines are such that most batches
//! depart in time: one in twenty is late. An event's latency is the time from
//! handing its report to the stream until the end of the first order that considered it has been read,
//! i.e. both ways through gRPC, the debounce, and the run.

mod tls;
mod usage;

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use laxity_wire::v1::coordination_client::CoordinationClient;
use laxity_wire::v1::{
    self, BatchArrived, BatchFinished, Capability, Direction, Event, FromCoordinator, FromDaemon,
    Heartbeat, Hello, PortBytes, PortInfo, Report, RequestEnded, RequestLoad, SnapshotPiece,
    event::Event as Kind, from_coordinator, from_daemon::Message,
};
use serde::Serialize;
use thiserror::Error;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{ClientTlsConfig, Endpoint};

use self::tls::Identities;
pub use self::tls::LoadFiles;

const NICS: u32 = 4;
const REQUESTS_PER_BATCH: u64 = 4;
const RATE_BYTES_PER_S: u64 = 50_000_000_000;
/// Events are sent in ticks of this length.
const TICK: Duration = Duration::from_millis(1);
/// How long all daemons may take to be told their first order.
const SETTLE_MAX: Duration = Duration::from_secs(60);
/// Connections that are opened at a time.
const CONNECT_AT_ONCE: usize = 64;

/// What load to make.
#[derive(Clone, Debug)]
pub struct LoadPlan {
    /// Daemons.
    pub daemons: usize,
    /// Active batches.
    pub batches: usize,
    /// Batch events (arrivals and departures) per second.
    pub events_per_s: f64,
    /// How long, after everything has been set up.
    pub duration: Duration,
    /// A coordinator that runs, such as `http://127.0.0.1:7471`; without it one is started.
    pub endpoint: Option<String>,
    /// How the daemons prove who they are.
    pub tls: LoadTls,
}

/// How the daemons of a load prove who they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LoadTls {
    /// Not at all: the endpoint is `http://`, or the coordinator is the load's own.
    #[default]
    Off,
    /// To a coordinator of the load's own, with certificates of a CA that ends with it.
    ThrowAway,
    /// To one that runs at `https://`.
    Files(LoadFiles),
}

/// What was measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadReport {
    /// Event to order.
    pub order_latency_ms: Latency,
    /// Resident memory of the coordinator at the end; none if it is not a process that this user can see.
    pub rss_mib: Option<f64>,
    /// When the load began.
    pub rss_start_mib: Option<f64>,
    /// Batch events that were made per second.
    pub events_per_s: f64,
    /// CPU time of the coordinator per second, in cores; none if it is not a process that this user can see.
    pub coordinator_cores: Option<f64>,
    /// Daemons.
    pub daemons: usize,
    /// Active batches.
    pub batches: usize,
    /// Events whose order came back.
    pub answered: usize,
    /// Events that no order considered within a second after the end.
    pub unanswered: usize,
    /// Orders read.
    pub orders: u64,
    /// Refusals read: none, unless the coordinator's limits are smaller than the plan.
    pub refusals: u64,
}

impl LoadReport {
    /// What the coordinator used, for people.
    #[must_use]
    pub fn usage_text(&self) -> String {
        match (self.coordinator_cores, self.rss_mib, self.rss_start_mib) {
            (Some(cores), Some(end), Some(start)) => {
                format!("coordinator {cores:.2} cores, {end:.0} MiB ({start:.0} at the start)")
            }
            _ => "what the coordinator uses cannot be seen from here".to_owned(),
        }
    }
}

/// A distribution of latencies, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Latency {
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// The worst.
    pub max: f64,
}

impl Latency {
    fn of(mut samples_us: Vec<u32>) -> Self {
        samples_us.sort_unstable();
        let at = |permille: usize| {
            let index = (samples_us.len() * permille).div_ceil(1000).max(1) - 1;
            samples_us.get(index).map_or(0.0, |&us| f64::from(us) / 1e3)
        };
        Self {
            p50: at(500),
            p90: at(900),
            p99: at(990),
            max: at(1000),
        }
    }
}

/// A load that could not be made.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The plan makes no sense; the text says what would.
    #[error("{0}")]
    Plan(String),
    /// No coordinator could be started. Build it, or name one that runs with `--endpoint`.
    #[error("cannot start {program}: {cause}; build it, or name a coordinator that runs with --endpoint", program = .program.display())]
    Start {
        /// What was to be started.
        program: PathBuf,
        /// What went wrong.
        cause: String,
    },
    /// The coordinator cannot be reached, or ended a stream.
    #[error("the coordinator at {endpoint}: {cause}")]
    Coordinator {
        /// Where it is.
        endpoint: String,
        /// What it said.
        cause: String,
    },
}

/// A coordinator of our own, that ends with this.
struct Own {
    child: Child,
    endpoint: String,
    /// For the configuration and the certificates.
    _folder: tempfile::TempDir,
}

impl Own {
    /// With TLS, if the plan says so; then with what its daemons connect with, too.
    fn start(plan: &LoadPlan) -> Result<(Self, Option<Identities>), LoadError> {
        let program = beside_this_program("laxity-coordinator");
        let fail = |cause: String| LoadError::Start {
            program: program.clone(),
            cause,
        };
        let folder = tempfile::tempdir().map_err(|cause| fail(cause.to_string()))?;
        let (identities, section) = match plan.tls {
            LoadTls::ThrowAway => {
                let made = Identities::throw_away(folder.path(), plan.daemons);
                let (identities, section) = made.map_err(|error| fail(error.to_string()))?;
                (Some(identities), section)
            }
            _ => (None, String::new()),
        };
        let file = folder.path().join("coordinator.toml");
        std::fs::write(&file, section).map_err(|cause| fail(cause.to_string()))?;
        let mut child = Command::new(&program)
            .arg("--config")
            .arg(&file)
            .args(["--listen", "127.0.0.1:0", "--log", "warn"])
            .stdout(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .map_err(|cause| fail(cause.to_string()))?;
        let mut line = String::new();
        let read = match child.stdout.take() {
            Some(out) => BufReader::new(out).read_line(&mut line),
            None => Ok(0),
        };
        let address = line.trim().strip_prefix("listening on ").map(str::to_owned);
        match (read, address) {
            (Ok(_), Some(address)) => {
                let scheme = identities.as_ref().map_or("http", |_| "https");
                let own = Self {
                    child,
                    endpoint: format!("{scheme}://{address}"),
                    _folder: folder,
                };
                Ok((own, identities))
            }
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                Err(fail("it did not say where it listens".into()))
            }
        }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn beside_this_program(name: &str) -> PathBuf {
    let here = std::env::current_exe().ok();
    let beside = here
        .as_deref()
        .and_then(Path::parent)
        .map(|at| at.join(name));
    beside
        .filter(|path| path.exists())
        .unwrap_or_else(|| name.into())
}

/// What a daemon has sent and not seen considered, and what came back.
#[derive(Debug, Default)]
struct Book {
    sent: u64,
    waiting: VecDeque<(u64, Instant)>,
    samples_us: Vec<u32>,
    measuring: bool,
    ordered: bool,
    orders: u64,
    refusals: u64,
    ended: Option<String>,
}

#[derive(Clone)]
struct Daemon {
    outbound: mpsc::Sender<FromDaemon>,
    book: Arc<Mutex<Book>>,
}

impl Daemon {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn report(&self, snapshot: SnapshotPiece, events: Vec<Kind>) {
        let sequence = {
            let mut book = self.book();
            book.sent += 1;
            let sequence = book.sent;
            if book.measuring {
                book.waiting.push_back((sequence, Instant::now()));
            }
            sequence
        };
        let events = events.into_iter().map(|event| Event { event: Some(event) });
        let report = Report {
            sequence,
            snapshot: snapshot as i32,
            events: events.collect(),
        };
        // A stream that has ended is found in the book.
        let _ = self.outbound.send(say(Message::Report(report))).await;
    }

    fn heard(&self, frame: FromCoordinator) {
        let mut book = self.book();
        match frame.message {
            Some(from_coordinator::Message::Order(order)) if order.last => {
                book.ordered = true;
                book.orders += 1;
                while let Some(&(sequence, at)) = book.waiting.front()
                    && sequence <= order.considered_report
                {
                    book.waiting.pop_front();
                    let us = u32::try_from(at.elapsed().as_micros()).unwrap_or(u32::MAX);
                    book.samples_us.push(us);
                }
            }
            Some(from_coordinator::Message::Refusal(refusal)) => {
                book.refusals += u64::from(refusal.count);
            }
            Some(from_coordinator::Message::Goodbye(last)) => book.ended = Some(last.detail),
            _ => {}
        }
    }
}

fn say(message: Message) -> FromDaemon {
    FromDaemon {
        message: Some(message),
    }
}

/// A well-mixed function of its argument (the finalizer of SplitMix64).
fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// How long a batch is there.
fn lifetime_ns(plan: &LoadPlan) -> u64 {
    (2e9 * plan.batches as f64 / plan.events_per_s) as u64
}

/// `left_permille` of its lifetime is left to the batch.
/// For `examples/run_cost.rs`, too: an arrival of the load.
pub fn arrival(batch: u64, lifetime_ns: u64, left_permille: u64) -> Kind {
    let left_ns = lifetime_ns / 1000 * left_permille;
    let late = batch.is_multiple_of(20);
    let request = |nth: u64| {
        let id = batch * REQUESTS_PER_BATCH + nth;
        let bits = mix(id);
        let load = |port: u32| PortBytes {
            port,
            bytes: (1 << 20) + mix(id + u64::from(port)) % (16 << 20),
        };
        RequestLoad {
            request: id,
            remaining_ns: Some(if late {
                left_ns as i64 / 2
            } else {
                (left_ns + lifetime_ns / 20 + bits % (lifetime_ns / 2).max(1)) as i64
            }),
            loads: (0..NICS).map(load).collect(),
            started: false,
        }
    };
    Kind::BatchArrived(BatchArrived {
        batch,
        compute_ns: 50_000_000,
        requests: (0..REQUESTS_PER_BATCH).map(request).collect(),
        layers: 80,
        ..BatchArrived::default()
    })
}

/// For `examples/run_cost.rs`, too: a departure of the load.
pub fn departure(batch: u64) -> Vec<Kind> {
    let requests = (0..REQUESTS_PER_BATCH).map(|nth| {
        Kind::RequestEnded(RequestEnded {
            request: batch * REQUESTS_PER_BATCH + nth,
        })
    });
    requests
        .chain([Kind::BatchFinished(BatchFinished { batch })])
        .collect()
}

/// What the host of a daemon is called.
pub(crate) fn host(nth: usize) -> String {
    format!("load-{nth:05}")
}

/// For `examples/run_cost.rs`, too: how the load's daemons introduce themselves.
pub fn hello(nth: usize) -> Hello {
    let port = |index: u32| PortInfo {
        addresses: Vec::new(),
        name: format!("mlx5_{}", index / 2),
        direction: if index.is_multiple_of(2) {
            Direction::Egress as i32
        } else {
            Direction::Ingress as i32
        },
        rate_bytes_per_s: RATE_BYTES_PER_S,
    };
    Hello {
        protocol: v1::PROTOCOL,
        protocol_min: v1::PROTOCOL_MIN,
        software: "laxity cluster load".into(),
        capabilities: vec![
            Capability::OrderDeltas as i32,
            Capability::PruneCauses as i32,
        ],
        host: host(nth),
        instance: nth as u64,
        ports: (0..NICS * 2).map(port).collect(),
        applied: None,
    }
}

async fn attend(
    endpoint: &str,
    nth: usize,
    tls: Option<ClientTlsConfig>,
) -> Result<Daemon, String> {
    let text = |error: tonic::transport::Error| format!("{error:?}");
    let mut connecting = Endpoint::from_shared(endpoint.to_owned())
        .map_err(text)?
        .tcp_nodelay(true);
    if let Some(tls) = tls {
        connecting = connecting.tls_config(tls).map_err(text)?;
    }
    let channel = connecting.connect().await.map_err(text)?;
    let (outbound, messages) = mpsc::channel(64);
    let _ = outbound.send(say(Message::Hello(hello(nth)))).await;
    let mut inbound = CoordinationClient::new(channel)
        .attend(ReceiverStream::new(messages))
        .await
        .map_err(|status| status.to_string())?
        .into_inner();
    let daemon = Daemon {
        outbound,
        book: Arc::default(),
    };
    let listener = daemon.clone();
    tokio::spawn(async move {
        let ended = loop {
            match inbound.message().await {
                Ok(Some(frame)) => listener.heard(frame),
                Ok(None) => break "the stream ended".to_owned(),
                Err(status) => break status.to_string(),
            }
        };
        listener.book().ended.get_or_insert(ended);
    });
    let beat = daemon.outbound.clone();
    tokio::spawn(async move {
        while beat
            .send(say(Message::Heartbeat(Heartbeat {})))
            .await
            .is_ok()
        {
            tokio::time::sleep(Duration::from_millis(900)).await;
        }
    });
    Ok(daemon)
}

/// Makes the load and measures.
///
/// # Errors
/// [`LoadError`].
pub fn run(plan: &LoadPlan) -> Result<LoadReport, LoadError> {
    if plan.daemons == 0 || plan.batches == 0 {
        return Err(LoadError::Plan("at least one daemon and one batch".into()));
    }
    if !(plan.events_per_s.is_finite() && plan.events_per_s > 0.0) {
        return Err(LoadError::Plan("the rate must be above 0".into()));
    }
    let (own, endpoint, identities) = match &plan.endpoint {
        Some(endpoint) => (None, endpoint.clone(), identities(plan, endpoint)?),
        None if matches!(plan.tls, LoadTls::Files(_)) => {
            return Err(LoadError::Plan(
                "certificates are for a coordinator that runs: name it with --endpoint, or start one that has its own with --tls".into(),
            ));
        }
        None => {
            let (own, identities) = Own::start(plan)?;
            let endpoint = own.endpoint.clone();
            (Some(own), endpoint, identities)
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|cause| LoadError::Plan(format!("cannot start the runtime: {cause}")))?;
    let pid = match &own {
        Some(own) => Some(own.child.id()),
        None => usage::listener(&endpoint),
    };
    runtime
        .block_on(drive(plan, &endpoint, identities.as_ref(), pid))
        .map_err(|cause| LoadError::Coordinator { endpoint, cause })
}

/// What the daemons need for a coordinator that runs.
fn identities(plan: &LoadPlan, endpoint: &str) -> Result<Option<Identities>, LoadError> {
    let fail = |problem: &str| Err(LoadError::Plan(problem.into()));
    match (&plan.tls, endpoint.starts_with("https://")) {
        (LoadTls::Off, false) => Ok(None),
        (LoadTls::Files(files), true) => Identities::read(files, plan.daemons)
            .map(Some)
            .map_err(LoadError::Plan),
        (LoadTls::Off, true) => fail(
            "https:// needs --ca, --cert and --key; `laxity certs --load N` makes a certificate for N daemons",
        ),
        (LoadTls::Files(_), false) => {
            fail("certificates are of no use with http://; write https:// in --endpoint")
        }
        (LoadTls::ThrowAway, _) => fail(
            "--tls is for a coordinator that the load starts; for one that runs give --ca, --cert and --key",
        ),
    }
}

async fn connect(
    plan: &LoadPlan,
    endpoint: &str,
    identities: Option<&Identities>,
) -> Result<Vec<Daemon>, String> {
    let mut daemons = Vec::with_capacity(plan.daemons);
    for first in (0..plan.daemons).step_by(CONNECT_AT_ONCE) {
        let some = first..(first + CONNECT_AT_ONCE).min(plan.daemons);
        let opening = some.map(|nth| {
            let endpoint = endpoint.to_owned();
            let tls = identities.map(|identities| identities.of(nth));
            tokio::spawn(async move { attend(&endpoint, nth, tls).await })
        });
        for daemon in opening.collect::<Vec<_>>() {
            daemons.push(daemon.await.map_err(|error| error.to_string())??);
        }
    }
    Ok(daemons)
}

async fn drive(
    plan: &LoadPlan,
    endpoint: &str,
    identities: Option<&Identities>,
    pid: Option<u32>,
) -> Result<LoadReport, String> {
    let daemons = connect(plan, endpoint, identities).await?;
    let count = daemons.len();
    let owner = |batch: u64| batch as usize % count;
    let other = |batch: u64| (batch as usize + 1) % count;
    let first_batches = 1..=plan.batches as u64;
    let lifetime_ns = lifetime_ns(plan);
    let announce = |batch| arrival(batch, lifetime_ns, 1000 * batch / plan.batches as u64);
    for (nth, daemon) in daemons.iter().enumerate() {
        let mine = first_batches.clone().filter(|&batch| owner(batch) == nth);
        let part = first_batches.clone().filter(|&batch| other(batch) == nth);
        let events: Vec<Kind> = mine.chain(part).map(announce).collect();
        daemon.report(SnapshotPiece::End, events).await;
    }
    let begun = Instant::now();
    while !daemons.iter().all(|daemon| daemon.book().ordered) {
        if let Some(ended) = daemons
            .iter()
            .find_map(|daemon| daemon.book().ended.clone())
        {
            return Err(ended);
        }
        if begun.elapsed() > SETTLE_MAX {
            return Err(format!("no order for some daemons within {SETTLE_MAX:?}"));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for daemon in &daemons {
        daemon.book().measuring = true;
    }
    let start = pid.and_then(usage::of);
    let mut oldest = 1;
    let mut newest = plan.batches as u64;
    let mut made = 0_u64;
    let begun = Instant::now();
    let mut ticks = tokio::time::interval(TICK);
    while begun.elapsed() < plan.duration {
        ticks.tick().await;
        let due = (begun.elapsed().as_secs_f64() * plan.events_per_s) as u64;
        while made < due {
            made += 1;
            if made.is_multiple_of(2) {
                for nth in [owner(oldest), other(oldest)] {
                    let gone = departure(oldest);
                    daemons[nth].report(SnapshotPiece::Unspecified, gone).await;
                    if count == 1 {
                        break;
                    }
                }
                oldest += 1;
            } else {
                newest += 1;
                for nth in [owner(newest), other(newest)] {
                    let arrived = vec![arrival(newest, lifetime_ns, 1000)];
                    daemons[nth]
                        .report(SnapshotPiece::Unspecified, arrived)
                        .await;
                    if count == 1 {
                        break;
                    }
                }
            }
        }
        let nth = made as usize % count;
        if let Some(ended) = daemons[nth].book().ended.clone() {
            return Err(ended);
        }
    }
    let elapsed_s = begun.elapsed().as_secs_f64();
    let end = pid.and_then(usage::of);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut samples = Vec::new();
    let (mut unanswered, mut orders, mut refusals) = (0, 0, 0);
    for daemon in &daemons {
        let mut book = daemon.book();
        samples.append(&mut book.samples_us);
        unanswered += book.waiting.len();
        orders += book.orders;
        refusals += book.refusals;
    }
    Ok(LoadReport {
        answered: samples.len(),
        order_latency_ms: Latency::of(samples),
        rss_mib: end.map(|end| end.rss_mib),
        rss_start_mib: start.map(|start| start.rss_mib),
        events_per_s: made as f64 / elapsed_s,
        coordinator_cores: start
            .zip(end)
            .map(|(start, end)| (end.cpu_s - start.cpu_s) / elapsed_s),
        daemons: count,
        batches: plan.batches,
        unanswered,
        orders,
        refusals,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_samples_and_none_gives_zero() {
        assert_eq!(Latency::of(Vec::new()), Latency::default());
        let latency = Latency::of((1..=1000).collect());
        assert_eq!((latency.p50, latency.p99, latency.max), (0.5, 0.99, 1.0));
    }
}
