//! Loads a coordinator through its real API as thousands of daemons do, and measures the time from
//! an event to the order that considers it.
//!
//! Daemon `i mod N` owns batch `i`, and daemon `i + 1` takes part in it. Each request of a batch
//! loads four ports of each. After all batches are announced, events come at a constant rate. They
//! alternate between the departure of the oldest batch and the arrival of a new one, so the number
//! of batches is constant. One batch in twenty is late. The latency of an event starts when its
//! report goes to the stream. It ends when the first order that considered the event has been read,
//! so it contains both ways through gRPC, the debounce and the run.

mod daemon;
mod own;
mod report;
mod tls;
mod usage;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use laxity_credentials::explain::Settings;
use laxity_wire::v1::{
    self, BatchArrived, BatchFinished, Capability, Direction, Hello, PortBytes, PortInfo,
    RequestEnded, RequestLoad, SnapshotPiece, event::Event as Kind,
};
use thiserror::Error;
use tokio::signal::unix::{Signal, SignalKind, signal};

use self::daemon::{Daemon, attend};
use self::own::Own;
pub use self::report::{Latency, LoadReport};
use self::tls::Identities;
use self::usage::Usage;

const NICS: u32 = 4;
const REQUESTS_PER_BATCH: u64 = 4;
const RATE_BYTES_PER_S: u64 = 50_000_000_000;
/// Events are sent in ticks of this duration.
const TICK: Duration = Duration::from_millis(1);
/// Longest wait until all daemons have their first order.
const SETTLE_MAX: Duration = Duration::from_secs(60);
/// Connections that are opened in parallel.
const CONNECT_AT_ONCE: usize = 64;

#[derive(Clone, Debug)]
pub struct LoadPlan {
    pub daemons: usize,
    pub batches: usize,
    /// Batch events (arrivals and departures) per second.
    pub events_per_s: f64,
    /// Duration of the measurement, after the setup.
    pub duration: Duration,
    /// URL of a coordinator that runs without TLS. Without it, one is started.
    pub endpoint: Option<String>,
    /// Whether the started coordinator and its daemons authenticate, with a CA that is dropped at
    /// the end.
    pub tls: bool,
}

#[derive(Debug, Error)]
pub enum LoadError {
    #[error("{0}")]
    Plan(String),
    #[error("cannot start {program}: {cause}; build it, or name one that runs with --endpoint",
        program = .program.display())]
    Start { program: PathBuf, cause: String },
    #[error("{cause}")]
    Stopped { cause: String, partial: Option<Box<LoadReport>> },
}

const SETTINGS: Settings = Settings::OPTIONS;

fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn lifetime_ns(plan: &LoadPlan) -> u64 {
    (2e9 * plan.batches as f64 / plan.events_per_s) as u64
}

fn arrival(batch: u64, lifetime_ns: u64, left_permille: u64) -> Kind {
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

fn departure(batch: u64) -> Vec<Kind> {
    let requests = (0..REQUESTS_PER_BATCH)
        .map(|nth| Kind::RequestEnded(RequestEnded { request: batch * REQUESTS_PER_BATCH + nth }));
    requests.chain([Kind::BatchFinished(BatchFinished { batch })]).collect()
}

fn host(nth: usize) -> String {
    format!("load-{nth:05}")
}

fn hello(nth: usize) -> Hello {
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
        capabilities: vec![Capability::OrderDeltas as i32, Capability::PruneCauses as i32],
        host: host(nth),
        instance: nth as u64,
        ports: (0..NICS * 2).map(port).collect(),
        applied: None,
    }
}

