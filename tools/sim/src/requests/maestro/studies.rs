//! Schedulers by cases as listed in `studies.toml`: Maestro's figure 7, Tables II and VIII, and
//! regimes in which refuted claims could hold. Memory is counted over all runs.

use std::sync::Arc;

use laxity_requests::Span;
use laxity_requests::workflow::NodeSpec;
use serde::Deserialize;

use super::super::PaperError;
use super::super::measurements::Measurements;
use super::super::reproduction::{Options, Section, each};
use super::catalogue::{GB, node};
use super::trial::{Kit, Measured, Trial, TrialPolicy};
use super::world::Ran;

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Study {
    place: String,
    policies: Vec<String>,
    #[serde(default = "one")]
    seeds: u64,
    cases: Vec<Case>,
    tables: Vec<TableText>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    /// Rate of arrivals, in jobs per second.
    rate: f64,
    /// Share of jobs that are batch jobs, 0 to 1.
    batch: f64,
    seconds: f64,
    nodes: usize,
    /// Number of nodes in another region, 60 ms away. The others are 1 ms away from the source.
    #[serde(default)]
    far: usize,
    gpu: Option<u64>,
    slots: Option<u32>,
    #[serde(default = "one")]
    rounds: u16,
    #[serde(default = "one")]
    variants: u16,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TableText {
    title: String,
    columns: Vec<String>,
    #[serde(default)]
    notes: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StudiesFile {
    study: Vec<Study>,
}

fn one<T: From<u8>>() -> T {
    T::from(1)
}

impl Case {
    fn trial(&self, policy: TrialPolicy, seed: u64, quick: bool) -> Trial {
        let own = NodeSpec {
            gpu: self.gpu.map_or(node(0).gpu, |gpu| gpu * GB),
            slots: self.slots.unwrap_or(node(0).slots),
            ..node(0)
        };
        let mut nodes = vec![own; self.nodes];
        nodes.extend(vec![node(1); self.far]);
        let rtt = [Span::from_millis(1), Span::from_millis(60)].to_vec();
        Trial {
            policy,
            rate: self.rate,
            batch: self.batch,
            seconds: if quick { self.seconds.min(600.0) / 30.0 } else { self.seconds },
            nodes: Arc::new(nodes),
            rtt: Arc::new(if self.far > 0 { vec![rtt] } else { Vec::new() }),
            seed,
            rounds: self.rounds,
            variants: self.variants,
        }
    }
}

fn memory(into: &mut Measurements, ran: &[Measured]) -> Section {
    let sum = |of: fn(&Ran) -> u64| ran.iter().map(|run| of(&run.ran)).sum::<u64>() as f64;
    let fullest = ran.iter().map(|of| of.ran.fullest).fold(0.0, f64::max);
    let rows = [
        ("runs", ran.len() as f64),
        ("instants with more in use than there is", sum(|of| of.overflows)),
        ("fullest a GPU was, %", 100.0 * fullest),
        ("stages that asked for more than promised", sum(|of| of.grown)),
        ("stages swapped out", sum(|of| of.swapped)),
        ("stages aborted", sum(|of| of.aborted)),
        ("models stopped on their way to sleep", sum(|of| of.stopped)),
        ("jobs that never ended", sum(|of| of.lost as u64)),
    ];
    for (row, count) in rows {
        into.add("memory", row, &[vec![("count", count)]]);
    }
    let title = "GPU memory over all runs above, by the simulated GPU's own account";
    into.table(title, &[("memory", "")], &["count"], "")
}

pub(super) fn run(
    kit: &Kit,
    options: &Options,
    into: &mut Measurements,
) -> Result<Vec<Section>, PaperError> {
    let file: StudiesFile = toml::from_str(include_str!("studies.toml"))
        .map_err(|error| PaperError::BuiltIn(error.to_string()))?;
    let (mut sections, mut all) = (Vec::new(), Vec::new());
    for study in &file.study {
        let more = if options.quick { 1 } else { study.seeds };
        let seeds = options.seeds.iter();
        let seeds: Vec<u64> =
            seeds.flat_map(|seed| (0..more).map(move |k| seed + 1000 * k)).collect();
        let mut points = Vec::new();
        for name in &study.policies {
            let policy = TrialPolicy::named(name)
                .ok_or_else(|| PaperError::BuiltIn(format!("no scheduler is called {name}")))?;
            for case in &study.cases {
                let trial = |seed: &u64| case.trial(policy.clone(), *seed, options.quick);
                points.extend(seeds.iter().map(trial));
            }
        }
        let ran = each(&points, options, |trial| trial.run(kit));
        let mut runs = ran.chunks(seeds.len());
        for name in &study.policies {
            for (case, runs) in study.cases.iter().zip(runs.by_ref()) {
                let place = format!("{}: {}", study.place, case.name);
                let columns: Vec<_> = runs.iter().map(Measured::columns).collect();
                into.add(&place, name, &columns);
            }
        }
        let places = study.cases.iter().map(|case| format!("{}: {}", study.place, case.name));
        let places: Vec<String> = places.collect();
        let names = places.iter().zip(&study.cases);
        let names: Vec<_> =
            names.map(|(place, case)| (place.as_str(), case.name.as_str())).collect();
        for table in &study.tables {
            let columns: Vec<&str> = table.columns.iter().map(String::as_str).collect();
            sections.push(into.table(&table.title, &names, &columns, &table.notes));
        }
        all.extend(ran);
    }
    sections.push(memory(into, &all));
    Ok(sections)
}
