//! H-MAS (`laxity_requests::hmas`) on one replica in virtual time: the claims of its tables 1, 2, 4
//! and 5, of equation 2, and of Appendix C, beside fixed structures, tuned static limits and the
//! best in hindsight.
//!
//! What cannot be had here: Qwen3-30B on eight A100, ShareGPT and APPS, the fine-tuned perception,
//! the language model that decides. The machine is the roofline of an A100 with Llama-3-8B under
//! both calibrations; [`traffic`] says what is asked for.
//!
//! Numbers that the paper leaves open were set on seeds 101 and 102; what is run here has other
//! seeds. Static limits are tuned in each run, on these seeds, so that the baseline is as good as
//! it can be.

mod bed;
mod claims;
mod service;
mod traffic;
mod training;

use std::sync::Arc;

use laxity_requests::hmas::pool::Kind;
use laxity_requests::hmas::qos::Long;
use laxity_requests::hmas::statera::{self, Frozen, Score};

use super::PaperError;
use super::latency::Roofline;
use super::reproduction::{Options, Reproduction, Section, each, spread};
use super::workload::Asked;
use crate::compute::Gpu;
use crate::model::Model;
use bed::{BLOCK_TOKENS, Bed, Chooses, Measured, Sees, Setting};
pub use service::{Ask, Service, example_question};
use traffic::{Mix, Stretch};

/// Requests per second that the machine just about serves, of the mix [`Mix::Complex`].
const RATE: f64 = 10.5;

/// Blocks where memory is tight: requests wait for it rather than for computation.
const TIGHT_BLOCKS: u32 = 7_000;

/// Seeds that settings and static limits were tuned on.
const TUNING: [u64; 2] = [101, 102];

/// Requests that a forest of lengths learns from.
const TRAINING: u64 = 9_001;

/// Rates of mixes that come to the same work.
const fn weight(mix: Mix) -> f64 {
    match mix {
        Mix::Interactive => 2.0,
        Mix::Long => 0.4,
        Mix::Heavy | Mix::Complex => 1.0,
    }
}

/// Statera as it was set on the tuning seeds, for all figures.
fn frozen_statera() -> statera::Config {
    statera::Config {
        // As the paper has it, errors in tokens, the fence does not hold what it promises: a table
        // of its own shows that.
        score: Score::Relative,
        ..statera::Config::default()
    }
}

/// Traffic with a name.
struct Scenario {
    name: &'static str,
    stretches: Vec<Stretch>,
}

/// Where and how.
struct Experiment<'a> {
    name: &'static str,
    bed: &'a Bed,
    scenario: &'a Scenario,
}

/// A setting with a name.
struct Row {
    name: String,
    setting: Setting,
}

fn row(name: &str, setting: Setting) -> Row {
    Row {
        name: name.to_owned(),
        setting,
    }
}

/// What was measured: by place, row and seed.
type Grid = Vec<Vec<Vec<Measured>>>;