/// Makes the load and measures. SIGINT, SIGTERM and SIGHUP end the load in order.
pub fn run(plan: &LoadPlan) -> Result<LoadReport, LoadError> {
    if plan.daemons == 0 || plan.batches == 0 {
        return Err(LoadError::Plan("at least one daemon and one batch".into()));
    }
    if !(plan.events_per_s.is_finite() && plan.events_per_s > 0.0) {
        return Err(LoadError::Plan("the rate must be above 0".into()));
    }
    let none =
        |cause: std::io::Error| LoadError::Plan(format!("cannot start the runtime: {cause}"));
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(none)?;
    runtime.block_on(async {
        // Handle signals before anything starts that a signal would leave behind.
        let mut signals = Signals::new().map_err(none)?;
        let mut progress = Progress::default();
        let mut own = None;
        let stopped = tokio::select! {
            // A terminal also sends its signals to the load's own coordinator, so signals come
            // first.
            biased;
            name = signals.next() => Some(Stop::Signal(name)),
            made = make(plan, &mut own, &mut progress) => made.err(),
        };
        let Some(stopped) = stopped else {
            return Ok(progress.report(plan, true));
        };
        let partial = progress.begun.map(|_| Box::new(progress.report(plan, false)));
        let cause = match (stopped, &mut own) {
            (Stop::Plan(error), _) => return Err(error),
            (Stop::Signal(name), _) => format!("{name} ended the load before its time"),
            (Stop::Coordinator(cause), Some(own)) => own.ended().await.unwrap_or(cause),
            (Stop::Coordinator(cause), None) => cause,
        };
        Err(LoadError::Stopped { cause, partial })
    })
}

enum Stop {
    /// The load was refused before anything was started.
    Plan(LoadError),
    /// The coordinator could not be reached or ended a stream. The text says why.
    Coordinator(String),
    Signal(&'static str),
}

/// Receivers of the signals that would end this process.
struct Signals([(&'static str, Signal); 3]);

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self([
            ("SIGINT", signal(SignalKind::interrupt())?),
            ("SIGTERM", signal(SignalKind::terminate())?),
            ("SIGHUP", signal(SignalKind::hangup())?),
        ]))
    }

    async fn next(&mut self) -> &'static str {
        let [(int, on_int), (term, on_term), (hup, on_hup)] = &mut self.0;
        tokio::select! {
            _ = on_int.recv() => int,
            _ = on_term.recv() => term,
            _ = on_hup.recv() => hup,
        }
    }
}

