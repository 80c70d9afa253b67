//! Figures 3, 4 and 7: attainment and latency over the rate of requests, on instances that do all
//! and on prefill and decode pools.

use laxity_requests::baseline::LineOrder;
use laxity_requests::dispatch::Role;

use super::tasks::{self, Task};
use super::world::{self, Machine, System};
use super::{Found, lasts, mean, strings};
use crate::requests::reproduction::{Claim, Options, Section, each, spread};

/// A workload on a machine, over rates.
struct Scene<'a> {
    title: String,
    machine: &'a Machine,
    tasks: Vec<Task>,
    roles: Vec<Role>,
    rates: Vec<f64>,
    systems: Vec<System>,
}

/// What a point gave, a figure for each seed.
#[derive(Clone, Debug, Default)]
struct Point {
    attained: Vec<f64>,
    /// As `laxity-requests` counts: every token in time.
    met: Vec<f64>,
    latency: Vec<f64>,
}

/// Points of a scene, by system and rate.
type Grid = Vec<Vec<Point>>;

fn grid(scene: &Scene<'_>, options: &Options) -> Grid {
    let mut points = Vec::new();
    for system in 0..scene.systems.len() {
        for rate in 0..scene.rates.len() {
            points.extend(options.seeds.iter().map(|seed| (system, rate, *seed)));
        }
    }
    let lasts = lasts(options);
    let results = each(&points, options, |(system, rate, seed)| {
        let streams = tasks::together(&scene.tasks, scene.rates[*rate], lasts);
        let asked = tasks::requests(&streams, *seed);
        let system = &scene.systems[*system];
        let outcome = world::run(scene.machine, system, &scene.roles, None, &asked).outcome;
        [
            world::attainment(&outcome, |_| true),
            outcome.met(|_| true).unwrap_or(100.0),
            world::latency_s(&outcome),
        ]
    });
    let mut grid = vec![vec![Point::default(); scene.rates.len()]; scene.systems.len()];
    for ((system, rate, _), [attained, met, latency]) in points.into_iter().zip(results) {
        let point = &mut grid[system][rate];
        point.attained.push(attained);
        point.met.push(met);
        point.latency.push(latency);
    }
    grid
}

fn table(scene: &Scene<'_>, grid: &Grid, what: &str, of: impl Fn(&Point) -> &Vec<f64>) -> Section {
    let mut head = strings(&["requests/s"]);
    head.extend(scene.rates.iter().map(|rate| format!("{rate:.0}")));
    let row = |(system, points): (&System, &Vec<Point>)| {
        let mut row = strings(&[system.name()]);
        row.extend(points.iter().map(|point| spread(of(point))));
        row
    };
    Section {
        title: format!("{}: {what}", scene.title),
        head,
        rows: scene.systems.iter().zip(grid).map(row).collect(),
        notes: String::new(),
    }
}

