//! Measures the hot path with the shipped daemon: the round trip of a gated submit, the cost of a
//! submit with credit, and the rates of both.
//!
//! Every repetition starts a new daemon, so that the placement of its pages is part of the spread.
//! Each flow is completed after its permit, outside the timed bracket. Otherwise the daemon's
//! tables would only grow, which is no realistic state.

use std::time::{Duration, Instant};

use laxity_client::{Client, Flow, Lane, Stage, Ticket};

use crate::bench::{Bench, Measured};
use crate::clock::Clock;
use crate::error::{BenchError, Result};
use crate::figure::{Gate, Limit, Quantile, Row, Unit};
use crate::sample::{Percentiles, Recorder, Summary};
use crate::service::Laxityd;

/// Bytes of a measured flow. They are less than any chunk, so that one permit covers the flow.
pub(crate) const FLOW_BYTES: u64 = 4096;
const PAUSE_NS: f64 = 1_000.0;
/// Credited submits in one timed bracket. A single one is shorter than the bracket itself.
const CREDIT_BURST: usize = 32;
/// Gated flows that wait at once in the closed loop.
const WINDOW: usize = 64;

pub(crate) fn flow(stage: Stage) -> Flow {
    Flow { stage, layer: 1, bytes: FLOW_BYTES, batch: 1, request: 1, ..Flow::default() }
}

pub(crate) fn rows(bench: &mut Bench) {
    round_trips(bench);
    credit(bench);
    throughput(bench);
}

fn round_trips(bench: &mut Bench) {
    let limits = [(Quantile::P50, 1.15), (Quantile::P99, 1.4), (Quantile::P999, 2.5)];
    let gates = limits.map(|(quantile, most)| Gate::at_most(quantile, Limit::TimesP(most)));
    let row = Row::latency("submit-permit", "submit → permit")
        .gates(gates)
        .note("open port; 1 µs between the completion of one flow and the submit of the next.");
    bench.measure(row, |bench| round_trip(bench, 1, Some(PAUSE_NS)));
    let row = Row::latency("submit-permit-back-to-back", "submit → permit, back to back")
        .gates(gates)
        .note("the next submit also waits until the daemon has accounted for the last flow.");
    bench.measure(row, |bench| round_trip(bench, 1, None));
    let row = Row::latency("submit-permit-64", "submit → permit, 64 clients registered")
        .gates([Gate::at_most(Quantile::P50, Limit::TimesP(1.2))])
        .note("paced as above.");
    bench.measure(row, |bench| round_trip(bench, 64, Some(PAUSE_NS)));
}

/// Measures round trips of one client while `clients` are attached.
fn round_trip(bench: &mut Bench, clients: usize, pause_ns: Option<f64>) -> Result<Summary> {
    let far = bench.far_core()?;
    bench.latencies(|bench| {
        let daemon = Laxityd::open(&bench.cores, far)?;
        let mut bystanders = Vec::new();
        for i in 1..clients {
            let client = daemon.attach(&format!("bystander-{i}"))?;
            // Each bystander uses its lane once, because the daemon needn't scan an unused lane.
            let mut lane = client.lane();
            one_flow(&mut lane, bench.clock, &mut Recorder::with_room_for(1));
            bystanders.push((client, lane));
        }
        let client = daemon.attach("bench")?;
        gated_flows(&client, bench.clock, bench.effort.round_trips / 2, pause_ns)
    })
}

fn gated_flows(
    client: &Client,
    clock: Clock,
    count: usize,
    pause_ns: Option<f64>,
) -> Result<Percentiles> {
    let mut lane = client.lane();
    let pause = pause_ns.map(|ns| clock.ticks(ns));
    let mut recorder = Recorder::with_room_for(count + count / 10);
    for _ in 0..count / 10 {
        one_flow(&mut lane, clock, &mut recorder);
    }
    recorder.clear();
    for _ in 0..count {
        one_flow(&mut lane, clock, &mut recorder);
        if let Some(ticks) = pause {
            clock.pause(ticks);
        }
    }
    // If other programs keep the daemon from its core for longer than the stall timeout, flows are
    // bypassed. Up to 1 % is noise, and more is an error.
    let bypassed = client.stats().bypassed_flows as usize;
    if bypassed > count / 100 {
        return Err(BenchError::Failed(format!("{bypassed} of {count} flows were bypassed")));
    }
    Ok(recorder.finish(clock))
}

/// Submits a flow, waits for the permit and completes it. Only submit to permit is timed.
#[inline(always)]
fn one_flow(lane: &mut Lane, clock: Clock, recorder: &mut Recorder) {
    let flow = flow(Stage::KvReuse);
    let begin = clock.begin();
    let mut ticket = lane.submit(&flow);
    let permit = lane.wait(&mut ticket);
    let end = clock.end();
    if !permit.bypassed {
        lane.complete(&ticket, permit.bytes);
        recorder.note(begin, end);
    }
}

fn credit(bench: &mut Bench) {
    let row = Row::latency("credit-submit", "submit with credit")
        .gates([Gate::at_most(Quantile::P50, Limit::Value(15.0))])
        .note(format!("per submit, in bursts of {CREDIT_BURST}, completions not timed."));
    bench.measure(row, |bench| {
        let far = bench.far_core()?;
        bench.latencies(|bench| {
            let daemon = Laxityd::open(&bench.cores, far)?;
            let client = daemon.attach("bench")?;
            credited_bursts(&client, bench.clock, bench.effort.round_trips / 10)
        })
    });
}

