//! Tables of a report, each with a caption that describes its numbers.

use super::metric::{
    ATTAINMENT, COLLECTIVE_MEAN, COLLECTIVE_P99, COLLECTIVE_STRETCH, EARLINESS_MEAN, KV_REUSE,
    LATENESS_MEAN, Metric, P2D, PORT_BUSY_MEAN, PRUNED, QUEUE, TTFT_MEAN, TTFT_P50, TTFT_P99,
};
use super::sheet::{Cell, Sheet};
use super::view::View;
use super::{Estimate, Report, Sustained};
use crate::reproduce;

pub(super) struct Column {
    heading: &'static str,
    metric: &'static Metric,
}

const fn column(heading: &'static str, metric: &'static Metric) -> Column {
    Column { heading, metric }
}

pub(super) static TTFT: [Column; 4] = [
    column("in time, %", &ATTAINMENT),
    column("mean TTFT, ms", &TTFT_MEAN),
    column("median, ms", &TTFT_P50),
    column("p99, ms", &TTFT_P99),
];

pub(super) static COLLECTIVES: [Column; 3] = [
    column("mean collective, ms", &COLLECTIVE_MEAN),
    column("over that alone", &COLLECTIVE_STRETCH),
    column("p99, ms", &COLLECTIVE_P99),
];

pub(super) static EARLINESS: [Column; 3] = [
    column("in time, %", &ATTAINMENT),
    column("these early by, ms", &EARLINESS_MEAN),
    column("the others late by, ms", &LATENESS_MEAN),
];

pub(super) static OVERVIEW: [Column; 14] = [
    column("in time %", &ATTAINMENT),
    column("TTFT ms", &TTFT_MEAN),
    column("p50", &TTFT_P50),
    column("p99", &TTFT_P99),
    column("collect. ms", &COLLECTIVE_MEAN),
    column("p99", &COLLECTIVE_P99),
    column("stretch", &COLLECTIVE_STRETCH),
    column("early ms", &EARLINESS_MEAN),
    column("late ms", &LATENESS_MEAN),
    column("queue ms", &QUEUE),
    column("KV ms", &KV_REUSE),
    column("P2D ms", &P2D),
    column("NICs %", &PORT_BUSY_MEAN),
    column("pruned", &PRUNED),
];

/// Returns tables of attainment: one per panel, or a single one without a horizontal axis.
pub(super) fn attainment(view: &View<'_>) -> Vec<Sheet> {
    match view.report.plan.x() {
        Some(_) => over_x(view, &ATTAINMENT),
        None => vec![attainment_by_point(view)],
    }
}

/// Returns a table of a metric for each panel, or none without a horizontal axis.
pub(super) fn over_x(view: &View<'_>, metric: &Metric) -> Vec<Sheet> {
    let report = view.report;
    let Some(x) = report.plan.x() else { return Vec::new() };
    let column = |point: usize| {
        if metric.key == ATTAINMENT.key {
            return shares(view, point);
        }
        let value = |variant| with_interval(report.estimate(point, variant, metric), metric);
        view.variants().map(|variant| Cell::Text(value(variant))).collect()
    };
    let tables = view.panels.iter().map(|panel| {
        let mut heading = vec![report.plan.axes[x].label.as_str().into()];
        heading.extend(panel.points.iter().map(|&p| Cell::name(report.x_name(p))));
        let columns: Vec<Vec<Cell>> = panel.points.iter().map(|&point| column(point)).collect();
        let mut table = Sheet::new(1, heading);
        for (row, variant) in view.variants().enumerate() {
            let mut cells = vec![view.name(variant)];
            cells.extend(columns.iter().map(|column| column[row].clone()));
            table.add(cells);
        }
        table.about(&panel.name, &metric.title())
    });
    tables.collect()
}

/// Returns the attainment table of a plan without a horizontal axis. Each of several points is a
/// row. A single point has a row for each variant.
fn attainment_by_point(view: &View<'_>) -> Sheet {
    let mut table;
    if let [panel] = view.panels.as_slice() {
        table = Sheet::new(1, vec!["variant".into(), "in time, %".into()]);
        let column = shares(view, panel.points[0]);
        for (variant, share) in view.variants().zip(column) {
            table.add(vec![view.name(variant), share]);
        }
    } else {
        let mut heading = vec!["in time, %".into()];
        heading.extend(view.variants().map(|variant| view.name(variant)));
        table = Sheet::new(1, heading);
        for panel in &view.panels {
            let mut cells = vec![Cell::name(&panel.name)];
            cells.extend(shares(view, panel.points[0]));
            table.add(cells);
        }
    }
    table
}

