//! QoServe's claims (§4): what each of its parts is worth, beside fair baselines.
//!
//! The points of figures 7, 11 and 12 and tables 4 and 5 that turn on the scheduler: one replica of
//! Llama-3-8B on an A100 (a cluster for table 4), the classes of table 3, lengths of Azure's code
//! trace. Under two calibrations of host time, since figure 4 (2×) and the gain of dynamic chunking
//! (fits 1.4×) disagree, each with the one speed at which EDF-256 serves what it does in the paper
//! (`setting`). Nothing else is tuned, on these seeds or others: all settings are the paper's or
//! defaults of `laxity-requests`.
//!
//! Departures: four hours of arrivals are two here for capacities (a backlog that ends in
//! violations of the 600 s class needs its time: capacities of deadline-aware policies come out a
//! few percent higher); the trace is drawn from with replacement, as Poisson arrivals at any rate
//! need.

mod claims;
mod setting;

use laxity_requests::Span;
use laxity_requests::baseline::{LineOrder, RoundRobin, Silo};
use laxity_requests::request::Importance;

use super::PaperError;
use super::latency_file::LatencyFile;
use super::outcome::{Outcome, Record};
use super::reproduction::{Options, Reproduction, Section, each, spread};
use super::workload::Lengths;
use setting::{
    CALIBRATIONS, Policy, Setting, alphas, choices, classes, cluster, edf_relegating,
    late_after_prefill, one, prefilling, recipe, steps, violations,
};

/// Steps of rate in which capacities are told apart, requests per second.
const STEP: f64 = 0.05;

/// Rates at which α is swept, requests per second: below capacity, above it, far above it.
const ALPHA_RATES: [f64; 3] = [2.5, 4.0, 6.0];

/// Lengths of the runs, seconds.
struct Horizon {
    capacity: u64,
    overload: u64,
    phase: u64,
}

const FULL: Horizon = Horizon {
    capacity: 7_200,
    overload: 14_400,
    phase: 900,
};

const QUICK: Horizon = Horizon {
    capacity: 400,
    overload: 1_200,
    phase: 150,
};

/// What is run with.
struct Bench<'a> {
    options: &'a Options,
    settings: Vec<Setting>,
    lengths: Lengths,
    trace: &'static str,
    horizon: Horizon,
    /// The predictor that was given, in words; else nothing.
    model: String,
}

/// Figures of one policy under one calibration, a value for each seed.
#[derive(Clone, Debug, Default)]
struct Figures {
    setting: usize,
    name: String,
    /// All, important, and each class; or a single figure.
    values: Vec<Vec<f64>>,
}

impl Figures {
    fn mean(&self, of: usize) -> f64 {
        let values = &self.values[of];
        values.iter().sum::<f64>() / values.len().max(1) as f64
    }
}

/// Runs the claims.
///
/// # Errors
/// If the recorded trace cannot be read, or the predictor cannot be trained.
pub fn reproduce(options: &Options) -> Result<Reproduction, PaperError> {
    reproduce_with(options, None)
}

