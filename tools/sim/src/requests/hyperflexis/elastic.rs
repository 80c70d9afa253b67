//! Scaling: attainment and its cost (figures 3 and 4), what a start takes (table 2), and how often
//! to look (figure 8).

use laxity_requests::baseline::LineOrder;
use laxity_requests::dispatch::Role;
use laxity_requests::{Span, Time};

use super::tasks::{self, FOUR, Stream};
use super::world::{self, Machine, Scales, System};
use super::{Found, mean, strings};
use crate::requests::reproduction::{Claim, Options, Section, each, spread};
use crate::requests::workload::Asked;

const SECOND: u64 = 1_000_000_000;
/// What all have to reach when their costs are compared, %.
const EQUAL: f64 = 95.0;

/// Load that rises and falls: (requests per second, seconds).
const WAVE: [(f64, u64); 5] = [(30.0, 30), (70.0, 20), (150.0, 40), (70.0, 20), (30.0, 40)];

fn wave(options: &Options, seed: u64) -> Vec<Asked> {
    let mut streams = Vec::new();
    let mut begins = 0;
    for (rate, seconds) in WAVE {
        let lasts = if options.quick { seconds / 10 } else { seconds } * SECOND;
        for (class, task) in FOUR.iter().enumerate() {
            streams.push(Stream {
                task: *task,
                class: class as u16,
                begins: Time(begins),
                ends: Time(begins + lasts),
                rate: rate / 4.0,
            });
        }
        begins += lasts;
    }
    tasks::requests(&streams, seed)
}

/// A system, its instances at the start, and its scaler.
struct Case {
    name: String,
    system: System,
    roles: Vec<Role>,
    scales: Option<Scales>,
}

/// What a case gave, a figure for each seed.
#[derive(Clone, Debug, Default)]
struct Gave {
    attained: Vec<f64>,
    cost: Vec<f64>,
    latency: Vec<f64>,
}

fn run_all(machine: &Machine, cases: &[Case], options: &Options) -> Vec<Gave> {
    let mut points = Vec::new();
    for case in 0..cases.len() {
        points.extend(options.seeds.iter().map(|seed| (case, *seed)));
    }
    let results = each(&points, options, |(case, seed)| {
        let case = &cases[*case];
        let asked = wave(options, *seed);
        let outcome = world::run(machine, &case.system, &case.roles, case.scales, &asked).outcome;
        let attained = world::attainment(&outcome, |_| true);
        let latency = world::latency_s(&outcome);
        (attained, world::cost(&outcome), latency)
    });
    let mut gave = vec![Gave::default(); cases.len()];
    for ((case, _), (attained, cost, latency)) in points.into_iter().zip(results) {
        gave[case].attained.push(attained);
        gave[case].cost.push(cost);
        gave[case].latency.push(latency);
    }
    gave
}

fn table(title: &str, cases: &[Case], gave: &[Gave]) -> Section {
    let row = |(case, gave): (&Case, &Gave)| {
        vec![
            case.name.clone(),
            spread(&gave.attained),
            spread(&gave.cost),
            spread(&gave.latency),
        ]
    };
    Section {
        title: title.to_owned(),
        head: strings(&[
            "system",
            "attainment, %",
            "cost, thousands of 50 ms",
            "mean latency, s",
        ]),
        rows: cases.iter().zip(gave).map(row).collect(),
        notes: String::new(),
    }
}

fn fixed(system: &System, roles: &[Role]) -> Case {
    Case {
        name: format!("{}, {} instances", system.name(), roles.len()),
        system: system.clone(),
        roles: roles.to_vec(),
        scales: None,
    }
}

fn scaled(name: &str, system: &System, roles: &[Role], scales: Scales) -> Case {
    Case {
        name: name.to_owned(),
        system: system.clone(),
        roles: roles.to_vec(),
        scales: Some(scales),
    }
}

/// The cheapest of those that reach [`EQUAL`].
fn cheapest<'a>(
    cases: &'a [Case],
    gave: &[Gave],
    of: impl Fn(&Case) -> bool,
) -> Option<(&'a Case, f64, f64)> {
    let all = cases.iter().zip(gave).filter(|(case, _)| of(case));
    let enough = all.map(|(case, gave)| (case, mean(&gave.cost), mean(&gave.attained)));
    enough
        .filter(|(_, _, attained)| *attained >= EQUAL)
        .min_by(|x, y| x.1.total_cmp(&y.1))
}

