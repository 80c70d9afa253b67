//! Tests of workflows under random events: no stage is lost, all sums agree after every step, and
//! no node exceeds its memory. This holds for any order, boundary rule and comparison of nodes.

use std::collections::{BTreeMap, BTreeSet};

use laxity_requests::maestro::fitness::Mode;
use laxity_requests::maestro::queue::{Boundary, StageOrder};
use laxity_requests::maestro::{Estimator, MaestroOptions, Scheduler};
use laxity_requests::workflow::{
    Class, ClusterId, JobId, ModelId, ModelSpec, NodeId, NodeSpec, Outcome, RoleId, Stage, StageId,
    TemplateId, WorkflowDecision, WorkflowEvent, WorkflowJob,
};
use laxity_requests::{Span, Time};
use proptest::prelude::*;

const GB: u64 = 1_000_000_000;
const S: u64 = 1_000_000_000;

fn models() -> Vec<ModelSpec> {
    [2, 8, 15, 27]
        .map(|weights| ModelSpec {
            weights: weights * GB,
            context: GB / 4,
            kv_per_token: 150_000,
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

/// Predicts the mean length of the role so far, 200 tokens at first, and no later stage.
#[derive(Default)]
struct ByRole(BTreeMap<RoleId, (f64, f64)>);

impl Estimator for ByRole {
    fn ready(&mut self, _: &WorkflowJob, stage: &Stage) -> f64 {
        let output = self.0.get(&stage.role).map_or(200.0, |(sum, count)| sum / count);
        output.clamp(1.0, f64::from(stage.output_max))
    }

    fn future(&self, _: &WorkflowJob, _: &Stage) -> Span {
        Span::ZERO
    }

    fn finished(&mut self, stage: &Stage, _: f64, outcome: &Outcome) {
        let (sum, count) = self.0.entry(stage.role).or_default();
        *sum += f64::from(outcome.output);
        *count += 1.0;
    }

    fn ended(&mut self, _: JobId) {}
}

/// A job of a test. Its first `wide` stages are ready at once, and later ones follow one by one.
#[derive(Clone, Debug)]
struct Script {
    class: Class,
    source: u16,
    wide: usize,
    /// Model, prompt tokens and output tokens of each stage.
    stages: Vec<(u16, u32, u32)>,
}

/// A driver that has the true lengths and checks the scheduler's decisions.
struct World {
    scheduler: Scheduler,
    now: u64,
    scripts: Vec<Script>,
    /// Next stage and number of ready or running stages of each job, or `None` for a job that is
    /// over.
    jobs: BTreeMap<usize, (usize, usize)>,
    /// Node, permitted KV and needed KV of each running stage.
    running: BTreeMap<StageId, (NodeId, u64, u64)>,
    ready: BTreeSet<StageId>,
    /// Stages that asked for more KV and wait for the answer.
    asked: BTreeSet<StageId>,
    loads: Vec<(NodeId, ModelId)>,
    /// Weights that are leaving, with the time when they are gone.
    leaves: Vec<(u64, NodeId, ModelId)>,
    finished: usize,
}

impl World {
    fn new(options: MaestroOptions, nodes: &[NodeSpec], scripts: Vec<Script>) -> Self {
        let scheduler = Scheduler::new(options, ByRole::default(), models(), nodes);
        Self {
            scheduler,
            now: 0,
            scripts,
            jobs: BTreeMap::new(),
            running: BTreeMap::new(),
            ready: BTreeSet::new(),
            asked: BTreeSet::new(),
            loads: Vec::new(),
            leaves: Vec::new(),
            finished: 0,
        }
    }

    fn id(job: usize, stage: usize) -> StageId {
        StageId((job * 100 + stage) as u64)
    }

    fn handle(&mut self, event: &WorkflowEvent) {
        self.scheduler.handle(Time(self.now), event);
    }

    fn submit(&mut self, index: usize) {
        let script = self.scripts[index].clone();
        self.handle(&WorkflowEvent::Submitted(WorkflowJob {
            id: JobId(index as u64),
            template: TemplateId(script.stages.len() as u16),
            class: script.class,
            arrival: Time(self.now),
            deadline: Time(self.now + 100 * S),
            source: ClusterId(script.source),
        }));
        self.jobs.insert(index, (0, 0));
        for _ in 0..script.wide.min(script.stages.len()) {
            self.next(index);
        }
        self.drain();
    }

    fn next(&mut self, index: usize) {
        let Some((next, open)) = self.jobs.get_mut(&index) else { return };
        let at = *next;
        if at == self.scripts[index].stages.len() {
            if *open == 0 {
                self.jobs.remove(&index);
                self.handle(&WorkflowEvent::Ended(JobId(index as u64)));
            }
            return;
        }
        *next += 1;
        *open += 1;
        let (model, prompt, output) = self.scripts[index].stages[at];
        self.ready.insert(Self::id(index, at));
        self.handle(&WorkflowEvent::Ready(Stage {
            id: Self::id(index, at),
            job: JobId(index as u64),
            model: ModelId(model),
            role: RoleId(model),
            position: at as u16,
            tools: 1,
            prompt,
            output_max: output.max(2) * 2,
            ..Stage::default()
        }));
    }

    fn drain(&mut self) {
        while let Some(decision) = self.scheduler.poll_decision(Time(self.now)) {
            match decision {
                WorkflowDecision::Start { stage, node, kv } => {
                    assert!(self.ready.remove(&stage), "{stage:?} starts and was not waiting");
                    let (job, at) = ((stage.0 / 100) as usize, (stage.0 % 100) as usize);
                    let (model, prompt, output) = self.scripts[job].stages[at];
                    let needed = models()[usize::from(model)].kv(prompt, f64::from(output));
                    let cold = self.loads.contains(&(node, ModelId(model)));
                    assert!(!cold, "{stage:?} starts before its weights are there");
                    self.running.insert(stage, (node, kv, needed));
                }
                WorkflowDecision::Grow { stage, kv } => {
                    let held = self.running.get_mut(&stage).expect("who grows runs");
                    assert!(kv > held.1);
                    held.1 = kv;
                    self.asked.remove(&stage);
                }
                WorkflowDecision::SwapOut(stage) | WorkflowDecision::Abort(stage) => {
                    assert!(self.running.remove(&stage).is_some(), "{stage:?} did not run");
                    self.asked.remove(&stage);
                    self.ready.insert(stage);
                }
                WorkflowDecision::Activate { node, model, .. } => self.loads.push((node, model)),
                WorkflowDecision::Demote { node, model, takes, .. } => {
                    if takes > Span::ZERO {
                        self.leaves.push((self.now + takes.0, node, model));
                    }
                }
                WorkflowDecision::StopTransition { node, model } => {
                    let before = self.leaves.len();
                    self.leaves.retain(|(_, at, other)| (*at, *other) != (node, model));
                    assert!(self.leaves.len() < before, "{model:?} was not leaving");
                }
                WorkflowDecision::Preempted(_) => {}
            }
        }
        assert!(self.scheduler.is_balanced());
    }

    /// Reports the next event, chosen by `dice`. Returns whether there was one.
    fn step(&mut self, dice: u64) -> bool {
        self.now += 1 + dice % S;
        // Report weights that are gone by now.
        let now = self.now;
        let (left, still): (Vec<_>, Vec<_>) =
            self.leaves.drain(..).partition(|(at, ..)| *at <= now);
        self.leaves = still;
        for (_, node, model) in left {
            self.handle(&WorkflowEvent::Slept { node, model });
            self.drain();
        }
        let outgrown = self.running.iter().find(|(stage, (_, promised, needed))| {
            promised < needed && !self.asked.contains(*stage)
        });
        if let Some((stage, (_, _, needed))) = outgrown {
            let (stage, bytes) = (*stage, *needed);
            self.asked.insert(stage);
            self.handle(&WorkflowEvent::Outgrew { stage, bytes });
            self.drain();
            return true;
        }
        // A stage that waits for more KV can't finish.
        let goes_on: Vec<StageId> =
            self.running.keys().filter(|stage| !self.asked.contains(*stage)).copied().collect();
        let happening = self.loads.len() + goes_on.len();
        if happening == 0 {
            let next = self.leaves.iter().map(|(at, ..)| *at).min();
            self.now = next.unwrap_or(self.now);
            return next.is_some();
        }
        let at = (dice / 7) as usize % happening;
        if at < self.loads.len() {
            let (node, model) = self.loads.swap_remove(at);
            self.handle(&WorkflowEvent::Activated { node, model });
        } else {
            let stage = goes_on[at - self.loads.len()];
            self.running.remove(&stage);
            let (job, index) = ((stage.0 / 100) as usize, (stage.0 % 100) as usize);
            let outcome = Outcome {
                output: self.scripts[job].stages[index].2,
                took: Span(1 + dice % (20 * S)),
            };
            self.handle(&WorkflowEvent::Finished { stage, outcome });
            self.finished += 1;
            if let Some((_, open)) = self.jobs.get_mut(&job) {
                *open -= 1;
            }
            self.next(job);
        }
        self.drain();
        true
    }
}

const ORDERS: [StageOrder; 7] = [
    StageOrder::Remaining { aging: 0.1, aging_interactive: 0.0 },
    StageOrder::Fcfs,
    StageOrder::Edf,
    StageOrder::EdfByClass,
    StageOrder::LeastAttained,
    StageOrder::InteractiveFirst,
    StageOrder::InteractiveRemaining,
];

fn scripts() -> impl Strategy<Value = Vec<Script>> {
    let stage = (0u16..4, 1u32..4000, 1u32..20_000);
    let script = (prop::bool::ANY, 0u16..2, 1usize..4, prop::collection::vec(stage, 1..6))
        .prop_map(|(batch, source, wide, stages)| Script {
            class: if batch { Class::Batch } else { Class::Interactive },
            source,
            wide,
            stages,
        });
    prop::collection::vec(script, 1..25)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn nobody_is_lost_and_no_memory_is_promised_twice(
        scripts in scripts(),
        order in prop::sample::select(&ORDERS),
        boundary in prop::sample::select(&[Boundary::Hold, Boundary::MAESTRO, Boundary::Requeue]),
        mode in prop::sample::select(vec![
            Mode::MAESTRO, Mode::BIN_PACK, Mode::LoadBalance, Mode::WarmShortest,
            Mode::EndToEnd,
        ]),
        host in prop::sample::select(vec![10u64, 60, 500]),
        slots in 1u32..6,
        dice in prop::collection::vec(any::<u64>(), 40),
    ) {
        let nodes = [node(0, host, slots), node(0, host, slots), node(1, host, slots)];
        let options = MaestroOptions { order, boundary, mode, ..MaestroOptions::maestro() };
        let mut world = World::new(options, &nodes, scripts.clone());
        for index in 0..scripts.len() {
            world.submit(index);
            world.step(dice[index % dice.len()]);
        }
        for turn in 0..20_000 {
            if !world.step(dice[turn % dice.len()].wrapping_add(turn as u64)) {
                break;
            }
        }
        prop_assert!(world.jobs.is_empty(), "{} jobs never ended", world.jobs.len());
        prop_assert!(world.ready.is_empty() && world.running.is_empty());
        prop_assert!(world.scheduler.is_idle());
    }
}

fn one(class: Class, stages: &[(u16, u32, u32)]) -> Script {
    Script { class, source: 0, wide: 1, stages: stages.to_vec() }
}

/// Two models don't fit on the node together. The large one gets its turn although stages of the
/// small one always wait.
#[test]
fn a_stage_whose_weights_find_no_room_is_not_overtaken_for_ever() {
    let mut scripts = vec![one(Class::Batch, &[(2, 100, 4000)]); 60];
    scripts[5] = one(Class::Interactive, &[(3, 100, 50)]);
    let mut world = World::new(MaestroOptions::maestro(), &[node(0, 100, 3)], scripts);
    for index in 0..20 {
        world.submit(index);
    }
    let mut submitted = 20;
    while world.jobs.contains_key(&5) {
        assert!(submitted < 60, "it waits while {} others ended", world.finished);
        // Each step takes a second.
        world.step(S - 1);
        if world.jobs.len() < 20 {
            world.submit(submitted);
            submitted += 1;
        }
    }
}

fn starts(world: &mut World, scripts: usize) -> Vec<u64> {
    for index in 0..scripts {
        world.submit(index);
    }
    let mut order = Vec::new();
    let mut seen = BTreeSet::new();
    loop {
        for stage in world.running.keys() {
            if seen.insert(*stage) {
                order.push(stage.0);
            }
        }
        if !world.step(S) {
            return order;
        }
    }
}

#[test]
fn a_batch_job_loses_its_turn_between_stages_to_a_shorter_job_and_not_without_preemption() {
    let long = one(Class::Batch, &[(0, 10, 9000), (0, 10, 9000)]);
    let short = one(Class::Interactive, &[(0, 10, 20)]);
    let scripts = vec![long, short];
    let nodes = [node(0, 100, 1)];
    let options = |boundary| MaestroOptions { boundary, ..MaestroOptions::maestro() };
    let mut world = World::new(options(Boundary::MAESTRO), &nodes, scripts.clone());
    // The role's length is unknown at first, so the first job's expected length is that of the
    // second.
    assert_eq!(starts(&mut world, 2), [0, 100, 1]);
    let mut world = World::new(options(Boundary::Hold), &nodes, scripts);
    assert_eq!(starts(&mut world, 2), [0, 1, 100]);
}

#[test]
fn a_turn_that_finds_no_room_is_no_turn_any_more() {
    let long = one(Class::Batch, &[(0, 10, 9000), (0, 4000, 9000)]);
    let short = one(Class::Interactive, &[(0, 10, 20)]);
    let mut world = World::new(MaestroOptions::maestro(), &[node(0, 100, 1)], vec![long, short]);
    world.submit(0);
    while world.running.is_empty() {
        assert!(world.step(0));
    }
    // The next stage is ready while the first has the only slot. Nobody waits, so the job keeps its
    // turn, and then a shorter job comes.
    world.next(0);
    world.drain();
    world.submit(1);
    while !world.running.contains_key(&World::id(1, 0)) {
        assert!(!world.running.contains_key(&World::id(0, 1)), "the longer job is first");
        assert!(world.step(0));
    }
}
