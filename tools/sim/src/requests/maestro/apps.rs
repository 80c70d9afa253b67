//! Nine agent applications after Maestro's Table I: their agents, the order and the models of the
//! agents, and the lengths of their outputs.
//!
//! The paper's trace is not public, and it describes only the kinds of templates (serial, loop,
//! parallel, supervisor and workers). The shares of applications are those of the table. Everything
//! else is chosen to match the paper's observations (its figure 1): 3.1 stages per job, short tool
//! calls, long answers, and still longer, heavy-tailed thinking. Two hidden numbers per prompt
//! (difficulty and need of a tool) stand for its meaning. Predictors see them with noise.

use laxity_requests::Time;
use laxity_requests::workflow::{
    Class, JobId, ModelId, RoleId, Stage, StageId, TemplateId, WorkflowJob,
};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution as _, Exp, StandardNormal};

#[derive(Clone, Copy, Debug)]
enum Times {
    Once,
    /// Stages one after the other: each repeats with this probability, up to this number of times.
    Loop(f64, u16),
    Fan(u16, u16),
}

#[derive(Clone, Copy, Debug)]
struct AppStep {
    role: u16,
    model: u16,
    prompt: f64,
    tools: u16,
    answer: f64,
    call: f64,
    /// Share of stages that think, which makes answers 2.5 times as long.
    thinking: f64,
    times: Times,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct App {
    #[cfg_attr(not(test), expect(dead_code, reason = "the table's names, for readers and tests"))]
    pub(super) name: &'static str,
    class: Class,
    jobs: f64,
    steps: &'static [AppStep],
}

#[cfg(test)]
impl App {
    pub(super) fn share(&self) -> f64 {
        self.jobs / APPS.iter().map(|app| app.jobs).sum::<f64>()
    }
}

const fn step(role: u16, model: u16, prompt: f64, answer: f64) -> AppStep {
    AppStep { role, model, prompt, tools: 0, answer, call: 0.0, thinking: 0.0, times: Times::Once }
}

const fn tools(of: AppStep, tools: u16, call: f64) -> AppStep {
    AppStep { tools, call, ..of }
}

const fn thinks(of: AppStep, thinking: f64) -> AppStep {
    AppStep { thinking, ..of }
}

const fn repeats(of: AppStep, times: Times) -> AppStep {
    AppStep { times, ..of }
}

const fn app(name: &'static str, class: Class, jobs: f64) -> App {
    App { name, class, jobs, steps: &[] }
}

impl App {
    const fn with_steps(self, steps: &'static [AppStep]) -> Self {
        Self { steps, ..self }
    }
}

const PLANNER: u16 = 0;
const CALLER: u16 = 1;
const RESPONDER: u16 = 2;
const ROUTER: u16 = 3;
const SOLVER: u16 = 4;
const WRITER: u16 = 5;
const EDITOR: u16 = 6;
const COLLECTOR: u16 = 7;
const ANALYST: u16 = 8;
const TRANSLATOR: u16 = 9;
const CODER: u16 = 10;
const REVIEWER: u16 = 11;

const B06: u16 = 0;
const B17: u16 = 1;
const B4: u16 = 2;
const B8: u16 = 3;
const B14: u16 = 4;

use Class::{Batch, Interactive};
use Times::{Fan, Loop};

pub(super) const APPS: [App; 9] = [
    app("Meeting Booking", Interactive, 8626.0).with_steps(&[
        repeats(tools(step(CALLER, B4, 700.0, 90.0), 4, 40.0), Loop(0.5, 4)),
        step(RESPONDER, B8, 900.0, 120.0),
    ]),
    app("Document Writing", Batch, 8319.0).with_steps(&[
        thinks(step(PLANNER, B8, 600.0, 350.0), 0.3),
        repeats(step(WRITER, B14, 1200.0, 800.0), Fan(1, 3)),
        step(EDITOR, B14, 3000.0, 700.0),
    ]),
    app("News Collection", Batch, 6616.0).with_steps(&[
        repeats(tools(step(COLLECTOR, B4, 1500.0, 250.0), 3, 50.0), Loop(0.6, 5)),
        step(WRITER, B8, 3500.0, 500.0),
    ]),
    app("Performance", Batch, 6548.0).with_steps(&[
        tools(thinks(step(ANALYST, B8, 2500.0, 500.0), 0.4), 2, 60.0),
        step(WRITER, B14, 3000.0, 700.0),
    ]),
    app("QA Assistant", Interactive, 5849.0).with_steps(&[
        step(ROUTER, B06, 400.0, 12.0),
        thinks(step(SOLVER, B8, 700.0, 180.0), 0.35),
        step(RESPONDER, B4, 800.0, 110.0),
    ]),
    app("Text Translation", Batch, 5124.0).with_steps(&[
        step(ROUTER, B17, 1800.0, 20.0),
        repeats(step(TRANSLATOR, B8, 1800.0, 1100.0), Fan(1, 2)),
    ]),
    app("Food Assistant", Interactive, 3334.0).with_steps(&[
        repeats(tools(step(CALLER, B4, 600.0, 100.0), 3, 35.0), Loop(0.3, 3)),
        step(RESPONDER, B4, 800.0, 140.0),
    ]),
    app("Travel Assistant", Interactive, 1543.0).with_steps(&[
        thinks(step(PLANNER, B8, 800.0, 250.0), 0.3),
        repeats(tools(step(CALLER, B4, 900.0, 120.0), 5, 45.0), Fan(2, 3)),
        step(RESPONDER, B8, 1600.0, 250.0),
    ]),
    app("Code Refactoring", Batch, 810.0).with_steps(&[
        thinks(step(PLANNER, B14, 9000.0, 600.0), 0.5),
        repeats(step(CODER, B14, 6000.0, 1200.0), Fan(2, 3)),
        step(REVIEWER, B8, 7000.0, 400.0),
    ]),
];

#[derive(Clone, Debug)]
pub(super) struct Planned {
    pub(super) stage: Stage,
    pub(super) output: u32,
    pub(super) tool: bool,
    /// Stages of the job that must end before this one starts.
    pub(super) after: Vec<usize>,
    /// Time of the tool call between those stages and this one, in nanoseconds.
    pub(super) delay: u64,
}

#[derive(Clone, Debug)]
pub(super) struct PlannedJob {
    pub(super) job: WorkflowJob,
    pub(super) stages: Vec<Planned>,
}

pub(super) const STAGES: u64 = 64;

fn normal(rng: &mut ChaCha8Rng) -> f64 {
    StandardNormal.sample(rng)
}

pub(super) struct JobSource {
    rng: ChaCha8Rng,
    next: u64,
    rounds: u16,
}

impl JobSource {
    pub(super) fn new(seed: u64) -> Self {
        Self { rng: ChaCha8Rng::seed_from_u64(seed ^ 0x6d61_6573_7472_6f00), next: 0, rounds: 1 }
    }