/// Returns the attainment of each variant at a point. The best variants are bold, except the bound.
/// If all show the same value, none is bold.
fn shares(view: &View<'_>, point: usize) -> Vec<Cell> {
    let estimates: Vec<Option<Estimate>> =
        view.variants().map(|variant| view.report.estimate(point, variant, &ATTAINMENT)).collect();
    let mean = |e: &Option<Estimate>| e.map(|e| ATTAINMENT.unit.shown(e.mean));
    let policies = || {
        let all = view.variants().zip(&estimates);
        all.filter(|(variant, _)| !view.report.is_bound(*variant)).map(|(_, estimate)| estimate)
    };
    let best = policies()
        .filter(|e| e.is_some())
        .max_by(|a, b| {
            let of = |e: &Option<Estimate>| e.map_or(f64::NAN, |e| e.mean);
            of(a).total_cmp(&of(b))
        })
        .and_then(mean);
    let differ = policies().any(|e| mean(e) != best);
    view.variants()
        .zip(&estimates)
        .map(|(variant, estimate)| {
            let text = with_interval(*estimate, &ATTAINMENT);
            if differ && mean(estimate) == best && !view.report.is_bound(variant) {
                Cell::Best(text)
            } else {
                Cell::Text(text)
            }
        })
        .collect()
}

fn with_interval(estimate: Option<Estimate>, metric: &Metric) -> String {
    let Some(estimate) = estimate else { return "–".to_owned() };
    let mean = metric.unit.shown(estimate.mean);
    match estimate.half_width {
        None => mean,
        Some(half) => {
            let decimals = metric.unit.decimals(estimate.mean);
            format!("{mean} ± {:.decimals$}", half * metric.unit.scale())
        }
    }
}

pub(super) fn details(view: &View<'_>, columns: &[Column]) -> Vec<Sheet> {
    let mut tables = Vec::new();
    for panel in &view.panels {
        let point = view.report.telling(panel);
        let mut heading = vec!["variant".into()];
        heading.extend(columns.iter().map(|column| column.heading.into()));
        let mut table = Sheet::new(1, heading);
        for variant in view.variants() {
            let mut cells = vec![view.name(variant)];
            cells.extend(columns.iter().map(|column| {
                let estimate = view.report.estimate(point, variant, column.metric);
                Cell::Text(with_interval(estimate, column.metric))
            }));
            table.add(cells);
        }
        tables.push(table.about(&panel.name, &view.at(point)));
    }
    tables
}

const MEASURES: [&str; 2] = ["karuna", "two_class"];

/// Returns tables of the request rates with 90 % and 50 % attainment.
pub(super) fn sustained(view: &View<'_>) -> Result<Vec<Sheet>, String> {
    let report = view.report;
    let x = report.plan.rate_axis().ok_or("the plan does not vary the request rate")?;
    let measures: Vec<(&str, usize)> =
        MEASURES.iter().filter_map(|name| Some((*name, view.variant(name)?))).collect();
    let mut heading = vec!["variant".into()];
    for share in ["at 90 %", "at 50 %"] {
        heading.push(share.into());
        let over = measures.iter().map(|(name, _)| format!("over {name}'s"));
        heading.extend(over.map(Cell::Text));
    }
    let tables = view.panels.iter().map(|panel| {
        let rates = [0.9, 0.5].map(|asked| report.sustained_with(asked, panel));
        let mut table = Sheet::new(1, heading.clone());
        for variant in view.variants() {
            let mut cells = vec![view.name(variant)];
            for rates in &rates {
                let rate = |variant: usize| rates[variant].rate.as_ref();
                let shown = rate(variant).map_or_else(|| "–".to_owned(), Sustained::to_string);
                cells.push(Cell::Text(shown));
                for &(_, measure) in &measures {
                    cells.push(Cell::Text(ratio(rate(variant), rate(measure))));
                }
            }
            table.add(cells);
        }
        table.about(&panel.name, &report.plan.axes[x].label)
    });
    Ok(tables.collect())
}

/// Returns the ratio of two rates, or a bound where one lies outside of the plan's rates.
fn ratio(own: Option<&Sustained>, other: Option<&Sustained>) -> String {
    use Sustained::{AboveHighest as Above, At, BelowLowest as Below};
    let (Some(own), Some(other)) = (own, other) else { return "–".to_owned() };
    let sign = match (own, other) {
        (At(_), At(_)) => "",
        (Above(_), At(_) | Below(_)) | (At(_), Below(_)) => "> ",
        (Below(_), At(_) | Above(_)) | (At(_), Above(_)) => "< ",
        (Above(_), Above(_)) | (Below(_), Below(_)) => return "–".to_owned(),
    };
    format!("{sign}{:.2}", own.bound() / other.bound())
}

