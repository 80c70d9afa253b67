//! Plots of the page: one section each, with a panel for every combination of the other axes.

use maud::{Markup, PreEscaped, html};

use super::super::metric::{ATTAINMENT, Metric, Unit};
use super::super::plot::{self, Marks, PlotLine, Scale};
use super::super::pooled::{self, Curve, quantile};
use super::super::sustained::ASKED;
use super::super::{Estimate, Panel};
use super::View;
use crate::outcome::{Distribution, Outcome};

/// Sizes of a plot among several and of a single plot.
const SIZES: [(u32, u32); 2] = [(620, 370), (1000, 470)];

fn size(view: &View<'_>) -> (u32, u32) {
    SIZES[usize::from(view.panels.len() == 1)]
}

/// Returns a section with a plot for each panel, or nothing if there are no plots.
fn section(title: &str, explanation: &str, legend: &Markup, plots: &[(String, String)]) -> Markup {
    html! {
        @if !plots.is_empty() {
            section {
                h2 { (title) }
                p { (explanation) }
                (legend)
                div.panels {
                    @for (caption, svg) in plots {
                        figure {
                            @if !caption.is_empty() { figcaption { (caption) } }
                            (PreEscaped(svg))
                        }
                    }
                }
            }
        }
    }
}

/// Returns a caption with the panel's name and the point that is shown.
fn caption(view: &View<'_>, panel: &Panel, point: usize) -> String {
    let here = view.at(point);
    let parts = [panel.name.as_str(), here.as_str()];
    parts.join(" ").trim().to_owned()
}

/// Plots a metric over the horizontal axis. Returns nothing if there is none.
pub(super) fn over_x(view: &View<'_>, metric: &Metric) -> Markup {
    let mut title = metric.label.to_owned();
    if let Some(first) = title.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    let Some(x) = view.report.plan.x() else {
        return html! {};
    };
    let ends = |panel: &Panel| {
        let first = panel.points.first().map_or(0.0, |&p| view.report.x_of(p));
        let last = panel.points.last().map_or(1.0, |&p| view.report.x_of(p));
        (first, last)
    };
    // All panels share one vertical scale.
    let all: Vec<Estimate> = view
        .panels
        .iter()
        .flat_map(|panel| panel.points.iter())
        .flat_map(|&point| view.variants().map(move |variant| (point, variant)))
        .filter_map(|(point, variant)| view.report.estimate(point, variant, metric))
        .collect();
    let y = scale_of(metric, &all);
    let plots: Vec<(String, String)> = view
        .panels
        .iter()
        .map(|panel| {
            let lines: Vec<PlotLine> =
                view.variants().map(|variant| line(view, panel, variant, metric)).collect();
            let x = Scale::linear(view.report.plan.axes[x].label.as_str(), ends(panel));
            let marks =
                Marks { level: (metric.key == ATTAINMENT.key).then_some(ASKED), upright: None };
            let svg = plot::lines(size(view), (&x, &y), marks, &view.looks, &lines);
            (panel.name.clone(), svg)
        })
        .collect();
    let explanation = if metric.key == ATTAINMENT.key {
        "Share of the requests whose first token came before its deadline; the line across is at \
         90 %. \
         Means over seeds, bands 95 % confidence. Point at a name to see it alone."
    } else {
        "Means over seeds, bands 95 % confidence."
    };
    section(&title, explanation, &view.legend(), &plots)
}

fn line(view: &View<'_>, panel: &Panel, variant: usize, metric: &Metric) -> PlotLine {
    let estimates: Vec<(f64, Estimate)> = panel
        .points
        .iter()
        .filter_map(|&point| {
            let estimate = view.report.estimate(point, variant, metric)?;
            Some((view.report.x_of(point), estimate))
        })
        .collect();
    PlotLine {
        number: variant,
        points: estimates.iter().map(|(x, e)| (*x, e.mean)).collect(),
        band: estimates
            .iter()
            .filter(|(_, e)| e.half_width.is_some())
            .map(|(x, e)| (*x, e.low(), e.high()))
            .collect(),
        marked: true,
    }
}

fn scale_of(metric: &Metric, all: &[Estimate]) -> Scale {
    if metric.unit == Unit::Share {
        return Scale::share(metric.title());
    }
    let least = all.iter().map(|e| e.mean).fold(f64::INFINITY, f64::min);
    let most = all.iter().map(Estimate::high).fold(0.0, f64::max);
    Scale { factor: metric.unit.scale(), ..Scale::around(metric.title(), least, most, 25.0) }
}

/// Plots cumulative distributions at the point of each panel where variants differ most.
pub(super) fn distributions(view: &View<'_>) -> Markup {
    let mut first =
        "Arrival to the last byte of KV cache at decode; cumulative, all seeds together."
            .to_owned();
    if view.report.plan.x().is_some() && view.report.plan.plot.at.is_none() {
        first += " Here and below, of each panel the point where attainment differs most.";
    }
    html! {
        (cumulative(view, "Time to first token", &first,
            "TTFT, ms", |o| &o.ttft_ms))
        (cumulative(view, "Collective completion time",
            "From the start of a collective to its end: it blocks the computation of its layer. \
             Cumulative.",
            "collective, ms", |o| &o.collective_ms))
        (earliness(view))
    }
}

