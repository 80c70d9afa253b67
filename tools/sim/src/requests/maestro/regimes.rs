//! Where what is refuted could hold: Maestro's claims in regimes other than those of its figures,
//! as far as the paper leaves them open.
//!
//! * [`longer`]: its trace has 46 769 jobs, hours at two a second. An overload of ten minutes is
//!   mild on whoever loses by queues that grow.
//! * [`aging`]: it ages “long-waiting background jobs” and gives no pace.
//! * [`rounds`]: what a boundary is worth turns on how many there are in a batch job, and on how
//!   many stages run at once.
//! * [`variants`]: it says that applications have models of their own, most of them rarely used;
//!   five that all share are few.

use std::sync::Arc;

use laxity_requests::Span;
use laxity_requests::maestro::fitness::Mode;
use laxity_requests::maestro::queue::{Boundary, StageOrder};
use laxity_requests::workflow::NodeSpec;

use super::super::reproduction::{Claim, Options, Section};
use super::catalogue::{GB, node};
use super::figures::{Memory, Runs, trial};
use super::trial::{Kit, Policy, Trial};

fn aged(name: &str, aging: f64, aging_interactive: f64) -> Policy {
    let mut policy = Policy::maestro();
    name.clone_into(&mut policy.options.name);
    policy.options.order = StageOrder::Remaining {
        aging,
        aging_interactive,
    };
    policy
}

/// The heaviest point of figure 7 for longer.
pub(super) fn longer(kit: &Kit, options: &Options, memory: &mut Memory) -> (Section, Vec<Claim>) {
    const NODES: usize = 6;
    let lengths: &[f64] = if options.quick {
        &[60.0]
    } else {
        &[600.0, 2400.0]
    };
    let wanted = [
        "maestro",
        "fcfs",
        "edf",
        "edf by class",
        "oracle srtf",
        "interactive, remaining",
        "remaining time alone",
    ];
    let mut policies: Vec<Policy> = Policy::orders();
    policies.retain(|policy| wanted.contains(&policy.options.name.as_str()));
    policies.insert(
        1,
        aged("maestro, only background ages, 1 s per 100 s", 0.01, 0.0),
    );
    let mut points = Vec::new();
    for policy in &policies {
        for seconds in lengths {
            points.push(Trial {
                seconds: *seconds,
                ..trial(policy.clone(), 2.0, 0.8, NODES, options)
            });
        }
    }
    let runs = Runs::new(&points, kit, options);
    memory.add(&runs);
    let mut head = vec!["order".to_owned()];
    for seconds in lengths {
        head.push(format!("{seconds:.0} s: met, %"));
        head.push("wait of an interactive job, s".to_owned());
    }
    let rows = policies
        .iter()
        .enumerate()
        .map(|(row, policy)| {
            let mut cells = vec![policy.options.name.clone()];
            for at in 0..lengths.len() {
                let of = row * lengths.len() + at;
                cells.push(runs.shown(of, |m| m.met));
                cells.push(runs.shown(of, |m| m.delay));
            }
            cells
        })
        .collect();
    let last = lengths.len() - 1;
    let met = |name: &str| {
        let row = policies.iter().position(|p| p.options.name == name);
        runs.mean(row.unwrap_or(0) * lengths.len() + last, |m| m.met)
    };
    let slow = runs.mean(lengths.len() + last, |m| m.met);
    let gain = slow - met("edf");
    let claim = Claim {
        says: "attainment of the remaining-time queue over EDF's, points, where the overload lasts"
            .to_owned(),
        paper: "+23.6 (73.6 against 50.0), FCFS below 10 %".to_owned(),
        here: format!(
            "{gain:+.1} with a tenth of the pace of aging ({slow:.1} against {:.1}), FCFS {:.1}; \
             as in figure 7 {:+.1}; remaining time alone {:+.1}",
            met("edf"),
            met("fcfs"),
            met("maestro") - met("edf"),
            met("remaining time alone") - met("edf")
        ),
        regime: format!("λ 2.0, 80 % batch, {NODES} nodes, {:.0} s", lengths[last]),
        baseline: ["oracle srtf", "edf by class", "interactive, remaining"]
            .map(|name| format!("{name} {:.1}", met(name)))
            .join(", "),
        holds: gain >= 10.0,
    };
    let section = Section {
        title: format!("The heaviest point for longer: λ 2.0, 80 % batch, {NODES} nodes"),
        head,
        rows,
        notes: String::new(),
    };
    (section, vec![claim])
}

