//! One point of an experiment: jobs, nodes, a scheduler with its predictor, and the objectives.
//!
//! Objectives follow §IV-A. A batch job must end within a deadline derived from isolated runs of
//! its application. The stages of an interactive job must not wait too long in total. The paper
//! gives no factors. Here they are three times the isolated 95th percentile, and half the isolated
//! median.

use std::collections::HashMap;
use std::sync::Arc;

use laxity_requests::maestro::estimate::Estimator;
use laxity_requests::maestro::fitness::Mode;
use laxity_requests::maestro::predict::{LengthPredictor, StageRecord};
use laxity_requests::maestro::queue::{Boundary, StageOrder};
use laxity_requests::maestro::{LearnedEstimator, MaestroOptions, Scheduler};
use laxity_requests::trees::Trees;
use laxity_requests::workflow::{
    Class, JobId, ModelSpec, NodeSpec, Outcome, Stage, StageId, WorkflowJob,
};
use laxity_requests::{Span, Time};

use super::super::PaperError;
use super::super::measurements::Columns;
use super::apps::{APPS, JobSource, PlannedJob};
use super::catalogue::{self, ServedModel};
use super::world::{MaestroWorld, Ran};

/// Deadline of a batch job, as a multiple of the 95th percentile of isolated jobs of its
/// application.
const BATCH_FACTOR: f64 = 3.0;
const WAIT_SHARE: f64 = 0.5;

/// The objectives of an application's jobs, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Promise {
    waits: u64,
    deadline: u64,
}

pub(super) struct Kit {
    pub(super) models: Vec<ServedModel>,
    promises: Vec<Promise>,
    predictor: LengthPredictor,
}

const TRAINING: u64 = 1 << 62;
const ISOLATED: u64 = TRAINING + 1;

fn records(jobs: &[PlannedJob]) -> Vec<StageRecord> {
    jobs.iter()
        .flat_map(|job| &job.stages)
        .map(|planned| StageRecord { stage: planned.stage, output: planned.output })
        .collect()
}

fn trees(quick: bool) -> Trees {
    if quick {
        Trees { count: 12, depth: 3, rate: 0.4, ..Trees::default() }
    } else {
        Trees::default()
    }
}

/// Returns the longest path through a job with every stage alone, in nanoseconds.
fn alone(job: &PlannedJob, models: &[ServedModel]) -> u64 {
    let mut ends: Vec<u64> = Vec::new();
    for planned in &job.stages {
        let ready = planned.after.iter().map(|at| ends[*at]).max().unwrap_or(0);
        let model = &models[usize::from(planned.stage.model.0)];
        let runs = model.alone(planned.stage.prompt, planned.output) as u64;
        ends.push(ready + planned.delay + runs);
    }
    ends.into_iter().max().unwrap_or(0)
}

pub(super) fn percentile(values: &mut [f64], share: f64) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * share).round() as usize]
}

pub(super) fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), v| (sum + v, count + 1.0));
    if count > 0.0 { sum / count } else { 0.0 }
}

impl Kit {
    pub(super) fn new(quick: bool) -> Result<Self, PaperError> {
        let models = catalogue::models()?;
        let mut source = JobSource::new(ISOLATED);
        let promises = (0..APPS.len())
            .map(|app| {
                let mut took: Vec<f64> =
                    (0..400).map(|_| alone(&source.job(app, Time::ZERO), &models) as f64).collect();
                let waits = (WAIT_SHARE * percentile(&mut took, 0.5)) as u64;
                let slow = percentile(&mut took, 0.95);
                Promise {
                    waits,
                    // The deadline of an interactive job adds the longest allowed wait.
                    deadline: match source.job(app, Time::ZERO).job.class {
                        Class::Batch => (BATCH_FACTOR * slow) as u64,
                        Class::Interactive => slow as u64 + waits,
                    },
                }
            })
            .collect();
        let jobs = JobSource::new(TRAINING).mixed(if quick { 250 } else { 1500 });
        let predictor = LengthPredictor::train(&records(&jobs), &trees(quick))
            .map_err(|error| PaperError::BuiltIn(error.to_string()))?;
        Ok(Self { models, promises, predictor })
    }

    pub(super) fn predictor(&self) -> LengthPredictor {
        self.predictor.clone()
    }

