//! A map of where policies differ, as one SVG file: a row for each value of one axis, a column for
//! each value of another, and the difference to static classes in each cell.
//!
//! If the plan also varies the request rate, a cell shows one rate: the one where static classes
//! serve nearest to [`TELLING`] of the requests in time. No other policy has a say in that choice,
//! so noise in the others does not choose the cells that flatter them.

use super::paired::{Verdict, difference};
use super::{Estimate, Report, metric};

const TELLING: f64 = 0.8;
const STRONG: f64 = 0.15;

const CELL: (usize, usize) = (118, 30);
const LEFT: usize = 190;
const ABOVE: usize = 64;
const EDGE: usize = 14;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    #[error("a map needs two axes besides the request rate, rows and columns; this plan has {0}")]
    Axes(usize),
    #[error("a map compares policies with `{0}`; the plan needs it and one more")]
    Variants(&'static str),
}

const AGAINST: &str = "two_class";

#[derive(Clone, Debug, PartialEq)]
struct MapCell {
    /// Difference in attainment to [`AGAINST`], seed by seed.
    gain: Estimate,
    /// Attainment of [`AGAINST`], and the share of the NICs' rate in use then.
    against: f64,
    busy: f64,
    /// Attainment without contention, if the plan has that variant.
    bound: Option<f64>,
}

pub fn map(report: &Report) -> Result<String, MapError> {
    let (axes, rate) = (&report.plan.axes, report.plan.rate_axis());
    let sides: Vec<usize> = (0..axes.len()).filter(|&axis| Some(axis) != rate).collect();
    let &[rows, columns] = &sides[..] else { return Err(MapError::Axes(sides.len())) };
    let variants = &report.plan.variants;
    let against = variants.iter().position(|variant| variant.name == AGAINST);
    let others: Vec<usize> = (0..variants.len())
        .filter(|&variant| Some(variant) != against && !report.is_bound(variant))
        .collect();
    let Some(against) = against.filter(|_| !others.is_empty()) else {
        return Err(MapError::Variants(AGAINST));
    };
    let grid = (axes[rows].values.len(), axes[columns].values.len());
    let height = ABOVE + grid.0 * CELL.1;
    let (width, whole) = (LEFT + grid.1 * CELL.0 + EDGE, others.len() * height + EDGE);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {whole}\" \
         width=\"{width}\" height=\"{whole}\" font-family=\"sans-serif\" font-size=\"13\" \
         fill=\"#1d2127\">\n<rect width=\"{width}\" height=\"{whole}\" fill=\"#ffffff\"/>\n"
    );
    for (panel, &other) in others.iter().enumerate() {
        let top = panel * height;
        let title = format!(
            "{} less {AGAINST}: requests in time, in percentage points",
            variants[other].name
        );
        label(&mut text, (EDGE, top + 22), "start", "bold", &title);
        label(&mut text, (LEFT - 10, top + ABOVE - 8), "end", "normal", &axes[columns].label);
        for (column, value) in axes[columns].values.iter().enumerate() {
            let middle = LEFT + column * CELL.0 + CELL.0 / 2;
            label(&mut text, (middle, top + ABOVE - 8), "middle", "normal", &value.name);
        }
        for (row, value) in axes[rows].values.iter().enumerate() {
            let y = top + ABOVE + row * CELL.1;
            label(&mut text, (LEFT - 10, y + 20), "end", "normal", &value.name);
            for column in 0..grid.1 {
                let at = (LEFT + column * CELL.0, y);
                let chosen = [(rows, row), (columns, column)];
                draw(&mut text, at, cell(report, chosen, (against, other)).as_ref());
            }
        }
    }
    text += "</svg>\n";
    Ok(text)
}

/// Returns the cell at the chosen values of two axes, or `None` if nothing was run there.
fn cell(
    report: &Report,
    chosen: [(usize, usize); 2],
    (against, other): (usize, usize),
) -> Option<MapCell> {
    let attainment = |point| report.estimate(point, against, &metric::ATTAINMENT);
    let here = |point: &usize| {
        let choices = &report.points[*point].choices;
        chosen.iter().all(|&(axis, value)| choices[axis] == value)
    };
    let distance = |point: &usize| {
        attainment(*point).map_or(f64::INFINITY, |estimate| (estimate.mean - TELLING).abs())
    };
    let point =
        (0..report.points.len()).filter(here).min_by(|a, b| distance(a).total_cmp(&distance(b)))?;
    let values = |variant| report.values(point, variant, &metric::ATTAINMENT);
    Some(MapCell {
        gain: difference(&values(other), &values(against))?,
        against: attainment(point)?.mean,
        busy: report.estimate(point, against, &metric::PORT_BUSY_MEAN)?.mean,
        bound: (0..report.plan.variants.len())
            .find(|&variant| report.is_bound(variant))
            .and_then(|bound| report.estimate(point, bound, &metric::ATTAINMENT))
            .map(|bound| bound.mean),
    })
}

