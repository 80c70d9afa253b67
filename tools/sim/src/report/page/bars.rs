//! The page's bars: what is compared without a horizontal axis, in rows.

use maud::{Markup, html};

use super::super::Estimate;
use super::super::metric::{Metric, Unit};
use super::super::palette::{Look, STAGES, Set};
use super::super::plot::{self, Row, Scale};
use super::super::sustained::Sustained;
use super::figures::{caption, scale_of, section, size};
use super::{View, legend};
use crate::outcome::Waiting;

/// A plot of bars: its caption, its scale, its rows.
struct Bars {
    caption: String,
    x: Scale,
    rows: Vec<Row>,
}

/// Draws them with as much room behind the bars as any of them needs, so that they compare.
fn draw(view: &View<'_>, (set, looks): (Set, &[Look]), bars: &[Bars]) -> Vec<(String, String)> {
    let room = bars
        .iter()
        .flat_map(|bars| &bars.rows)
        .map(|row| row.text.chars().count())
        .max()
        .unwrap_or(0);
    bars.iter()
        .filter(|bars| !bars.rows.is_empty())
        .map(|bars| {
            let svg = plot::rows(size(view).0, &bars.x, (set, looks), room, &bars.rows);
            (bars.caption.clone(), svg)
        })
        .collect()
}

/// A metric of every variant at every point.
pub(super) fn of_metric(view: &View<'_>, metric: &Metric, title: &str) -> Markup {
    let mut all = Vec::new();
    let mut bars = Vec::new();
    for panel in &view.panels {
        let rows = view
            .variants()
            .filter_map(|variant| {
                let estimate = view.report.estimate(panel.points[0], variant, metric)?;
                all.push(estimate);
                let mut text = metric.unit.shown(estimate.mean);
                if let Some(half) = estimate.half_width {
                    text += &format!(" ± {}", metric.unit.shown(half));
                }
                Some(Row {
                    name: view.report.plan.variants[variant].name.clone(),
                    parts: vec![(variant, estimate.mean)],
                    whisker: Some((estimate.low(), estimate.high())),
                    text,
                })
            })
            .collect();
        bars.push((panel.name.clone(), rows));
    }
    // Bars begin at zero, and the same length means the same in every panel.
    let mut x = scale_of(metric, &all);
    if x.logarithmic {
        x = Scale {
            factor: x.factor,
            ..Scale::linear(x.label, (0.0, x.range.1 * 1.05))
        };
    }
    let bars: Vec<Bars> = bars
        .into_iter()
        .map(|(caption, rows)| Bars {
            caption,
            x: x.clone(),
            rows,
        })
        .collect();
    let explanation = "Means over seeds; whiskers are 95 % confidence intervals.";
    let plots = draw(view, (Set::Variants, &view.looks), &bars);
    section(view, title, explanation, &html! {}, &plots)
}

/// The request rate that each variant serves with 90 % in time.
pub(super) fn sustained(view: &View<'_>) -> Markup {
    let row = |found: super::super::summary::Rate| {
        let rate = found.rate?;
        let mut text = rate.to_string();
        if let Some(ratio) = found.over_reference.filter(|r| (r - 1.0).abs() > 1e-9) {
            text += &format!("  ({ratio:.2} ×)");
        }
        Some(Row {
            name: view.report.plan.variants[found.variant].name.clone(),
            parts: vec![(found.variant, rate.bound())],
            whisker: match rate {
                Sustained::At(estimate) => Some((estimate.low(), estimate.high())),
                Sustained::BelowLowest(_) | Sustained::AboveHighest(_) => None,
            },
            text,
        })
    };
    let bars: Vec<Bars> = view
        .panels
        .iter()
        .map(|panel| {
            let rates = panel.points.iter().map(|&p| view.report.x_of(p));
            Bars {
                caption: panel.name.clone(),
                x: Scale::linear(
                    "requests/s per prefill GPU",
                    (0.0, rates.fold(0.0, f64::max)),
                ),
                rows: view
                    .report
                    .sustained(panel)
                    .into_iter()
                    .filter_map(row)
                    .collect(),
            }
        })
        .collect();
    let reference = view.report.plan.reference();
    let explanation = format!(
        "Where attainment first falls below 90 %, by interpolation between the rates of the plan. \
         “<” and \
         “>”: below the lowest or above the highest of them.{}",
        reference.map_or_else(String::new, |reference| format!(
            " In brackets: over that of {}.",
            view.report.plan.variants[reference].name
        ))
    );
    let plots = draw(view, (Set::Variants, &view.looks), &bars);
    section(view, "Rate at 90 %", &explanation, &html! {}, &plots)
}

/// A part of a request's time: what it is called, and how to read it off.
type Part = (&'static str, fn(&Waiting) -> f64);

/// The parts of a request's time, in their order.
const PARTS: [Part; 5] = [
    ("waiting for a batch", |w| w.queue),
    ("stalled for reused KV", |w| w.kv_reuse),
    ("in collectives", |w| w.collective),
    ("computing", |w| w.compute),
    ("KV to decode", |w| w.p2d),
];

/// Where a request's time goes.
pub(super) fn waiting(view: &View<'_>) -> Markup {
    let mut bars = Vec::new();
    for panel in &view.panels {
        let point = view.report.telling(panel);
        let row = |variant| {
            let runs: Vec<&Waiting> = view
                .report
                .runs_of(point, variant)
                .map(|run| &run.outcome.waiting_ms)
                .collect();
            let mut parts = Vec::new();
            for (number, (_, of)) in PARTS.iter().enumerate() {
                let values: Vec<f64> = runs.iter().map(|waiting| of(waiting)).collect();
                parts.push((number, Estimate::of(&values)?.mean));
            }
            Some(Row {
                name: view.report.plan.variants[variant].name.clone(),
                text: Unit::Millis.shown(total(&parts)),
                parts,
                whisker: None,
            })
        };
        let rows: Vec<Row> = view.variants().filter_map(row).collect();
        let most = rows.iter().map(|row| total(&row.parts)).fold(0.0, f64::max);
        bars.push(Bars {
            caption: caption(view, panel, point),
            x: Scale::linear("mean time of a request, ms", (0.0, most * 1.02)),
            rows,
        });
    }
    section(
        view,
        "Where the time goes",
        "Means over requests, from arrival to the first token.",
        &legend(Set::Stages, PARTS.iter().map(|(name, _)| *name), &STAGES),
        &draw(view, (Set::Stages, &STAGES), &bars),
    )
}

fn total(parts: &[(usize, f64)]) -> f64 {
    parts.iter().map(|(_, length)| length).sum()
}
