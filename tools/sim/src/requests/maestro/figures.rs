//! Who is first, who keeps its turn, which node: Maestro's figure 7 and Tables II and VIII, and
//! memory over all of those runs.

use std::sync::Arc;

use laxity_requests::Span;
use laxity_requests::maestro::fitness::Mode;
use laxity_requests::maestro::queue::Boundary;
use laxity_requests::workflow::NodeSpec;

use super::super::reproduction::{Claim, Options, Section, each, spread};
use super::catalogue::{GB, node};
use super::trial::{Kit, Measured, Policy, Trial};

/// Nodes of figure 7. The paper gives no number, but says that at its heaviest point (two jobs a
/// second, 80 % batch) FCFS falls below 10 %: with so many it does here.
const NODES: usize = 4;

/// Points of a figure, by row, and what each seed of each gave.
pub(super) struct Runs {
    rows: Vec<Vec<Measured>>,
}

impl Runs {
    pub(super) fn new(points: &[Trial], kit: &Kit, options: &Options) -> Self {
        let seeded: Vec<Trial> = points
            .iter()
            .flat_map(|point| {
                options.seeds.iter().map(|seed| Trial {
                    seed: *seed,
                    ..point.clone()
                })
            })
            .collect();
        let ran = each(&seeded, options, |trial| trial.run(kit));
        let per = options.seeds.len().max(1);
        Self {
            rows: ran.chunks(per).map(<[Measured]>::to_vec).collect(),
        }
    }

    pub(super) fn mean(&self, row: usize, of: impl Fn(&Measured) -> f64) -> f64 {
        super::trial::mean(self.rows[row].iter().map(of))
    }

    pub(super) fn shown(&self, row: usize, of: impl Fn(&Measured) -> f64) -> String {
        let values: Vec<f64> = self.rows[row].iter().map(of).collect();
        spread(&values)
    }
}

/// What all runs did to memory.
#[derive(Default)]
pub(super) struct Memory {
    runs: usize,
    overflows: u64,
    lost: usize,
    fullest: f64,
    grown: u64,
    swapped: u64,
    aborted: u64,
    stopped: u64,
}

impl Memory {
    pub(super) fn add(&mut self, runs: &Runs) {
        for of in runs.rows.iter().flatten() {
            self.runs += 1;
            self.overflows += of.overflows;
            self.lost += of.lost;
            self.fullest = self.fullest.max(of.fullest);
            self.grown += of.grown;
            self.swapped += of.swapped;
            self.aborted += of.aborted;
            self.stopped += of.stopped;
        }
    }

    /// What came of it.
    pub(super) fn section(&self) -> (Section, Vec<Claim>) {
        let cell = |name: &str, value: String| vec![name.to_owned(), value];
        let section = Section {
            title: "GPU memory over all runs above, by the simulated GPU's own book".to_owned(),
            head: ["what", "count"].map(str::to_owned).to_vec(),
            rows: vec![
                cell("runs", self.runs.to_string()),
                cell(
                    "instants with more in use than there is",
                    self.overflows.to_string(),
                ),
                cell(
                    "fullest a GPU was",
                    format!("{:.2} %", 100.0 * self.fullest),
                ),
                cell(
                    "stages that asked for more than promised",
                    self.grown.to_string(),
                ),
                cell("stages swapped out", self.swapped.to_string()),
                cell("stages aborted", self.aborted.to_string()),
                cell(
                    "models stopped on their way to sleep",
                    self.stopped.to_string(),
                ),
                cell("jobs that never ended", self.lost.to_string()),
            ],
            notes: String::new(),
        };
        let claim = Claim {
            says: "no KV overflow".to_owned(),
            paper: "none (by admission and on-demand mapping)".to_owned(),
            here: format!("{} in {} runs", self.overflows, self.runs),
            regime: "all runs".to_owned(),
            baseline: "every baseline runs on the same admission".to_owned(),
            holds: self.overflows == 0 && self.lost == 0,
        };
        (section, vec![claim])
    }
}

pub(super) fn trial(
    policy: Policy,
    rate: f64,
    batch: f64,
    nodes: usize,
    options: &Options,
) -> Trial {
    Trial {
        policy,
        rate,
        batch,
        seconds: if options.quick { 90.0 } else { 600.0 },
        nodes: Arc::new(vec![node(0); nodes]),
        rtt: Arc::new(Vec::new()),
        seed: 0,
        rounds: 1,
        variants: 1,
    }
}