    pub(super) fn with_rounds(mut self, rounds: u16) -> Self {
        self.rounds = rounds;
        self
    }

    pub(super) fn job(&mut self, app: usize, arrival: Time) -> PlannedJob {
        let id = JobId(self.next);
        self.next += 1;
        let of = &APPS[app];
        let mut stages: Vec<Planned> = Vec::new();
        let mut before: Vec<usize> = Vec::new();
        let passes = match of.class {
            Batch => self.rounds,
            Interactive => 1,
        };
        let steps = (0..passes).flat_map(|_| of.steps.iter().enumerate());
        for (position, step) in steps {
            let (rounds, width) = match step.times {
                Times::Once => (1, 1),
                Times::Loop(again, most) => {
                    let mut rounds = 1;
                    while rounds < most && self.rng.random::<f64>() < again {
                        rounds += 1;
                    }
                    (rounds, 1)
                }
                Times::Fan(least, most) => (1, self.rng.random_range(least..=most)),
            };
            for round in 0..rounds {
                let first = stages.len();
                for _ in 0..width {
                    let called = before.iter().any(|stage| stages[*stage].tool);
                    let mut planned = self.stage(step, position as u16, round);
                    planned.stage.id = StageId(id.0 * STAGES + stages.len() as u64);
                    planned.stage.job = id;
                    planned.after.clone_from(&before);
                    if called {
                        planned.delay = (self.rng.random_range(0.2..1.2) * 1e9) as u64;
                    }
                    stages.push(planned);
                }
                before = (first..stages.len()).collect();
            }
        }
        PlannedJob {
            job: WorkflowJob {
                id,
                template: TemplateId(app as u16),
                class: of.class,
                arrival,
                deadline: Time::NEVER,
                ..WorkflowJob::default()
            },
            stages,
        }
    }

