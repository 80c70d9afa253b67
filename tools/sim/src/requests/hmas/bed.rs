//! One replica under a setting of H-MAS or a baseline, and what of it is measured, as H-MAS
//! measures it (§4, Appendix B.2).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use laxity_requests::baseline::RoundRobin;
use laxity_requests::discipline::Discipline;
use laxity_requests::dispatch::Role;
use laxity_requests::hmas::cognition::Cognition;
use laxity_requests::hmas::meta::{
    Answer, Bandit, ChangePoint, Classifier, Rules, Selector, Table,
};
use laxity_requests::hmas::perception::{self, Paced, Perception, Tagger, Tags};
use laxity_requests::hmas::pool::{Hints, Kind};
use laxity_requests::hmas::prediction::Modelled;
use laxity_requests::hmas::qos::Long;
use laxity_requests::hmas::{Agent, Config, Journal, Log, statera};
use laxity_requests::kv::Pool;
use laxity_requests::replica::Replica;
use laxity_requests::request::{InstanceId, RequestId, Slo, Spec};
use laxity_requests::{Span, Time};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha12Rng;
use rand_distr::{Distribution as _, LogNormal};

use super::service::{Asks, Service};
use super::traffic::{TASKS, ends};
use crate::requests::cluster;
use crate::requests::latency::Roofline;
use crate::requests::link::Link;
use crate::requests::outcome::{Outcome, Record};
use crate::requests::workload::Asked;

/// Tokens of a KV block.
pub(super) const BLOCK_TOKENS: u32 = 16;

/// What learners and services may choose.
pub(super) const POOL: [Kind; 5] = [Kind::Fcfs, Kind::Edf, Kind::Sjf, Kind::TwoLane, Kind::Wfq];

/// The machine.
#[derive(Clone, Debug)]
pub(super) struct Bed {
    pub(super) clock: Roofline,
    pub(super) blocks: u32,
}

/// Who perceives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sees {
    /// As well as the paper's fine-tuned model: 94.2 % of tasks right, lengths off by 12.4 % on
    /// average (table 5).
    Paper,
    /// A forest, from what comes with a request.
    Forest,
    /// Rules and statistics.
    Rules,
    /// Nothing: all are unknown.
    Nothing,
}

/// Who decides on structures.
#[derive(Clone, Debug)]
pub(super) enum Chooses {
    Fixed(Kind),
    Rules,
    ChangePoint,
    Bandit,
    /// Trained on these.
    Classifier(Arc<Vec<(Long, Kind)>>),
    /// Outside of the simulation.
    Service(Service),
    /// Nobody: long views are kept for training.
    Watches(Kind, Watched),
}

/// Long views that were seen.
pub(super) type Watched = Arc<Mutex<Vec<Long>>>;

/// A setting.
#[derive(Clone, Debug)]
pub(super) struct Setting {
    pub(super) chooses: Chooses,
    pub(super) sees: Sees,
    pub(super) statera: Option<statera::Config>,
    /// Two-lane is not in the pool: EDF takes its place.
    pub(super) no_two_lane: bool,
    pub(super) chunk: u32,
    pub(super) hints: Hints,
}

impl Setting {
    /// With the default of all else.
    pub(super) fn new(chooses: Chooses) -> Self {
        Self {
            chooses,
            sees: Sees::Paper,
            statera: Some(super::frozen_statera()),
            no_two_lane: false,
            chunk: 512,
            hints: Hints {
                // The best of 5 to 45 s on the tuning seeds: about the 95th percentile of the heavy
                // mix.
                lane_split: Span::from_millis(45_000),
                fast_weight: 4,
            },
        }
    }

    pub(super) fn fixed(kind: Kind) -> Self {
        Self::new(Chooses::Fixed(kind))
    }
}

/// Lengths as the paper's perception would say them: from what only the driver knows, with noise.
struct Oracle {
    tags: HashMap<RequestId, Tags>,
}