/// Runs the claims, with a predictor that is given instead of one that is trained for each
/// calibration.
///
/// # Errors
/// As [`reproduce`].
pub fn reproduce_with(
    options: &Options,
    model: Option<&LatencyFile>,
) -> Result<Reproduction, PaperError> {
    let path = options.data.as_ref().map(|data| {
        let name = "azure_llm_2023_code.csv.gz";
        let nested = data.join("traces").join(name);
        if nested.exists() {
            nested
        } else {
            data.join(name)
        }
    });
    let (lengths, trace) = match path.filter(|path| path.exists()) {
        Some(path) => (Lengths::azure(&path)?, "azure_llm_2023_code"),
        None => (
            Lengths::like_azure_code(),
            "made up like the Azure code trace",
        ),
    };
    let settings: Result<Vec<Setting>, PaperError> = each(&CALIBRATIONS, options, |calibration| {
        Setting::new(*calibration, options.quick, model)
    })
    .into_iter()
    .collect();
    let bench = Bench {
        options,
        settings: settings?,
        lengths,
        trace,
        horizon: if options.quick { QUICK } else { FULL },
        model: model.map_or_else(String::new, |model| {
            format!(
                "Given, not trained here: {}. Its errors are those on the calibration's own \
                 iterations, its margin that of its file. ",
                model.trained_on
            )
        }),
    };
    let capacity = bench.capacities();
    let high = bench.high();
    let overload = bench.overload();
    let silo = bench.silo(&capacity);
    let prefill = bench.disaggregated();
    let alphas = ALPHA_RATES.map(|rate| bench.alphas(rate));
    let claims = claims::claims(
        &bench,
        &claims::Found {
            capacity: &capacity,
            high: &high,
            overload: &overload,
            silo: &silo,
            prefill: &prefill,
            alphas: &alphas[ALPHA_RATES.len() - 1],
        },
    );
    let mut sections = vec![
        bench.predictor(),
        bench.section(
            "Capacity: requests per second with at most 1 % of violations (figure 7, table 5)",
            &["capacity"],
            &capacity,
            "Bisected in steps of 0.05. The paper has, for EDF-256, DC, DC+ER, DC+ER+HP: 2.75, \
             3.3, 3.6, 3.65.",
        ),
        bench.section(
            "Violations at 6 requests per second, %, all important (table 5, figure 11)",
            &["all", "important", "Q1", "Q2", "Q3"],
            &high,
            "The paper has, for EDF-256, DC, DC+ER, DC+ER+HP: 100, 74, 26, 16 (its two last \
             columns look swapped).",
        ),
        bench.section(
            "Violations when 2 and 5 requests per second take turns, %, a fifth unimportant \
             (figure 12)",
            &["all", "important", "Q1", "Q2", "Q3", "unimportant"],
            &overload,
            "The paper has: FCFS-256 81.9, EDF-256 84.1, QoServe 8.6 (important 0, Q1 16.0, Q2 \
             10.0, Q3 0).",
        ),
        bench.section(
            "GPUs for 35 requests per second (table 4)",
            &["GPUs", "Q1", "Q2", "Q3", "violations, %"],
            &silo,
            "As many replicas of each silo as its capacity asks for, and of QoServe; then the \
             whole cluster is run so. \
             The paper has 13 (7, 3, 3) and 10.",
        ),
        bench.section(
            "Prefill replicas of a disaggregated cluster: requests per second and replica with at \
             most 1 % late (figure 8)",
            &["capacity"],
            &prefill,
            "Lengths made up like the Azure conversation trace, chunks of 8192, only prompts are \
             computed: decode replicas are the same under every policy, \
             and take 50 ms a token, so that a batch request has to be prefilled so much before \
             its deadline. Figure 8 has no numbers in the text.",
        ),
    ];
    for (rate, figures) in ALPHA_RATES.iter().zip(&alphas) {
        sections.push(bench.section(
            &format!(
                "What a token that is left counts (α) at {rate} requests per second (figure \
                14)"
            ),
            &["late, %", "long prompts, %", "median, s", "p99, s"],
            figures,
            "All of QoServe but for α. Long: the longest tenth of prompts. Latency: to the first \
             token for interactive requests, to the last for others; the paper: a \
             larger α lowers the median, and most long requests pay for it.",
        ));
    }
    Ok(Reproduction {
        title: format!("QoServe: Llama-3-8B on A100, lengths {}", bench.trace),
        sections,
        claims,
        quick: options.quick,
    })
}

/// Fixed chunks, in the order in which a sceptic tries them.
fn sarathi(chunks: &[u32]) -> Vec<(String, Policy)> {
    let orders = [
        ("FCFS", LineOrder::Fcfs),
        ("EDF", LineOrder::Edf),
        ("SRPF", LineOrder::Srpf),
    ];
    let mut all = Vec::new();
    for (name, order) in orders {
        for tokens in chunks {
            all.push((format!("{name}-{tokens}"), Policy::Sarathi(order, *tokens)));
        }
    }
    all
}

fn named(all: &[(&str, Policy)]) -> Vec<(String, Policy)> {
    all.iter()
        .map(|(name, policy)| ((*name).to_owned(), *policy))
        .collect()
}

/// What an objective is about: the first token where somebody reads along, else the last.
fn latency(record: &Record) -> Option<Span> {
    if record.spec.slo.is_interactive() {
        record.ttft()
    } else {
        record.ttlt()
    }
}

/// Violations: all, of important ones, of each class.
fn split(outcome: &Outcome) -> Vec<f64> {
    let mut all = vec![
        violations(outcome, |_| true),
        violations(outcome, |r| r.spec.importance == Importance::Important),
    ];
    for class in 0..classes().len() {
        all.push(violations(outcome, |r| {
            usize::from(r.spec.class.0) == class
        }));
    }
    all
}