/// Claims of figure 3 in one scene.
fn claims(scene: &Scene<'_>, grid: &Grid, paper: &str) -> Vec<Claim> {
    let position = |wanted: fn(&System) -> bool| scene.systems.iter().position(wanted);
    let robin = position(|s| matches!(s, System::RoundRobin(LineOrder::Fcfs)));
    let own = position(|s| matches!(s, System::HyperFlexis(_)));
    let (Some(robin), Some(own)) = (robin, own) else {
        return Vec::new();
    };
    let at = |system: usize, rate: usize| mean(&grid[system][rate].attained);
    let rates = || 0..scene.rates.len();
    let regime = format!(
        "{}; {} instances, ratio {}, {:.0} to {:.0} requests/s",
        scene.title,
        scene.roles.len(),
        scene.machine.ratio,
        scene.rates[0],
        scene.rates[scene.rates.len() - 1]
    );
    let least = rates()
        .map(|rate| at(own, rate) - at(robin, rate))
        .fold(f64::INFINITY, f64::min);
    let past: Vec<usize> = rates().filter(|rate| at(robin, *rate) < 90.0).collect();
    let ratio = |system: usize, rate: usize| at(system, rate) / at(robin, rate).max(0.1);
    let ratios: Vec<f64> = past.iter().map(|rate| ratio(own, *rate)).collect();
    let fair: Vec<usize> = (0..scene.systems.len())
        .filter(|system| scene.systems[*system].is_fair_baseline())
        .collect();
    let best = fair
        .iter()
        .map(|system| {
            let all: Vec<f64> = past.iter().map(|rate| at(*system, *rate)).collect();
            (mean(&all), *system)
        })
        .max_by(|x, y| x.0.total_cmp(&y.0));
    let own_past = mean(&past.iter().map(|rate| at(own, *rate)).collect::<Vec<_>>());
    let baseline = best.filter(|_| !past.is_empty()).map_or_else(
        || "–".to_owned(),
        |(best, system)| {
            let name = scene.systems[system].name();
            format!("past the knee: {name} {best:.1} %, HyperFlexis {own_past:.1} %")
        },
    );
    let smallest = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let largest = ratios.iter().copied().fold(0.0, f64::max);
    let here = if ratios.is_empty() {
        "round robin stays above 90 %".to_owned()
    } else {
        format!("{smallest:.2} to {largest:.2} ×")
    };
    let latency = |system: usize, rate: usize| mean(&grid[system][rate].latency);
    let shorter = rates()
        .map(|rate| 1.0 - latency(own, rate) / latency(robin, rate))
        .fold(f64::NEG_INFINITY, f64::max);
    let best_latency = fair
        .iter()
        .map(|system| {
            let all = rates().map(|rate| 1.0 - latency(*system, rate) / latency(robin, rate));
            (all.fold(f64::NEG_INFINITY, f64::max), *system)
        })
        .max_by(|x, y| x.0.total_cmp(&y.0));
    vec![
        Claim {
            says: "attainment at least that of round robin at every rate".to_owned(),
            paper: "yes (figures 3 to 5)".to_owned(),
            here: format!("at worst {least:+.1} points"),
            regime: regime.clone(),
            baseline: String::new(),
            // Two systems in which all is in time differ by a request or two.
            holds: least >= -0.25,
        },
        Claim {
            says: "attainment over that of round robin past the knee (below 90 %)".to_owned(),
            paper: paper.to_owned(),
            here,
            regime: regime.clone(),
            baseline,
            holds: !ratios.is_empty() && smallest > 1.2,
        },
        Claim {
            says: "mean latency below that of round robin".to_owned(),
            paper: "up to 23.0 % (figure 3)".to_owned(),
            here: format!("up to {:.1} %", shorter * 100.0),
            regime,
            baseline: best_latency.map_or_else(String::new, |(best, system)| {
                let name = scene.systems[system].name();
                format!("{name}: up to {:.1} %", best * 100.0)
            }),
            holds: shorter > 0.0,
        },
    ]
}

/// All systems, the paper's other baselines among them.
fn with_theirs(machine: &Machine) -> Vec<System> {
    let mut systems = System::all(machine);
    systems.extend(System::of_the_paper());
    systems
}