    pub(super) fn jobs(
        &self,
        seed: u64,
        rate: f64,
        seconds: f64,
        batch: f64,
        rounds: u16,
    ) -> Vec<PlannedJob> {
        let source = JobSource::new(seed).with_rounds(rounds);
        // Batch jobs with more rounds arrive less often, so that the work is the same.
        let (interactive, batches) = (rate * (1.0 - batch), rate * batch / f64::from(rounds));
        let rate = interactive + batches;
        let mut jobs = { source }.jobs(rate, seconds, batches / rate);
        for job in &mut jobs {
            let promise = &self.promises[usize::from(job.job.template.0)];
            job.job.deadline = job.job.arrival + Span(promise.deadline);
        }
        jobs
    }
}

/// A predictor with perfect knowledge (the paper's Oracle-SRTF).
pub(super) struct OracleEstimator {
    output: HashMap<StageId, f64>,
    future: HashMap<StageId, Span>,
}

impl OracleEstimator {
    pub(super) fn new(jobs: &[PlannedJob], models: &[ModelSpec]) -> Self {
        let (mut output, mut future) = (HashMap::new(), HashMap::new());
        for job in jobs {
            // All direct and indirect successors of a stage.
            let mut after: Vec<Vec<bool>> = vec![vec![false; job.stages.len()]; job.stages.len()];
            for (at, planned) in job.stages.iter().enumerate() {
                for before in &planned.after {
                    after[*before][at] = true;
                    for earlier in after.iter_mut().take(at) {
                        if earlier[*before] {
                            earlier[at] = true;
                        }
                    }
                }
                output.insert(planned.stage.id, f64::from(planned.output));
            }
            for (at, planned) in job.stages.iter().enumerate() {
                let rest = job.stages.iter().enumerate().filter(|(other, _)| after[at][*other]);
                let work: u64 = rest
                    .map(|(_, other)| {
                        let model = &models[usize::from(other.stage.model.0)];
                        model.execution(other.stage.prompt, f64::from(other.output)).0
                    })
                    .sum();
                future.insert(planned.stage.id, Span(work));
            }
        }
        Self { output, future }
    }
}

impl Estimator for OracleEstimator {
    fn ready(&mut self, _: &WorkflowJob, stage: &Stage) -> f64 {
        self.output.get(&stage.id).copied().unwrap_or_default()
    }

    fn future(&self, _: &WorkflowJob, stage: &Stage) -> Span {
        self.future.get(&stage.id).copied().unwrap_or_default()
    }

    fn finished(&mut self, _: &Stage, _: f64, _: &Outcome) {}

    fn ended(&mut self, _: JobId) {}
}

#[derive(Clone, Debug)]
pub(super) struct TrialPolicy {
    pub(super) options: MaestroOptions,
    pub(super) oracle: bool,
}

impl TrialPolicy {
    pub(super) fn maestro() -> Self {
        Self { options: MaestroOptions::maestro(), oracle: false }
    }

    pub(super) fn turned(name: &str, boundary: Boundary) -> Self {
        Self::changed(name, |options| options.boundary = boundary)
    }

    fn changed(name: &str, change: impl FnOnce(&mut MaestroOptions)) -> Self {
        let mut of = Self::maestro();
        name.clone_into(&mut of.options.name);
        change(&mut of.options);
        of
    }

    pub(super) fn all() -> Vec<Self> {
        let remaining =
            |aging, aging_interactive| StageOrder::Remaining { aging, aging_interactive };
        let ordered =
            |name, order| Self { options: MaestroOptions::ordered(name, order), oracle: false };
        let routed = |name: &str, mode| Self::changed(name, |options| options.mode = mode);
        let aged = |name: &str, aging, aging_interactive| {
            Self::changed(name, |options| {
                options.order = remaining(aging, aging_interactive);
            })
        };
        let only = Boundary::Preempt { interactive_only: true };
        vec![
            Self::maestro(),
            ordered("fcfs", StageOrder::Fcfs),
            ordered("edf", StageOrder::Edf),
            ordered("edf by class", StageOrder::EdfByClass),
            Self { oracle: true, ..ordered("oracle srtf", remaining(0.0, 0.0)) },
            ordered("least attained", StageOrder::LeastAttained),
            ordered("interactive first", StageOrder::InteractiveFirst),
            ordered("interactive, remaining", StageOrder::InteractiveRemaining),
            // The oracle's order with Maestro's predictions.
            ordered("remaining time alone", remaining(0.0, 0.0)),
            ordered("none, and no hysteresis", remaining(0.0, 0.0)),
            Self::turned("maestro, no hysteresis", Boundary::Requeue),
            Self::turned("no hysteresis", Boundary::Requeue),
            Self::turned("w/o preempt", Boundary::Hold),
            Self::turned("only for interactive", only),
            Self::changed("interactive first, then remaining time", |options| {
                options.order = StageOrder::InteractiveRemaining;
                options.boundary = Boundary::Requeue;
            }),
            routed("full score", Mode::MAESTRO),
            routed("load balance", Mode::LoadBalance),
            routed("bin pack only", Mode::BIN_PACK),
            routed("end to end, ms", Mode::EndToEnd),
            routed("warm, then shortest", Mode::WarmShortest),
            aged("both, 1 s per 10 s", 0.1, 0.1),
            aged("background, 1 s per 10 s", 0.1, 0.0),
            aged("both, 1 s per 100 s", 0.01, 0.01),
            aged("background, 1 s per 30 s", 1.0 / 30.0, 0.0),
            aged("none", 0.0, 0.0),
        ]
    }

