//! What a decision of HyperFlexis' dispatcher costs (at most 10 µs per dispatch over 64 instances).
//!
//! 64 instances that decode 64 requests each, and 10 000 requests in line. A measured round is one report of an instance, after which
//! it is asked, or one request that comes. Three situations:
//!
//! * `takes`: an instance reports that it has computed its prompts and is mature; it takes a batch from the line. The figure is
//!   for the whole batch: divide by its size, printed first;
//! * `full`: an instance reports that it has no room: the scan of the line gives nothing;
//! * `arrives`: a request comes while all instances are full: each of them is asked about it.

use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use laxity_requests::dispatch::{Dispatch as _, Event, Role};
use laxity_requests::hyperflexis::{HyperFlexis, Linear, Options};
use laxity_requests::iteration::Load;
use laxity_requests::request::{
    ApplicationId, ClassId, Importance, InstanceId, RequestId, Slo, Spec,
};
use laxity_requests::{Span, Time};

const MODEL: Linear = Linear {
    prefill: [8e6, 60_000.0, 1.5],
    decode: [7e6, 12.0, 20_000.0],
};
const INSTANCES: u32 = 64;
const LINE: u64 = 10_000;
const NOW: Time = Time(1_000_000_000_000);

fn spec(id: u64) -> Spec {
    let class = id % 4;
    let (ttft, tbt) = [(700, 50), (1_000, 70), (2_000, 90), (20_000, 100)][class as usize];
    Spec {
        id: RequestId(id),
        arrival: NOW,
        prompt: 100 + (id * 37 % 900) as u32,
        output_max: 200,
        ready: 0,
        generated: 0,
        class: ClassId(class as u16),
        application: ApplicationId(class as u32),
        importance: Importance::Important,
        slo: Slo::Interactive {
            ttft: ttft * 1_000_000,
            tbt: tbt * 1_000_000,
        },
    }
}

fn load(decoding: u32, blocks_free: u32) -> Load {
    Load {
        waiting: 0,
        running: decoding,
        decoding,
        prefill_tokens: 0,
        decode_context: u64::from(decoding) * 500,
        blocks: 8_192,
        blocks_free,
    }
}

fn report(at: u32, load: Load) -> Event {
    Event::Load {
        instance: InstanceId(at),
        load,
        took: 20_000_000,
    }
}

/// Instances that are full, and a line in front of them.
fn full() -> HyperFlexis {
    let mut dispatch = HyperFlexis::new(Options::new(MODEL, 16));
    for at in 0..INSTANCES {
        let (instance, role) = (InstanceId(at), Role::Whole);
        dispatch.handle(NOW, &Event::Up { instance, role });
    }
    // One request each that goes on for long, so that none is without anything to do.
    for id in 0..u64::from(INSTANCES) {
        dispatch.handle(NOW, &Event::Arrived(spec(LINE * 10 + id)));
        while dispatch.poll_decision(NOW).is_some() {}
    }
    let now = NOW + Span::from_millis(1);
    for at in 0..INSTANCES {
        dispatch.handle(now, &report(at, load(64, 0)));
    }
    for id in 0..LINE {
        dispatch.handle(now, &Event::Arrived(spec(id)));
    }
    while dispatch.poll_decision(now).is_some() {}
    assert!(dispatch.waiting() as u64 >= LINE - u64::from(INSTANCES));
    dispatch
}

fn round(dispatch: &mut HyperFlexis, event: &Event) -> usize {
    let now = NOW + Span::from_millis(600);
    dispatch.handle(now, event);
    let mut placed = 0;
    while let Some(decision) = dispatch.poll_decision(now) {
        black_box(decision);
        placed += 1;
    }
    placed
}

fn bench(criterion: &mut Criterion) {
    let ready = full();
    let situations = [
        ("takes", report(7, load(64, 6_000))),
        ("full", report(7, load(64, 0))),
        ("arrives", Event::Arrived(spec(LINE * 20))),
    ];
    let mut group = criterion.benchmark_group("hyperflexis/dispatch");
    for (name, event) in situations {
        // All are mature by then, and have been asked once.
        let mut asked = ready.clone();
        let now = NOW + Span::from_millis(599);
        while asked.poll_decision(now).is_some() {}
        println!(
            "{name}: {} requests are placed",
            round(&mut asked.clone(), &event)
        );
        group.bench_function(name, |bencher| {
            bencher.iter_batched_ref(
                || asked.clone(),
                |dispatch| round(dispatch, &event),
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
