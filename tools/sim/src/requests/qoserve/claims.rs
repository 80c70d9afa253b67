//! The paper's claims beside what came out.

use super::{Bench, Figures};
use crate::requests::reproduction::{Claim, spread};

/// A figure of a policy under a calibration.
fn of<'a>(all: &'a [Figures], setting: usize, name: &str) -> &'a Figures {
    all.iter()
        .find(|f| f.setting == setting && f.name == name)
        .expect("each claim is about what was run")
}

/// Ratios of two policies' figures, seed by seed.
fn ratio(one: &Figures, other: &Figures) -> Vec<f64> {
    let pairs = one.values[0].iter().zip(&other.values[0]);
    pairs.map(|(one, other)| one / other).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// The best of the policies whose names begin so: the most, or the least.
fn best<'a>(all: &'a [Figures], setting: usize, start: &str, most: bool) -> &'a Figures {
    let mut like: Vec<&Figures> = all
        .iter()
        .filter(|f| f.setting == setting && f.name.starts_with(start))
        .filter(|f| !f.name.contains('+'))
        .collect();
    like.sort_by(|a, b| a.mean(0).total_cmp(&b.mean(0)));
    if most { like[like.len() - 1] } else { like[0] }
}

fn shown(figures: &Figures) -> String {
    format!("{} {}", figures.name, spread(&figures.values[0]))
}

/// The best fixed chunk of each order, in words.
fn fixed(all: &[Figures], setting: usize, most: bool) -> String {
    ["EDF-", "FCFS-", "SRPF-"]
        .map(|start| shown(best(all, setting, start, most)))
        .join(", ")
}

/// What came out.
#[derive(Clone, Copy)]
pub(super) struct Found<'a> {
    pub(super) capacity: &'a [Figures],
    pub(super) high: &'a [Figures],
    pub(super) overload: &'a [Figures],
    pub(super) silo: &'a [Figures],
    pub(super) prefill: &'a [Figures],
    /// At the highest rate.
    pub(super) alphas: &'a [Figures],
}

