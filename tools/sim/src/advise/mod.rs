//! Whether scheduling helps on one cluster: a short simulation of static classes, of `laxity`, and
//! of a network without contention, which bounds what any policy can gain.
//!
//! Without a request rate, the question is asked where it matters: at the highest rate at which
//! computing alone serves [`BUSY`] as many requests in time as at a low rate. Below that rate there
//! is room for every policy, and above it requests are late whatever the network does.

use serde::Serialize;

use crate::plan::{Plan, PlanError};
use crate::report::{Estimate, Report, Verdict, metric, paired};
use crate::run::{self, RunError, RunOptions, Simulate};

/// Attainment without contention at the rate that is chosen, over that at the lowest rate.
const BUSY: f64 = 0.95;
const WORTH: f64 = 0.01;
/// Least added wait for a stage, as a share of the mean TTFT, to say that the stage contends.
const NOTABLE: f64 = 0.02;
/// Rates that are tried, in requests per second and prefill GPU.
const RATES: [f64; 12] = [0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0];

const POLICIES: [&str; 4] = ["two_class", "two_class_99", "mfs", "laxity"];

#[derive(Debug, thiserror::Error)]
pub enum AdviseError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error("{0}")]
    Failed(String),
}

#[derive(Clone, Debug, Serialize)]
pub struct PolicyResult {
    pub policy: String,
    pub attainment: Estimate,
    /// 99th percentile of TTFT, in milliseconds.
    pub ttft_p99_ms: Estimate,
}

/// Time that a request waits for each stage, beyond that without contention, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Added {
    pub kv_reuse: f64,
    pub collective: f64,
    pub p2d: f64,
}