    pub(super) fn named(name: &str) -> Option<Self> {
        let mut all = Self::all().into_iter();
        all.find(|policy| policy.options.name == name)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Trial {
    pub(super) policy: TrialPolicy,
    pub(super) rate: f64,
    pub(super) batch: f64,
    pub(super) seconds: f64,
    pub(super) nodes: Arc<Vec<NodeSpec>>,
    pub(super) rtt: Arc<Vec<Vec<Span>>>,
    pub(super) seed: u64,
    pub(super) rounds: u16,
    pub(super) variants: u16,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Measured {
    pub(super) met: f64,
    /// Mean duration of jobs, in seconds.
    pub(super) latency: f64,
    /// Mean total wait of interactive jobs, in seconds.
    pub(super) delay: f64,
    /// Mean wait of a stage of an interactive job, in seconds.
    pub(super) stage_delay: f64,
    /// The counts of the run, without its jobs.
    pub(super) ran: Ran,
}

impl Measured {
    pub(super) fn columns(&self) -> Columns {
        vec![
            ("met, %", self.met),
            ("time of a job, s", self.latency),
            ("wait of a job, s", self.delay),
            ("wait of a stage, s", self.stage_delay),
            ("activations", self.ran.activated as f64),
            ("busy, %", 100.0 * self.ran.busy),
        ]
    }
}

impl Trial {
    pub(super) fn run(&self, kit: &Kit) -> Measured {
        let mut jobs = kit.jobs(self.seed, self.rate, self.seconds, self.batch, self.rounds);
        let set = kit.models.len() as u16;
        let models: Vec<ServedModel> =
            (0..self.variants).flat_map(|_| kit.models.iter().cloned()).collect();
        for job in &mut jobs {
            let variant = job.job.template.0 % self.variants;
            for planned in &mut job.stages {
                planned.stage.model.0 += set * variant;
            }
        }
        let options = MaestroOptions { rtt: self.rtt.to_vec(), ..self.policy.options.clone() };
        let specs: Vec<ModelSpec> = models.iter().map(|model| model.spec).collect();
        let world = MaestroWorld::new(&models, &self.nodes, &jobs, &self.rtt);
        let ran = if self.policy.oracle {
            let oracle = OracleEstimator::new(&jobs, &specs);
            world.run(&mut Scheduler::new(options, oracle, specs, &self.nodes))
        } else {
            let learned = LearnedEstimator::new(kit.predictor());
            world.run(&mut Scheduler::new(options, learned, specs, &self.nodes))
        };
        // The first tenth of the jobs warms up weights, profiles and queues.
        Self::measure(&ran, kit, self.seconds / 10.0)
    }

    fn measure(ran: &Ran, kit: &Kit, from: f64) -> Measured {
        let jobs: Vec<_> = ran.jobs.iter().filter(|job| job.arrival >= from).collect();
        let met = |job: &&&super::world::JobResult| {
            let promise = &kit.promises[usize::from(job.template)];
            match job.class {
                Class::Interactive => job.waited <= promise.waits as f64 / 1e9,
                Class::Batch => job.took <= promise.deadline as f64 / 1e9,
            }
        };
        let of = |class| jobs.iter().filter(move |job| job.class == class);
        let interactive: Vec<f64> = of(Class::Interactive).map(|job| job.waited).collect();
        let stages: usize = of(Class::Interactive).map(|job| job.stages).sum();
        // Jobs that never ended did not meet their objective.
        let all = jobs.len() + ran.lost;
        let in_time = jobs.iter().filter(met).count();
        Measured {
            met: 100.0 * in_time as f64 / all.max(1) as f64,
            latency: mean(jobs.iter().map(|job| job.took)),
            delay: mean(interactive.iter().copied()),
            stage_delay: interactive.iter().sum::<f64>() / stages.max(1) as f64,
            ran: Ran { jobs: Vec::new(), ..*ran },
        }
    }
}