/// Figure 7.
pub(super) fn overall(
    kit: &Kit,
    options: &Options,
    memory: &mut Memory,
) -> (Vec<Section>, Vec<Claim>) {
    let (rates, batches): (&[f64], &[f64]) = if options.quick {
        (&[2.0], &[0.8])
    } else {
        (&[0.8, 2.0], &[0.2, 0.5, 0.8])
    };
    let orders = Policy::orders();
    let mut points = Vec::new();
    for policy in &orders {
        for batch in batches {
            for rate in rates {
                points.push(trial(policy.clone(), *rate, *batch, NODES, options));
            }
        }
    }
    let runs = Runs::new(&points, kit, options);
    memory.add(&runs);
    let per = rates.len() * batches.len();
    let heaviest = per - 1;
    let mut head = vec!["order".to_owned()];
    for batch in batches {
        for rate in rates {
            head.push(format!("{batch:.1}, λ {rate:.1}"));
        }
    }
    let table = |title: &str, notes: &str, of: &dyn Fn(&Measured) -> f64| Section {
        title: title.to_owned(),
        head: head.clone(),
        rows: orders
            .iter()
            .enumerate()
            .map(|(row, policy)| {
                let mut cells = vec![policy.options.name.clone()];
                cells.extend((0..per).map(|at| runs.shown(row * per + at, of)));
                cells
            })
            .collect(),
        notes: notes.to_owned(),
    };
    let (nodes, mut by_nodes) = by_nodes(kit, options, memory);
    let mut sections = vec![
        table(
            "Jobs that met their objective, % (figure 7), by batch share and jobs a second",
            "All route, admit and predict alike; `oracle srtf` knows lengths and workflows. All \
             but maestro queue anew after each stage.",
            &|m| m.met,
        ),
        table(
            "Mean sum of waits of an interactive job, s",
            "In queues, for weights and on the way.",
            &|m| m.delay,
        ),
        table("Mean time of a job, s", "", &|m| m.latency),
    ];
    sections.push(nodes);
    let mut claims = overall_claims(&runs, &orders, per, heaviest);
    claims.append(&mut by_nodes);
    (sections, claims)
}

/// The heaviest point of figure 7 on fewer and more nodes: which order is best turns on how much
/// there is to order.
fn by_nodes(kit: &Kit, options: &Options, memory: &mut Memory) -> (Section, Vec<Claim>) {
    let counts: &[usize] = if options.quick { &[6] } else { &[6, 8, 10] };
    let orders = Policy::orders();
    let mut points = Vec::new();
    for policy in &orders {
        for nodes in counts {
            points.push(trial(policy.clone(), 2.0, 0.8, *nodes, options));
        }
    }
    let runs = Runs::new(&points, kit, options);
    memory.add(&runs);
    let mut head = vec!["order".to_owned()];
    head.extend(counts.iter().map(|nodes| format!("{nodes} nodes")));
    let met = |row: usize, at: usize| runs.mean(row * counts.len() + at, |m| m.met);
    let rows = orders
        .iter()
        .enumerate()
        .map(|(row, policy)| {
            let mut cells = vec![policy.options.name.clone()];
            cells
                .extend((0..counts.len()).map(|at| runs.shown(row * counts.len() + at, |m| m.met)));
            cells
        })
        .collect();
    let section = Section {
        title: "Jobs that met their objective, %, λ 2.0, 80 % batch, by nodes".to_owned(),
        head,
        rows,
        notes: format!("{NODES} nodes are in the table of figure 7."),
    };
    // Rows of `Policy::orders`: maestro, then fcfs, edf.
    let gains: Vec<f64> = (0..counts.len())
        .map(|at| met(0, at) - met(2, at))
        .collect();
    let shown: Vec<String> = gains
        .iter()
        .zip(counts)
        .map(|(gain, nodes)| format!("{gain:+.1} at {nodes}"))
        .collect();
    let oracle: Vec<String> = (0..counts.len())
        .map(|at| format!("{:+.1} at {}", met(4, at) - met(2, at), counts[at]))
        .collect();
    let claim = Claim {
        says: "attainment over EDF's on other numbers of nodes, points".to_owned(),
        paper: "not shown".to_owned(),
        here: shown.join(", "),
        regime: "λ 2.0, 80 % batch".to_owned(),
        baseline: format!("oracle srtf: {}", oracle.join(", ")),
        holds: gains.iter().all(|gain| *gain >= 0.0),
    };
    (section, vec![claim])
}