/// Attainment over the paper's other baselines: those of figure 3 where there are several tasks,
/// those of figure 7 where there is one.
fn theirs(scene: &Scene<'_>, grid: &Grid) -> Vec<Claim> {
    let own = scene
        .systems
        .iter()
        .position(|system| matches!(system, System::HyperFlexis(_)));
    let Some(own) = own else { return Vec::new() };
    let at = |system: usize, rate: usize| mean(&grid[system][rate].attained);
    let paper = |system: &System| match (system, scene.tasks.len()) {
        (System::Scorpio, 4) => Some("up to 1.73 × (figure 3)"),
        (System::Scorpio, 2) => Some("up to 2.14 × (figure 3)"),
        (System::Aladdin | System::Annealing, 1) => Some("as good at least (figure 7)"),
        _ => None,
    };
    let mut claims = Vec::new();
    for (index, system) in scene.systems.iter().enumerate() {
        let Some(paper) = paper(system) else { continue };
        let rates = || 0..scene.rates.len();
        let points: Vec<f64> = rates()
            .map(|rate| at(own, rate) - at(index, rate))
            .collect();
        let ratios = rates().map(|rate| at(own, rate) / at(index, rate).max(0.1));
        let worst = points.iter().copied().fold(f64::INFINITY, f64::min);
        claims.push(Claim {
            says: format!("attainment at least that of {}", system.name()),
            paper: paper.to_owned(),
            here: format!(
                "at worst {worst:+.1} points; up to {:.2} ×",
                ratios.fold(0.0, f64::max)
            ),
            regime: format!("{}; ratio {}", scene.title, scene.machine.ratio),
            baseline: String::new(),
            holds: worst >= -0.25,
        });
    }
    claims
}

fn thin(rates: &[f64], options: &Options) -> Vec<f64> {
    if options.quick {
        vec![rates[0], rates[rates.len() - 1]]
    } else {
        rates.to_vec()
    }
}

pub(super) fn run(machines: &[Machine; 2], options: &Options) -> Found {
    let whole = vec![Role::Whole; 2];
    let pools = vec![Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
    let four = &tasks::FOUR[..];
    let mut scenes = Vec::new();
    for machine in machines {
        scenes.push((
            Scene {
                title: format!("Four tasks, ratio {:.1}", machine.ratio),
                machine,
                tasks: four.to_vec(),
                roles: whole.clone(),
                rates: thin(&[40.0, 60.0, 80.0, 90.0, 100.0, 110.0, 120.0], options),
                systems: with_theirs(machine),
            },
            "up to 2.60 × (figure 3)",
        ));
    }
    let machine = &machines[0];
    let scene = |title: &str, tasks: Vec<Task>, roles: &Vec<Role>, rates: &[f64]| Scene {
        title: title.to_owned(),
        machine,
        tasks,
        roles: roles.clone(),
        rates: thin(rates, options),
        // The paper has no more than round robin over pools.
        systems: if roles.contains(&Role::Decode) {
            System::all(machine)
        } else {
            with_theirs(machine)
        },
    };
    scenes.push((
        scene(
            "Two tasks",
            tasks::TWO.to_vec(),
            &whole,
            &[40.0, 60.0, 80.0, 90.0, 100.0, 120.0],
        ),
        "up to 1.23 × (figure 3)",
    ));
    scenes.push((
        scene(
            "Four tasks, a tenth of the time per token",
            tasks::tight(),
            &whole,
            &[40.0, 60.0, 80.0, 90.0, 100.0, 110.0, 120.0],
        ),
        "not in the paper",
    ));
    scenes.push((
        scene(
            "One task (figure 7)",
            tasks::ONE.to_vec(),
            &whole,
            &[10.0, 20.0, 30.0, 35.0, 40.0, 45.0],
        ),
        "against ALADDIN and SA only (figure 7)",
    ));
    scenes.push((
        scene(
            "Two prefill and two decode instances, four tasks",
            four.to_vec(),
            &pools,
            &[60.0, 80.0, 100.0, 120.0, 140.0, 160.0],
        ),
        "up to 2.54 × (figure 4)",
    ));
    let mut found = Found::default();
    for (scene, paper) in &scenes {
        let grid = grid(scene, options);
        let attained = table(scene, &grid, "attainment, %", |point| &point.attained);
        found.sections.push(attained);
        let met = "requests of which every token was in time, %";
        if scene.title.contains("tenth") {
            let met = table(scene, &grid, met, |point| &point.met);
            found.sections.push(met);
        }
        let latency = table(scene, &grid, "mean latency, s", |point| &point.latency);
        found.sections.push(latency);
        found.claims.extend(claims(scene, &grid, paper));
        found.claims.extend(theirs(scene, &grid));
    }
    found
}
