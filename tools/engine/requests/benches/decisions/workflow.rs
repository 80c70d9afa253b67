//! Benchmarks of Maestro over 64 nodes: the placement of a stage, the end of a stage while all
//! nodes are full and 10 000 stages wait, and a prediction.

use std::hint::black_box;

use laxity_requests::maestro::fitness::Mode;
use laxity_requests::maestro::predict::{ByRole, Predict as _, Record, TwoPhase, Without};
use laxity_requests::maestro::queue::StageOrder;
use laxity_requests::maestro::regressor::Trees;
use laxity_requests::maestro::{Learned, Options, Scheduler};
use laxity_requests::workflow::{
    Class, ClusterId, Decision, Event, Job, JobId, ModelId, ModelSpec, NodeId, NodeSpec, Outcome,
    RoleId, Stage, StageId, TemplateId, Workflow as _,
};
use laxity_requests::{Span, Time};

use crate::{Row, Subject};

const GB: u64 = 1_000_000_000;
const NODES: usize = 64;
const KIND: &str = "workflow";
const LIMIT_US: f64 = 10.0;

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

struct Loaded {
    scheduler: Scheduler<Learned<ByRole>>,
    running: Vec<StageId>,
    loads: Vec<(NodeId, ModelId)>,
    next: u64,
    /// Whether the measured event is the end of a stage. Otherwise it is a new stage.
    ends: bool,
}

impl Loaded {
    /// Places `load` stages on 64 nodes with all weights loaded, and then adds `waiting` more.
    fn new(options: Options, load: u64, waiting: u64) -> Self {
        let learned = Learned::new(ByRole::default());
        let nodes = vec![node(); NODES];
        let mut loaded = Self {
            scheduler: Scheduler::new(options, learned, models(), &nodes),
            running: Vec::new(),
            loads: Vec::new(),
            next: 0,
            ends: waiting > 0,
        };
        for _ in 0..load {
            loaded.submit();
            loaded.settle();
        }
        for _ in 0..waiting {
            loaded.submit();
        }
        loaded.settle();
        loaded
    }

    fn now(&self) -> Time {
        Time(self.next)
    }

    fn submit(&mut self) {
        let id = self.next;
        self.next += 1;
        let job = Job {
            id: JobId(id),
            template: TemplateId((id % 9) as u16),
            class: if id.is_multiple_of(2) { Class::Batch } else { Class::Interactive },
            arrival: Time(id),
            deadline: Time(id + 100 * GB),
            source: ClusterId(0),
            confined: false,
        };
        self.scheduler.handle(Time(id), &Event::Submitted(job));
        self.scheduler.handle(Time(id), &Event::Ready(stage(id)));
    }

    fn finish(&mut self) {
        let Some(stage) = self.running.pop() else {
            return;
        };
        let outcome = Outcome { output: 100, tool: false, took: Span(GB) };
        let event = Event::Finished { stage, outcome };
        self.scheduler.handle(self.now(), &event);
    }

    fn drain(&mut self) -> usize {
        let mut started = 0;
        while let Some(decision) = self.scheduler.poll_decision(self.now()) {
            match decision {
                Decision::Start { stage, .. } => {
                    self.running.push(stage);
                    started += 1;
                }
                Decision::Activate { node, model, .. } => self.loads.push((node, model)),
                _ => {}
            }
        }
        started
    }

    /// Handles events until all weights are loaded.
    fn settle(&mut self) {
        self.drain();
        while let Some((node, model)) = self.loads.pop() {
            let event = Event::Activated { node, model };
            self.scheduler.handle(self.now(), &event);
            self.drain();
        }
    }
}

impl Subject for Loaded {
    fn prepare(&mut self) {
        self.settle();
        // Each time another stage ends.
        let count = self.running.len();
        if count > 0 {
            self.running.swap(count - 1, self.next as usize * 7_919 % count);
        }
        if self.ends {
            self.next += 1;
        } else {
            self.finish();
            self.settle();
        }
    }

    fn decide(&mut self) -> usize {
        if self.ends {
            self.finish();
        } else {
            self.submit();
        }
        self.drain().max(1)
    }
}

struct Asked(TwoPhase);

impl Subject for Asked {
    fn decide(&mut self) -> usize {
        black_box(self.0.predict(black_box(&stage(17))));
        1
    }
}

fn predictor() -> TwoPhase {
    let records: Vec<Record> = (0..1000)
        .map(|id| Record {
            stage: stage(id),
            output: 50 + (id * 37 % 900) as u32,
            tool: id.is_multiple_of(4),
        })
        .collect();
    TwoPhase::train(&records, Without::default(), &Trees::default()).expect("there are records")
}

pub(crate) fn rows() -> Vec<Row> {
    let mode = |name: &str, mode| Options { name: name.to_owned(), mode, ..Options::maestro() };
    let settings = [
        Options::maestro(),
        Options::ordered("maestro, edf", StageOrder::Edf),
        mode("maestro, load balance", Mode::LoadBalance),
        mode("maestro, warm shortest", Mode::WarmShortest),
        mode("maestro, end to end", Mode::EndToEnd { degradation: 1.0 }),
    ];
    let mut rows = Vec::new();
    for options in settings {
        for (said, load, waiting) in
            [("a stage comes", 500, 0), ("a stage ends, 10 000 wait", 1_100, 10_000)]
        {
            let options = options.clone();
            rows.push(Row {
                name: format!("workflow: {}, {said}", options.name),
                kind: KIND,
                limit_us: Some(LIMIT_US),
                make: Box::new(move || Box::new(Loaded::new(options.clone(), load, waiting))),
            });
        }
    }
    rows.push(Row {
        name: "maestro's predictor, asked once".to_owned(),
        kind: KIND,
        limit_us: None,
        make: Box::new(|| Box::new(Asked(predictor()))),
    });
    rows
}
