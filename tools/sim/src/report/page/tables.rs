//! The page's tables: what the paper says, the reference against the others, and the numbers.

use maud::{Markup, html};

use super::super::paired::Verdict;
use super::super::summary::Comparison;
use super::super::table::DETAILS;
use super::super::{Estimate, Report};
use super::View;
use crate::reproduce;

/// Beside the paper's claims, if the plan is one of its figures.
pub(super) fn paper(report: &Report) -> Markup {
    let findings = reproduce::check(report);
    html! {
        @if !findings.is_empty() {
            section {
                h2 { "Beside the paper" }
                p {
                    "What MFS says about this figure, and what came out here. Ratios of attainment \
                     are taken at rates "
                    "at which at least half of the first tokens are in time."
                }
                table {
                    thead { tr {
                        th.name { "claim" } th.name { "where" } th { "paper" } th { "here" } th { "laxity here" }
                    } }
                    tbody { @for finding in &findings { tr {
                        td.name { (finding.says) } td.name { (finding.panel) } td { (finding.paper_shown()) }
                        td { (finding.shown(finding.here)) } td { (finding.shown(finding.laxity)) }
                    } } }
                }
            }
        }
    }
}

/// Attainment of the reference less that of each other variant, point by point.
pub(super) fn comparison(view: &View<'_>) -> Markup {
    let report = view.report;
    let Some(reference) = report.plan.reference() else {
        return html! {};
    };
    let comparisons = report.comparisons();
    let others: Vec<usize> = view
        .variants()
        .filter(|&other| comparisons.iter().any(|c| c.other == other))
        .collect();
    let name = |variant: usize| report.plan.variants[variant].name.as_str();
    html! {
        @if !comparisons.is_empty() {
            section {
                h2 { (name(reference)) " against the others" }
                p {
                    "Attainment of " (name(reference)) " less that of the other, in percentage \
                     points, on the same "
                    "arrivals, seed by seed, with 95 % confidence. Green: better beyond noise. \
                     Red: worse beyond noise; "
                    "by chance alone, one in forty comparisons would be."
                }
                table {
                    thead { tr {
                        @if report.points.len() > 1 { th.name { "point" } }
                        @for &other in &others { th { (name(other)) } }
                    } }
                    tbody {
                        @for point in 0..report.points.len() { tr {
                            @if report.points.len() > 1 { td.name { (report.point_name(point)) } }
                            @for &other in &others {
                                (difference(comparisons.iter().find(|c| c.point == point && c.other == other)))
                            }
                        } }
                    }
                }
                (tally(view, &comparisons, &others))
            }
        }
    }
}

fn difference(comparison: Option<&Comparison>) -> Markup {
    let Some(comparison) = comparison else {
        return html! { td { "–" } };
    };
    let class = match comparison.standing {
        Verdict::Above => "above",
        Verdict::Below => "below",
        Verdict::Level | Verdict::Unknown => "",
    };
    html! {
        td class=(class) {
            (format!("{:+.1}", comparison.difference.mean * 100.0))
            @if let Some(half) = comparison.difference.half_width {
                small { (format!(" ± {:.1}", half * 100.0)) }
            }
        }
    }
}

fn tally(view: &View<'_>, comparisons: &[Comparison], others: &[usize]) -> Markup {
    let report = view.report;
    let extreme = |found: Option<(Estimate, usize)>| match found {
        Some((difference, point)) if report.points.len() > 1 => format!(
            "{:+.1} ({})",
            difference.mean * 100.0,
            report.point_name(point)
        ),
        Some((difference, _)) => format!("{:+.1}", difference.mean * 100.0),
        None => "–".to_owned(),
    };
    html! {
        table {
            thead { tr {
                th.name { "against" } th { "points better" } th { "no difference" } th { "worse" }
                th { "one seed" } th { "least" } th { "most" }
            } }
            tbody { @for &other in others {
                @let tally = report.tally(comparisons, other);
                tr {
                    td.name { (report.plan.variants[other].name) }
                    td { (tally.above) } td { (tally.level) }
                    td class=[(tally.below > 0).then_some("below")] { (tally.below) }
                    td { (tally.unknown) }
                    td { (extreme(tally.worst)) } td { (extreme(tally.best)) }
                }
            } }
        }
    }
}

/// Means of many metrics at the point of each panel where variants differ most.
pub(super) fn numbers(view: &View<'_>) -> Markup {
    let report = view.report;
    let reference = report.plan.reference();
    html! {
        section {
            h2 { "Numbers" }
            p { "Means over seeds; ± is half a 95 % confidence interval. Of each panel, the point \
                that is plotted above." }
            @for panel in &view.panels {
                @let point = report.telling(panel);
                h3 { (report.point_name(point)) }
                table {
                    thead { tr {
                        th.name { "variant" }
                        @for metric in DETAILS { th { (metric.title()) } }
                    } }
                    tbody { @for variant in view.variants() {
                        tr class=[(reference == Some(variant)).then_some("reference")] {
                            td.name { (report.plan.variants[variant].name) }
                            @for metric in DETAILS {
                                td { @if let Some(estimate) = report.estimate(point, variant, metric) {
                                    (metric.unit.shown(estimate.mean))
                                    @if let Some(half) = estimate.half_width {
                                        small { " ± " (metric.unit.shown(half)) }
                                    }
                                } @else { "–" } }
                            }
                        }
                    } }
                }
            }
        }
    }
}
