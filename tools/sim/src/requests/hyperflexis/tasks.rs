//! The tasks of HyperFlexis' table 1, with objectives and the means and standard deviations of
//! lengths.
//!
//! The paper samples 300 rows of public data sets. Lengths here are log-normal with the same two
//! moments, because table 1 gives no more. The requests of each task are a Poisson process (§7.3),
//! and all tasks have the same rate.

use laxity_requests::request::{ApplicationId, ClassId, RequestId, Slo, Spec};
use laxity_requests::{Span, Time};
use rand::SeedableRng as _;
use rand_chacha::ChaCha12Rng;
use rand_distr::{Distribution as _, Exp1, LogNormal};

use crate::requests::workload::Asked;

const TOKENS_MAX: u32 = 8192;
const OUTPUT_MAX: u32 = 1024;

/// A task of the paper's table 1, with objectives and lengths.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    pub name: &'static str,
    /// Objective of the first token, in milliseconds.
    pub ttft: u64,
    /// Objective of each later token, in milliseconds.
    pub tpot: u64,
    input: (f64, f64),
    output: (f64, f64),
}

const fn task(
    name: &'static str,
    (ttft, tpot): (u64, u64),
    input: (f64, f64),
    output: (f64, f64),
) -> Task {
    Task { name, ttft, tpot, input, output }
}

pub(super) const FOUR: [Task; 4] = [
    task("medical_qa", (700, 500), (32.57, 10.32), (38.92, 16.83)),
    task("tldr_content_gen", (1_000, 700), (44.38, 6.58), (96.04, 35.03)),
    task("tldr_headline_gen", (2_000, 900), (121.82, 35.04), (13.59, 6.55)),
    task("wikisql", (20_000, 1_000), (643.22, 337.01), (27.82, 4.84)),
];

pub(super) const TWO: [Task; 2] = [
    task("gsm8k", (700, 200), (51.44, 15.78), (90.13, 26.73)),
    task("sharegpt", (2_000, 500), (259.19, 324.88), (207.79, 234.99)),
];

/// The single task of figure 7, with its own objectives (§9.2).
pub(super) const ONE: [Task; 1] = [task("wikisql", (700, 500), (643.22, 337.01), (27.82, 4.84))];

/// Returns the four tasks with a tenth of the time per token. On a GPU with steps of 10 to 30 ms,
/// table 1's 0.5 to 1 s are no constraint.
pub(super) fn tight() -> Vec<Task> {
    FOUR.map(|task| Task { tpot: task.tpot / 10, ..task }).to_vec()
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    pub task: Task,
    pub class: u16,
    pub begins: Time,
    pub ends: Time,
    /// Rate of arrivals, in requests per second.
    pub rate: f64,
}

/// Returns streams of all tasks from time 0, each with an equal share of `rate`.
pub(super) fn together(tasks: &[Task], rate: f64, lasts: Span) -> Vec<Stream> {
    let streams = tasks.iter().enumerate().map(|(class, task)| Stream {
        task: *task,
        class: class as u16,
        begins: Time::ZERO,
        ends: Time::ZERO + lasts,
        rate: rate / tasks.len() as f64,
    });
    streams.collect()
}

fn tokens((mean, deviation): (f64, f64), most: u32, rng: &mut ChaCha12Rng) -> u32 {
    // σ² = ln(1 + (deviation / mean)²), µ = ln(mean) − σ² / 2.
    let variance = (deviation / mean).powi(2).ln_1p();
    let of = LogNormal::new(mean.ln() - variance / 2.0, variance.sqrt()).expect("σ is finite");
    (of.sample(rng).round() as u32).clamp(1, most)
}

pub(super) fn requests(streams: &[Stream], seed: u64) -> Vec<Asked> {
    let mut asked = Vec::new();
    for (at, stream) in streams.iter().enumerate() {
        let mut rng = ChaCha12Rng::seed_from_u64(seed);
        rng.set_stream(at as u64 + 1);
        let mut now = stream.begins;
        loop {
            let gap: f64 = Exp1.sample(&mut rng);
            now = now + Span((gap / stream.rate * 1e9) as u64);
            if now >= stream.ends {
                break;
            }
            let task = &stream.task;
            asked.push(Asked {
                spec: Spec {
                    arrival: now,
                    prompt: tokens(task.input, TOKENS_MAX, &mut rng),
                    output_max: OUTPUT_MAX,
                    class: ClassId(stream.class),
                    application: ApplicationId(u32::from(stream.class)),
                    slo: Slo::Interactive {
                        ttft: task.ttft * 1_000_000,
                        tbt: task.tpot * 1_000_000,
                    },
                    ..Spec::default()
                },
                output: tokens(task.output, OUTPUT_MAX, &mut rng),
            });
        }
    }
    asked.sort_by_key(|asked| (asked.spec.arrival, asked.spec.class));
    for (at, asked) in asked.iter_mut().enumerate() {
        asked.spec.id = RequestId(at as u64);
    }
    asked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_moments_of_table_1_and_come_in_order() {
        let lasts = Span(3_000_000_000_000);
        let asked = requests(&together(&FOUR, 40.0, lasts), 7);
        assert!(asked.is_sorted_by_key(|asked| asked.spec.arrival));
        for (class, task) in FOUR.iter().enumerate() {
            let mine = asked.iter().filter(|a| usize::from(a.spec.class.0) == class);
            let prompts: Vec<f64> = mine.map(|a| f64::from(a.spec.prompt)).collect();
            let count = prompts.len() as f64;
            assert!((count / 30_000.0 - 1.0).abs() < 0.03, "{count}");
            let mean = prompts.iter().sum::<f64>() / count;
            let variance = prompts.iter().map(|p| (p - mean).powi(2)).sum::<f64>() / count;
            assert!((mean / task.input.0 - 1.0).abs() < 0.02, "{}: {mean}", task.name);
            let deviation = variance.sqrt();
            assert!((deviation / task.input.1 - 1.0).abs() < 0.05, "{}: {deviation}", task.name);
        }
        assert_eq!(requests(&together(&FOUR, 40.0, lasts), 7), asked);
    }
}