    fn stage(&mut self, step: &AppStep, position: u16, round: u16) -> Planned {
        let rng = &mut self.rng;
        let (hard, intent) = (normal(rng), normal(rng));
        let prompt = step.prompt * (0.5 * normal(rng)).exp();
        let thinking = rng.random::<f64>() < step.thinking;
        // Later rounds of a loop call fewer tools.
        let pull = 3.0 * intent - 0.5 * f64::from(round);
        let tool = step.tools > 0 && rng.random::<f64>() < 1.0 / (1.0 + (-pull).exp());
        let length = if tool {
            step.call * (0.15 * hard + 0.2 * normal(rng)).exp()
        } else if thinking {
            2.5 * step.answer * (0.6 * hard + 0.4 * normal(rng)).exp()
        } else {
            step.answer * (0.5 * hard + 0.25 * normal(rng)).exp()
        };
        let output_max = 8192;
        let noise = |rng: &mut ChaCha8Rng| normal(rng) as f32;
        let semantics = [
            hard as f32 + 0.4 * noise(rng),
            intent as f32 + 0.3 * noise(rng),
            noise(rng),
            noise(rng),
        ];
        Planned {
            stage: Stage {
                model: ModelId(step.model),
                role: RoleId(step.role),
                position,
                invocation: round,
                tools: step.tools,
                thinking,
                prompt: (prompt as u32).clamp(16, 24_000),
                output_max,
                semantics,
                ..Stage::default()
            },
            output: (length as u32).clamp(1, output_max),
            tool,
            after: Vec::new(),
            delay: 0,
        }
    }

    /// Draws an application of a class, by its share of the trace.
    fn app(&mut self, batch: bool) -> usize {
        let class = if batch { Batch } else { Interactive };
        let of = |app: &App| if app.class == class { app.jobs } else { 0.0 };
        let all: f64 = APPS.iter().map(of).sum();
        let mut left = self.rng.random::<f64>() * all;
        for (index, app) in APPS.iter().enumerate() {
            left -= of(app);
            if left < 0.0 {
                return index;
            }
        }
        APPS.iter().rposition(|app| app.class == class).unwrap_or(0)
    }

    /// Returns jobs of a Poisson process with `rate` per second for `seconds`. `batch` is the share
    /// of batch jobs.
    pub(super) fn jobs(&mut self, rate: f64, seconds: f64, batch: f64) -> Vec<PlannedJob> {
        let gap = Exp::new(rate).expect("a rate above zero");
        let mut jobs = Vec::new();
        let mut at = 0.0;
        loop {
            at += gap.sample(&mut self.rng);
            if at >= seconds {
                return jobs;
            }
            let is_batch = self.rng.random::<f64>() < batch;
            let app = self.app(is_batch);
            jobs.push(self.job(app, Time((at * 1e9) as u64)));
        }
    }

    /// Returns `count` jobs by the shares of the whole trace, all submitted at once.
    pub(super) fn mixed(&mut self, count: usize) -> Vec<PlannedJob> {
        let batch = 27_417.0 / 46_769.0;
        (0..count)
            .map(|_| {
                let is_batch = self.rng.random::<f64>() < batch;
                let app = self.app(is_batch);
                self.job(app, Time::ZERO)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_have_about_as_many_stages_as_in_the_trace() {
        let jobs = JobSource::new(1).mixed(4000);
        let stages: usize = jobs.iter().map(|job| job.stages.len()).sum();
        let mean = stages as f64 / 4000.0;
        assert!((2.7..3.5).contains(&mean), "{mean}; the trace has 3.09");
    }

    #[test]
    fn a_stage_comes_after_what_it_needs_and_numbers_are_not_used_twice() {
        let jobs = JobSource::new(2).mixed(500);
        let mut seen = std::collections::HashSet::new();
        for job in &jobs {
            for (index, planned) in job.stages.iter().enumerate() {
                assert!(planned.after.iter().all(|before| *before < index));
                assert!(seen.insert(planned.stage.id));
            }
            assert!((job.stages.len() as u64) < STAGES);
        }
    }

    #[test]
    fn the_same_seed_makes_the_same_jobs() {
        let one = JobSource::new(3).jobs(2.0, 60.0, 0.5);
        let two = JobSource::new(3).jobs(2.0, 60.0, 0.5);
        assert_eq!(format!("{one:?}"), format!("{two:?}"));
    }

    #[test]
    fn as_many_are_batch_as_is_asked() {
        let jobs = JobSource::new(4).jobs(5.0, 1000.0, 0.8);
        let batch = jobs.iter().filter(|job| job.job.class == Batch).count();
        let share = batch as f64 / jobs.len() as f64;
        assert!((share - 0.8).abs() < 0.03, "{share}");
    }
}
