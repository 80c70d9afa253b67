//! How far off predictions are: the latency model (appendix A) and maturity times; and what the
//! options are worth that fill the paper's holes.

use laxity_requests::Span;
use laxity_requests::dispatch::Role;
use laxity_requests::hyperflexis::dispatcher::Options as Dispatcher;
use laxity_requests::hyperflexis::latency::{self, Error, Sample};
use laxity_requests::hyperflexis::{Probability, Tightest, forecast};
use laxity_requests::latency::{Composition, Latency as _};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha12Rng;

use super::tasks;
use super::world::{self, Machine, System};
use super::{Found, lasts, mean, strings};
use crate::requests::reproduction::{Claim, Options, Section, each, spread};

/// Rates of the runs: well below the knee, at it, above it.
const RATES: [f64; 3] = [50.0, 75.0, 100.0];

/// Steps that the fit has not seen: prompts and contexts of any length up to 2048, batches as they
/// come.
fn held_out(machine: &Machine, prompts: bool, decodes: bool, seed: u64) -> Vec<Sample> {
    let mut rng = ChaCha12Rng::seed_from_u64(seed);
    let mut samples = Vec::new();
    for _ in 0..2_000 {
        let mut of = Composition::default();
        if prompts {
            let mut left: u32 = 2_048;
            for _ in 0..rng.random_range(1..16) {
                let tokens = rng.random_range(4..700).min(left);
                if tokens > 0 {
                    of = of.with_chunk(0, tokens);
                    left -= tokens;
                }
            }
        }
        if decodes {
            for _ in 0..rng.random_range(1..192) {
                of = of.with_decode(rng.random_range(4..2_020));
            }
        }
        let took = machine.clock.iteration(&of);
        samples.push(Sample { of, took });
    }
    samples
}

fn percent(value: f64) -> String {
    format!("{:.1}", value * 100.0)
}

fn fitted(machines: &[Machine; 2], options: &Options) -> Section {
    let mut rows = Vec::new();
    let seed = options.seeds.first().copied().unwrap_or(1);
    for machine in machines {
        let model = &machine.model;
        let profile = latency::profile(&machine.clock, 32_768);
        let decode = |sample: &Sample| sample.of.decodes > 0;
        let (tokens, prompts): (Vec<_>, Vec<_>) = profile.into_iter().partition(decode);
        let mut row = |name: &str, error: Error| {
            rows.push(vec![
                format!("ratio {}: {name}", machine.ratio),
                error.steps.to_string(),
                percent(error.mean),
                percent(error.p95),
                percent(error.most),
                percent(error.bias),
            ]);
        };
        row("profile, prompts", model.error(&prompts));
        row("profile, tokens", model.error(&tokens));
        let held = |prompts, decodes| model.error(&held_out(machine, prompts, decodes, seed));
        row("held out, prompts", held(true, false));
        row("held out, tokens", held(false, true));
        row("held out, both in a step", held(true, true));
    }
    let coefficients = |machine: &Machine| {
        let [a, b, c] = machine.model.prefill;
        let [d, e, f] = machine.model.decode;
        format!(
            "Ratio {}: E_p = {:.2} ms + {:.2} µs · Σ l + {:.4} ns · Σ l²; E_d = {:.2} ms + {:.2} \
             ns · Σ l_cur + {:.2} µs · B.",
            machine.ratio,
            a / 1e6,
            b / 1e3,
            c,
            d / 1e6,
            e,
            f / 1e3
        )
    };
    Section {
        title: "Latency model (eq. 1 and 2): |predicted / measured − 1|, %".to_owned(),
        head: strings(&[
            "steps",
            "count",
            "mean",
            "95th percentile",
            "largest",
            "bias",
        ]),
        rows,
        notes: machines
            .iter()
            .map(coefficients)
            .collect::<Vec<_>>()
            .join("\n"),
    }
}

/// Errors of predicted maturity: of those that came true, realised minus predicted, ms.
struct Maturity {
    mean_ms: f64,
    absolute_p50: f64,
    absolute_p95: f64,
    /// Mean of |realised − predicted| / predicted.
    relative: f64,
    cut: f64,
    predicted_ms: f64,
}

