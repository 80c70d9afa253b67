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

use std::path::PathBuf;
use std::time::{Duration, Instant};

use laxity_wire::v1::{
    self, BatchArrived, BatchFinished, Direction, Hello, PortBytes, PortInfo, RequestEnded,
    RequestLoad, SnapshotPiece, event::Event as Kind,
};
use thiserror::Error;

use self::daemon::{Daemon, attend};
use self::own::{Own, usage};
pub use self::report::{Latency, LoadReport};

const NICS: u32 = 4;
const REQUESTS_PER_BATCH: u64 = 4;
const RATE_BYTES_PER_S: u64 = 50_000_000_000;
/// Events are sent in ticks of this duration.
const TICK: Duration = Duration::from_millis(1);
/// Longest wait until all daemons have their first order.
const SETTLE_MAX: Duration = Duration::from_secs(60);
const CONNECT_AT_ONCE: usize = 64;

#[derive(Clone, Debug)]
pub struct LoadPlan {
    pub daemons: usize,
    pub batches: usize,
    /// Batch events (arrivals and departures) per second.
    pub events_per_s: f64,
    pub duration: Duration,
}

#[derive(Debug, Error)]
pub enum LoadError {
    #[error("{0}")]
    Plan(String),
    #[error("cannot start {program}: {cause}", program = .program.display())]
    Start { program: PathBuf, cause: String },
    #[error("{0}")]
    Stopped(String),
}

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

fn hello(nth: usize) -> Hello {
    let port = |index: u32| PortInfo {
        addresses: Vec::new(),
        name: format!("mlx5_{}", index / 2),
        direction: [Direction::Egress, Direction::Ingress][index as usize % 2] as i32,
        rate_bytes_per_s: RATE_BYTES_PER_S,
    };
    Hello {
        protocol: v1::PROTOCOL,
        protocol_min: v1::PROTOCOL_MIN,
        software: "laxity cluster load".into(),
        capabilities: Vec::new(),
        host: format!("load-{nth:05}"),
        instance: nth as u64,
        ports: (0..NICS * 2).map(port).collect(),
        applied: None,
    }
}

pub fn run(plan: &LoadPlan) -> Result<LoadReport, LoadError> {
    if plan.daemons == 0 || plan.batches == 0 {
        return Err(LoadError::Plan("at least one daemon and one batch".into()));
    }
    if !(plan.events_per_s.is_finite() && plan.events_per_s > 0.0) {
        return Err(LoadError::Plan("the rate must be above 0".into()));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime =
        runtime.map_err(|cause| LoadError::Plan(format!("cannot start the runtime: {cause}")))?;
    runtime.block_on(async {
        let mut own = Own::start()?;
        let endpoint = own.endpoint().await?;
        match drive(plan, &endpoint, own.pid()).await {
            Ok(report) => Ok(report),
            Err(cause) => Err(LoadError::Stopped(match own.ended().await {
                Some(ended) => ended,
                None => format!("the coordinator at {endpoint}: {cause}"),
            })),
        }
    })
}

async fn connect(plan: &LoadPlan, endpoint: &str) -> Result<Vec<Daemon>, String> {
    let mut daemons = Vec::with_capacity(plan.daemons);
    for first in (0..plan.daemons).step_by(CONNECT_AT_ONCE) {
        let some = first..(first + CONNECT_AT_ONCE).min(plan.daemons);
        let opening = some.map(|nth| {
            let endpoint = endpoint.to_owned();
            tokio::spawn(async move { attend(&endpoint, nth).await })
        });
        for daemon in opening.collect::<Vec<_>>() {
            daemons.push(daemon.await.map_err(|error| error.to_string())??);
        }
    }
    Ok(daemons)
}

fn ended(daemons: &[Daemon]) -> Option<String> {
    daemons.iter().find_map(|daemon| daemon.book().ended.clone())
}

/// Announces all batches and waits until every daemon has an order.
async fn settle(plan: &LoadPlan, daemons: &[Daemon]) -> Result<(), String> {
    let count = daemons.len();
    let lifetime_ns = lifetime_ns(plan);
    let batches = 1..=plan.batches as u64;
    let announce = |batch| arrival(batch, lifetime_ns, 1000 * batch / plan.batches as u64);
    for (nth, daemon) in daemons.iter().enumerate() {
        let mine = batches.clone().filter(|&batch| owner(batch, count) == nth);
        let part = batches.clone().filter(|&batch| member(batch, count) == nth);
        let events: Vec<Kind> = mine.chain(part).map(announce).collect();
        daemon.report(SnapshotPiece::End, events).await;
    }
    let begun = Instant::now();
    while !daemons.iter().all(|daemon| daemon.book().ordered) {
        if let Some(ended) = ended(daemons) {
            return Err(ended);
        }
        if begun.elapsed() > SETTLE_MAX {
            return Err(format!("no order for some daemons within {SETTLE_MAX:?}"));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

fn owner(batch: u64, daemons: usize) -> usize {
    batch as usize % daemons
}

fn member(batch: u64, daemons: usize) -> usize {
    (batch as usize + 1) % daemons
}

async fn drive(plan: &LoadPlan, endpoint: &str, coordinator: u32) -> Result<LoadReport, String> {
    let daemons = connect(plan, endpoint).await?;
    settle(plan, &daemons).await?;
    for daemon in &daemons {
        daemon.book().measuring = true;
    }
    let start = usage(coordinator);
    let count = daemons.len();
    let lifetime_ns = lifetime_ns(plan);
    let (mut oldest, mut newest, mut made) = (1, plan.batches as u64, 0_u64);
    let begun = Instant::now();
    let mut ticks = tokio::time::interval(TICK);
    while begun.elapsed() < plan.duration {
        ticks.tick().await;
        let due = (begun.elapsed().as_secs_f64() * plan.events_per_s) as u64;
        while made < due {
            made += 1;
            let (batch, events) = if made.is_multiple_of(2) {
                oldest += 1;
                (oldest - 1, departure(oldest - 1))
            } else {
                newest += 1;
                (newest, vec![arrival(newest, lifetime_ns, 1000)])
            };
            for nth in [owner(batch, count), member(batch, count)] {
                daemons[nth].report(SnapshotPiece::Unspecified, events.clone()).await;
                if count == 1 {
                    break;
                }
            }
        }
        if let Some(ended) = daemons[made as usize % count].book().ended.clone() {
            return Err(ended);
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    let end = usage(coordinator);
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
        seconds,
        answered: samples.len(),
        order_latency_ms: Latency::of(samples),
        rss_mib: end.map(|end| end.rss_mib),
        rss_start_mib: start.map(|start| start.rss_mib),
        events_per_s: made as f64 / seconds,
        coordinator_cores: start.zip(end).map(|(start, end)| (end.cpu_s - start.cpu_s) / seconds),
        daemons: count,
        batches: plan.batches,
        unanswered,
        orders,
        refusals,
    })
}