impl Added {
    /// Returns the stage that adds most, with its milliseconds.
    pub fn most(&self) -> (&'static str, f64) {
        let stages =
            [("KV reuse", self.kv_reuse), ("collectives", self.collective), ("P2D", self.p2d)];
        stages.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or(("", 0.0))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Advised {
    NothingToGain,
    Schedule,
    KeepClasses,
    /// There is something to gain, but `laxity` does not gain it beyond noise.
    StaticIsEnough,
}

/// The answer, under static classes unless noted.
#[derive(Clone, Debug, Serialize)]
pub struct Advice {
    /// Requests per second and prefill GPU.
    pub rate_per_gpu: f64,
    pub nics_busy: (f64, f64),
    pub compute_busy: f64,
    pub bytes: [f64; 3],
    /// Mean TTFT, in milliseconds.
    pub ttft_ms: f64,
    pub added_ms: Added,
    pub contends: Option<&'static str>,
    pub served: Vec<PolicyResult>,
    pub gain: Estimate,
    /// No contention less `two_class`, seed by seed: the most that a policy could gain.
    pub room: Estimate,
    pub advised: Advised,
}

/// Answers for the cluster and the workload of `plan`, which has neither axes nor variants. `rate`
/// is in requests per second and prefill GPU.
/// The error has the first invalid field, or why a run failed.
pub fn advise(
    plan: &Plan,
    rate: Option<f64>,
    simulate: &Simulate<'_>,
    options: &RunOptions<'_>,
) -> Result<Advice, AdviseError> {
    let rate = match rate {
        Some(rate) => rate,
        None => busy_rate(plan, simulate, options)?,
    };
    let mut compared = plan.clone();
    compared.set(&format!("workload.rate_per_gpu={rate}"))?;
    let mut bound = compared.clone();
    compared.compare(&POLICIES.map(str::to_owned))?;
    alone(&mut bound)?;
    let compared = whole(run::run(&compared, simulate, options)?)?;
    let bound = whole(run::run(&bound, simulate, options)?)?;
    Ok(answer(rate, &compared, &bound))
}

/// Leaves the network without contention as the only variant.
fn alone(plan: &mut Plan) -> Result<(), PlanError> {
    plan.set("policy.no_contention=true")?;
    plan.compare(&["fair".to_owned()])
}

/// Returns the highest rate at which computing alone serves [`BUSY`] as many requests in time as at
/// the lowest rate, interpolated between those that are tried.
fn busy_rate(
    plan: &Plan,
    simulate: &Simulate<'_>,
    options: &RunOptions<'_>,
) -> Result<f64, AdviseError> {
    let mut last: Option<(f64, f64)> = None;
    let mut asked = 0.0;
    for rate in RATES {
        let mut one = plan.clone();
        one.seeds.truncate(1);
        one.set(&format!("workload.rate_per_gpu={rate}"))?;
        alone(&mut one)?;
        let report = whole(run::run(&one, simulate, options)?)?;
        let served = mean(&report, 0, &metric::ATTAINMENT);
        match last {
            None => asked = BUSY * served,
            Some((lower, before)) if served < asked => {
                let share = (before - asked) / (before - served);
                let between = lower + (rate - lower) * share.clamp(0.0, 1.0);
                return Ok((between * 1000.0).round() / 1000.0);
            }
            Some(_) => {}
        }
        last = Some((rate, served));
    }
    Ok(last.map_or(RATES[0], |(rate, _)| rate))
}

fn whole(report: Report) -> Result<Report, AdviseError> {
    match report.failures.first() {
        Some(failure) => Err(AdviseError::Failed(failure.problem.clone())),
        None => Ok(report),
    }
}

fn over(report: &Report, variant: usize, of: impl Fn(&crate::outcome::Outcome) -> f64) -> f64 {
    let values: Vec<f64> = report.runs_of(0, variant).map(|run| of(&run.outcome)).collect();
    Estimate::of(&values).map_or(0.0, |estimate| estimate.mean)
}

fn mean(report: &Report, variant: usize, metric: &metric::Metric) -> f64 {
    over(report, variant, metric.of)
}

fn answer(rate: f64, compared: &Report, bound: &Report) -> Advice {
    let values = |report: &Report, variant| report.values(0, variant, &metric::ATTAINMENT);
    let classes = values(compared, 0);
    let none = Estimate { mean: 0.0, half_width: None, count: 0 };
    let less = |other: Vec<(u64, f64)>| paired::difference(&other, &classes).unwrap_or(none);
    let (gain, room) = (less(values(compared, POLICIES.len() - 1)), less(values(bound, 0)));
    let served = |report: &Report, variant, name: &str| PolicyResult {
        policy: name.to_owned(),
        attainment: report.estimate(0, variant, &metric::ATTAINMENT).unwrap_or(none),
        ttft_p99_ms: Estimate::of(
            &report
                .runs_of(0, variant)
                .map(|run| run.outcome.ttft_ms.percentile(99))
                .collect::<Vec<_>>(),
        )
        .unwrap_or(none),
    };
    let mut all: Vec<PolicyResult> =
        POLICIES.iter().zip(0..).map(|(name, n)| served(compared, n, name)).collect();
    all.push(served(bound, 0, "no contention"));
    let added = |of: fn(&crate::outcome::Waiting) -> f64| {
        over(compared, 0, |o| of(&o.waiting_ms)) - over(bound, 0, |o| of(&o.waiting_ms))
    };
    let added_ms = Added {
        kv_reuse: added(|w| w.kv_reuse),
        collective: added(|w| w.collective),
        p2d: added(|w| w.p2d),
    };
    let ttft_ms = over(compared, 0, |o| o.ttft_ms.mean);
    let (stage, most) = added_ms.most();
    let stages = [
        over(compared, 0, |o| o.bytes.kv_reuse as f64),
        over(compared, 0, |o| o.bytes.collective as f64),
        over(compared, 0, |o| o.bytes.p2d as f64),
    ];
    let bytes: f64 = stages.iter().sum();
    Advice {
        rate_per_gpu: rate,
        nics_busy: (
            mean(compared, 0, &metric::PORT_BUSY_MEAN),
            mean(compared, 0, &metric::PORT_BUSY_MOST),
        ),
        compute_busy: over(compared, 0, |o| o.compute_busy),
        bytes: stages.map(|stage| if bytes > 0.0 { stage / bytes } else { 0.0 }),
        ttft_ms,
        added_ms,
        contends: (most > NOTABLE * ttft_ms).then_some(stage),
        served: all,
        gain,
        room,
        advised: advised(&gain, &room),
    }
}

fn advised(gain: &Estimate, room: &Estimate) -> Advised {
    match Verdict::of(gain) {
        Verdict::Above if gain.mean >= WORTH => Advised::Schedule,
        Verdict::Below if gain.mean <= -WORTH => Advised::KeepClasses,
        _ if room.mean < WORTH => Advised::NothingToGain,
        _ => Advised::StaticIsEnough,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::{Distribution, Outcome, StageBytes, Waiting};
    use crate::scenario::Scenario;

    /// Serves all in time up to 1.5 requests per second, and half at 2. A network with contention
    /// costs 20 points, of which `laxity` gains back 15.
    fn fake(scenario: &Scenario) -> Result<Outcome, String> {
        let computing = if scenario.workload.rate_per_gpu < 1.6 { 1.0 } else { 0.5 };
        let luck = 0.001 * scenario.seed as f64;
        let (lost, p2d) = match scenario.policy.kind.name() {
            _ if scenario.policy.no_contention => (0.0, 1.0),
            "laxity" => (0.05, 20.0),
            _ => (0.2 - luck, 90.0),
        };
        Ok(Outcome {
            attainment: computing - lost,
            ttft_ms: Distribution::of(vec![100.0, 900.0]),
            waiting_ms: Waiting { p2d, queue: 500.0, ..Waiting::default() },
            bytes: StageBytes { kv_reuse: 1, collective: 6, p2d: 3 },
            ..Outcome::default()
        })
    }

    fn plan() -> Plan {
        let mut plan = Plan::empty("advise", "Advise");
        plan.seeds = vec![1, 2, 3];
        plan
    }

    #[test]
    fn the_rate_is_where_computing_alone_begins_to_fail() {
        let advice = advise(&plan(), None, &fake, &RunOptions::default()).expect("it runs");
        // Between 1.5 and 2, a tenth of the way from all to half.
        assert!((advice.rate_per_gpu - 1.55).abs() < 1e-9, "{}", advice.rate_per_gpu);
    }

    #[test]
    fn the_advice_names_the_stage_the_gain_and_the_room() {
        let advice = advise(&plan(), Some(1.0), &fake, &RunOptions::default()).expect("it runs");
        assert_eq!((advice.contends, advice.advised), (Some("P2D"), Advised::Schedule));
        assert!((advice.gain.mean - 0.148).abs() < 1e-9 && (advice.room.mean - 0.198).abs() < 1e-9);
        assert_eq!(advice.bytes, [0.1, 0.6, 0.3]);
        let names: Vec<&str> = advice.served.iter().map(|one| one.policy.as_str()).collect();
        assert_eq!(names, ["two_class", "two_class_99", "mfs", "laxity", "no contention"]);
    }

    #[test]
    fn a_difference_within_noise_is_no_reason_to_change() {
        let of = |values: &[f64]| Estimate::of(values).expect("values");
        let room = of(&[0.2, 0.2, 0.2]);
        assert_eq!(advised(&of(&[0.05, 0.06, 0.05]), &room), Advised::Schedule);
        assert_eq!(advised(&of(&[0.05, -0.06, 0.05]), &room), Advised::StaticIsEnough);
        assert_eq!(advised(&of(&[-0.05, -0.06, -0.05]), &room), Advised::KeepClasses);
        assert_eq!(advised(&of(&[0.004, 0.004]), &of(&[0.005, 0.005])), Advised::NothingToGain);
    }
}
