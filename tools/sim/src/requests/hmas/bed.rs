//! One replica under a setting of H-MAS or a baseline, with the metrics of H-MAS (§4, Appendix
//! B.2).

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use laxity_requests::Span;
use laxity_requests::discipline::Discipline;
use laxity_requests::dispatch::Role;
use laxity_requests::hmas::cognition::Cognition;
use laxity_requests::hmas::perception::{self, Perception, Tagger, Tags};
use laxity_requests::hmas::pool::Kind;
use laxity_requests::hmas::prediction::Prediction;
use laxity_requests::hmas::statera::StateraConfig;
use laxity_requests::hmas::{Agent, Config, Log};
use laxity_requests::kv::Pool;
use laxity_requests::replica::Replica;
use laxity_requests::request::{InstanceId, RequestId, Slo, Spec};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha12Rng;
use rand_distr::{Distribution as _, LogNormal};

use super::traffic::{TASKS, ends};
use crate::requests::cluster;
use crate::requests::latency::Roofline;
use crate::requests::measurements::Columns;
use crate::requests::outcome::{ClusterOutcome, Record};
use crate::requests::workload::Asked;

pub(super) const BLOCK_TOKENS: u32 = 16;

#[derive(Clone, Debug)]
pub(super) struct Bed {
    pub(super) clock: Roofline,
    pub(super) blocks: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sees {
    /// Perception with the accuracy of the paper's model: 94.2 % of tasks are right, and lengths
    /// have a mean error of 12.4 % (table 5).
    Paper,
    Even,
    Forest,
    Rules,
    /// No perception, so that all properties are unknown.
    Nothing,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct HmasSetting {
    pub(super) kind: Kind,
    pub(super) sees: Sees,
    pub(super) statera: Option<StateraConfig>,
    pub(super) chunk: u32,
}

impl HmasSetting {
    pub(super) fn new(kind: Kind) -> Self {
        Self { kind, sees: Sees::Paper, statera: Some(super::tuned_statera()), chunk: 512 }
    }
}

/// Perception with the paper's accuracy, from the actual lengths with added noise.
struct OraclePerception {
    tags: HashMap<RequestId, Tags>,
}

impl OraclePerception {
    fn new(asked: &[Asked], seed: u64, even: bool) -> Self {
        let mut rng = ChaCha12Rng::seed_from_u64(seed ^ 0x5ee5);
        // The mean of |e^(σz) − 1| is about 0.8 σ.
        let noise = LogNormal::new(0.0, 0.155).expect("σ is a number");
        let sum: f64 = asked.iter().map(|asked| f64::from(asked.output)).sum();
        let mean = sum / asked.len().max(1) as f64;
        let tags = asked
            .iter()
            .map(|asked| {
                let right = rng.random::<f64>() < 0.942;
                let other = rng.random_range(0..TASKS.len() as u16);
                let off: f64 = noise.sample(&mut rng);
                let most = f64::from(asked.spec.output_max);
                let tags = Tags {
                    task: if right { asked.spec.class.0 } else { other },
                    length: if even {
                        f64::from(asked.output) + mean * (off - 1.0)
                    } else {
                        f64::from(asked.output) * off
                    }
                    .clamp(1.0, most),
                };
                (asked.spec.id, tags)
            })
            .collect();
        Self { tags }
    }
}

impl Tagger for OraclePerception {
    fn tag(&mut self, spec: &Spec) -> Option<Tags> {
        self.tags.get(&spec.id).copied()
    }
}

const PERCEPTION: Span = Span::from_micros(1_640);

fn cognition(
    setting: &HmasSetting,
    bed: &Bed,
    asked: &[Asked],
    trained: &[Asked],
    seed: u64,
) -> Cognition {
    fn paced(tagger: impl Tagger + 'static) -> Perception {
        Perception::new(tagger, PERCEPTION)
    }
    let perception = match setting.sees {
        Sees::Paper => paced(OraclePerception::new(asked, seed, false)),
        Sees::Even => paced(OraclePerception::new(asked, seed, true)),
        Sees::Rules => paced(perception::Rules::default()),
        Sees::Nothing => paced(perception::Unknown),
        Sees::Forest => match forest(trained) {
            Some(forest) => paced(forest),
            None => paced(perception::Unknown),
        },
    };
    let prediction = Prediction::new(bed.clock.clone(), setting.chunk);
    Cognition::new(perception, prediction)
}

/// Trains a forest on requests that are not part of the experiments.
pub(super) fn forest(on: &[Asked]) -> Option<perception::Trained> {
    let examples: Vec<(Spec, u32)> = on.iter().map(|a| (a.spec, a.output)).collect();
    perception::Trained::fit(&examples, 7).ok()
}

fn agent(setting: &HmasSetting, bed: &Bed, asked: &[Asked], trained: &[Asked], seed: u64) -> Agent {
    let cognition = cognition(setting, bed, asked, trained, seed);
    let config = Config { chunk: setting.chunk, statera: setting.statera, ..Config::default() };
    Agent::new(setting.kind, config, cognition)
}

/// Runs requests under a setting. A forest may learn from the requests in `trained`.
pub(super) fn run(
    setting: &HmasSetting,
    bed: &Bed,
    asked: &[Asked],
    trained: &[Asked],
    seed: u64,
) -> Columns {
    let agent = agent(setting, bed, asked, trained, seed);
    let journal = agent.journal();
    let outcome = serve(Box::new(agent), bed, asked);
    measured(&outcome, &journal.read())
}

pub(super) fn serve(
    discipline: Box<dyn Discipline + Send>,
    bed: &Bed,
    asked: &[Asked],
) -> ClusterOutcome {
    let slot = Mutex::new(Some(discipline));
    let make = |_: InstanceId, _: Role| {
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        let discipline = slot.take().expect("there is one instance");
        Replica::new(Pool::new(bed.blocks, BLOCK_TOKENS), bed.blocks / 100, discipline)
    };
    let alone = cluster::Config::single(&make, &bed.clock, bed.clock.kv_bytes_per_token);
    cluster::run(cluster::Config { ends: ends(asked), ..alone }, asked)
}

fn is_good(record: &Record) -> bool {
    let Slo::Interactive { tbt, .. } = record.spec.slo else { return false };
    let slow = record.tpot().is_some_and(|tpot| tpot.0 > tbt);
    record.complete() && record.met_first() && !slow
}

fn percent(part: usize, of: usize) -> f64 {
    part as f64 / of.max(1) as f64 * 100.0
}

/// Returns the metrics by column name.
///
/// *Goodput* is the share of requests that met both objectives (eq. 9): the time to first token,
/// and the *mean* time between tokens (eq. 8). A request without a first token counts with its
/// waiting time. *Service gain* is eq. 6 divided by its maximum. Phases are thirds of the requests,
/// by arrival.
fn measured(outcome: &ClusterOutcome, log: &Log) -> Columns {
    let records = &outcome.records;
    let count = |of: &dyn Fn(&Record) -> bool| records.iter().filter(|r| of(r)).count();
    let (mut gain, mut most) = (0.0, 0.0);
    for record in records {
        let base = f64::from(record.spec.prompt) + 2.0 * f64::from(record.output);
        most += base;
        if let Some(took) = record.ttlt() {
            let due = record.spec.deadline(record.output).since(record.spec.arrival);
            gain += base * (due.0 as f64 / took.0.max(1) as f64).min(1.0);
        }
    }
    let waited = |r: &Record| Some(r.ttft().unwrap_or(outcome.ended.since(r.spec.arrival)));
    let last = records.last().map_or(1, |r| r.spec.arrival.0 + 1);
    let third = |n: u64| {
        let of = |r: &&Record| r.spec.arrival.0 * 3 / last == n;
        let good = records.iter().filter(of).filter(|r| is_good(r)).count();
        percent(good, records.iter().filter(of).count())
    };
    let part = |part: u64, of: u64| part as f64 / of.max(1) as f64;
    let (own, own_above) = log.fenced_own_bucket;
    vec![
        ("goodput, %", percent(count(&is_good), records.len())),
        ("TTFT met, %", percent(count(&Record::met_first), records.len())),
        ("TTFT p95, s", outcome.quantile_ms(0.95, waited).unwrap_or(0.0) / 1e3),
        ("TPOT p95, ms", outcome.quantile_ms(0.95, Record::tpot).unwrap_or(0.0)),
        ("service gain, %", gain / f64::max(most, 1.0) * 100.0),
        ("drops", outcome.drops as f64),
        ("goodput, phase 1", third(0)),
        ("phase 2", third(1)),
        ("phase 3", third(2)),
        ("above their bound, %", 100.0 * part(log.violations, log.fenced)),
        ("with a full bucket, %", 100.0 * part(own_above, own)),
        ("requests", log.fenced as f64),
        ("bound over real", part(log.bound_tokens, log.real_tokens)),
    ]
}