fn overall_claims(runs: &Runs, orders: &[Policy], per: usize, at: usize) -> Vec<Claim> {
    let row = |name: &str| {
        let of = orders.iter().position(|policy| policy.options.name == name);
        of.unwrap_or(0) * per + at
    };
    let met = |name: &str| runs.mean(row(name), |m| m.met);
    let delay = |name: &str| runs.mean(row(name), |m| m.delay);
    let regime = format!(
        "λ 2.0, 80 % batch, {NODES} nodes busy {:.0} %",
        100.0 * runs.mean(row("maestro"), |m| m.busy)
    );
    // The oracle's row is named as Maestro's options name it.
    let baseline = [
        "oracle srtf",
        "least attained",
        "interactive first",
        "interactive, remaining",
        "edf by class",
        "maestro, no hysteresis",
    ]
    .map(|name| format!("{name} {:.1}", met(name)))
    .join(", ");
    let delays = [
        "oracle srtf",
        "least attained",
        "interactive first",
        "edf by class",
    ]
    .map(|name| format!("{name} {:.2} s", delay(name)))
    .join(", ");
    let gain = met("maestro") - met("edf");
    let cut = 100.0 * (1.0 - delay("maestro") / delay("edf").max(1e-9));
    vec![
        Claim {
            says: "attainment of the remaining-time queue over EDF's, points".to_owned(),
            paper: "+23.6 (73.6 against 50.0)".to_owned(),
            here: format!(
                "{gain:+.1} ({:.1} against {:.1}); without hysteresis {:+.1}; remaining time alone \
                 {:+.1}",
                met("maestro"),
                met("edf"),
                met("maestro, no hysteresis") - met("edf"),
                met("remaining time alone") - met("edf")
            ),
            regime: regime.clone(),
            baseline,
            holds: gain >= 10.0,
        },
        Claim {
            says: "interactive delay against EDF's".to_owned(),
            paper: "−84.8 %".to_owned(),
            here: format!(
                "−{cut:.1} % ({:.2} s against {:.2} s)",
                delay("maestro"),
                delay("edf")
            ),
            regime: regime.clone(),
            baseline: delays,
            holds: cut >= 50.0,
        },
        Claim {
            says: "FCFS collapses".to_owned(),
            paper: "below 10 %".to_owned(),
            here: format!("{:.1} %", met("fcfs")),
            regime,
            baseline: String::new(),
            holds: met("fcfs") < 15.0,
        },
    ]
}

/// Table II, on nodes whose models compete for memory and on nodes of 80 GB that hold all of them.
pub(super) fn preemption(
    kit: &Kit,
    options: &Options,
    roomy: bool,
    memory: &mut Memory,
) -> (Section, Vec<Claim>) {
    let counts: &[usize] = match (options.quick, roomy) {
        (true, _) => &[6],
        (false, false) => &[6, 8, 12, 16, 20],
        (false, true) => &[2, 4, 6, 8, 12],
    };
    let gpu = if roomy { 80 } else { 40 };
    let anyone = Boundary::MAESTRO;
    let only = match anyone {
        Boundary::Preempt {
            share,
            least,
            cooldown,
            ..
        } => Boundary::Preempt {
            share,
            least,
            cooldown,
            interactive_only: true,
        },
        other => other,
    };
    let policies = [
        Policy::maestro(),
        Policy::turned("w/o preempt", Boundary::Hold),
        Policy::turned("only for interactive", only),
        Policy::turned("no hysteresis", Boundary::Requeue),
        Policy::remaining_alone(),
    ];
    let mut points = Vec::new();
    for policy in &policies {
        for nodes in counts {
            points.push(Trial {
                seconds: if options.quick { 40.0 } else { 200.0 },
                nodes: Arc::new(vec![
                    NodeSpec {
                        gpu: gpu * GB,
                        ..node(0)
                    };
                    *nodes
                ]),
                ..trial(policy.clone(), 5.0, 0.6, *nodes, options)
            });
        }
    }
    let runs = Runs::new(&points, kit, options);
    memory.add(&runs);
    // One to five of the paper's nodes, of which it does not say how large they are: beside ours in
    // order, not in number.
    let paper = ["29 / 29", "60 / 27", "38 / 26", "75 / 59", "85 / 84"];
    let row = |at: usize| {
        let mut cells = vec![counts[at].to_string()];
        for policy in 0..policies.len() {
            let of = policy * counts.len() + at;
            cells.push(runs.shown(of, |m| m.met));
            cells.push(runs.shown(of, |m| m.stage_delay));
        }
        cells.push(paper[at % paper.len()].to_owned());
        cells
    };
    let mut head = vec!["nodes".to_owned()];
    for policy in &policies {
        head.push(format!("{}: met, %", policy.options.name));
        head.push("wait of a stage, s".to_owned());
    }
    head.push("paper, 1 to 5 nodes: met with / without, %".to_owned());
    let ratio = |at: usize| {
        runs.mean(counts.len() + at, |m| m.stage_delay) / runs.mean(at, |m| m.stage_delay).max(1e-9)
    };
    let ratios: Vec<(usize, f64)> = (0..counts.len())
        .map(|at| (counts[at], ratio(at)))
        .collect();
    let shown: Vec<String> = ratios
        .iter()
        .map(|(nodes, ratio)| format!("{ratio:.1}× at {nodes}"))
        .collect();
    let best = ratios.iter().map(|(_, ratio)| *ratio).fold(0.0, f64::max);
    let section = Section {
        title: format!("Turns between stages: λ 5.0, 60 % batch, nodes of {gpu} GB (Table II)"),
        head,
        rows: (0..counts.len()).map(row).collect(),
        notes: "Interactive stages' mean wait. The paper's own table is not monotone in nodes."
            .to_owned(),
    };
    let without = |at: usize| runs.mean(counts.len() + at, |m| m.stage_delay);
    let alone = |at: usize| runs.mean(4 * counts.len() + at, |m| m.stage_delay);
    let claim = Claim {
        says: format!("boundary preemption cuts interactive delay, nodes of {gpu} GB"),
        paper: "2.8× at 1 node, 604× at 2, 3 700× at 3, 2 100× at 4, 5 500× at 5".to_owned(),
        here: shown.join(", "),
        regime: "λ 5.0, 60 % batch".to_owned(),
        baseline: format!(
            "remaining time alone: {}",
            (0..counts.len())
                .map(|at| format!(
                    "{:.1}× at {}",
                    without(at) / alone(at).max(1e-9),
                    counts[at]
                ))
                .collect::<Vec<_>>()
                .join(", ")
        ),
        holds: best >= 10.0,
    };
    (section, vec![claim])
}

