//! The decisions of Maestro's scheduler in each order and comparison of nodes.

use std::collections::{BTreeMap, BTreeSet};

use laxity_requests::maestro::fitness::Mode;
use laxity_requests::maestro::predict::ByRole;
use laxity_requests::maestro::queue::{Boundary, StageOrder};
use laxity_requests::maestro::{Learned, Options, Scheduler};
use laxity_requests::workflow::{
    Class, ClusterId, Decision, Event, Job, JobId, ModelId, ModelSpec, NodeId, NodeSpec, Outcome,
    RoleId, Stage, StageId, TemplateId, Workflow as _,
};
use laxity_requests::{Span, Time};

use super::{Dice, Tally, table};

const GB: u64 = 1_000_000_000;
const S: u64 = 1_000_000_000;

fn models() -> Vec<ModelSpec> {
    [2, 8, 15, 27]
        .map(|weights| ModelSpec {
            weights: weights * GB,
            context: GB / 4,
            kv_per_token: 1_500_000,
            prefill_base: 10_000_000,
            prefill_per_token: 100_000,
            decode_per_token: weights * 1_000_000,
            context_start: 5 * S,
        })
        .to_vec()
}

fn node(cluster: u16, host: u64, slots: u32) -> NodeSpec {
    NodeSpec {
        cluster: ClusterId(cluster),
        gpu: 40 * GB,
        other: GB,
        host: host * GB,
        disk: 45 * GB,
        host_rate: 25 * GB,
        disk_rate: 3 * GB,
        remote_rate: GB,
        slots,
    }
}

struct Run {
    scheduler: Scheduler<Learned<ByRole>>,
    dice: Dice,
    now: u64,
    jobs: BTreeMap<JobId, (Job, u16)>,
    stages: BTreeMap<StageId, Stage>,
    running: BTreeMap<StageId, NodeId>,
    loads: Vec<(NodeId, ModelId)>,
    down: BTreeSet<NodeId>,
    next: u64,
    tally: Tally,
}

impl Run {
    fn tell(&mut self, event: &Event) {
        self.scheduler.handle(Time(self.now), event);
        let mut refused = Vec::new();
        while let Some(decision) = self.scheduler.poll_decision(Time(self.now)) {
            let words = format!("{decision:?}");
            self.tally.add(&words);
            self.tally.count(words.split([' ', '(']).next().unwrap_or(&words), 1);
            self.tally.show(|| words);
            match decision {
                Decision::Start { stage, node, .. } => {
                    self.running.insert(stage, node);
                }
                Decision::SwapOut(stage) | Decision::Abort(stage) => {
                    self.running.remove(&stage);
                }
                Decision::Activate { node, model, .. } => self.loads.push((node, model)),
                Decision::Refuse(stage) => refused.extend(self.stages.remove(&stage)),
                _ => (),
            }
        }
        assert!(self.scheduler.is_balanced());
        self.tally.add(&self.scheduler.waiting());
        for stage in refused {
            self.cancel(stage.job);
        }
    }

    fn cancel(&mut self, job: JobId) {
        self.jobs.remove(&job);
        self.stages.retain(|_, stage| stage.job != job);
        let stages = &self.stages;
        self.running.retain(|stage, _| stages.contains_key(stage));
        self.tell(&Event::Cancelled(job));
    }

    fn submit(&mut self) {
        let id = JobId(self.next);
        self.next += 1;
        let batch = self.dice.one_in(2);
        let job = Job {
            id,
            template: TemplateId(self.dice.below(5) as u16),
            class: if batch { Class::Batch } else { Class::Interactive },
            arrival: Time(self.now),
            deadline: Time(self.now + (1 + self.dice.below(100)) * S),
            source: ClusterId(self.dice.below(2) as u16),
            confined: self.dice.one_in(6),
        };
        self.jobs.insert(id, (job, 0));
        self.tell(&Event::Submitted(job));
        for _ in 0..=self.dice.below(2) {
            self.ready(id);
        }
    }

    fn ready(&mut self, job: JobId) {
        let Some((of, position)) = self.jobs.get_mut(&job) else {
            return;
        };
        let position = std::mem::replace(position, *position + 1);
        let model = (u64::from(of.template.0) + u64::from(position)) % 4;
        let id = StageId(self.next);
        self.next += 1;
        let stage = Stage {
            id,
            job,
            model: ModelId(model as u16),
            role: RoleId((model % 3) as u16),
            position,
            invocation: 0,
            tools: position % 2,
            thinking: false,
            prompt: 100 + self.dice.below(1_500) as u32,
            output_max: 200 + self.dice.below(8_000) as u32,
            semantics: [0.0; 4],
        };
        self.stages.insert(id, stage);
        self.tell(&Event::Ready(stage));
    }

    fn a_running(&mut self) -> Option<StageId> {
        let at = self.dice.below(self.running.len() as u64) as usize;
        self.running.keys().nth(at).copied()
    }

