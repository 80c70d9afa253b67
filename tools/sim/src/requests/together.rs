//! Request scheduler × flow scheduler: what each is worth, alone and together (issue's item 7; no paper has it).
//!
//! The flow-level simulator ([`crate::simulate`]) runs every pair on the same arrivals. A request scheduler here is the order
//! of a prefill unit and its batch size; a flow scheduler is a policy of `laxity-policy`. Goodput counts requests
//! in time per second of arrivals, cost the prefill GPU-seconds that each took. Two clusters: one whose collectives are on the network (experts) and
//! one with long prompts, whose KV is (sequence parallelism, prefixes in one place).
//!
//! Clusters and batch sizes were chosen on seeds 1 and 2, from some twenty that were looked at (4096 for long prompts without a look at 8192,
//! which turned out to be better); what the documentation shows is of other seeds.

use laxity_policy::PolicyKind;

use super::PaperError;
use super::reproduction::{Claim, Options, Reproduction, Section, each, spread};
use crate::outcome::Outcome;
use crate::scenario::{P2dDue, RequestOrder, Routing, Scenario, Source};
use crate::simulate;

const FLOWS: [PolicyKind; 4] = [
    PolicyKind::Fair,
    PolicyKind::TwoClass,
    PolicyKind::Mfs,
    PolicyKind::Laxity,
];

/// A cluster with its traffic.
struct Regime {
    name: &'static str,
    rates: &'static [f64],
    /// Batches of the built-in order, and of those that are compared.
    tokens: (u32, u32),
    set: fn(&mut Scenario),
}

const REGIMES: [Regime; 2] = [
    Regime {
        name: "agents, DBRX (EP 16), 100 Gb/s, 3 × alone",
        rates: &[0.2, 0.4, 0.6],
        tokens: (8192, 512),
        set: |s| {
            s.cluster.nic_gbps = 100.0;
            s.model.ep = 16;
        },
    },
    Regime {
        name: "long agents, Llama-3-8B (SP 4), 50 Gb/s, prefixes in one place, 3 × alone, 500 ms at least",
        rates: &[0.3, 0.4, 0.5],
        tokens: (8192, 4096),
        set: |s| {
            s.cluster.nic_gbps = 50.0;
            s.model.name = "llama-3-8b".into();
            (s.model.tp, s.model.ep, s.model.sp) = (4, 1, 4);
            s.serving.decode_tp = 4;
            s.serving.routing = Routing::StaticHomes;
            s.workload.source = Source::LongAgent;
            s.slo.least_ms = 500.0;
        },
    },
];

/// An order and its batches: the built-in one first.
fn schedulers(regime: &Regime) -> Vec<(String, RequestOrder, u32)> {
    let (large, small) = regime.tokens;
    let built_in = (format!("fcfs, {large}"), RequestOrder::Fcfs, large);
    let others = RequestOrder::ALL
        .into_iter()
        .map(|order| (format!("{}, {small}", order.name()), order, small));
    std::iter::once(built_in).chain(others).collect()
}

/// A run.
#[derive(Clone, Debug)]
struct Point {
    scenario: Scenario,
}

impl Point {
    fn new(regime: &Regime, quick: bool, rate: f64, seed: u64) -> Self {
        let mut scenario = Scenario::default();
        scenario.cluster.servers = 8;
        scenario.workload.seconds = if quick { 4.0 } else { 40.0 };
        scenario.workload.rate_per_gpu = rate;
        scenario.seed = seed;
        (regime.set)(&mut scenario);
        Self { scenario }
    }

    fn with(mut self, order: RequestOrder, tokens: u32, flows: PolicyKind) -> Self {
        self.scenario.serving.requests = order;
        self.scenario.serving.token_budget = tokens;
        self.scenario.policy.kind = flows;
        self
    }

    fn changed(mut self, change: impl FnOnce(&mut Scenario)) -> Self {
        change(&mut self.scenario);
        self
    }
}

fn run(points: &[Point], options: &Options) -> Result<Vec<Outcome>, PaperError> {
    each(points, options, |point| simulate(&point.scenario))
        .into_iter()
        .map(|outcome| outcome.map_err(|cause| PaperError::BuiltIn(cause.to_string())))
        .collect()
}

/// Requests in time per second, and prefill GPU-seconds of each, over the arrivals that count.
fn worth(point: &Point, outcome: &Outcome) -> (f64, f64) {
    let (scenario, in_time) = (
        &point.scenario,
        outcome.attainment * outcome.requests as f64,
    );
    let counted = scenario.workload.seconds * (1.0 - scenario.workload.warm_up);
    let gpus = f64::from(scenario.cluster.prefill_gpus());
    (in_time / counted, gpus * counted / in_time.max(1.0))
}

/// One regime's runs: by rate, scheduler, policy and seed.
struct Grid {
    attainment: Vec<Vec<Vec<Vec<f64>>>>,
    goodput: Vec<Vec<Vec<Vec<f64>>>>,
    cost: Vec<Vec<Vec<Vec<f64>>>>,
}