fn grid(places: &[Experiment<'_>], rows: &[Row], seeds: &[u64], options: &Options) -> Grid {
    let lessons = lessons();
    let mut points = Vec::new();
    for place in 0..places.len() {
        for row in 0..rows.len() {
            points.extend(seeds.iter().map(|seed| (place, row, *seed)));
        }
    }
    let all = each(&points, options, |(place, row, seed)| {
        let place = &places[*place];
        let asked = traffic::requests(&place.scenario.stretches, *seed);
        bed::run(&rows[*row].setting, place.bed, &asked, &lessons, *seed)
    });
    let mut all = all.into_iter();
    let mut take = || all.by_ref().take(seeds.len()).collect();
    places
        .iter()
        .map(|_| rows.iter().map(|_| take()).collect())
        .collect()
}

/// What a forest of lengths learns from: all mixes, another seed.
fn lessons() -> Vec<Asked> {
    let mixes = [Mix::Heavy, Mix::Interactive, Mix::Long, Mix::Complex];
    let stretches = mixes.map(|mix| Stretch::steady(100.0, 10.0, mix));
    traffic::requests(&stretches, TRAINING)
}

fn machine(ratio: f64) -> Result<Bed, PaperError> {
    let gpu = Gpu::named("a100").map_err(|error| PaperError::BuiltIn(error.to_string()))?;
    let model =
        Model::named("llama-3-8b").map_err(|error| PaperError::BuiltIn(error.to_string()))?;
    let clock = Roofline::calibrated(&gpu, &model, 1, ratio).ok_or_else(|| {
        PaperError::BuiltIn(format!("no host time makes chunks differ {ratio} times"))
    })?;
    let blocks = clock.blocks(&gpu, 1, BLOCK_TOKENS);
    Ok(Bed { clock, blocks })
}

/// A column of a table: its name, and what it shows of a run.
type Column = (&'static str, fn(&Measured) -> f64);

const COLUMNS: [Column; 6] = [
    ("goodput, %", |m| m.good),
    ("TTFT met, %", |m| m.first),
    ("TTFT p95, s", |m| m.ttft_p95),
    ("TPOT p95, ms", |m| m.tpot_p95),
    ("service gain, %", |m| m.gain),
    ("drops", |m| m.drops),
];

fn mean(runs: &[Measured], of: fn(&Measured) -> f64) -> f64 {
    runs.iter().map(of).sum::<f64>() / runs.len().max(1) as f64
}

fn table(
    title: String,
    rows: &[Row],
    runs: &[Vec<Measured>],
    columns: &[Column],
    notes: &str,
) -> Section {
    let head = std::iter::once("setting").chain(columns.iter().map(|(name, _)| *name));
    let line = |(row, runs): (&Row, &Vec<Measured>)| {
        let cells = columns.iter().map(|(_, of)| {
            let values: Vec<f64> = runs.iter().map(of).collect();
            spread(&values)
        });
        std::iter::once(row.name.clone()).chain(cells).collect()
    };
    Section {
        title,
        head: head.map(str::to_owned).collect(),
        rows: rows.iter().zip(runs).map(line).collect(),
        notes: notes.to_owned(),
    }
}

fn with_statera(setting: Setting, with: impl FnOnce(&mut statera::Config)) -> Setting {
    let mut config = frozen_statera();
    with(&mut config);
    Setting {
        statera: Some(config),
        ..setting
    }
}

/// The five ways to choose, and what they are compared with: every fixed structure.
fn everyone(examples: &Arc<Vec<(Long, Kind)>>, service: Option<&Service>) -> Vec<Row> {
    let memory_only = Setting {
        statera: None,
        ..Setting::fixed(Kind::Fcfs)
    };
    let mut rows = vec![row("fcfs, memory only (vLLM)", memory_only)];
    rows.extend(Kind::ALL.map(|kind| row(kind.name(), Setting::fixed(kind))));
    rows.extend([
        row("H-MAS, rules", Setting::new(Chooses::Rules)),
        row("H-MAS, change point", Setting::new(Chooses::ChangePoint)),
        row("H-MAS, bandit", Setting::new(Chooses::Bandit)),
        row(
            "H-MAS, classifier",
            Setting::new(Chooses::Classifier(Arc::clone(examples))),
        ),
    ]);
    rows.extend(service.map(|service| {
        let name = format!("H-MAS, {}", service.name);
        row(&name, Setting::new(Chooses::Service(service.clone())))
    }));
    rows
}

/// What H-MAS is without its parts, and with static limits that were tuned.
fn ablations(main: &Setting, tuned: u32) -> Vec<Row> {
    let frozen = |frozen| with_statera(main.clone(), |config| config.frozen = frozen);
    let sees = |sees| Setting {
        sees,
        ..main.clone()
    };
    vec![
        row("H-MAS", main.clone()),
        row(
            "two-lane disabled",
            Setting {
                no_two_lane: true,
                ..main.clone()
            },
        ),
        row("Statera frozen, all of it", frozen(Frozen::ALL)),
        row(
            "  its bound only",
            frozen(Frozen {
                bound: true,
                limits: false,
            }),
        ),
        row(
            "  its limits only",
            frozen(Frozen {
                bound: false,
                limits: true,
            }),
        ),
        row(
            "no Statera: memory only",
            Setting {
                statera: None,
                ..main.clone()
            },
        ),
        row(
            &format!("static limits, tuned: N = {tuned}"),
            fixed_limits(main, tuned),
        ),
        row(
            "Meta disabled (fcfs)",
            Setting {
                chooses: Chooses::Fixed(Kind::Fcfs),
                ..main.clone()
            },
        ),
        row(
            "rule-based Meta",
            Setting {
                chooses: Chooses::Rules,
                ..main.clone()
            },
        ),
        row(
            "srtf, same predictor",
            Setting {
                chooses: Chooses::Fixed(Kind::Srtf),
                ..main.clone()
            },
        ),
        row("perception: forest", sees(Sees::Forest)),
        row("perception: rules", sees(Sees::Rules)),
        row("perception: nothing", sees(Sees::Nothing)),
    ]
}

/// No bound, no loops: so many may run, whatever happens.
fn fixed_limits(main: &Setting, concurrency: u32) -> Setting {
    with_statera(main.clone(), |config| {
        config.frozen = Frozen::ALL;
        config.control.concurrency = (1, concurrency);
        config.control.tokens = (1, concurrency.max(1));
    })
}

/// The concurrency that is best on the tuning seeds.
fn tune(main: &Setting, place: Experiment<'_>, options: &Options) -> u32 {
    let limits: &[u32] = if options.quick {
        &[64, 256]
    } else {
        &[48, 64, 96, 128, 192, 256, 384]
    };
    let rows: Vec<Row> = limits
        .iter()
        .map(|limit| row("", fixed_limits(main, *limit)))
        .collect();
    let found = grid(&[place], &rows, &TUNING, options);
    let mut best = (f64::NEG_INFINITY, limits[0]);
    for (limit, runs) in limits.iter().zip(&found[0]) {
        let good = mean(runs, |m| m.good);
        if good > best.0 {
            best = (good, *limit);
        }
    }
    best.1
}

/// Checks the claims.
///
/// # Errors
/// If a GPU or model that is built in cannot be had.
pub fn reproduce(options: &Options) -> Result<Reproduction, PaperError> {
    reproduce_with(options, None)
}

/// As [`reproduce`], with a decision service among the controllers.
///
/// # Errors
/// As [`reproduce`].
pub fn reproduce_with(
    options: &Options,
    service: Option<&Service>,
) -> Result<Reproduction, PaperError> {
    let seconds = if options.quick { 10.0 } else { 120.0 };
    let beds = [machine(1.4)?, machine(2.0)?];
    let tight = Bed {
        blocks: TIGHT_BLOCKS,
        ..beds[0].clone()
    };
    let third = seconds * 2.0 / 3.0;
    let heavy = Scenario {
        name: "heavy mix",
        stretches: vec![Stretch::steady(seconds, RATE, Mix::Heavy)],
    };
    // Eq. 13, with its base rate so that phase 2 is as far above what the machine serves as 1.4
    // times the paper's mean rate is.
    let rates = Scenario {
        name: "rate drift",
        stretches: vec![
            Stretch::steady(third, 0.6 * RATE, Mix::Complex),
            Stretch::steady(third, 1.4 * RATE, Mix::Complex),
            Stretch {
                off_rate: Some(0.2 * RATE),
                ..Stretch::steady(third, 1.8 * RATE, Mix::Complex)
            },
        ],
    };
    let tasks = Scenario {
        name: "task drift",
        stretches: [Mix::Interactive, Mix::Long, Mix::Complex]
            .map(|mix| Stretch::steady(third, RATE * weight(mix), mix))
            .to_vec(),
    };
    let examples = training::examples(&beds[0], options);
    let main = Setting::new(Chooses::Classifier(Arc::clone(&examples)));
    let everyone = everyone(&examples, service);
    let place = |name, bed, scenario| Experiment {
        name,
        bed,
        scenario,
    };
    let places = [
        place("calibration 1.4", &beds[0], &heavy),
        place("calibration 2", &beds[1], &heavy),
        place("calibration 1.4", &beds[0], &rates),
        place("calibration 1.4", &beds[0], &tasks),
    ];
    let compared = grid(&places, &everyone, &options.seeds, options);
    let tuned = tune(&main, place("", &tight, &tasks), options);
    let ablations = ablations(&main, tuned);
    let parts_places = [
        place("tight memory", &tight, &heavy),
        place("tight memory", &tight, &tasks),
    ];
    let parts = grid(&parts_places, &ablations, &options.seeds, options);
    let fences = claims::fences();
    let fence_places = [
        place("tight memory", &tight, &heavy),
        place("tight memory", &tight, &tasks),
    ];
    let fenced = grid(&fence_places, &fences, &options.seeds, options);
    let mut sections = Vec::new();
    for (place, runs) in places.iter().zip(&compared) {
        sections.push(claims::comparison(place, &everyone, runs));
    }
    for (place, runs) in places.iter().zip(&compared) {
        sections.extend(service::answers(place, &everyone, runs));
    }
    for (place, runs) in parts_places.iter().zip(&parts) {
        sections.push(claims::ablation(place, &ablations, runs));
    }
    for (place, runs) in fence_places.iter().zip(&fenced) {
        sections.push(claims::fence_table(place, &fences, runs));
    }
    sections.push(claims::perception(&traffic::requests(&heavy.stretches, 77)));
    Ok(Reproduction {
        title: "H-MAS: hierarchical control of one replica".to_owned(),
        claims: claims::claims(&everyone, &compared, &ablations, &parts, &fenced),
        sections,
        quick: options.quick,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quick_run_gives_all_tables_and_no_controller_switches_twice_in_delta_t() {
        let found = reproduce(&Options::quick(3)).expect("built in");
        assert_eq!(found.sections.len(), 9);
        found.assert_whole();
        let switch = found.claims.iter().find(|c| c.says.contains("ΔT"));
        assert!(switch.is_some_and(|claim| claim.holds), "{switch:?}");
    }

    #[test]
    fn the_same_seed_gives_the_same_outcome() {
        let bed = machine(1.4).expect("built in");
        let stretches = [Stretch::steady(20.0, RATE, Mix::Heavy)];
        let asked = traffic::requests(&stretches, 4);
        assert_eq!(asked, traffic::requests(&stretches, 4));
        let run = || bed::run(&Setting::new(Chooses::Rules), &bed, &asked, &[], 4);
        let (one, two) = (run(), run());
        assert_eq!((one.good, one.ttft_p95), (two.good, two.ttft_p95));
        assert_eq!(one.log.switches, two.log.switches);
    }

    #[test]
    fn rates_go_on_and_off_and_mixes_differ() {
        let on_off = Stretch {
            off_rate: Some(1.0),
            ..Stretch::steady(40.0, 20.0, Mix::Long)
        };
        let asked = traffic::requests(&[on_off], 5);
        let in_second = |from: u64, to: u64| {
            let at = |a: &&Asked| (from..to).contains(&(a.spec.arrival.0 / 1_000_000_000));
            asked.iter().filter(at).count()
        };
        assert!(in_second(0, 10) > 5 * in_second(10, 20));
        let mean = |mix| {
            let asked = traffic::requests(&[Stretch::steady(100.0, 10.0, mix)], 5);
            asked.iter().map(|a| f64::from(a.output)).sum::<f64>() / asked.len() as f64
        };
        assert!(mean(Mix::Long) > 3.0 * mean(Mix::Interactive));
    }
}
