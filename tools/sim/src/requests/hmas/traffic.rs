//! The traffic of H-MAS (Appendix E.5): thirteen types of tasks with the objectives of table 6,
//! scaled by each request's importance (eq. 14), in mixes and rates that change (eq. 13, Appendix
//! D.2).
//!
//! The paper draws prompts from ShareGPT and APPS, which are not available here. Lengths are
//! log-normal with σ = 0.7 and medians that suit the task: a few hundred tokens for chats, a
//! thousand and more for long forms.

use laxity_requests::request::{ApplicationId, ClassId, Importance, RequestId, Slo, Spec};
use laxity_requests::{Span, Time};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha12Rng;
use rand_distr::{Distribution as _, Exp1, LogNormal};

use crate::requests::workload::Asked;

pub(super) struct TaskType {
    /// Base objective of the first token, in milliseconds (table 6).
    ttft_ms: f64,
    /// Base objective of each later token, in milliseconds.
    tpot_ms: f64,
    prompt: f64,
    output: f64,
    /// Shares in the mixes of [`Mix`], in the same order.
    shares: [f64; 4],
}

const fn task(ttft_ms: f64, tpot_ms: f64, prompt: f64, output: f64, shares: [f64; 4]) -> TaskType {
    TaskType { ttft_ms, tpot_ms, prompt, output, shares }
}

/// Tasks in the order of table 6: QA, dialogue, translation, extraction, paraphrasing, code,
/// instructions, summaries, letters, mathematics, essays, long forms, research.
pub(super) const TASKS: [TaskType; 13] = [
    task(4000.0, 70.0, 90.0, 120.0, [2.0, 5.0, 0.2, 2.0]),
    task(4000.0, 70.0, 200.0, 150.0, [3.0, 6.0, 0.2, 2.0]),
    task(4500.0, 80.0, 220.0, 230.0, [1.0, 2.0, 0.1, 1.0]),
    task(6000.0, 80.0, 700.0, 90.0, [1.0, 1.0, 0.1, 1.0]),
    task(6000.0, 90.0, 220.0, 200.0, [1.0, 1.0, 0.1, 1.0]),
    task(6000.0, 90.0, 420.0, 400.0, [3.0, 0.5, 1.0, 2.0]),
    task(6000.0, 100.0, 150.0, 250.0, [1.0, 1.0, 0.2, 1.0]),
    task(7000.0, 110.0, 1500.0, 180.0, [1.0, 0.2, 0.5, 1.0]),
    task(8000.0, 120.0, 130.0, 350.0, [1.0, 0.1, 1.0, 1.0]),
    task(10_000.0, 130.0, 160.0, 600.0, [1.0, 0.1, 2.0, 1.0]),
    task(10_000.0, 130.0, 120.0, 900.0, [1.0, 0.0, 3.0, 1.0]),
    task(12_000.0, 150.0, 150.0, 1300.0, [1.0, 0.0, 3.0, 1.0]),
    task(13_000.0, 150.0, 1300.0, 1000.0, [1.0, 0.0, 2.0, 1.5]),
];

/// A mix of tasks, by the shares in [`TaskType`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mix {
    Heavy,
    Interactive,
    Long,
    Complex,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Stretch {
    pub(super) seconds: f64,
    /// Rate of arrivals, in requests per second.
    pub(super) rate: f64,
    /// Rate in every second interval of ten seconds, if it differs (eq. 13, third phase).
    pub(super) off_rate: Option<f64>,
    pub(super) mix: Mix,
}

impl Stretch {
    pub(super) const fn steady(seconds: f64, rate: f64, mix: Mix) -> Self {
        Self { seconds, rate, off_rate: None, mix }
    }

    fn rate_at(&self, since: f64) -> f64 {
        match self.off_rate {
            Some(off) if since % 20.0 >= 10.0 => off,
            _ => self.rate,
        }
    }
}

const OUTPUT_MAX: u32 = 4096;
const TENANTS: u32 = 8;
const SIGMA: f64 = 0.7;

fn length(rng: &mut ChaCha12Rng, median: f64, most: u32) -> u32 {
    let of = LogNormal::new(median.ln(), SIGMA).expect("σ is a number");
    (of.sample(rng) as u32).clamp(4, most)
}

fn one(rng: &mut ChaCha12Rng, id: u64, at: f64, mix: Mix) -> Asked {
    let shares = TASKS.iter().map(|task| task.shares[mix as usize]);
    let sum: f64 = shares.clone().sum();
    let mut point = rng.random::<f64>() * sum;
    let index = shares
        .enumerate()
        .find(|(_, share)| {
            point -= share;
            point < 0.0
        })
        .map_or(0, |(index, _)| index);
    let task = &TASKS[index];
    let importance = 0.5 + rng.random::<f64>() / 2.0;
    // The factor falls from 1.2 to 0.8, so that important requests have stricter objectives.
    let factor = 1.2 - 0.8 * (importance - 0.5);
    let ns = |ms: f64| (ms * factor).floor() as u64 * 1_000_000;
    let prompt = length(rng, task.prompt, 8192);
    let output = length(rng, task.output, OUTPUT_MAX);
    let tenant = rng.random_range(0..2 * TENANTS);
    let spec = Spec {
        id: RequestId(id),
        arrival: Time((at * 1e9) as u64),
        prompt,
        output_max: OUTPUT_MAX,
        class: ClassId(index as u16),
        application: ApplicationId(if tenant < TENANTS { 0 } else { tenant - TENANTS + 1 }),
        importance: if importance < 0.7 { Importance::Low } else { Importance::Important },
        slo: Slo::Interactive { ttft: ns(task.ttft_ms), tbt: ns(task.tpot_ms) },
        ..Spec::default()
    };
    Asked { spec, output }
}

pub(super) fn requests(stretches: &[Stretch], seed: u64) -> Vec<Asked> {
    let mut arrivals = ChaCha12Rng::seed_from_u64(seed);
    let mut content = arrivals.clone();
    content.set_stream(2);
    let mut asked = Vec::new();
    let mut begins = 0.0;
    for stretch in stretches {
        let mut since = 0.0;
        loop {
            // Arrivals at the higher of the two rates are thinned.
            let rate = stretch.rate.max(stretch.off_rate.unwrap_or(0.0));
            let gap: f64 = Exp1.sample(&mut arrivals);
            since += gap / rate;
            if since >= stretch.seconds {
                break;
            }
            if arrivals.random::<f64>() * rate < stretch.rate_at(since) {
                let id = asked.len() as u64;
                asked.push(one(&mut content, id, begins + since, stretch.mix));
            }
        }
        begins += stretch.seconds;
    }
    asked
}

/// Returns the end of a run. Requests that are incomplete this long after the last arrival are
/// late.
pub(super) fn ends(asked: &[Asked]) -> Time {
    let last = asked.last().map_or(Time::ZERO, |asked| asked.spec.arrival);
    last + Span::from_millis(120_000)
}