impl Grid {
    fn run(regime: &Regime, rates: &[f64], options: &Options) -> Result<Self, PaperError> {
        let mut points = Vec::new();
        let all = schedulers(regime);
        for &rate in rates {
            for (_, order, tokens) in &all {
                for flows in FLOWS {
                    for &seed in &options.seeds {
                        let point = Point::new(regime, options.quick, rate, seed);
                        points.push(point.with(*order, *tokens, flows));
                    }
                }
            }
        }
        let outcomes = run(&points, options)?;
        let of = |value: &dyn Fn(&Point, &Outcome) -> f64| {
            let values: Vec<f64> = points
                .iter()
                .zip(&outcomes)
                .map(|(p, o)| value(p, o))
                .collect();
            let seeds = options.seeds.len();
            let by_seed: Vec<Vec<f64>> = values.chunks(seeds).map(<[f64]>::to_vec).collect();
            let by_flow: Vec<_> = by_seed.chunks(FLOWS.len()).map(<[_]>::to_vec).collect();
            by_flow.chunks(all.len()).map(<[_]>::to_vec).collect()
        };
        Ok(Self {
            attainment: of(&|_, outcome| 100.0 * outcome.attainment),
            goodput: of(&|point, outcome| worth(point, outcome).0),
            cost: of(&|point, outcome| worth(point, outcome).1),
        })
    }

    fn section(title: String, regime: &Regime, values: &[Vec<Vec<f64>>], notes: &str) -> Section {
        let head = std::iter::once("request scheduler, tokens of a batch".to_owned());
        let flows = FLOWS.iter().map(|kind| kind.name().to_owned());
        let rows = schedulers(regime)
            .into_iter()
            .zip(values)
            .map(|((name, ..), by_flow)| {
                let cells = by_flow.iter().map(|seeds| spread(seeds));
                std::iter::once(name).chain(cells).collect()
            })
            .collect();
        Section {
            title,
            head: head.chain(flows).collect(),
            rows,
            notes: notes.to_owned(),
        }
    }

    /// What is gained at a rate, by seed: by the best request scheduler under `fair`, by `laxity` under the built-in one,
    /// and by both.
    fn gains(&self, rate: usize) -> Gains {
        let grid = &self.attainment[rate];
        let (fair, laxity) = (0, FLOWS.len() - 1);
        // The best by its mean, not seed by seed: nobody picks a scheduler after the fact.
        let best = |flow: usize| {
            let mean = |s: &usize| grid[*s][flow].iter().sum::<f64>();
            (0..grid.len())
                .max_by(|a, b| mean(a).total_cmp(&mean(b)))
                .unwrap_or(0)
        };
        let start = &grid[0][fair];
        let less = |to: &[f64]| -> Vec<f64> { to.iter().zip(start).map(|(a, b)| a - b).collect() };
        let requests = less(&grid[best(fair)][fair]);
        let flows = less(&grid[0][laxity]);
        let both = less(&grid[best(laxity)][laxity]);
        let sums = requests.iter().zip(&flows).map(|(a, b)| a + b);
        let beyond = both
            .iter()
            .zip(sums)
            .map(|(both, sum)| both - sum)
            .collect();
        Gains {
            requests,
            flows,
            both,
            beyond,
        }
    }
}

struct Gains {
    requests: Vec<f64>,
    flows: Vec<f64>,
    both: Vec<f64>,
    beyond: Vec<f64>,
}