impl Oracle {
    fn new(asked: &[Asked], seed: u64) -> Self {
        let mut rng = ChaCha12Rng::seed_from_u64(seed ^ 0x5ee5);
        // The mean of |e^(σz) − 1| is about 0.8 σ.
        let noise = LogNormal::new(0.0, 0.155).expect("σ is a number");
        let tags = asked
            .iter()
            .map(|asked| {
                let right = rng.random::<f64>() < 0.942;
                let other = rng.random_range(0..TASKS.len() as u16);
                let off: f64 = noise.sample(&mut rng);
                let most = f64::from(asked.spec.output_max);
                let tags = Tags {
                    task: if right { asked.spec.class.0 } else { other },
                    length: (f64::from(asked.output) * off).clamp(1.0, most),
                };
                (asked.spec.id, tags)
            })
            .collect();
        Self { tags }
    }
}

impl Tagger for Oracle {
    fn tag(&mut self, spec: &Spec) -> Option<Tags> {
        self.tags.get(&spec.id).copied()
    }
}

/// Keeps what it sees.
struct Watch(Watched);

impl Selector for Watch {
    fn name(&self) -> &'static str {
        "watch"
    }

    fn select(&mut self, _: Time, view: &Long, _: Kind) -> Answer {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.push(view.clone());
        Answer::Stay
    }
}

/// Another selector without one structure.
struct WithoutTwoLane(Box<dyn Selector>);

impl Selector for WithoutTwoLane {
    fn name(&self) -> &'static str {
        "without two-lane"
    }

    fn select(&mut self, now: Time, view: &Long, current: Kind) -> Answer {
        match self.0.select(now, view, current) {
            Answer::Decided(mut decision) if decision.kind == Kind::TwoLane => {
                decision.kind = Kind::Edf;
                Answer::Decided(decision)
            }
            other => other,
        }
    }
}

/// Time that perception takes for a request (Appendix E.4).
const PERCEPTION: Span = Span::from_micros(1_640);

fn cognition(
    setting: &Setting,
    bed: &Bed,
    asked: &[Asked],
    trained: &[Asked],
    seed: u64,
) -> Cognition {
    fn paced(tagger: impl Tagger + 'static) -> Box<dyn Perception> {
        Box::new(Paced::new(tagger, PERCEPTION))
    }
    let perception = match setting.sees {
        Sees::Paper => paced(Oracle::new(asked, seed)),
        Sees::Rules => paced(perception::Rules::default()),
        Sees::Nothing => paced(perception::Unknown),
        Sees::Forest => match forest(trained) {
            Some(forest) => paced(forest),
            None => paced(perception::Unknown),
        },
    };
    let prediction = Modelled::new(bed.clock.clone(), setting.chunk);
    Cognition::new(perception, Box::new(prediction))
}

/// Trained on other requests than those that it is asked about.
pub(super) fn forest(on: &[Asked]) -> Option<perception::Trained> {
    let examples: Vec<(Spec, u32)> = on.iter().map(|a| (a.spec, a.output)).collect();
    perception::Trained::fit(&examples, 7).ok()
}

fn agent(setting: &Setting, bed: &Bed, asked: &[Asked], trained: &[Asked], seed: u64) -> Agent {
    let cognition = cognition(setting, bed, asked, trained, seed);
    let config = Config {
        chunk: setting.chunk,
        statera: setting.statera,
        hints: setting.hints,
        ..Config::default()
    };
    let selector: Box<dyn Selector> = match &setting.chooses {
        Chooses::Fixed(kind) => return Agent::fixed(*kind, config, cognition),
        Chooses::Watches(kind, watched) => {
            let first = Config {
                first: *kind,
                ..config
            };
            let watch = Box::new(Watch(Arc::clone(watched)));
            return Agent::new(first, cognition, watch);
        }
        Chooses::Rules => Box::new(Rules::default()),
        Chooses::ChangePoint => Box::new(ChangePoint::new(Table::default())),
        Chooses::Bandit => Box::new(Bandit::new(&POOL, 0.3)),
        Chooses::Service(service) => Box::new(Asks::new(service.clone(), &POOL)),
        Chooses::Classifier(examples) => match Classifier::fit(examples, 5) {
            Ok(classifier) => Box::new(classifier),
            // One best policy everywhere is a classifier, too.
            Err(_) => Box::new(laxity_requests::hmas::meta::Fixed(
                examples.first().map_or(Kind::Sjf, |(_, kind)| *kind),
            )),
        },
    };
    let selector = if setting.no_two_lane {
        Box::new(WithoutTwoLane(selector))
    } else {
        selector
    };
    Agent::new(config, cognition, selector)
}

