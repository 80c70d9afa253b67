//! Request schedulers combined with flow schedulers: the gain of each alone and of both together.
//! No paper has this comparison.
//!
//! The flow-level simulator ([`crate::simulate`]) runs every pair on the same arrivals. The request
//! schedulers are orders of a prefill unit, each with two batch sizes. The flow schedulers are the
//! policies of `laxity-policy`. Goodput counts requests in time per second of arrivals, and cost is
//! prefill GPU-seconds per such request. In one cluster collectives use the network (experts). The
//! other has long prompts whose KV cache uses it (sequence parallelism, static homes of prefixes).
//!
//! Clusters and batch sizes were chosen on seeds 1 and 2 from about twenty candidates. The
//! documentation shows results of other seeds.

use laxity_policy::PolicyKind;

use super::PaperError;
use super::reproduction::{Claim, Options, Reproduction, Section, each, spread};
use crate::outcome::Outcome;
use crate::scenario::{RequestOrder, Routing, Scenario, Source};
use crate::simulate;

const FLOWS: [PolicyKind; PolicyKind::ALL.len()] = PolicyKind::ALL;

/// Policies under which parts of the shared slack are compared one by one.
const PARTS: [PolicyKind; 4] =
    [PolicyKind::Fair, PolicyKind::TwoClass, PolicyKind::Mfs, PolicyKind::Laxity];

/// A cluster with its workload.
struct Regime {
    name: &'static str,
    rates: &'static [f64],
    /// Tokens of a batch, with the built-in size first.
    tokens: [u32; 2],
    set: fn(&mut Scenario),
}

