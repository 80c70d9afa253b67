//! What ordering the batches costs: one trigger of `laxity_policy::admission` (a batch departs,
//! another arrives, RED is sorted and Algorithm 1 runs) with 10 000 batches active.

use laxity_policy::admission::{Admission, AdmissionConfig, AdmissionEvent, RequestLoad};
use laxity_policy::{BatchId, PortId, RequestId, Span, Time};

use crate::bench::{Bench, Row};
use crate::clock::Clock;
use crate::draw::Draw;
use crate::figure::{Gate, Limit, Quantile};
use crate::sample::{Percentiles, Recorder};

const BATCHES: u64 = 10_000;
const REQUESTS_PER_BATCH: u64 = 4;
const PORTS: u64 = 512;
const TRIGGERS: usize = 30;

/// One row per state of the cluster: nearly everything can be in time, or much of it cannot.
pub(crate) fn rows(bench: &mut Bench) {
    let states = [
        (
            "admission-10k",
            "admission trigger, 10 000 batches, in time",
            200_000,
        ),
        (
            "admission-10k-late",
            "admission trigger, 10 000 batches, overloaded",
            2_000,
        ),
    ];
    for (name, title, horizon_ms) in states {
        let row = Row::latency(name, title)
            .gates([Gate::at_most(Quantile::P50, Limit::Value(5e6))])
            .note(format!(
                "{REQUESTS_PER_BATCH} requests a batch, {PORTS} ports, deadlines within {} s.",
                horizon_ms / 1000
            ));
        bench.measure(row, |bench| {
            bench.latencies_alone(|bench| repetition(bench.clock, horizon_ms))
        });
    }
}

fn repetition(clock: Clock, horizon_ms: u64) -> anyhow::Result<Percentiles> {
    let mut admission =
        Admission::new(AdmissionConfig::default()).map_err(|e| anyhow::anyhow!("{e}"))?;
    let mut draw = Draw::new(horizon_ms);
    let mut now = Time(1_000_000_000);
    for port in 0..PORTS as u32 {
        let rate = AdmissionEvent::PortRate {
            port: PortId(port),
            bytes_per_second: 12_500_000_000,
        };
        admission.handle(now, rate);
    }
    for batch in 1..=BATCHES {
        admission.handle(now, arrival(&mut draw, now, batch, horizon_ms));
    }
    while admission.poll_action(now).is_some() {}
    anyhow::ensure!(
        admission.active_batches() as u64 == BATCHES,
        "batches were forgotten"
    );

    let mut recorder = Recorder::with_room_for(TRIGGERS);
    for i in 0..TRIGGERS as u64 {
        now = now + Span::from_millis(1);
        let departed = AdmissionEvent::BatchDeparted {
            batch: BatchId(1 + i),
        };
        let arrived = arrival(&mut draw, now, BATCHES + 1 + i, horizon_ms);
        let begin = clock.begin();
        admission.handle(now, departed);
        admission.handle(now, arrived);
        while admission.poll_action(now).is_some() {}
        recorder.note(begin, clock.end());
    }
    Ok(recorder.finish(clock))
}

fn arrival(draw: &mut Draw, now: Time, batch: u64, horizon_ms: u64) -> AdmissionEvent {
    let requests = (0..REQUESTS_PER_BATCH)
        .map(|member| RequestLoad {
            request: RequestId(batch * REQUESTS_PER_BATCH + member),
            deadline: now + Span::from_millis(100 + draw.below(horizon_ms)),
            ports: (0..2)
                .map(|_| {
                    (
                        PortId(draw.below(PORTS) as u32),
                        (64 << 20) + draw.below(256 << 20),
                    )
                })
                .collect(),
            started: draw.below(8) == 0,
        })
        .collect();
    AdmissionEvent::BatchArrived {
        batch: BatchId(batch),
        requests,
        compute: Span::from_millis(50 + draw.below(200)),
    }
}