/// Runs requests under a setting. `trained` are requests that a forest may learn from.
pub(super) fn run(
    setting: &Setting,
    bed: &Bed,
    asked: &[Asked],
    trained: &[Asked],
    seed: u64,
) -> Measured {
    let agent = agent(setting, bed, asked, trained, seed);
    let journal = agent.journal();
    let outcome = serve(Box::new(agent), bed, asked);
    Measured::of(&outcome, &journal)
}

/// Runs requests under a discipline.
pub(super) fn serve(discipline: Box<dyn Discipline + Send>, bed: &Bed, asked: &[Asked]) -> Outcome {
    let slot = Mutex::new(Some(discipline));
    let make = |_: InstanceId, _: Role| {
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        let discipline = slot.take().expect("there is one instance");
        Replica::new(
            Pool::new(bed.blocks, BLOCK_TOKENS),
            bed.blocks / 100,
            discipline,
        )
    };
    let config = cluster::Config {
        roles: vec![Role::Whole],
        make: &make,
        clock: &bed.clock,
        dispatch: Box::new(RoundRobin::default()),
        scaler: None,
        link: Link::new(12_500_000_000, Span::from_micros(20)),
        kv_bytes_per_token: bed.clock.kv_bytes_per_token(),
        ends: ends(asked),
    };
    cluster::run(config, asked)
}

/// What is measured.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    /// Part of requests that met both objectives (eq. 9), %: time to first token, and *mean* time
    /// between tokens (eq. 8).
    pub(super) good: f64,
    /// Part that met the first, %.
    pub(super) first: f64,
    /// Time to first token, 95th percentile, s. What never got one counts as long as it waited.
    pub(super) ttft_p95: f64,
    /// Mean time between tokens, 95th percentile, ms.
    pub(super) tpot_p95: f64,
    /// Expected service gain (eq. 6) over its most, %.
    pub(super) gain: f64,
    /// How often blocks were taken from a request.
    pub(super) drops: f64,
    /// Part met of each third of the requests, by arrival.
    pub(super) thirds: [f64; 3],
    pub(super) log: Log,
}

fn is_good(record: &Record) -> bool {
    let Slo::Interactive { tbt, .. } = record.spec.slo else {
        return false;
    };
    let slow = record.tpot().is_some_and(|tpot| tpot.0 > tbt);
    record.complete() && record.met_first() && !slow
}

fn percent(part: usize, of: usize) -> f64 {
    part as f64 / of.max(1) as f64 * 100.0
}

impl Measured {
    pub(super) fn of(outcome: &Outcome, journal: &Journal) -> Self {
        let records = &outcome.records;
        let count = |of: &dyn Fn(&Record) -> bool| records.iter().filter(|r| of(r)).count();
        let (mut gain, mut most) = (0.0, 0.0);
        for record in records {
            let base = f64::from(record.spec.prompt) + 2.0 * f64::from(record.output);
            most += base;
            if let Some(took) = record.ttlt() {
                let due = record
                    .spec
                    .deadline(record.output)
                    .since(record.spec.arrival);
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
        Self {
            good: percent(count(&is_good), records.len()),
            first: percent(count(&Record::met_first), records.len()),
            ttft_p95: outcome.quantile_ms(0.95, waited).unwrap_or(0.0) / 1e3,
            tpot_p95: outcome.quantile_ms(0.95, Record::tpot).unwrap_or(0.0),
            gain: gain / f64::max(most, 1.0) * 100.0,
            drops: outcome.drops as f64,
            thirds: [third(0), third(1), third(2)],
            log: journal.read(),
        }
    }
}
