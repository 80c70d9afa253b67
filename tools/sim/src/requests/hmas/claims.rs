//! Tables and claims, from what was measured.

use laxity_requests::hmas::statera::Score;
use laxity_requests::request::Spec;

use super::bed::{Measured, Sees, Setting, forest};
use super::{
    COLUMNS, Chooses, Column, Experiment, Kind, Row, lessons, mean, row, table, with_statera,
};
use crate::requests::reproduction::{Claim, Section};
use crate::requests::workload::Asked;

/// Settings of the fence: ε, what an error is, and who predicts.
pub(super) const FENCES: [(f64, Score, Sees, &str); 8] = [
    (0.05, Score::Additive, Sees::Paper, "in tokens (eq. 4)"),
    (0.1, Score::Additive, Sees::Paper, "in tokens (eq. 4)"),
    (0.2, Score::Additive, Sees::Paper, "in tokens (eq. 4)"),
    (0.05, Score::Relative, Sees::Paper, "relative"),
    (0.1, Score::Relative, Sees::Paper, "relative"),
    (0.2, Score::Relative, Sees::Paper, "relative"),
    (
        0.1,
        Score::Relative,
        Sees::Forest,
        "relative, lengths by forest",
    ),
    (
        0.1,
        Score::Relative,
        Sees::Rules,
        "relative, lengths by rules",
    ),
];

pub(super) fn fences() -> Vec<Row> {
    FENCES
        .map(|(epsilon, score, sees, name)| {
            let setting = Setting {
                sees,
                ..Setting::new(Chooses::Fixed(Kind::Sjf))
            };
            let setting = with_statera(setting, |config| {
                config.epsilon = epsilon;
                config.score = score;
            });
            row(&format!("ε = {epsilon}, errors {name}"), setting)
        })
        .into()
}

fn violations(m: &Measured) -> f64 {
    m.log.violations as f64 / m.log.fenced.max(1) as f64 * 100.0
}

/// Half width of the 95 % confidence interval of a part, %, of so many requests in all runs.
fn half_width(epsilon: f64, requests: u64) -> f64 {
    1.96 * (epsilon * (1.0 - epsilon) / requests.max(1) as f64).sqrt() * 100.0
}

fn fenced(runs: &[Measured]) -> u64 {
    runs.iter().map(|m| m.log.fenced).sum()
}

fn switches(m: &Measured) -> f64 {
    m.log.switches.len() as f64
}

/// Everybody in a place.
pub(super) fn comparison(place: &Experiment<'_>, rows: &[Row], runs: &[Vec<Measured>]) -> Section {
    let mut columns: Vec<Column> = COLUMNS.to_vec();
    if place.scenario.stretches.len() == 3 {
        columns.truncate(4);
        columns.extend::<[Column; 4]>([
            ("goodput, phase 1", |m| m.thirds[0]),
            ("phase 2", |m| m.thirds[1]),
            ("phase 3", |m| m.thirds[2]),
            ("switches", switches),
        ]);
    } else {
        columns.push(("switches", switches));
    }
    let title = format!(
        "{}, {}: every structure, every controller",
        place.scenario.name, place.name
    );
    table(title, rows, runs, &columns, "")
}

/// Parts taken away in a place.
pub(super) fn ablation(place: &Experiment<'_>, rows: &[Row], runs: &[Vec<Measured>]) -> Section {
    let title = format!("{}, {}: parts (table 2)", place.scenario.name, place.name);
    table(title, rows, runs, &COLUMNS, "")
}

/// The fence in a place.
pub(super) fn fence_table(place: &Experiment<'_>, rows: &[Row], runs: &[Vec<Measured>]) -> Section {
    let columns: [Column; 6] = [
        ("above their bound, %", violations),
        ("with a full bucket, %", |m| {
            let (count, above) = m.log.fenced_own_bucket;
            above as f64 / count.max(1) as f64 * 100.0
        }),
        ("requests", |m| m.log.fenced as f64),
        ("bound over real", |m| {
            m.log.bound_tokens as f64 / m.log.real_tokens.max(1) as f64
        }),
        ("drops", |m| m.drops),
        ("goodput, %", |m| m.good),
    ];
    let title = format!("{}, {}: the fence", place.scenario.name, place.name);
    let notes = "A request that is above its bound is no harm yet: the pool is what is never \
        exceeded. Drops are.";
    table(title, rows, runs, &columns, notes)
}