/// All claims, under each calibration.
pub(super) fn claims(bench: &Bench<'_>, found: &Found<'_>) -> Vec<Claim> {
    let Found {
        capacity,
        high,
        overload,
        silo,
        prefill,
        alphas,
    } = *found;
    let mut all = Vec::new();
    for (at, setting) in bench.settings.iter().enumerate() {
        let regime =
            |what: &str| format!("{what}, {}, calibration {}", bench.trace, setting.name());
        let mut add =
            |says: &str, paper: &str, here: String, holds, baseline: String, what: &str| {
                all.push(Claim {
                    says: says.to_owned(),
                    paper: paper.to_owned(),
                    here,
                    regime: regime(what),
                    baseline,
                    holds,
                });
            };
        let full = of(capacity, at, "DC+ER+HP");
        let chunks = ratio(of(capacity, at, "DC"), of(capacity, at, "EDF-256"));
        add(
            "dynamic chunks raise the capacity of EDF",
            "1.20× (≥ 1.15×)",
            format!("{}×", spread(&chunks)),
            mean(&chunks) >= 1.15,
            shown(best(capacity, at, "EDF-", true)),
            "capacity",
        );
        let whole = ratio(full, of(capacity, at, "FCFS-256"));
        add(
            "all of QoServe serves more than Sarathi-FCFS",
            "1.5× to 2.4×",
            format!("{}×", spread(&whole)),
            mean(&whole) >= 1.5,
            fixed(capacity, at, true),
            "capacity",
        );
        let over_best = ratio(full, best(capacity, at, "EDF-", true));
        add(
            "all of QoServe serves more than EDF at its best fixed chunk",
            "not compared",
            format!("{}×", spread(&over_best)),
            mean(&over_best) > 1.02,
            shown(of(capacity, at, "EDF-512+ER")),
            "capacity",
        );
        let steps = ["EDF-256", "DC", "DC+ER", "DC+ER+HP"].map(|name| of(high, at, name).mean(0));
        add(
            "each part lowers the violations at 6 requests per second, to 20 % at most",
            "100 > 74 > 26 > 16 %",
            steps.map(|late| format!("{late:.1}")).join(" > ") + " %",
            steps.is_sorted_by(|a, b| a > b) && steps[3] <= 20.0,
            format!(
                "{}, {}",
                fixed(high, at, false),
                shown(of(high, at, "EDF-512+ER"))
            ),
            "6 requests per second",
        );
        let base = ["FCFS-256", "EDF-256"].map(|name| of(overload, at, name));
        add(
            "under overload FCFS and EDF fail most requests",
            "82 and 84 % (80 to 88 %)",
            format!(
                "{} and {} %",
                spread(&base[0].values[0]),
                spread(&base[1].values[0])
            ),
            base.iter().all(|f| (80.0..=88.0).contains(&f.mean(0))),
            fixed(overload, at, false),
            "2 and 5 requests per second in turns",
        );
        let qoserve = of(overload, at, "QoServe");
        add(
            "under overload QoServe fails one in ten, and no important one",
            "8.6 %, important 0 % (≤ 10 %, ≤ 0.5 %)",
            format!(
                "{} %, important {} %",
                spread(&qoserve.values[0]),
                spread(&qoserve.values[1])
            ),
            qoserve.mean(0) <= 10.0 && qoserve.mean(1) <= 0.5,
            shown(of(overload, at, "EDF-512+ER")),
            "2 and 5 requests per second in turns",
        );
        let hints = [qoserve, of(overload, at, "QoServe, no hints")];
        add(
            "hints move what is late from important requests to the others",
            "important 0 % (≤ 0.5 %)",
            format!(
                "important {} % with hints, {} % without; others {} and {} %",
                spread(&hints[0].values[1]),
                spread(&hints[1].values[1]),
                spread(&hints[0].values[5]),
                spread(&hints[1].values[5]),
            ),
            hints[0].mean(1) <= 0.5 && hints[0].mean(1) < hints[1].mean(1),
            shown(of(overload, at, "EDF-512+ER")),
            "2 and 5 requests per second in turns",
        );
        let (silos, shared) = (of(silo, at, "silos"), of(silo, at, "QoServe"));
        add(
            "one cluster needs fewer GPUs than silos",
            "10 instead of 13 (−23 %)",
            format!("{:.0} instead of {:.0}", shared.mean(0), silos.mean(0)),
            shared.mean(0) <= 0.8 * silos.mean(0) && shared.mean(4) <= 1.0,
            format!(
                "a shared cluster of {} at its best chunk needs {:.0}",
                best(capacity, at, "EDF-", true).name,
                (35.0 / best(capacity, at, "EDF-", true).mean(0)).ceil()
            ),
            "35 requests per second",
        );
        let pooled = of(prefill, at, "QoServe");
        let over = ["FCFS-8192", "EDF-8192"].map(|name| ratio(pooled, of(prefill, at, name)));
        add(
            "on prefill replicas of a disaggregated cluster QoServe serves more than FCFS and EDF",
            "more, by less than without disaggregation",
            format!("{}× and {}×", spread(&over[0]), spread(&over[1])),
            over.iter().all(|ratios| mean(ratios) > 1.0)
                && mean(&over[0]) < mean(&whole)
                && mean(&over[1]) < mean(&ratio(full, of(capacity, at, "EDF-256"))),
            format!(
                "{}, {}",
                shown(of(prefill, at, "SRPF-8192")),
                shown(of(prefill, at, "EDF-8192+ER"))
            ),
            "prefill capacity, conversations",
        );
        let (none, eight) = (of(alphas, at, "α = 0 ms"), of(alphas, at, "α = 8 ms"));
        let pair = |column: usize| {
            [none, eight]
                .map(|figures| format!("{:.1}", figures.mean(column)))
                .join(" → ")
        };
        add(
            "a larger α lowers what is late and the median latency, and long requests pay for it",
            "so at 8 ms (figure 14, no numbers)",
            format!(
                "α 0 → 8 ms: late {} %, median {} s, long requests {} %",
                pair(0),
                pair(2),
                pair(1)
            ),
            eight.mean(0) < none.mean(0)
                && eight.mean(2) < none.mean(2)
                && eight.mean(1) > none.mean(1),
            shown(best(alphas, at, "α", false)),
            "6 requests per second",
        );
    }
    all
}