impl Bench<'_> {
    fn chunks(&self) -> &'static [u32] {
        if self.options.quick {
            &[256, 512]
        } else {
            &[256, 512, 1024]
        }
    }

    /// Runs policies under all calibrations and seeds.
    fn all(
        &self,
        policies: &[(String, Policy)],
        work: impl Fn(&Setting, Policy, u64) -> Vec<f64> + Sync,
    ) -> Vec<Figures> {
        let mut points = Vec::new();
        for setting in 0..self.settings.len() {
            for (_, policy) in policies {
                for seed in &self.options.seeds {
                    points.push((setting, *policy, *seed));
                }
            }
        }
        let values = each(&points, self.options, |(setting, policy, seed)| {
            work(&self.settings[*setting], *policy, *seed)
        });
        let mut values = values.chunks(self.options.seeds.len());
        let mut figures = Vec::new();
        for setting in 0..self.settings.len() {
            for (name, _) in policies {
                let runs = values.next().expect("a chunk for each policy");
                let columns = runs[0].len();
                figures.push(Figures {
                    setting,
                    name: name.clone(),
                    values: (0..columns)
                        .map(|at| runs.iter().map(|run| run[at]).collect())
                        .collect(),
                });
            }
        }
        figures
    }

    /// The highest rate, a multiple of [`STEP`], up to which at most 1 % is late: of requests of
    /// such classes.
    fn capacity(&self, setting: &Setting, policy: Policy, seed: u64, class: Option<usize>) -> f64 {
        self.highest(|rate| {
            let mut recipe = recipe(&self.lengths, &[(self.horizon.capacity, rate)], 0.0);
            if let Some(class) = class {
                recipe.classes = vec![recipe.classes[class]];
            }
            violations(&one(setting, policy, &recipe.requests(seed)), |_| true)
        })
    }

    /// The highest rate at which at most 1 % is late, where `late` says how many are.
    fn highest(&self, late: impl Fn(f64) -> f64) -> f64 {
        let serves = |steps: u32| late(f64::from(steps) * STEP) <= 1.0;
        // Half a request per second is served. An upper bound is looked for, not set: one that is
        // too low would look like a capacity.
        let (mut most, mut over) = (10_u32, 100_u32);
        while over < 400 && serves(over) {
            (most, over) = (over, 2 * over);
        }
        while over - most > if self.options.quick { 8 } else { 1 } {
            let middle = most.midpoint(over);
            if serves(middle) {
                most = middle;
            } else {
                over = middle;
            }
        }
        f64::from(most) * STEP
    }

    fn capacities(&self) -> Vec<Figures> {
        let mut policies = sarathi(self.chunks());
        let all = steps();
        policies.extend(named(&all[1..]));
        policies.push(("EDF-512+ER".to_owned(), edf_relegating(512)));
        self.all(&policies, |setting, policy, seed| {
            vec![self.capacity(setting, policy, seed, None)]
        })
    }

    fn high(&self) -> Vec<Figures> {
        let mut policies = sarathi(&self.chunks()[..2]);
        let all = steps();
        policies.extend(named(&all[1..]));
        policies.push(("EDF-512+ER".to_owned(), edf_relegating(512)));
        policies.extend(self.variants());
        self.all(&policies, |setting, policy, seed| {
            let recipe = recipe(&self.lengths, &[(self.horizon.capacity, 6.0)], 0.0);
            split(&one(setting, policy, &recipe.requests(seed)))
        })
    }

    fn overload(&self) -> Vec<Figures> {
        let mut policies = sarathi(&self.chunks()[..2]);
        policies.extend(named(&[("QoServe", steps()[3].1)]));
        policies.push(("EDF-512+ER".to_owned(), edf_relegating(512)));
        policies.extend(self.variants());
        let turns = (self.horizon.overload / self.horizon.phase / 2) as usize;
        let phases = [(self.horizon.phase, 2.0), (self.horizon.phase, 5.0)].repeat(turns);
        self.all(&policies, |setting, policy, seed| {
            let recipe = recipe(&self.lengths, &phases, 0.2);
            let outcome = one(setting, policy, &recipe.requests(seed));
            let mut late = split(&outcome);
            late.push(violations(&outcome, |r| {
                r.spec.importance == Importance::Low
            }));
            late
        })
    }

    /// Prefill alone: what one replica of a disaggregated cluster's prefill pool serves (figure 8).
    fn disaggregated(&self) -> Vec<Figures> {
        let lengths = Lengths::like_azure_conversation();
        self.all(&prefilling(), |setting, policy, seed| {
            vec![self.highest(|rate| {
                let recipe = recipe(&lengths, &[(self.horizon.capacity, rate)], 0.0);
                late_after_prefill(setting, policy, &recipe.requests(seed))
            })]
        })
    }

    /// What a token that is left counts (figure 14): late, late of those with long prompts, and the
    /// median latency.
    fn alphas(&self, rate: f64) -> Vec<Figures> {
        self.all(&alphas(), |setting, policy, seed| {
            let recipe = recipe(&self.lengths, &[(self.horizon.capacity, rate)], 0.0);
            let outcome = one(setting, policy, &recipe.requests(seed));
            let mut prompts: Vec<u32> = outcome.records.iter().map(|r| r.spec.prompt).collect();
            prompts.sort_unstable();
            let long = prompts.get(prompts.len() * 9 / 10).copied().unwrap_or(0);
            let seconds = |q| outcome.quantile_ms(q, latency).unwrap_or(f64::NAN) / 1e3;
            vec![
                violations(&outcome, |_| true),
                violations(&outcome, |r| r.spec.prompt >= long),
                seconds(0.5),
                seconds(0.99),
            ]
        })
    }

    fn variants(&self) -> Vec<(String, Policy)> {
        let all = choices().into_iter();
        all.filter(|(name, _)| !self.options.quick || *name == "no hints")
            .map(|(name, policy)| (format!("QoServe, {name}"), policy))
            .collect()
    }

    /// As many replicas as 35 requests per second need, in silos and together, and how such
    /// clusters do.
    fn silo(&self, capacity: &[Figures]) -> Vec<Figures> {
        let rate = if self.options.quick { 7.0 } else { 35.0 };
        let seed = self.options.seeds[0];
        let replicas = |rate: f64, capacity: f64| (rate / capacity).ceil().max(1.0) as u32;
        let strict = Policy::Sarathi(LineOrder::Fcfs, 256);
        let loose = Policy::Sarathi(LineOrder::Fcfs, 2048);
        let work: Vec<usize> = (0..self.settings.len()).collect();
        let found = each(&work, self.options, |at| {
            let setting = &self.settings[*at];
            let tiers = [(strict, 0), (loose, 1), (loose, 2)].map(|(policy, class)| {
                replicas(
                    rate / 3.0,
                    self.capacity(setting, policy, seed, Some(class)),
                )
            });
            let whole = capacity
                .iter()
                .find(|f| f.setting == *at && f.name == "DC+ER+HP")
                .map_or(1.0, |f| f.mean(0));
            let together = replicas(rate, whole);
            let asked =
                recipe(&self.lengths, &[(self.horizon.capacity / 2, rate)], 0.0).requests(seed);
            let mut policies = vec![strict; tiers[0] as usize];
            policies.resize(tiers.iter().sum::<u32>() as usize, loose);
            let silos = cluster(setting, &policies, Box::new(Silo::new(&tiers)), &asked);
            let policies = vec![steps()[3].1; together as usize];
            let round_robin = Box::new(RoundRobin::default());
            let shared = cluster(setting, &policies, round_robin, &asked);
            let row = |name: &str, gpus: [u32; 4], late: f64| Figures {
                setting: *at,
                name: name.to_owned(),
                values: gpus
                    .map(f64::from)
                    .into_iter()
                    .chain([late])
                    .map(|value| vec![value])
                    .collect(),
            };
            let sum = tiers.iter().sum();
            [
                row(
                    "silos",
                    [sum, tiers[0], tiers[1], tiers[2]],
                    violations(&silos, |_| true),
                ),
                row(
                    "QoServe",
                    [together, together, together, together],
                    violations(&shared, |_| true),
                ),
            ]
        });
        found.into_iter().flatten().collect()
    }

    fn predictor(&self) -> Section {
        let row = |setting: &Setting| {
            let errors = &setting.errors;
            vec![
                setting.name(),
                setting.clock.roofline.host().to_string(),
                format!("{:.2}×", setting.clock.factor),
                format!("{:.2} %", errors.mean),
                format!("{:.1} %", errors.p95),
                format!("{:.1} %", errors.most),
                format!("{:.1} %", errors.late),
                format!("{:.1} %", errors.margin * 100.0),
                format!("{:.2} %", errors.late_with_margin),
            ]
        };
        Section {
            title: "The batch predictor on iterations that it was not trained on".to_owned(),
            head: [
                "calibration",
                "host",
                "slower",
                "mean error",
                "p95",
                "largest",
                "longer than predicted + 5 %",
                "safe margin",
                "longer than with it",
            ]
            .map(str::to_owned)
            .to_vec(),
            rows: self.settings.iter().map(row).collect(),
            notes: format!(
                "{}A random forest (§3.6.1: less than 10 % on chunk sizes). A calibration is how \
                 much more prompt tokens a second chunks of 2500 \
                    give than chunks of 256; the host's time between iterations is what makes it \
                    so. \
                    The forest learns a roofline here, whose form is close to the line that it \
                    corrects: on a machine it would be off by more.",
                self.model
            ),
        }
    }

    fn section(&self, title: &str, columns: &[&str], of: &[Figures], notes: &str) -> Section {
        let mut head = vec!["policy".to_owned()];
        for setting in &self.settings {
            for column in columns {
                head.push(format!("{} {column}", setting.name()));
            }
        }
        let mut rows: Vec<Vec<String>> = Vec::new();
        for figures in of {
            let cells = figures.values.iter().map(|values| spread(values));
            match rows.iter_mut().find(|row| row[0] == figures.name) {
                Some(row) => row.extend(cells),
                None => rows.push([figures.name.clone()].into_iter().chain(cells).collect()),
            }
        }
        Section {
            title: title.to_owned(),
            head,
            rows,
            notes: notes.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests;