/// Paces of aging at the heaviest point of figure 7.
pub(super) fn aging(kit: &Kit, options: &Options, memory: &mut Memory) -> Section {
    let nodes: &[usize] = if options.quick { &[4] } else { &[4, 6] };
    let mut policies = vec![
        aged("both, 1 s per 10 s (figure 7)", 0.1, 0.1),
        aged("background, 1 s per 10 s", 0.1, 0.0),
        aged("both, 1 s per 100 s", 0.01, 0.01),
        aged("background, 1 s per 100 s", 0.01, 0.0),
        aged("none", 0.0, 0.0),
    ];
    let mut alone = Policy::remaining_alone();
    "none, and no hysteresis".clone_into(&mut alone.options.name);
    policies.push(alone);
    let mut points = Vec::new();
    for policy in &policies {
        for nodes in nodes {
            points.push(trial(policy.clone(), 2.0, 0.8, *nodes, options));
        }
    }
    let runs = Runs::new(&points, kit, options);
    memory.add(&runs);
    let mut head = vec!["who ages".to_owned()];
    for nodes in nodes {
        head.push(format!("{nodes} nodes: met, %"));
        head.push("wait of an interactive job, s".to_owned());
    }
    let rows = policies
        .iter()
        .enumerate()
        .map(|(row, policy)| {
            let mut cells = vec![policy.options.name.clone()];
            for at in 0..nodes.len() {
                let of = row * nodes.len() + at;
                cells.push(runs.shown(of, |m| m.met));
                cells.push(runs.shown(of, |m| m.delay));
            }
            cells
        })
        .collect();
    Section {
        title: "Who ages, and how fast: λ 2.0, 80 % batch".to_owned(),
        head,
        rows,
        notes: "With hysteresis, but for the last row.".to_owned(),
    }
}

/// Turns between stages where batch jobs are longer, at the same load.
pub(super) fn rounds(kit: &Kit, options: &Options, memory: &mut Memory) -> (Section, Vec<Claim>) {
    // Slots of a node, nodes, passes of a batch job through its steps.
    let cases: &[(u32, usize, u16)] = if options.quick {
        &[(4, 6, 4)]
    } else {
        &[(16, 12, 1), (16, 12, 8), (4, 16, 1), (4, 16, 8)]
    };
    let mut by_class = Policy::maestro();
    "interactive first, then remaining time".clone_into(&mut by_class.options.name);
    by_class.options.order = StageOrder::InteractiveRemaining;
    by_class.options.boundary = Boundary::Requeue;
    let policies = [
        Policy::turned("w/o preempt", Boundary::Hold),
        Policy::maestro(),
        aged("maestro, only background ages, 1 s per 100 s", 0.01, 0.0),
        Policy::remaining_alone(),
        by_class,
    ];
    let mut points = Vec::new();
    for policy in &policies {
        for (slots, nodes, rounds) in cases {
            points.push(Trial {
                seconds: if options.quick { 40.0 } else { 300.0 },
                nodes: Arc::new(vec![
                    NodeSpec {
                        gpu: 80 * GB,
                        slots: *slots,
                        ..node(0)
                    };
                    *nodes
                ]),
                rounds: *rounds,
                ..trial(policy.clone(), 5.0, 0.6, *nodes, options)
            });
        }
    }
    let runs = Runs::new(&points, kit, options);
    memory.add(&runs);
    let mut head = vec!["turns between stages".to_owned()];
    for (slots, nodes, rounds) in cases {
        head.push(format!(
            "{nodes} nodes of {slots} slots, batch jobs × {rounds}: wait of a stage, s"
        ));
    }
    let wait = |row: usize, at: usize| runs.mean(row * cases.len() + at, |m| m.stage_delay);
    let rows = policies
        .iter()
        .enumerate()
        .map(|(row, policy)| {
            let mut cells = vec![policy.options.name.clone()];
            for at in 0..cases.len() {
                cells.push(runs.shown(row * cases.len() + at, |m| m.stage_delay));
            }
            cells
        })
        .collect();
    let shown = |row: usize| {
        cases
            .iter()
            .enumerate()
            .map(|(at, (slots, nodes, rounds))| {
                let ratio = wait(0, at) / wait(row, at).max(1e-9);
                format!("{ratio:.1}× ({nodes} × {slots} slots, jobs × {rounds})")
            })
            .collect::<Vec<_>>()
            .join(", ")
    };
    let best = (0..cases.len())
        .map(|at| wait(0, at) / wait(1, at).max(1e-9))
        .fold(0.0, f64::max);
    let claim = Claim {
        says: "boundary preemption cuts interactive delay, long batch jobs and few slots"
            .to_owned(),
        paper: "2.8 to 5 500× (Table II)".to_owned(),
        here: shown(1),
        regime: "λ 5.0, 60 % batch, nodes of 80 GB; the same load, in jobs so many times as long"
            .to_owned(),
        baseline: format!(
            "interactive first: {}; remaining time alone: {}",
            shown(4),
            shown(3)
        ),
        holds: best >= 10.0,
    };
    let section = Section {
        title: "Turns between stages where batch jobs are long: λ 5.0, 60 % batch, nodes of 80 GB"
            .to_owned(),
        head,
        rows,
        notes: "Interactive stages' mean wait. Batch jobs that pass through their steps eight \
            times come an eighth as often."
            .to_owned(),
    };
    (section, vec![claim])
}

