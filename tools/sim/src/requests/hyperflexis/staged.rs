//! Figure 6: clients of rising priority join one after the other; objectives come from priorities
//! (§5.2, §9.1).
//!
//! The paper starts the lowest priority at 15 requests per second and adds the next every 20 s, to
//! 60. That is what its two instances can barely serve; here the rates are such that all four
//! together are above what two instances serve at once. Each client goes on until 90 s (the paper's
//! 250 requests at 15 per second would end before the next client comes, its figure goes on). Tasks
//! of the classes are those of table 1 in its order, P0 `medical_qa` to P3 `wikisql`; a request is
//! judged by its task's objectives, which the dispatcher does not see.

use laxity_requests::Time;
use laxity_requests::baseline::LineOrder;
use laxity_requests::dispatch::Role;
use laxity_requests::hyperflexis::Mapping;
use laxity_requests::hyperflexis::priority::Bounds;

use super::tasks::{self, FOUR, Stream};
use super::world::{self, Machine, System};
use super::{Found, mean, strings};
use crate::requests::outcome::{Outcome, Record};
use crate::requests::reproduction::{Claim, Options, Section, each, spread};

const SECOND: u64 = 1_000_000_000;
/// Requests that the mapping looks at.
const WINDOW: usize = 200;

/// Objectives of ±25 % around table 1's, the upper end of which is the median: "configured to
/// satisfy these targets" (§9.1).
fn mapping() -> Mapping {
    let bounds = FOUR.map(|task| {
        let around = Bounds::around(task.ttft * 1_000_000, task.tpot * 1_000_000, 0.25);
        Bounds {
            ttft: (around.ttft.0, task.ttft * 1_000_000),
            tpot: (around.tpot.0, task.tpot * 1_000_000),
        }
    });
    Mapping::new(bounds.to_vec(), WINDOW)
}

fn streams(rate: f64, step: u64) -> Vec<Stream> {
    // The lowest priority first.
    let stream = |class: usize| Stream {
        task: FOUR[class],
        class: class as u16,
        begins: Time((3 - class as u64) * step * SECOND),
        ends: Time(step * 9 / 2 * SECOND),
        rate,
    };
    (0..4).map(stream).collect()
}

/// First token in time, %, and its 95th percentile, ms, of a class while all are there.
fn of_class(outcome: &Outcome, class: u16, from: Time) -> (f64, f64) {
    let mine = |r: &Record| r.spec.class.0 == class && r.spec.arrival >= from;
    let all = outcome.records.iter().filter(|r| mine(r)).count().max(1);
    let good = outcome
        .records
        .iter()
        .filter(|r| mine(r) && r.met_first())
        .count();
    let p95 = outcome.quantile_ms(0.95, |r| r.ttft().filter(|_| mine(r)));
    (good as f64 / all as f64 * 100.0, p95.unwrap_or(0.0))
}

pub(super) fn run(machine: &Machine, options: &Options) -> Found {
    let systems = [
        System::RoundRobin(LineOrder::Fcfs),
        System::RoundRobin(LineOrder::Edf),
        System::LeastWork(LineOrder::Fcfs),
        System::EdfAdmission,
        System::HyperFlexis(machine.options()),
        System::Priorities(machine.as_it_stands(), mapping()),
        System::Priorities(machine.options(), mapping()),
    ];
    let step = if options.quick { 3 } else { 20 };
    let from = Time(3 * step * SECOND);
    let rates: &[f64] = if options.quick {
        &[26.0]
    } else {
        &[15.0, 24.0, 26.0, 28.0]
    };
    let mut found = Found::default();
    for rate in rates {
        let mut points = Vec::new();
        for system in 0..systems.len() {
            points.extend(options.seeds.iter().map(|seed| (system, *seed)));
        }
        let results = each(&points, options, |(system, seed)| {
            let asked = tasks::requests(&streams(*rate, step), *seed);
            let roles = [Role::Whole; 2];
            let outcome = world::run(machine, &systems[*system], &roles, None, &asked).outcome;
            let early = |r: &Record| r.spec.arrival < Time(step * SECOND);
            let first = outcome.quantile_ms(0.5, |r| r.ttft().filter(|_| early(r)));
            let classes: [(f64, f64); 4] =
                std::array::from_fn(|class| of_class(&outcome, class as u16, from));
            let attained = world::attainment(&outcome, |_| true);
            (classes, first.unwrap_or(0.0), attained)
        });
        let mut rows = Vec::new();
        let mut p0 = Vec::new();
        for (at, system) in systems.iter().enumerate() {
            let mine: Vec<_> = points
                .iter()
                .zip(&results)
                .filter(|((system, _), _)| *system == at)
                .map(|(_, result)| result)
                .collect();
            let mut row = strings(&[system.name()]);
            for class in 0..4 {
                let share: Vec<f64> = mine.iter().map(|r| r.0[class].0).collect();
                let p95: Vec<f64> = mine.iter().map(|r| r.0[class].1).collect();
                row.push(format!("{} ({:.0})", spread(&share), mean(&p95)));
                if class == 0 {
                    p0.push(mean(&share));
                }
            }
            row.push(spread(&mine.iter().map(|r| r.1).collect::<Vec<_>>()));
            row.push(spread(&mine.iter().map(|r| r.2).collect::<Vec<_>>()));
            rows.push(row);
        }
        let joined = format!("from {} s on, when all are there", 3 * step);
        found.sections.push(Section {
            title: format!(
                "Staged priorities, {rate:.0} requests/s of each: first tokens in time, % (95th \
                 percentile, ms), {joined}"
            ),
            head: std::iter::once("system".to_owned())
                .chain(
                    FOUR.iter()
                        .enumerate()
                        .map(|(class, task)| format!("P{class}: {}, {} ms", task.name, task.ttft)),
                )
                .chain(strings(&["P3 alone, median ms", "attainment, %"]))
                .collect(),
            rows,
            notes: String::new(),
        });
        let own = p0.len() - 1;
        let fair = (0..own).filter(|at| systems[*at].is_fair_baseline());
        let best = fair.max_by(|x, y| p0[*x].total_cmp(&p0[*y]));
        found.claims.push(Claim {
            says: "P0 stays within its TTFT when all priorities are there".to_owned(),
            paper: "yes; round robin does not (figure 6)".to_owned(),
            here: format!("{:.1} % in time; round robin {:.1} %", p0[own], p0[0]),
            regime: format!(
                "two instances, {rate:.0} requests/s of each of four priorities, ratio {}",
                machine.ratio
            ),
            baseline: best.map_or_else(String::new, |best| {
                format!("{}: {:.1} %", systems[best].name(), p0[best])
            }),
            holds: p0[own] >= 99.0,
        });
    }
    found
}