    fn finish(&mut self) {
        let Some(id) = self.a_running() else { return };
        self.running.remove(&id);
        let Some(stage) = self.stages.remove(&id) else {
            return;
        };
        let outcome = Outcome {
            output: 1 + self.dice.below(u64::from(stage.output_max)) as u32,
            tool: self.dice.one_in(3),
            took: Span(self.dice.below(5 * S)),
        };
        self.tell(&Event::Finished { stage: id, outcome });
        if self.dice.one_in(3) {
            self.jobs.remove(&stage.job);
            let others = self.stages.values().any(|other| other.job == stage.job);
            if others {
                self.cancel(stage.job);
            } else {
                self.tell(&Event::Ended(stage.job));
            }
        } else {
            self.ready(stage.job);
        }
    }

    fn step(&mut self, nodes: u32) {
        self.now += self.dice.below(S / 4);
        match self.dice.below(20) {
            0..6 => self.submit(),
            6..13 => self.finish(),
            13..16 => {
                let at = self.dice.below(self.loads.len() as u64) as usize;
                if !self.loads.is_empty() {
                    let (node, model) = self.loads.swap_remove(at);
                    self.tell(&Event::Activated { node, model });
                }
            }
            16..18 => {
                if let Some(stage) = self.a_running() {
                    let bytes = (1 + self.dice.below(14)) * GB;
                    self.tell(&Event::Outgrew { stage, bytes });
                }
            }
            18 if self.dice.one_in(6) => {
                let node = NodeId(self.dice.below(u64::from(nodes)) as u32);
                if self.down.remove(&node) {
                    self.tell(&Event::NodeUp(node));
                } else {
                    self.down.insert(node);
                    self.loads.retain(|(other, _)| *other != node);
                    self.running.retain(|_, other| *other != node);
                    self.tell(&Event::NodeDown(node));
                }
            }
            19 if self.dice.one_in(3) => {
                let at = self.dice.below(self.jobs.len() as u64) as usize;
                if let Some(job) = self.jobs.keys().nth(at).copied() {
                    self.cancel(job);
                }
            }
            _ => (),
        }
    }
}

fn settings() -> Vec<(String, Options)> {
    let rtt =
        vec![vec![Span::ZERO, Span::from_millis(80)], vec![Span::from_millis(80), Span::ZERO]];
    let near = |options: Options| Options { rtt: rtt.clone(), ..options };
    let mut all = vec![near(Options::maestro())];
    let orders = [
        ("fcfs", StageOrder::Fcfs),
        ("edf", StageOrder::Edf),
        ("edf_by_class", StageOrder::EdfByClass),
        ("least_attained", StageOrder::LeastAttained),
        ("interactive_first", StageOrder::InteractiveFirst),
        ("interactive_remaining", StageOrder::InteractiveRemaining),
    ];
    all.extend(orders.map(|(name, order)| near(Options::ordered(name, order))));
    let modes = [
        ("bin_pack", Mode::BIN_PACK),
        ("end_to_end", Mode::EndToEnd { degradation: 1.0 }),
        ("load_balance", Mode::LoadBalance),
        ("warm_shortest", Mode::WarmShortest),
    ];
    all.extend(modes.map(|(name, mode)| {
        near(Options {
            name: name.to_owned(),
            mode,
            boundary: Boundary::Hold,
            backlog: 2,
            patience: Span::from_millis(300),
            ..Options::maestro()
        })
    }));
    all.into_iter().map(|o| (o.name.clone(), o)).collect()
}

fn run(options: &Options, nodes: &[NodeSpec], seed: u64, tally: Tally) -> Tally {
    let learned = Learned::new(ByRole::default());
    let mut run = Run {
        scheduler: Scheduler::new(options.clone(), learned, models(), nodes),
        dice: Dice(seed),
        now: S,
        jobs: BTreeMap::new(),
        stages: BTreeMap::new(),
        running: BTreeMap::new(),
        loads: Vec::new(),
        down: BTreeSet::new(),
        next: 0,
        tally,
    };
    for _ in 0..600 {
        run.step(nodes.len() as u32);
    }
    run.tally
}

#[test]
fn a_workflow_scheduler_decides_as_it_did() {
    let few = [node(0, 60, 3), node(1, 20, 2), node(0, 8, 4)];
    let many: Vec<_> = (0..64).map(|at| node(at % 2, 60, 2)).collect();
    for (name, options) in settings() {
        let mut rows = [("3 nodes", Tally::new()), ("64 nodes", Tally::new())];
        for seed in 0..8 {
            let of_many = seed % 4 == 0;
            let nodes = if of_many { &many[..] } else { &few };
            let tally = &mut rows[usize::from(of_many)].1;
            *tally = run(&options, nodes, seed, std::mem::replace(tally, Tally::new()));
        }
        insta::assert_snapshot!(name, table(&rows));
    }
}