fn cost(machine: &Machine, options: &Options) -> Found {
    let own = System::HyperFlexis(machine.options());
    let systems = [
        System::RoundRobin(LineOrder::Fcfs),
        System::LeastWork(LineOrder::Fcfs),
        System::EdfAdmission,
        own.clone(),
        System::HyperFlexis(machine.as_it_stands()),
    ];
    let mut cases = Vec::new();
    for system in &systems {
        for count in 2..=5 {
            cases.push(fixed(system, &vec![Role::Whole; count]));
        }
    }
    let two = [Role::Whole; 2];
    let name = "HyperFlexis-Scaling, 2 to 4";
    cases.push(scaled(name, &own, &two, Scales::up_to(4)));
    let name = "least work under the same scaler, 2 to 4";
    cases.push(scaled(name, &systems[1], &two, Scales::up_to(4)));
    let name = "EDF + admission under the same scaler, 2 to 4";
    cases.push(scaled(name, &systems[2], &two, Scales::up_to(4)));
    let gave = run_all(machine, &cases, options);
    let claim = |fixed: bool| {
        let mine = |case: &Case| {
            matches!(case.system, System::HyperFlexis(_)) && case.scales.is_none() == fixed
        };
        let robin = cheapest(&cases, &gave, |case| {
            matches!(case.system, System::RoundRobin(_))
        });
        let fair = cheapest(&cases, &gave, |case| {
            case.system.is_fair_baseline() && case.scales.is_none() == fixed
        });
        let own = cheapest(&cases, &gave, mine);
        let say = |found: &Option<(&Case, f64, f64)>| {
            found.as_ref().map_or_else(
                || format!("none reaches {EQUAL} %"),
                |(case, cost, attained)| format!("{}: {cost:.2} ({attained:.1} %)", case.name),
            )
        };
        let what = if fixed { "fixed" } else { "scaled" };
        Claim {
            says: format!("cost at equal attainment ({EQUAL} %), {what} instances"),
            paper: "parity with round robin on larger models, higher on the smallest (figure 3)"
                .to_owned(),
            here: format!("{}; {}", say(&own), say(&robin)),
            regime: format!(
                "load of 30 to 150 requests/s and back, four tasks, ratio {}",
                machine.ratio
            ),
            baseline: say(&fair),
            holds: match (&own, &robin) {
                (Some(own), Some(robin)) => own.1 <= robin.1 * 1.02,
                (own, _) => own.is_some(),
            },
        }
    };
    Found {
        sections: vec![table(
            "Load that rises and falls: attainment and cost",
            &cases,
            &gave,
        )],
        claims: vec![claim(true), claim(false)],
    }
}

fn pools(machine: &Machine, options: &Options) -> Found {
    let own = System::HyperFlexis(machine.options());
    let four = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
    let eight = [four, four].concat();
    let robin = System::RoundRobin(LineOrder::Fcfs);
    let cases = [
        fixed(&robin, &four),
        fixed(&System::LeastWork(LineOrder::Fcfs), &four),
        fixed(&own, &four),
        scaled(
            "HyperFlexis-PD-Scaling, 4 to 8",
            &own,
            &four,
            Scales::up_to(8),
        ),
        fixed(&robin, &eight),
        fixed(&own, &eight),
    ];
    let gave = run_all(machine, &cases, options);
    let title = "Load that rises and falls, prefill and decode pools: attainment and cost";
    Found {
        sections: vec![table(title, &cases, &gave)],
        claims: Vec::new(),
    }
}

/// Where weights come from, and what becomes of a transfer that fails (table 2).
fn weights(machine: &Machine, options: &Options) -> Found {
    let own = System::HyperFlexis(machine.options());
    let two = [Role::Whole; 2];
    let peers = Scales::up_to(4);
    let failing = |fail_every| Scales {
        fail_every,
        ..peers
    };
    let disk = Scales {
        from_peers: false,
        ..peers
    };
    let cases = [
        scaled("weights from a running instance", &own, &two, peers),
        scaled("every second transfer fails", &own, &two, failing(2)),
        scaled("every transfer fails", &own, &two, failing(1)),
        scaled("weights from disk", &own, &two, disk),
    ];
    let gave = run_all(machine, &cases, options);
    let mut section = table("Where weights come from", &cases, &gave);
    let [direct, disk] = world::start_seconds(machine);
    section.notes = format!(
        "A start takes {direct:.2} s from a running instance whose port is idle and {disk:.2} s \
         from disk; when a transfer fails, half of its time is lost and the disk comes after."
    );
    let attained = |at: usize| mean(&gave[at].attained);
    Found {
        claims: vec![Claim {
            says: "a start with weights from a running instance is shorter than from disk"
                .to_owned(),
            paper: "0.89 s against 4.14 s, 4.7 × for 7 B; up to 19.4 × (table 2)".to_owned(),
            here: format!("{direct:.2} s against {disk:.2} s, {:.1} ×", disk / direct),
            regime: "set by constants: 200 Gb/s ports, 4 GB/s disk, 0.25 s beside; not a finding"
                .to_owned(),
            baseline: format!(
                "what it is worth: attainment {:.1} % against {:.1} % from disk, {:.1} % if every \
                 transfer fails",
                attained(0),
                attained(3),
                attained(2)
            ),
            holds: direct < disk,
        }],
        sections: vec![section],
    }
}

/// Figure 8, bottom.
fn intervals(machine: &Machine, options: &Options) -> Found {
    let own = System::HyperFlexis(machine.options());
    let two = [Role::Whole; 2];
    let case = |milliseconds| {
        let scales = Scales {
            interval: Span::from_millis(milliseconds),
            ..Scales::up_to(4)
        };
        scaled(&format!("every {milliseconds} ms"), &own, &two, scales)
    };
    let cases = [500, 1_000, 2_000].map(case);
    let gave = run_all(machine, &cases, options);
    let all: Vec<f64> = gave.iter().map(|gave| mean(&gave.attained)).collect();
    let width =
        all.iter().copied().fold(0.0, f64::max) - all.iter().copied().fold(f64::INFINITY, f64::min);
    Found {
        sections: vec![table("Scaling interval", &cases, &gave)],
        claims: vec![Claim {
            says: "attainment hardly depends on the scaling interval".to_owned(),
            paper: "0.5 to 2 s: minimal differences (figure 8)".to_owned(),
            here: format!("{width:.1} points between best and worst"),
            regime: "load of 30 to 150 requests/s and back, 2 to 4 instances".to_owned(),
            baseline: String::new(),
            holds: width < 2.0,
        }],
    }
}

pub(super) fn run(machine: &Machine, options: &Options) -> Found {
    let mut found = Found::default();
    for part in [
        cost(machine, options),
        pools(machine, options),
        weights(machine, options),
        intervals(machine, options),
    ] {
        found.sections.extend(part.sections);
        found.claims.extend(part.claims);
    }
    found
}