fn draw(text: &mut String, (x, y): (usize, usize), cell: Option<&MapCell>) {
    let (width, height) = (CELL.0 - 3, CELL.1 - 3);
    let rect = format!("<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"");
    let Some(cell) = cell else {
        *text += &format!("{rect} fill=\"#eeeeee\"/>\n");
        return;
    };
    let Estimate { mean, half_width, .. } = cell.gain;
    let told = half_width.map_or(String::new(), |half| format!(" ± {:.1}", 100.0 * half));
    let certain = matches!(Verdict::of(&cell.gain), Verdict::Above | Verdict::Below);
    let shown = format!("{:+.1}{told}", 100.0 * mean);
    let colour = colour(mean);
    *text += &format!("{rect} fill=\"{colour}\"><title>{shown} points</title></rect>\n");
    let weight = if certain { "bold" } else { "normal" };
    label(text, (x + width / 2, y + 13), "middle", weight, &shown);
    let of = |share: f64| format!("{:.0}", 100.0 * share);
    let bound = cell.bound.map_or(String::new(), |bound| format!(" of {}", of(bound)));
    let small = format!(
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" font-size=\"9\" fill=\"#444b55\">{}{bound} \
         %, NICs {} %</text>\n",
        x + width / 2,
        y + 24,
        of(cell.against),
        of(cell.busy),
    );
    *text += &small;
}

fn label(text: &mut String, (x, y): (usize, usize), anchor: &str, weight: &str, what: &str) {
    let what = what.replace('&', "&amp;").replace('<', "&lt;");
    *text += &format!(
        "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\" \
         font-weight=\"{weight}\">{what}</text>\n"
    );
}

/// Returns a colour between white and a strong one: red above zero, blue below.
fn colour(gain: f64) -> String {
    let strong = if gain > 0.0 { [217.0, 45.0, 32.0] } else { [31.0, 111.0, 235.0] };
    let share = (gain.abs() / STRONG).min(1.0) * 0.75;
    let [r, g, b] = strong.map(|part: f64| (255.0 + (part - 255.0) * share).round() as u8);
    format!("#{r:02x}{g:02x}{b:02x}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::Outcome;
    use crate::plan::Plan;
    use crate::run::{RunOptions, run};
    use crate::scenario::Scenario;

    /// Static classes serve 95, 75 and 20 % of the requests at the three rates. `laxity` serves 10
    /// points more on slow NICs.
    fn fake(scenario: &Scenario) -> Result<Outcome, String> {
        let base = match scenario.workload.rate_per_gpu {
            rate if rate < 0.5 => 0.95,
            rate if rate < 1.5 => 0.75,
            _ => 0.2,
        };
        let laxity = scenario.policy.kind.name() == "laxity" && scenario.cluster.nic_gbps < 75.0;
        let more = if laxity { 0.1 } else { 0.0 };
        Ok(Outcome { attainment: base + more, port_busy_mean: 0.4, ..Outcome::default() })
    }

    fn report(axes: &[&str], policies: &[&str]) -> Report {
        let mut plan = Plan::empty("map", "Map");
        let policies: Vec<String> = policies.iter().map(|&name| name.to_owned()).collect();
        plan.compare(&policies).expect("policies");
        for axis in axes {
            plan.vary(axis).expect("an axis");
        }
        plan.seeds = vec![1, 2];
        run(&plan, &fake, &RunOptions::default()).expect("it runs")
    }

    const AXES: [&str; 3] =
        ["serving.decode_tp=1,2", "cluster.nic_gbps=50,100", "workload.rate_per_gpu=0.25,1,2"];

    #[test]
    fn a_cell_shows_the_rate_at_which_static_classes_begin_to_fail() {
        let report = report(&AXES, &["two_class", "laxity"]);
        let at = |column| cell(&report, [(0, 0), (1, column)], (0, 1)).expect("it was run");
        assert_eq!(at(0).against, 0.75);
        assert!((at(0).gain.mean - 0.1).abs() < 1e-9 && at(1).gain.mean == 0.0);
        let svg = map(&report).expect("three axes");
        assert!(svg.contains("+10.0 ± 0.0") && svg.contains("75 %, NICs 40 %"), "{svg}");
        assert_eq!(svg.matches("<title>").count(), 4);
    }

    #[test]
    fn what_a_map_needs_is_said() {
        let without = map(&report(&AXES[1..], &["two_class", "laxity"]));
        assert_eq!(without, Err(MapError::Axes(1)));
        let alone = map(&report(&AXES, &["mfs", "laxity"]));
        assert_eq!(alone, Err(MapError::Variants("two_class")));
    }
}