/// Starts a coordinator if the plan names none, and loads it.
async fn make(plan: &LoadPlan, own: &mut Option<Own>, progress: &mut Progress) -> Result<(), Stop> {
    let (endpoint, identities) = if let Some(endpoint) = &plan.endpoint {
        if !endpoint.starts_with("http://") {
            let why = "--endpoint is for a coordinator without TLS, such as http://127.0.0.1:7471";
            return Err(Stop::Plan(LoadError::Plan(why.into())));
        }
        (endpoint.clone(), None)
    } else {
        let (started, identities) = Own::start(plan).map_err(Stop::Plan)?;
        let own = own.insert(started);
        progress.pid = Some(own.pid());
        (own.endpoint().await.map_err(Stop::Plan)?, identities)
    };
    drive(plan, &endpoint, identities.as_ref(), progress)
        .await
        .map_err(|cause| Stop::Coordinator(format!("the coordinator at {endpoint}: {cause}")))
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

#[derive(Default)]
struct Progress {
    daemons: Vec<Daemon>,
    pid: Option<u32>,
    /// The coordinator's usage when the measurement began.
    start: Option<Usage>,
    end: Option<Usage>,
    begun: Option<Instant>,
    /// Duration of the measurement, once it has ended.
    measured: Option<Duration>,
    /// Number of batch events that were sent.
    made: u64,
}

impl Progress {
    fn report(&self, plan: &LoadPlan, complete: bool) -> LoadReport {
        let measured =
            self.measured.or_else(|| self.begun.map(|begun| begun.elapsed())).unwrap_or_default();
        let seconds = measured.as_secs_f64();
        let end = self.end.or_else(|| self.pid.and_then(usage::of));
        let mut samples = Vec::new();
        let (mut unanswered, mut orders, mut refusals) = (0, 0, 0);
        for daemon in &self.daemons {
            let mut book = daemon.book();
            samples.append(&mut book.samples_us);
            unanswered += book.waiting.len();
            orders += book.orders;
            refusals += book.refusals;
        }
        LoadReport {
            complete,
            seconds,
            answered: samples.len(),
            order_latency_ms: Latency::of(samples),
            rss_mib: end.map(|end| end.rss_mib),
            rss_start_mib: self.start.map(|start| start.rss_mib),
            events_per_s: self.made as f64 / seconds.max(f64::MIN_POSITIVE),
            coordinator_cores: self
                .start
                .zip(end)
                .map(|(start, end)| (end.cpu_s - start.cpu_s) / seconds.max(f64::MIN_POSITIVE)),
            daemons: self.daemons.len(),
            batches: plan.batches,
            unanswered,
            orders,
            refusals,
        }
    }

    /// Returns why a daemon's stream ended, if one has.
    fn ended(&self) -> Option<String> {
        let mut ends = self.daemons.iter().map(|daemon| daemon.book().ended.clone());
        ends.find_map(|ended| ended)
    }
}

/// Announces all batches and waits until every daemon has an order.
async fn settle(plan: &LoadPlan, progress: &Progress) -> Result<(), String> {
    let count = progress.daemons.len();
    let lifetime_ns = lifetime_ns(plan);
    let batches = 1..=plan.batches as u64;
    let announce = |batch| arrival(batch, lifetime_ns, 1000 * batch / plan.batches as u64);
    for (nth, daemon) in progress.daemons.iter().enumerate() {
        let mine = batches.clone().filter(|&batch| owner(batch, count) == nth);
        let part = batches.clone().filter(|&batch| member(batch, count) == nth);
        let events: Vec<Kind> = mine.chain(part).map(announce).collect();
        daemon.report(SnapshotPiece::End, events).await;
    }
    let begun = Instant::now();
    while !progress.daemons.iter().all(|daemon| daemon.book().ordered) {
        if let Some(ended) = progress.ended() {
            return Err(ended);
        }
        if begun.elapsed() > SETTLE_MAX {
            return Err(format!("no order for some daemons within {SETTLE_MAX:?}"));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// Returns the daemon that owns a batch.
fn owner(batch: u64, daemons: usize) -> usize {
    batch as usize % daemons
}

fn member(batch: u64, daemons: usize) -> usize {
    (batch as usize + 1) % daemons
}

async fn drive(
    plan: &LoadPlan,
    endpoint: &str,
    identities: Option<&Identities>,
    progress: &mut Progress,
) -> Result<(), String> {
    progress.daemons = connect(plan, endpoint, identities).await?;
    settle(plan, progress).await?;
    for daemon in &progress.daemons {
        daemon.book().measuring = true;
    }
    progress.start = progress.pid.and_then(usage::of);
    let count = progress.daemons.len();
    let lifetime_ns = lifetime_ns(plan);
    let mut oldest = 1;
    let mut newest = plan.batches as u64;
    let begun = *progress.begun.insert(Instant::now());
    let mut ticks = tokio::time::interval(TICK);
    while begun.elapsed() < plan.duration {
        ticks.tick().await;
        let due = (begun.elapsed().as_secs_f64() * plan.events_per_s) as u64;
        while progress.made < due {
            progress.made += 1;
            let (batch, events) = if progress.made.is_multiple_of(2) {
                oldest += 1;
                (oldest - 1, departure(oldest - 1))
            } else {
                newest += 1;
                (newest, vec![arrival(newest, lifetime_ns, 1000)])
            };
            for nth in [owner(batch, count), member(batch, count)] {
                let daemon = &progress.daemons[nth];
                daemon.report(SnapshotPiece::Unspecified, events.clone()).await;
                if count == 1 {
                    break;
                }
            }
        }
        let nth = progress.made as usize % count;
        if let Some(ended) = progress.daemons[nth].book().ended.clone() {
            return Err(ended);
        }
    }
    progress.measured = Some(begun.elapsed());
    progress.end = progress.pid.and_then(usage::of);
    tokio::time::sleep(Duration::from_secs(1)).await;
    Ok(())
}