/// Table VIII.
pub(super) fn routing(kit: &Kit, options: &Options, memory: &mut Memory) -> (Section, Vec<Claim>) {
    let rates: &[f64] = if options.quick {
        &[1.0]
    } else {
        &[0.5, 1.0, 2.0]
    };
    let policies = [
        Policy::routed("full score", Mode::MAESTRO),
        Policy::routed("load balance", Mode::LoadBalance),
        Policy::routed("bin pack only", Mode::BIN_PACK),
        Policy::routed("end to end, ms", Mode::EndToEnd { degradation: 1.0 }),
        Policy::routed("warm, then shortest", Mode::WarmShortest),
    ];
    // Three here, two elsewhere: 1 ms within a region, 60 ms to another.
    let nodes = Arc::new(vec![node(0), node(0), node(0), node(1), node(1)]);
    let rtt = Arc::new(vec![vec![Span::from_millis(1), Span::from_millis(60)]]);
    let mut points = Vec::new();
    for policy in &policies {
        for rate in rates {
            points.push(Trial {
                nodes: Arc::clone(&nodes),
                rtt: Arc::clone(&rtt),
                ..trial(policy.clone(), *rate, 0.5, 5, options)
            });
        }
    }
    let runs = Runs::new(&points, kit, options);
    memory.add(&runs);
    let mut head = vec!["nodes are chosen by".to_owned()];
    for rate in rates {
        head.push(format!("λ {rate:.1}: wait, s"));
        head.push("met, %".to_owned());
        head.push("activations".to_owned());
    }
    head.push("paper, s".to_owned());
    let paper = [
        "0.03, 1.23, 30.77",
        "0.12, 1.79, 36.99",
        "0.05, 1.43, 33.67",
        "–",
        "–",
    ];
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
            cells.push(paper[row].to_owned());
            cells
        })
        .collect();
    let wait = |row: usize, at: usize| runs.mean(row * rates.len() + at, |m| m.stage_delay);
    let against = |row: usize| {
        (0..rates.len())
            .map(|at| {
                let cut = 100.0 * (1.0 - wait(0, at) / wait(row, at).max(1e-9));
                format!("{:+.0} % at λ {:.1}", -cut, rates[at])
            })
            .collect::<Vec<_>>()
            .join(", ")
    };
    let section = Section {
        title: "Interactive stages' mean wait by choice of node: 3 near, 2 far, 50 % batch (Table \
            VIII)"
            .to_owned(),
        head,
        rows,
        notes: "The way there and back is part of the wait.".to_owned(),
    };
    let claim = Claim {
        says: "interactive delay of the full score against load balancing".to_owned(),
        paper: "−75 %, −31 %, −17 %".to_owned(),
        here: against(1),
        regime: "3 near, 2 far".to_owned(),
        baseline: format!(
            "against warm, then shortest: {}; against end to end in ms: {}",
            against(4),
            against(3)
        ),
        holds: (0..rates.len()).all(|at| wait(0, at) < wait(1, at)),
    };
    (section, vec![claim])
}