const REGIMES: [Regime; 2] = [
    Regime {
        name: "agents, DBRX (EP 16), 100 Gb/s, 3 × alone",
        rates: &[0.2, 0.4, 0.6],
        tokens: [8192, 512],
        set: |s| {
            s.cluster.nic_gbps = 100.0;
            s.model.ep = 16;
        },
    },
    Regime {
        name: "long agents, Llama-3-8B (SP 4), 50 Gb/s, prefixes in one place, 3 × alone, 500 ms \
            at least",
        rates: &[0.3, 0.4, 0.5],
        tokens: [8192, 4096],
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

/// A request scheduler: an order and a batch size.
struct Scheduler {
    name: String,
    order: RequestOrder,
    tokens: u32,
}

/// Returns all request schedulers, with the built-in one first.
fn schedulers(regime: &Regime) -> Vec<Scheduler> {
    let of = |tokens: u32| {
        RequestOrder::ALL.map(|order| Scheduler {
            name: format!("{}, {tokens}", order.name()),
            order,
            tokens,
        })
    };
    regime.tokens.into_iter().flat_map(of).collect()
}

/// One run: a cluster, a rate, a pair of schedulers, and a seed.
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

/// The results of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Gave {
    /// Percentage of requests in time.
    attainment: f64,
    in_time: f64,
    /// Seconds of arrivals after the warm-up.
    seconds: f64,
    /// Prefill GPU-seconds in this time.
    gpu_seconds: f64,
}

impl Gave {
    fn of(scenario: &Scenario, outcome: &Outcome) -> Self {
        let seconds = scenario.workload.seconds * (1.0 - scenario.workload.warm_up);
        Self {
            attainment: 100.0 * outcome.attainment,
            in_time: outcome.attainment * outcome.requests as f64,
            seconds,
            gpu_seconds: f64::from(scenario.cluster.prefill_gpus()) * seconds,
        }
    }

    fn goodput(&self) -> f64 {
        self.in_time / self.seconds
    }
}

/// A function that formats a table cell from the results of all seeds.
type Cell = fn(&[Gave]) -> String;

fn attainment(seeds: &[Gave]) -> Vec<f64> {
    seeds.iter().map(|gave| gave.attainment).collect()
}

/// Formats prefill GPU-seconds per request in time, over all seeds together, with the least and
/// most of a seed in brackets. A mean of ratios would be dominated by seeds with few such requests.
fn cost(seeds: &[Gave]) -> String {
    let shown = |gpu_seconds: f64, in_time: f64| {
        let each = gpu_seconds / in_time;
        match each {
            _ if in_time < 0.5 => "∞".to_owned(),
            _ if each < 10.0 => format!("{each:.2}"),
            _ if each < 100.0 => format!("{each:.1}"),
            _ => format!("{each:.0}"),
        }
    };
    let total = |of: fn(&Gave) -> f64| seeds.iter().map(of).sum::<f64>();
    let all = shown(total(|gave| gave.gpu_seconds), total(|gave| gave.in_time));
    let of = |gave: &Gave| shown(gave.gpu_seconds, gave.in_time);
    let by = |a: &&Gave, b: &&Gave| a.in_time.total_cmp(&b.in_time);
    match (seeds.iter().max_by(by), seeds.iter().min_by(by)) {
        (Some(least), Some(most)) if seeds.len() > 1 => {
            format!("{all} ({} to {})", of(least), of(most))
        }
        _ => all,
    }
}

/// The runs of a regime by rate, scheduler, policy and seed.
struct Grid(Vec<Vec<Vec<Vec<Gave>>>>);

impl Grid {
    fn run(regime: &Regime, rates: &[f64], options: &Options) -> Result<Self, PaperError> {
        let mut points = Vec::new();
        let all = schedulers(regime);
        for &rate in rates {
            for scheduler in &all {
                for flows in FLOWS {
                    for &seed in &options.seeds {
                        let point = Point::new(regime, options.quick, rate, seed);
                        points.push(point.with(scheduler.order, scheduler.tokens, flows));
                    }
                }
            }
        }
        let outcomes = run(&points, options)?;
        let gave: Vec<Gave> = points
            .iter()
            .zip(&outcomes)
            .map(|(point, outcome)| Gave::of(&point.scenario, outcome))
            .collect();
        let by_seed: Vec<_> = gave.chunks(options.seeds.len()).map(<[_]>::to_vec).collect();
        let by_flow: Vec<_> = by_seed.chunks(FLOWS.len()).map(<[_]>::to_vec).collect();
        Ok(Self(by_flow.chunks(all.len()).map(<[_]>::to_vec).collect()))
    }

    fn section(&self, rate: usize, title: String, regime: &Regime, cell: Cell) -> Section {
        let head = std::iter::once("request scheduler, tokens of a batch".to_owned());
        let flows = FLOWS.iter().map(|kind| kind.name().to_owned());
        let rows = schedulers(regime)
            .into_iter()
            .zip(&self.0[rate])
            .map(|(scheduler, by_flow)| {
                let cells = by_flow.iter().map(|seeds| cell(seeds));
                std::iter::once(scheduler.name).chain(cells).collect()
            })
            .collect();
        Section { title, head: head.chain(flows).collect(), rows, notes: String::new() }
    }

    /// Returns the gains at a rate by seed: of the best request scheduler under `fair`, of `laxity`
    /// under the built-in scheduler, and of both together.
    fn gains(&self, rate: usize, regime: &Regime) -> Gains {
        let grid = &self.0[rate];
        let place = |kind| FLOWS.iter().position(|flow| *flow == kind).unwrap_or(0);
        let (fair, laxity) = (place(PolicyKind::Fair), place(PolicyKind::Laxity));
        // The best scheduler has the highest mean over seeds, because nobody can choose after the
        // fact. Among equals it is the first.
        let best = |flow: usize| {
            let mean = |s: &usize| mean(&attainment(&grid[*s][flow]));
            (0..grid.len()).rev().max_by(|a, b| mean(a).total_cmp(&mean(b))).unwrap_or(0)
        };
        let names = schedulers(regime);
        let start = attainment(&grid[0][fair]);
        let at = |scheduler: usize, flow: usize| {
            let seeds = &grid[scheduler][flow];
            let points = attainment(seeds).into_iter().zip(&start).map(|(a, b)| a - b);
            Gain {
                scheduler: names[scheduler].name.clone(),
                points: points.collect(),
                cost: cost(seeds),
            }
        };
        let (requests, flows) = (at(best(fair), fair), at(0, laxity));
        let both = at(best(laxity), laxity);
        let sums = requests.points.iter().zip(&flows.points);
        let beyond = both.points.iter().zip(sums);
        Gains {
            cost: cost(&grid[0][fair]),
            beyond: beyond.map(|(both, (a, b))| both - (a + b)).collect(),
            requests,
            flows,
            both,
        }
    }
}

/// The gain of a pair over the starting point.
struct Gain {
    scheduler: String,
    points: Vec<f64>,
    cost: String,
}

impl Gain {
    fn cell(&self) -> String {
        format!("{} ({})", spread(&self.points), self.scheduler)
    }
}

struct Gains {
    /// Cost at the starting point.
    cost: String,
    requests: Gain,
    flows: Gain,
    both: Gain,
    beyond: Vec<f64>,
}

impl Gains {
    /// Reports whether both gains are positive. Otherwise their sum means nothing.
    fn can_add_up(&self) -> bool {
        mean(&self.requests.points) > 0.5 && mean(&self.flows.points) > 0.5
    }

    fn row(&self, start: &str) -> Vec<String> {
        vec![
            start.to_owned(),
            self.requests.cell(),
            spread(&self.flows.points),
            self.both.cell(),
            spread(&self.beyond),
            self.cost.clone(),
            self.requests.cost.clone(),
            self.flows.cost.clone(),
            self.both.cost.clone(),
        ]
    }

    fn claim(&self, regime: String) -> Claim {
        Claim {
            says: "request and flow scheduling together gain what both gain alone".to_owned(),
            paper: "none".to_owned(),
            here: if self.can_add_up() {
                format!("{} points beyond the sum", spread(&self.beyond))
            } else {
                "one of them gained nothing: says nothing".to_owned()
            },
            regime,
            baseline: format!(
                "requests alone {}, flows alone {} points",
                spread(&self.requests.points),
                spread(&self.flows.points)
            ),
            holds: self.can_add_up() && mean(&self.beyond).abs() <= 2.0,
        }
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Measures the parts of the shared slack one by one, at one load of the second regime.
fn parts(options: &Options) -> Result<Section, PaperError> {
    type Change = fn(&mut Scenario);
    let regime = &REGIMES[1];
    let rate = regime.rates[1];
    let changes: [(&str, Change); 2] = [
        ("as above", |_| ()),
        ("a scale-out every 5 s", |s| {
            s.serving.scale_out_every_s = 5.0;
        }),
    ];
    let mut points = Vec::new();
    for (_, change) in changes {
        for flows in PARTS {
            for &seed in &options.seeds {
                let point = Point::new(regime, options.quick, rate, seed);
                let point = point.with(RequestOrder::EdfRelegate, regime.tokens[1], flows);
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
        .zip(cells.chunks(PARTS.len()))
        .map(|((name, _), cells)| {
            std::iter::once((*name).to_owned()).chain(cells.iter().cloned()).collect()
        })
        .collect();
    let flows = PARTS.iter().map(|kind| kind.name().to_owned());
    Ok(Section {
        title: format!(
            "In time, %: edf_relegate at {rate} requests/s per GPU, and what else there is ({})",
            regime.name
        ),
        head: std::iter::once("with".to_owned()).chain(flows).collect(),
        rows,
        notes: "A copy of weights goes from unit to unit, 4 ranks at once.".to_owned(),
    })
}

/// Runs all pairs.
///
/// # Errors
/// Returns an error if a built-in model or GPU cannot be loaded.
pub fn reproduce(options: &Options) -> Result<Reproduction, PaperError> {
    let mut sections = Vec::new();
    let mut claims = Vec::new();
    let mut worth_rows = Vec::new();
    for regime in &REGIMES {
        let rates = if options.quick { &regime.rates[..1] } else { regime.rates };
        let grid = Grid::run(regime, rates, options)?;
        for (at, rate) in rates.iter().enumerate() {
            let place = format!("{rate} requests/s per GPU, {}", regime.name);
            let shown: [(&str, Cell); 3] = [
                ("In time, %", |seeds| spread(&attainment(seeds))),
                ("Goodput, requests in time per second", |seeds| {
                    let each: Vec<f64> = seeds.iter().map(Gave::goodput).collect();
                    spread(&each)
                }),
                ("Cost, prefill GPU-seconds per request in time", cost),
            ];
            for (what, cell) in shown {
                sections.push(grid.section(at, format!("{what}: {place}"), regime, cell));
            }
            let gains = grid.gains(at, regime);
            let start = format!("{rate}, {}", regime.name);
            worth_rows.push(gains.row(&start));
            claims.push(gains.claim(start));
        }
    }
    sections.push(Section {
        title: "What each is worth: points of attainment over fcfs with its large batches under \
            fair"
            .to_owned(),
        head: [
            "requests/s per GPU",
            "best request scheduler, fair",
            "built-in, laxity",
            "best request scheduler, laxity",
            "beyond the sum",
            "GPU-s per request in time: fcfs, fair",
            "best, fair",
            "built-in, laxity",
            "best, laxity",
        ]
        .map(str::to_owned)
        .to_vec(),
        rows: worth_rows,
        notes: "Differences seed by seed on the same arrivals. The best request scheduler is that \
            of the highest mean under that policy. Cost is of all seeds together, in brackets the \
            least and the most of a seed."
            .to_owned(),
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
    use super::*;

    #[test]
    fn a_quick_run_has_a_cell_for_every_order_at_both_sizes_under_every_policy() {
        let found = reproduce(&Options::quick(3)).expect("it runs");
        found.assert_whole();
        for what in ["In time, %: 0", "Goodput", "Cost"] {
            let tables = found.sections.iter().filter(|s| s.title.starts_with(what));
            let mut count = 0;
            for table in tables {
                assert_eq!(table.rows.len(), 2 * RequestOrder::ALL.len());
                assert_eq!(table.head.len(), 1 + PolicyKind::ALL.len());
                count += 1;
            }
            assert_eq!(count, REGIMES.len(), "{what}");
        }
        assert!(found.table().contains("edf_relegate, 8192"));
    }

    #[test]
    fn a_seed_that_served_nobody_makes_no_cost_that_is_not_there() {
        let gave = |in_time| Gave { attainment: 0.0, in_time, seconds: 10.0, gpu_seconds: 320.0 };
        assert_eq!(cost(&[gave(160.0)]), "2.00");
        assert_eq!(cost(&[gave(160.0), gave(0.0)]), "4.00 (2.00 to ∞)");
        assert_eq!(cost(&[gave(0.0)]), "∞");
    }
}