fn maturity(outcomes: &[forecast::Outcome]) -> Maturity {
    let done: Vec<_> = outcomes.iter().filter(|one| !one.cut).collect();
    let off: Vec<f64> = done
        .iter()
        .map(|one| (one.realised - one.predicted) / 1e6)
        .collect();
    let mut absolute: Vec<f64> = off.iter().map(|one| one.abs()).collect();
    absolute.sort_unstable_by(f64::total_cmp);
    let at = |q: f64| {
        let last = absolute.len().saturating_sub(1) as f64;
        absolute.get((q * last) as usize).copied().unwrap_or(0.0)
    };
    let predicted: Vec<f64> = done.iter().map(|one| one.predicted / 1e6).collect();
    let relative: Vec<f64> = off
        .iter()
        .zip(&predicted)
        .map(|(off, predicted)| off.abs() / predicted.max(1e-3))
        .collect();
    Maturity {
        mean_ms: mean(&off),
        absolute_p50: at(0.5),
        absolute_p95: at(0.95),
        relative: mean(&relative) * 100.0,
        cut: (outcomes.len() - done.len()) as f64 / outcomes.len().max(1) as f64 * 100.0,
        predicted_ms: mean(&predicted),
    }
}

pub(super) fn run(machines: &[Machine; 2], options: &Options) -> Found {
    let machine = &machines[0];
    let mut points = Vec::new();
    for tight in [false, true] {
        for rate in RATES {
            points.extend(options.seeds.iter().map(|seed| (tight, rate, *seed)));
        }
    }
    let results = each(&points, options, |(tight, rate, seed)| {
        let tasks = if *tight {
            tasks::tight()
        } else {
            tasks::FOUR.to_vec()
        };
        let asked = tasks::requests(&tasks::together(&tasks, *rate, lasts(options)), *seed);
        let system = System::HyperFlexis(machine.options());
        maturity(&world::run(machine, &system, &[Role::Whole; 2], None, &asked).forecasts)
    });
    let mut rows = Vec::new();
    for tight in [false, true] {
        for rate in RATES {
            let mine: Vec<&Maturity> = points
                .iter()
                .zip(&results)
                .filter(|((t, r, _), _)| *t == tight && (r - rate).abs() < 0.5)
                .map(|(_, maturity)| maturity)
                .collect();
            let cell =
                |of: fn(&Maturity) -> f64| spread(&mine.iter().map(|m| of(m)).collect::<Vec<_>>());
            let name = if tight {
                "a tenth of the time per token"
            } else {
                "four tasks"
            };
            rows.push(vec![
                format!("{name}, {rate:.0} requests/s"),
                cell(|m| m.predicted_ms),
                cell(|m| m.mean_ms),
                cell(|m| m.absolute_p50),
                cell(|m| m.absolute_p95),
                cell(|m| m.relative),
                cell(|m| m.cut),
            ]);
        }
    }
    let below: Vec<f64> = points
        .iter()
        .zip(&results)
        .filter(|((tight, rate, _), _)| !tight && *rate < 80.0)
        .map(|(_, maturity)| maturity.absolute_p95)
        .collect();
    Found {
        sections: vec![
            fitted(machines, options),
            Section {
                title: "Maturity times: realised against predicted, ms".to_owned(),
                head: strings(&[
                    "workload",
                    "predicted, mean",
                    "realised − predicted, mean",
                    "|error| median",
                    "|error| 95th percentile",
                    "|error| / predicted, mean %",
                    "overtaken, %",
                ]),
                rows,
                notes: String::new(),
            },
        ],
        claims: vec![Claim {
            says: "maturity is predicted well enough to dispatch by".to_owned(),
            paper: "not given".to_owned(),
            here: format!(
                "95 % of errors below {:.0} ms up to the knee; a step takes 10 to 30 ms",
                mean(&below)
            ),
            regime: format!("four tasks, two instances, ratio {}", machine.ratio),
            baseline: String::new(),
            // The tightest TTFT is 700 ms; a tenth of it.
            holds: mean(&below) <= 70.0,
        }],
    }
}