impl Gains {
    /// Where one of the two gains nothing, any sum holds.
    fn can_add_up(&self) -> bool {
        mean(&self.requests) > 0.5 && mean(&self.flows) > 0.5
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// What the shared notion of slack is worth part by part, at one load of the second regime.
fn parts(options: &Options) -> Result<Section, PaperError> {
    type Change = fn(&mut Scenario);
    let regime = &REGIMES[1];
    let rate = regime.rates[1];
    let changes: [(&str, Change); 4] = [
        ("as above", |_| ()),
        ("P2D due by chunk", |s| s.serving.p2d_due = P2dDue::Chunk),
        ("a scale-out every 5 s", |s| {
            s.serving.scale_out_every_s = 5.0;
        }),
        ("levels tuned every 2 s", |s| {
            if matches!(s.policy.kind, PolicyKind::Mfs | PolicyKind::Laxity) {
                s.policy.tune_every_s = 2.0;
            }
        }),
    ];
    let mut points = Vec::new();
    for (_, change) in changes {
        for flows in FLOWS {
            for &seed in &options.seeds {
                let point = Point::new(regime, options.quick, rate, seed);
                let point = point.with(RequestOrder::EdfRelegate, regime.tokens.1, flows);
                points.push(point.changed(change));
            }
        }
    }
    let outcomes = run(&points, options)?;
    let cells: Vec<String> = outcomes
        .chunks(options.seeds.len())
        .map(|outcomes| {
            let shares: Vec<f64> = outcomes.iter().map(|o| 100.0 * o.attainment).collect();
            let copies = outcomes.iter().filter(|o| o.weights.done > 0);
            let seconds: Vec<f64> = copies.map(|o| o.weights.mean_s).collect();
            let share = spread(&shares);
            if seconds.is_empty() {
                share
            } else {
                format!("{share}, copies {:.1} s", mean(&seconds))
            }
        })
        .collect();
    let rows = changes
        .iter()
        .zip(cells.chunks(FLOWS.len()))
        .map(|((name, _), cells)| {
            std::iter::once((*name).to_owned())
                .chain(cells.iter().cloned())
                .collect()
        })
        .collect();
    let flows = FLOWS.iter().map(|kind| kind.name().to_owned());
    Ok(Section {
        title: format!("In time, %: edf_relegate at {rate} requests/s per GPU, and what else there is ({})", regime.name),
        head: std::iter::once("with".to_owned()).chain(flows).collect(),
        rows,
        notes: "Controllers tune mfs and laxity only; a copy of weights goes from unit to unit, 4 ranks at once.".to_owned(),
    })
}

/// Runs it.
///
/// # Errors
/// A built-in model or GPU cannot be had.
pub fn reproduce(options: &Options) -> Result<Reproduction, PaperError> {
    let mut sections = Vec::new();
    let mut claims = Vec::new();
    let mut worth_rows = Vec::new();
    for regime in &REGIMES {
        let rates = if options.quick {
            &regime.rates[..1]
        } else {
            regime.rates
        };
        let grid = Grid::run(regime, rates, options)?;
        for (at, rate) in rates.iter().enumerate() {
            let titled = |what: &str| format!("{what}: {rate} requests/s per GPU, {}", regime.name);
            sections.push(Grid::section(
                titled("In time, %"),
                regime,
                &grid.attainment[at],
                "",
            ));
            let gains = grid.gains(at);
            let start = format!("{rate}, {}", regime.name);
            let parts = [&gains.requests, &gains.flows, &gains.both, &gains.beyond];
            let cells = parts.into_iter().map(|values| spread(values));
            worth_rows.push(std::iter::once(start).chain(cells).collect());
            claims.push(Claim {
                says: "request and flow scheduling together gain what both gain alone".to_owned(),
                paper: "none".to_owned(),
                here: if gains.can_add_up() {
                    format!("{} points beyond the sum", spread(&gains.beyond))
                } else {
                    "one of them gained nothing: says nothing".to_owned()
                },
                regime: format!("{rate}, {}", regime.name),
                baseline: format!(
                    "requests alone {}, flows alone {} points",
                    spread(&gains.requests),
                    spread(&gains.flows)
                ),
                holds: gains.can_add_up() && mean(&gains.beyond).abs() <= 2.0,
            });
        }
        let last = rates.len() - 1;
        let titled = |what: &str| {
            format!(
                "{what}: {} requests/s per GPU, {}",
                rates[last], regime.name
            )
        };
        let goodput = titled("Goodput, requests in time per second");
        sections.push(Grid::section(goodput, regime, &grid.goodput[last], ""));
        let cost = titled("Cost, prefill GPU-seconds per request in time");
        sections.push(Grid::section(cost, regime, &grid.cost[last], ""));
    }
    sections.push(Section {
        title: "What each is worth: points of attainment over fcfs with its large batches under fair".to_owned(),
        head: [
            "requests/s per GPU",
            "best request scheduler, fair",
            "built-in, laxity",
            "best request scheduler, laxity",
            "beyond the sum",
        ]
        .map(str::to_owned)
        .to_vec(),
        rows: worth_rows,
        notes: "Differences seed by seed on the same arrivals. The best request scheduler is that of the highest mean under that policy.".to_owned(),
    });
    sections.push(parts(options)?);
    Ok(Reproduction {
        title: "Request scheduler × flow scheduler".to_owned(),
        sections,
        claims,
        quick: options.quick,
    })
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use super::*;

    #[test]
    fn a_quick_run_has_a_cell_for_every_pair() {
        let options = Options {
            seeds: vec![3],
            quick: true,
            jobs: NonZero::new(2).expect("two"),
            data: None,
            progress: false,
        };
        let found = reproduce(&options).expect("it runs");
        let tables = found
            .sections
            .iter()
            .filter(|s| s.title.starts_with("In time, %: 0"));
        let mut count = 0;
        for table in tables {
            assert_eq!(table.rows.len(), 1 + RequestOrder::ALL.len());
            assert!(table.rows.iter().all(|row| row.len() == 1 + FLOWS.len()));
            count += 1;
        }
        assert_eq!(count, REGIMES.len());
        assert!(found.table().contains("edf_relegate"));
    }
}