fn cumulative(
    view: &View<'_>,
    title: &str,
    explanation: &str,
    label: &str,
    of: fn(&Outcome) -> &Distribution,
) -> Markup {
    let mut plots = Vec::new();
    for panel in &view.panels {
        let point = view.report.telling(panel);
        let curves: Vec<Curve> =
            view.variants().map(|variant| pooled::curve(view.report, point, variant, of)).collect();
        let shown: Vec<&Curve> = curves.iter().filter(|c| !c.is_empty()).collect();
        // Without contention collectives take no time, which a logarithmic scale cannot show.
        let low = |c: &&Curve| Some(quantile(c, 0.01)).filter(|&low| low > 0.0);
        let least = shown.iter().filter_map(low).fold(f64::INFINITY, f64::min);
        let most = shown.iter().map(|c| quantile(c, 0.995)).fold(0.0, f64::max);
        if shown.is_empty() || most <= 0.0 {
            continue;
        }
        let x = Scale::around(label, least, most, 20.0);
        plots.push((
            caption(view, panel, point),
            cumulative_plot(view, &x, Marks::default(), &curves),
        ));
    }
    section(title, explanation, &view.legend(), &plots)
}

fn cumulative_plot(view: &View<'_>, x: &Scale, marks: Marks, curves: &[Curve]) -> String {
    let lines: Vec<PlotLine> = curves
        .iter()
        .enumerate()
        .map(|(number, curve)| PlotLine {
            number,
            points: clipped(curve, x.range),
            ..PlotLine::default()
        })
        .collect();
    let y = Scale::share("share of the sample, %");
    plot::lines(size(view), (x, &y), marks, &view.looks, &lines)
}

/// Returns the part of a curve inside a range, with the neighbouring points.
fn clipped(curve: &Curve, (low, high): (f64, f64)) -> Curve {
    let first = curve.partition_point(|p| p.0 < low).saturating_sub(1);
    let last = curve.partition_point(|p| p.0 <= high).min(curve.len());
    curve.get(first..last).unwrap_or_default().to_vec()
}

fn earliness(view: &View<'_>) -> Markup {
    let mut plots = Vec::new();
    for panel in &view.panels {
        let point = view.report.telling(panel);
        let curves: Vec<Curve> = view
            .variants()
            .map(|variant| {
                let early = pooled::curve(view.report, point, variant, |o| &o.earliness_ms);
                let late = pooled::curve(view.report, point, variant, |o| &o.lateness_ms);
                let in_time = view.report.estimate(point, variant, &ATTAINMENT);
                joined(&late, &early, in_time.map_or(1.0, |e| e.mean))
            })
            .collect();
        let most = curves.iter().map(|c| quantile(c, 0.99)).fold(0.0, f64::max);
        if most <= 0.0 {
            continue;
        }
        let least = curves.iter().map(|c| quantile(c, 0.02)).fold(0.0, f64::min).max(-most);
        let x = Scale::linear("deadline − first token, ms", (least, most));
        let marks = Marks { level: None, upright: Some(0.0) };
        plots.push((caption(view, panel, point), cumulative_plot(view, &x, marks, &curves)));
    }
    section(
        "Earliness",
        "Time left at the first token; left of 0 the deadline was missed. A policy that is just in \
         time rises \
         just right of 0. Cumulative.",
        &view.legend(),
        &plots,
    )
}

/// Joins the curves of lateness and earliness into one of time left.
fn joined(late: &Curve, early: &Curve, in_time: f64) -> Curve {
    let missed = 1.0 - in_time;
    let late = late.iter().rev().map(|&(value, share)| (-value, missed * (1.0 - share)));
    let early = early.iter().map(|&(value, share)| (value, missed + in_time * share));
    late.chain(early).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_curve_of_time_left_runs_from_the_latest_to_the_earliest() {
        let late = vec![(1.0, 0.0), (5.0, 1.0)];
        let early = vec![(2.0, 0.0), (8.0, 1.0)];
        let curve = joined(&late, &early, 0.75);
        assert_eq!(curve, [(-5.0, 0.0), (-1.0, 0.25), (2.0, 0.25), (8.0, 1.0)]);
    }

    #[test]
    fn clipping_keeps_what_lies_in_the_range() {
        let curve: Curve = (0..10).map(|i| (f64::from(i), f64::from(i) / 9.0)).collect();
        let kept = clipped(&curve, (2.5, 6.0));
        assert_eq!(kept.first().expect("some").0, 2.0);
        assert_eq!(kept.last().expect("some").0, 6.0);
        assert!(clipped(&Curve::new(), (0.0, 1.0)).is_empty());
    }
}