/// What the options are worth, one at a time.
pub(super) fn ablations(machine: &Machine, options: &Options) -> Found {
    let base = machine.options();
    let cases: Vec<(String, Dispatcher)> = vec![
        ("defaults".to_owned(), base),
        (
            "all of the TTFT, eq. 5 as it stands".to_owned(),
            machine.as_it_stands(),
        ),
        (
            "a quarter of the TTFT".to_owned(),
            Dispatcher {
                ttft_share: 0.25,
                ..base
            },
        ),
        (
            "TTFT of those dispatched, not of all seen".to_owned(),
            Dispatcher {
                tightest: Tightest::Present,
                ..base
            },
        ),
        (
            "probability without utilization".to_owned(),
            Dispatcher {
                probability: Probability::Plain,
                ..base
            },
        ),
        ("θ = 0.2".to_owned(), Dispatcher { theta: 0.2, ..base }),
        ("θ = 0.5".to_owned(), Dispatcher { theta: 0.5, ..base }),
        (
            "reports don't move maturity".to_owned(),
            Dispatcher {
                correct: false,
                ..base
            },
        ),
        (
            "monitor every 50 ms".to_owned(),
            Dispatcher {
                monitor: Span::from_millis(50),
                ..base
            },
        ),
        (
            "monitor every 1 s".to_owned(),
            Dispatcher {
                monitor: Span::from_millis(1_000),
                ..base
            },
        ),
        (
            "monitor every 5 s".to_owned(),
            Dispatcher {
                monitor: Span::from_millis(5_000),
                ..base
            },
        ),
    ];
    let mut points = Vec::new();
    for case in 0..cases.len() {
        for tight in [false, true] {
            for rate in RATES {
                points.extend(options.seeds.iter().map(|seed| (case, tight, rate, *seed)));
            }
        }
    }
    let results = each(&points, options, |(case, tight, rate, seed)| {
        let tasks = if *tight {
            tasks::tight()
        } else {
            tasks::FOUR.to_vec()
        };
        let asked = tasks::requests(&tasks::together(&tasks, *rate, lasts(options)), *seed);
        let system = System::HyperFlexis(cases[*case].1);
        let outcome = world::run(machine, &system, &[Role::Whole; 2], None, &asked).outcome;
        world::attainment(&outcome, |_| true)
    });
    let mut head = strings(&["option"]);
    for tight in ["", ", tight"] {
        head.extend(RATES.map(|rate| format!("{rate:.0}/s{tight}")));
    }
    let mut rows = Vec::new();
    let mut monitors: Vec<Vec<f64>> = Vec::new();
    for (at, (name, _)) in cases.iter().enumerate() {
        let mut row = vec![name.clone()];
        let mut means = Vec::new();
        for tight in [false, true] {
            for rate in RATES {
                let mine: Vec<f64> = points
                    .iter()
                    .zip(&results)
                    .filter(|((c, t, r, _), _)| *c == at && *t == tight && (r - rate).abs() < 0.5)
                    .map(|(_, attained)| *attained)
                    .collect();
                row.push(spread(&mine));
                if !tight {
                    means.push(mean(&mine));
                }
            }
        }
        if name.starts_with("monitor") {
            monitors.push(means);
        }
        rows.push(row);
    }
    let width = (0..RATES.len())
        .map(|rate| {
            let all: Vec<f64> = monitors.iter().map(|means| means[rate]).collect();
            all.iter().copied().fold(0.0, f64::max)
                - all.iter().copied().fold(f64::INFINITY, f64::min)
        })
        .fold(0.0, f64::max);
    Found {
        sections: vec![Section {
            title: "Options that fill holes, one at a time: attainment, %".to_owned(),
            head,
            rows,
            notes: String::new(),
        }],
        claims: vec![Claim {
            says: "attainment hardly depends on the monitor's interval".to_owned(),
            paper: "50 ms to 5 s: slightly lower at 5 s (figure 8)".to_owned(),
            here: format!("{width:.1} points between best and worst at one rate"),
            regime: "four tasks, two instances, 50 to 100 requests/s".to_owned(),
            baseline: String::new(),
            holds: width < 3.0,
        }],
    }
}
