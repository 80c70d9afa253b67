//! What Maestro's decisions cost: placing a stage over 64 nodes, with 10 000 stages in the queue and without, and predicting one.

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use laxity_requests::maestro::predict::{ByRole, Predict as _, Record, TwoPhase, Without};
use laxity_requests::maestro::regressor::Trees;
use laxity_requests::maestro::{Learned, Options, Scheduler};
use laxity_requests::workflow::{
    Class, ClusterId, Decision, Event, Job, JobId, ModelId, ModelSpec, NodeId, NodeSpec, Outcome,
    RoleId, Stage, StageId, TemplateId, Workflow as _,
};
use laxity_requests::{Span, Time};

const GB: u64 = 1_000_000_000;

fn models() -> Vec<ModelSpec> {
    [1, 3, 8, 16, 28]
        .map(|weights| ModelSpec {
            weights: weights * GB,
            context: GB / 4,
            kv_per_token: 140_000,
            prefill_base: 10_000_000,
            prefill_per_token: 100_000,
            decode_per_token: weights * 1_000_000,
            context_start: 6 * GB,
        })
        .to_vec()
}

fn node() -> NodeSpec {
    NodeSpec {
        cluster: ClusterId(0),
        gpu: 80 * GB,
        other: GB,
        host: 500 * GB,
        disk: 1000 * GB,
        host_rate: 25 * GB,
        disk_rate: 3 * GB,
        remote_rate: GB,
        slots: 16,
    }
}

fn stage(id: u64) -> Stage {
    Stage {
        id: StageId(id),
        job: JobId(id),
        model: ModelId((id % 4) as u16),
        role: RoleId((id % 7) as u16),
        position: 0,
        invocation: 0,
        tools: (id % 3) as u16,
        thinking: id.is_multiple_of(5),
        prompt: 200 + (id % 900) as u32,
        output_max: 4096,
        semantics: [(id % 11) as f32 / 11.0, (id % 13) as f32 / 13.0, 0.0, 0.0],
    }
}

fn submit(scheduler: &mut Scheduler<Learned<ByRole>>, id: u64) {
    let job = Job {
        id: JobId(id),
        template: TemplateId((id % 9) as u16),
        class: if id.is_multiple_of(2) {
            Class::Batch
        } else {
            Class::Interactive
        },
        arrival: Time(id),
        deadline: Time(id + 100 * GB),
        source: ClusterId(0),
        confined: false,
    };
    scheduler.handle(Time(id), &Event::Submitted(job));
    scheduler.handle(Time(id), &Event::Ready(stage(id)));
}

/// 64 nodes with about as many stages as they have slots, all weights there, and then `waiting` more.
fn full(load: u64, waiting: u64) -> (Scheduler<Learned<ByRole>>, Vec<StageId>) {
    let learned = Learned::new(ByRole::default());
    let nodes = vec![node(); 64];
    let mut scheduler = Scheduler::new(Options::maestro(), learned, models(), &nodes);
    let mut running = Vec::new();
    for id in 0..load + waiting {
        submit(&mut scheduler, id);
        if id < load || id + 1 == load + waiting {
            drain(&mut scheduler, id, &mut running);
        }
    }
    (scheduler, running)
}

fn drain(scheduler: &mut Scheduler<Learned<ByRole>>, now: u64, running: &mut Vec<StageId>) {
    let mut loads: Vec<(NodeId, ModelId)> = Vec::new();
    loop {
        while let Some(decision) = scheduler.poll_decision(Time(now)) {
            match decision {
                Decision::Start { stage, .. } => running.push(stage),
                Decision::Activate { node, model, .. } => loads.push((node, model)),
                _ => {}
            }
        }
        let Some((node, model)) = loads.pop() else {
            return;
        };
        scheduler.handle(Time(now), &Event::Activated { node, model });
    }
}

fn decisions(criterion: &mut Criterion) {
    criterion.bench_function("maestro: place a stage over 64 nodes", |bench| {
        bench.iter_batched_ref(
            || full(500, 0).0,
            |scheduler| {
                submit(scheduler, 100_000);
                let mut started = 0;
                while scheduler.poll_decision(Time(100_000)).is_some() {
                    started += 1;
                }
                started
            },
            BatchSize::LargeInput,
        );
    });
    criterion.bench_function(
        "maestro: a stage ends, 10 000 wait, 64 full nodes",
        |bench| {
            bench.iter_batched_ref(
                || full(1300, 10_000),
                |(scheduler, running)| {
                    let outcome = Outcome {
                        output: 100,
                        tool: false,
                        took: Span(GB),
                    };
                    let stage = running.pop().expect("somebody runs");
                    scheduler.handle(Time(20_000), &Event::Finished { stage, outcome });
                    let mut decided = 0;
                    while scheduler.poll_decision(Time(20_000)).is_some() {
                        decided += 1;
                    }
                    decided
                },
                BatchSize::LargeInput,
            );
        },
    );
    let records: Vec<Record> = (0..1000)
        .map(|id| Record {
            stage: stage(id),
            output: 50 + (id * 37 % 900) as u32,
            tool: id.is_multiple_of(4),
        })
        .collect();
    let two = TwoPhase::train(&records, Without::default(), &Trees::default()).expect("trained");
    criterion.bench_function("maestro: predict a stage", |bench| {
        bench.iter(|| two.predict(&stage(17)));
    });
}

criterion_group!(benches, decisions);
criterion_main!(benches);