fn credited_bursts(client: &Client, clock: Clock, bursts: usize) -> Result<Percentiles> {
    let mut lane = client.lane();
    let flow = flow(Stage::Collective);
    let pause = clock.ticks(20_000.0);
    let mut tickets: [Ticket; CREDIT_BURST] = std::array::from_fn(|_| Ticket::default());
    let mut recorder = Recorder::with_room_for(bursts);
    let (mut credited, mut gated) = (0_usize, 0_usize);
    for i in 0..bursts + bursts / 10 {
        let begin = clock.begin();
        for ticket in &mut tickets {
            lane.submit_into(&flow, ticket);
        }
        let end = clock.end();
        // A flow with credit is permitted at once, a gated one after a round trip.
        let mut all_credited = true;
        for ticket in &mut tickets {
            let permit = lane.poll(ticket).unwrap_or_else(|| {
                all_credited = false;
                lane.wait(ticket)
            });
            all_credited &= !permit.bypassed;
            lane.complete(ticket, permit.bytes);
        }
        // The daemon reads the records and renews the credit. If it lost its core meanwhile, the
        // lane is full and it needs more than this pause.
        if all_credited {
            clock.pause(pause);
        } else {
            std::thread::sleep(Duration::from_millis(2));
        }
        if i < bursts / 10 {
            continue;
        }
        if all_credited {
            credited += 1;
            recorder.note(begin, end);
        } else {
            gated += 1;
        }
    }
    if credited <= 9 * gated {
        let bursts = credited + gated;
        let why = format!("{gated} of {bursts} bursts found no credit or a full lane");
        return Err(BenchError::Failed(why));
    }
    Ok(recorder.finish(clock).divided_by(CREDIT_BURST as f64))
}

fn throughput(bench: &mut Bench) {
    let row = Row::counting("producers-1", "records, 1 producer", Unit::PerSecond)
        .gates([Gate::at_least(Limit::Value(20e6))])
        .note("credited submits and their completions, both counted.");
    bench.measure(row, records_per_second);
    let title = format!("permits, closed loop, window {WINDOW}");
    let row = Row::counting("permits-closed-loop", title, Unit::PerSecond)
        .gates([Gate::at_least(Limit::Value(15e6))])
        .note("each flow is submitted, permitted and completed.");
    bench.measure(row, |bench| {
        let far = bench.far_core()?;
        bench.numbers(|bench| {
            let daemon = Laxityd::open(&bench.cores, far)?;
            let client = daemon.attach("bench")?;
            permits_per_second(&client, bench.effort.stretch())
        })
    });
}

fn records_per_second(bench: &mut Bench) -> Result<Measured> {
    let far = bench.far_core()?;
    let mut all = Produced::default();
    let measured = bench.numbers(|bench| {
        let daemon = Laxityd::open(&bench.cores, far)?;
        let client = daemon.attach("bench")?;
        let begin = Instant::now();
        let before = all.accepted;
        credited_stream(&client, bench.effort.stretch(), &mut all);
        Ok(2.0 * (all.accepted - before) as f64 / begin.elapsed().as_secs_f64())
    })?;
    let share = |part: u64| 100.0 * part as f64 / (all.accepted + all.refused).max(1) as f64;
    let (gated, refused) = (share(all.gated), share(all.refused));
    let remark = measured.remark.unwrap_or_default();
    Ok(Measured {
        summary: measured.summary,
        remark: Some(format!(
            "{gated:.1} % of the submits found no credit, {refused:.1} % a full lane. {remark}"
        )),
    })
}

#[derive(Clone, Copy, Debug, Default)]
struct Produced {
    /// Flows that were permitted. Each makes two records, a submit and a completion.
    accepted: u64,
    /// Flows that waited because there was no credit.
    gated: u64,
    /// Flows that found the lane full, because the producer is faster than the daemon.
    refused: u64,
}

fn credited_stream(client: &Client, stretch: Duration, produced: &mut Produced) {
    let mut lane = client.lane();
    let flow = flow(Stage::Collective);
    let begin = Instant::now();
    while begin.elapsed() < stretch {
        for _ in 0..256 {
            let mut ticket = lane.submit(&flow);
            let permit = lane.poll(&mut ticket).unwrap_or_else(|| {
                produced.gated += 1;
                lane.wait(&mut ticket)
            });
            if permit.bypassed {
                produced.refused += 1;
                core::hint::spin_loop();
            } else {
                lane.complete(&ticket, permit.bytes);
                produced.accepted += 1;
            }
        }
    }
}

/// Measures permits per second. It waits for the oldest flow, completes it and submits another. An
/// idle port permits in order, and polls of younger flows would take their cache lines from the
/// daemon.
fn permits_per_second(client: &Client, stretch: Duration) -> Result<f64> {
    let mut lane = client.lane();
    let flow = flow(Stage::KvReuse);
    let mut tickets: Vec<Ticket> = (0..WINDOW).map(|_| lane.submit(&flow)).collect();
    let mut permits = 0_u64;
    let begin = Instant::now();
    while begin.elapsed() < stretch {
        for ticket in &mut tickets {
            let permit = loop {
                if let Some(permit) = lane.poll(ticket) {
                    break permit;
                }
                std::hint::spin_loop();
            };
            lane.complete(ticket, permit.bytes);
            permits += u64::from(!permit.bypassed);
            lane.submit_into(&flow, ticket);
        }
    }
    let rate = permits as f64 / begin.elapsed().as_secs_f64();
    for mut ticket in tickets {
        let permit = lane.wait(&mut ticket);
        lane.complete(&ticket, permit.bytes);
    }
    Ok(rate)
}