/// Choice of node where applications have models of their own.
pub(super) fn variants(kit: &Kit, options: &Options, memory: &mut Memory) -> (Section, Vec<Claim>) {
    let rates: &[f64] = if options.quick {
        &[0.5]
    } else {
        &[0.25, 0.5, 1.0]
    };
    let policies = [
        Policy::routed("full score", Mode::MAESTRO),
        Policy::routed("load balance", Mode::LoadBalance),
        Policy::routed("bin pack only", Mode::BIN_PACK),
        Policy::routed("end to end, ms", Mode::EndToEnd { degradation: 1.0 }),
        Policy::routed("warm, then shortest", Mode::WarmShortest),
    ];
    let nodes = Arc::new(vec![node(0), node(0), node(0), node(1), node(1)]);
    let rtt = Arc::new(vec![vec![Span::from_millis(1), Span::from_millis(60)]]);
    // Routes differ by less than seeds do: more of them, each a thousand further on.
    let seeds = options
        .seeds
        .iter()
        .flat_map(|seed| (0..if options.quick { 1 } else { 3 }).map(move |k| seed + 1000 * k))
        .collect();
    let options = &Options {
        seeds,
        ..options.clone()
    };
    let mut points = Vec::new();
    for policy in &policies {
        for rate in rates {
            points.push(Trial {
                nodes: Arc::clone(&nodes),
                rtt: Arc::clone(&rtt),
                variants: 3,
                ..trial(policy.clone(), *rate, 0.5, 5, options)
            });
        }
    }
    let runs = Runs::new(&points, kit, options);
    memory.add(&runs);
    let mut head = vec!["nodes are chosen by".to_owned()];
    for rate in rates {
        head.push(format!("λ {rate}: wait, s"));
        head.push("met, %".to_owned());
        head.push("activations".to_owned());
    }
    let rows = policies
        .iter()
        .enumerate()
        .map(|(row, policy)| {
            let mut cells = vec![policy.options.name.clone()];
            for at in 0..rates.len() {
                let of = row * rates.len() + at;
                cells.push(runs.shown(of, |m| m.stage_delay));
                cells.push(runs.shown(of, |m| m.met));
                cells.push(runs.shown(of, |m| m.activated as f64));
            }
            cells
        })
        .collect();
    let wait = |row: usize, at: usize| runs.mean(row * rates.len() + at, |m| m.stage_delay);
    let against = |row: usize| {
        (0..rates.len())
            .map(|at| {
                let change = 100.0 * (wait(0, at) / wait(row, at).max(1e-9) - 1.0);
                format!("{change:+.0} % at λ {}", rates[at])
            })
            .collect::<Vec<_>>()
            .join(", ")
    };
    let claim = Claim {
        says: "interactive delay of the full score against load balancing, 15 models".to_owned(),
        paper: "−75 %, −31 %, −17 %".to_owned(),
        here: against(1),
        regime: format!(
            "3 near, 2 far, a third of the applications share a set of five models, {} seeds",
            options.seeds.len()
        ),
        baseline: format!(
            "against warm, then shortest: {}; against end to end in ms: {}",
            against(4),
            against(3)
        ),
        holds: (0..rates.len()).all(|at| wait(0, at) < wait(1, at)),
    };
    let section = Section {
        title: "The same with 15 models: each application shares five with two others".to_owned(),
        head,
        rows,
        notes: "The way there and back is part of the wait.".to_owned(),
    };
    (section, vec![claim])
}