pub(super) fn against(view: &View<'_>) -> Result<Sheet, String> {
    let report = view.report;
    let reference = report.plan.reference().ok_or("there is nothing to compare")?;
    let mut comparisons = report.comparisons();
    comparisons.retain(|c| {
        let mut points = view.panels.iter().flat_map(|panel| &panel.points);
        points.any(|&point| point == c.point)
    });
    let unknown = comparisons.iter().any(|c| c.difference.half_width.is_none());
    let mut heading = vec!["against", "points better", "equal", "worse"];
    if unknown {
        heading.push("one seed");
    }
    heading.extend(["least", "most"]);
    let mut table = Sheet::new(1, heading.into_iter().map(Cell::from).collect());
    for other in view.variants() {
        if !comparisons.iter().any(|c| c.other == other) {
            continue;
        }
        let tally = report.tally(&comparisons, other);
        let extreme = |found: Option<(Estimate, usize)>| {
            Cell::Text(found.map_or_else(String::new, |(difference, point)| {
                let mut text = signed(difference.mean * 100.0);
                if let Some(half) = difference.half_width {
                    text += &format!(" ± {:.1}", half * 100.0);
                }
                if report.points.len() > 1 {
                    text += &format!(" ({})", report.point_name(point));
                }
                text
            }))
        };
        let mut cells = vec![view.name(other)];
        let mut counts = vec![tally.above, tally.level, tally.below];
        counts.extend(unknown.then_some(tally.unknown));
        cells.extend(counts.iter().map(|count| Cell::Text(count.to_string())));
        cells.extend([extreme(tally.worst), extreme(tally.best)]);
        table.add(cells);
    }
    let name = &report.plan.variants[reference].name;
    let caption = format!(
        "{name} less the others, attainment in percentage points (differences by seed, 95 % \
         confidence)"
    );
    Ok(table.about("", &caption))
}

/// Returns a number with one decimal and a sign, except zero.
fn signed(value: f64) -> String {
    match format!("{value:+.1}").as_str() {
        "+0.0" | "-0.0" => "0.0".to_owned(),
        text => text.replace('-', "−"),
    }
}

/// Returns a table of the paper's numbers and those of this report.
pub(super) fn paper(report: &Report) -> Result<Sheet, String> {
    let findings = reproduce::check(report);
    if findings.is_empty() {
        return Err("the plan stands for no figure of a paper".to_owned());
    }
    let several = report.panels().len() > 1;
    let mut heading = vec!["the paper says"];
    if several {
        heading.push("where");
    }
    let names = heading.len();
    heading.extend(["paper", "here", "holds", "laxity here"]);
    let mut table = Sheet::new(names, heading.into_iter().map(Cell::from).collect());
    for finding in findings {
        let mut cells = vec![Cell::Text(finding.says.clone())];
        if several {
            cells.push(Cell::name(&finding.panel));
        }
        let (here, laxity) = (finding.shown(finding.here), finding.shown(finding.laxity));
        let holds = finding.holds().to_owned();
        cells.extend([finding.paper_shown(), here, holds, laxity].map(Cell::Text));
        table.add(cells);
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_of_rates_beyond_the_plan_s_is_a_bound() {
        let at = |rate| Some(Sustained::At(Estimate::of(&[rate]).expect("a value")));
        let shown = |a: Option<Sustained>, b: Option<Sustained>| ratio(a.as_ref(), b.as_ref());
        let (above, below) = (Sustained::AboveHighest(4.0), Sustained::BelowLowest(0.5));
        assert_eq!(shown(at(3.0), at(2.0)), "1.50");
        assert_eq!(shown(Some(above), at(2.0)), "> 2.00");
        assert_eq!(shown(at(2.0), Some(above)), "< 0.50");
        assert_eq!(shown(at(2.0), Some(below)), "> 4.00");
        assert_eq!(shown(Some(below), at(2.0)), "< 0.25");
        assert_eq!(shown(Some(below), Some(below)), "–");
        assert_eq!(shown(None, at(2.0)), "–");
    }

    #[test]
    fn differences_have_a_sign_unless_they_are_none() {
        assert_eq!(signed(1.26), "+1.3");
        assert_eq!(signed(-1.26), "−1.3");
        assert_eq!(signed(-0.04), "0.0");
    }
}