/// What a forest makes of requests without their text.
pub(super) fn perception(held_out: &[Asked]) -> Section {
    let held_out: Vec<(Spec, u32)> = held_out.iter().map(|a| (a.spec, a.output)).collect();
    let error = forest(&lessons()).map_or(f64::NAN, |forest| forest.error(&held_out));
    let line = |name: &str, value: String| vec![name.to_owned(), value];
    Section {
        title: "Lengths of answers: error over the mean length".to_owned(),
        head: vec!["perception".to_owned(), "%".to_owned()],
        rows: vec![
            line(
                "the paper's, which reads the prompt (table 5, MAPE)",
                "12.4".to_owned(),
            ),
            line(
                "forest, of what comes with a request",
                format!("{:.1}", error * 100.0),
            ),
        ],
        notes:
            "Without the text a forest knows a task's typical length and no more. Where a table \
            says `as the paper's`, lengths are real ones \
                with noise of the paper's size."
                .to_owned(),
    }
}

struct Found<'a> {
    rows: &'a [Row],
    runs: &'a [Vec<Measured>],
}

impl Found<'_> {
    fn of(&self, name: &str, value: fn(&Measured) -> f64) -> f64 {
        let at = self.rows.iter().position(|row| row.name == name);
        at.map_or(f64::NAN, |at| mean(&self.runs[at], value))
    }

    /// Whether all seeds of one setting are below all of another.
    fn below(&self, one: &str, other: &str, value: fn(&Measured) -> f64) -> bool {
        let find = |name: &str| self.rows.iter().position(|row| row.name == name);
        let (Some(one), Some(other)) = (find(one), find(other)) else {
            return false;
        };
        let most = self.runs[one]
            .iter()
            .map(value)
            .fold(f64::NEG_INFINITY, f64::max);
        self.runs[other].iter().map(value).all(|least| most < least)
    }

    /// The best of the fixed structures with Statera, by goodput.
    fn best_fixed(&self) -> (&str, f64) {
        let fixed = self.rows.iter().zip(self.runs).filter(|(row, _)| {
            matches!(row.setting.chooses, Chooses::Fixed(_)) && row.setting.statera.is_some()
        });
        let mut best = ("", f64::NEG_INFINITY);
        for (row, runs) in fixed {
            let good = mean(runs, |m| m.good);
            if good > best.1 {
                best = (&row.name, good);
            }
        }
        best
    }
}

/// Most decided switches and rollbacks in any `ΔT`.
fn most_in_a_window(runs: &[Vec<Measured>]) -> usize {
    use laxity_requests::hmas::meta::{Guards, Why};
    let every = Guards::default().every;
    let mut most = 0;
    for m in runs.iter().flatten() {
        let own: Vec<_> = m
            .log
            .switches
            .iter()
            .filter(|switch| matches!(switch.why, Why::Decided | Why::Rollback))
            .map(|switch| switch.at)
            .collect();
        for (at, since) in own.iter().enumerate() {
            let within = own[at..]
                .iter()
                .take_while(|other| other.since(*since) < every);
            most = most.max(within.count());
        }
    }
    most
}

/// The claims, in the order of the places of [`super::reproduce`].
pub(super) fn claims(
    everyone: &[Row],
    compared: &[Vec<Vec<Measured>>],
    ablations: &[Row],
    parts: &[Vec<Vec<Measured>>],
    fenced_runs: &[Vec<Vec<Measured>>],
) -> Vec<Claim> {
    let good = |m: &Measured| m.good;
    let ttft = |m: &Measured| m.ttft_p95;
    let place = |at: usize| Found {
        rows: everyone,
        runs: &compared[at],
    };
    let part = |at: usize| Found {
        rows: ablations,
        runs: &parts[at],
    };
    let main = "H-MAS, classifier";
    let mut claims = Vec::new();
    for (at, name) in ["heavy mix", "task drift"].iter().enumerate() {
        let runs = &fenced_runs[at];
        claims.push(fence_claim("errors in tokens", name, runs, 0..3));
        claims.push(fence_claim("relative errors", name, runs, 3..6));
        claims.push(fence_claim("lengths by forest, rules", name, runs, 6..8));
    }
    for (at, calibration) in ["1.4", "2"].iter().enumerate() {
        let heavy = place(at);
        let (lanes, fcfs) = (heavy.of("two_lane", ttft), heavy.of("fcfs", ttft));
        claims.push(Claim {
            says: "two-lane lowers TTFT p95".to_owned(),
            paper: "2.92 times without it".to_owned(),
            here: format!(
                "{fcfs:.1} s with FCFS, {lanes:.1} s with two lanes: {:.2} times",
                fcfs / lanes
            ),
            regime: format!("heavy mix, calibration {calibration}"),
            baseline: format!(
                "SJF {:.1} s, SRTF {:.1} s",
                heavy.of("sjf", ttft),
                heavy.of("srtf", ttft)
            ),
            holds: heavy.below("two_lane", "fcfs", ttft),
        });
    }
    for (at, name) in ["heavy mix", "task drift"].iter().enumerate() {
        let found = part(at);
        let (all, frozen) = (
            found.of("H-MAS", good),
            found.of("Statera frozen, all of it", good),
        );
        let tuned = ablations.iter().find(|row| row.name.starts_with("static"));
        let tuned = tuned.map_or(f64::NAN, |row| found.of(&row.name, good));
        claims.push(Claim {
            says: "freezing Statera lowers goodput".to_owned(),
            paper: "0.63 times".to_owned(),
            here: format!("{frozen:.1} % of {all:.1} %: {:.2} times", frozen / all),
            regime: format!("{name}, tight memory"),
            baseline: format!("static limits, tuned: {tuned:.1} %"),
            holds: found.below("Statera frozen, all of it", "H-MAS", good),
        });
    }
    let most = compared.iter().map(|runs| most_in_a_window(runs)).max();
    let most = most.unwrap_or(0);
    claims.push(Claim {
        says: "one switch in ΔT at most".to_owned(),
        paper: "§C.2".to_owned(),
        here: format!("{most} at most"),
        regime: "all runs, ΔT = 20 s".to_owned(),
        baseline: "–".to_owned(),
        holds: most <= 1,
    });
    for (at, name) in ["heavy mix", "", "rate drift", "task drift"]
        .iter()
        .enumerate()
    {
        if name.is_empty() {
            continue;
        }
        claims.extend(adaptive(name, &place(at), main));
    }
    for (at, name) in ["heavy mix", "task drift"].iter().enumerate() {
        let found = part(at);
        let (all, rules) = (found.of("H-MAS", good), found.of("perception: rules", good));
        claims.push(Claim {
            says: "perception by rules lowers goodput".to_owned(),
            paper: "0.74 times".to_owned(),
            here: format!("{:.2} times", rules / all),
            regime: format!("{name}, tight memory"),
            baseline: format!(
                "forest {:.1} %, nothing known {:.1} %",
                found.of("perception: forest", good),
                found.of("perception: nothing", good)
            ),
            holds: found.below("perception: rules", "H-MAS", good),
        });
    }
    claims
}

/// Whether the fence holds for some of its settings.
fn fence_claim(
    says: &str,
    name: &str,
    runs: &[Vec<Measured>],
    which: std::ops::Range<usize>,
) -> Claim {
    let mut holds = true;
    let mut here = Vec::new();
    for ((epsilon, ..), runs) in FENCES[which.clone()].iter().zip(&runs[which]) {
        let found = mean(runs, violations);
        let width = half_width(*epsilon, fenced(runs));
        holds &= found <= epsilon * 100.0 + width;
        here.push(format!("{found:.1} of {:.0} ± {width:.1}", epsilon * 100.0));
    }
    Claim {
        says: format!("ε of answers above their bound at most, {says}, %"),
        paper: "1 − ε quantile (eq. 4)".to_owned(),
        here: here.join("; "),
        regime: format!("{name}, tight memory"),
        baseline: "the request's own limit: never, at many times the memory".to_owned(),
        holds,
    }
}

fn adaptive(name: &str, found: &Found<'_>, main: &str) -> [Claim; 3] {
    let good = |m: &Measured| m.good;
    let (best, best_good) = found.best_fixed();
    let all = found.of(main, good);
    let (vllm, fcfs) = (
        found.of("fcfs, memory only (vLLM)", good),
        found.of("fcfs", good),
    );
    let rules = found.of("H-MAS, rules", good);
    let baseline = format!(
        "best fixed in hindsight: {best} {best_good:.1} %; SRTF {:.1} %",
        found.of("srtf", good)
    );
    let claim = |says: &str, paper: &str, here: String, holds: bool| Claim {
        says: says.to_owned(),
        paper: paper.to_owned(),
        here,
        regime: name.to_owned(),
        baseline: baseline.clone(),
        holds,
    };
    [
        claim(
            "more goodput than vLLM's FCFS",
            "1.2 to 3.0 times",
            format!(
                "{all:.1} % against {vllm:.1} %: {:.2} times; FCFS under Statera {fcfs:.1} %",
                all / vllm
            ),
            all >= 1.2 * vllm,
        ),
        claim(
            "a rule-based Meta is worse",
            "0.89 times",
            format!("{:.2} times", rules / all),
            found.below("H-MAS, rules", main, good),
        ),
        claim(
            "adapting beats every fixed structure",
            "§2, not shown",
            format!("{all:.1} % against {best_good:.1} %"),
            all > best_good,
        ),
    ]
}
