//! Judges capacity before policies: where a request's time goes and how busy units are at each
//! rate, and where no network policy can serve enough requests in time.

use super::metric::{
    ATTAINMENT, ATTAINMENT_OWN, COLLECTIVE, COMPUTE, KV_REUSE, Metric, P2D, PORT_BUSY_MEAN, QUEUE,
    UNITS_BUSY,
};
use super::sheet::{Cell, Sheet};
use super::sustained::ASKED;
use super::view::View;
use super::{Panel, Report};

static COLUMNS: [(&str, &Metric); 9] = [
    ("in time, %", &ATTAINMENT),
    ("by own TTFT, %", &ATTAINMENT_OWN),
    ("queue, ms", &QUEUE),
    ("compute, ms", &COMPUTE),
    ("collectives, ms", &COLLECTIVE),
    ("KV reuse, ms", &KV_REUSE),
    ("P2D, ms", &P2D),
    ("units busy, %", &UNITS_BUSY),
    ("NICs in use, %", &PORT_BUSY_MEAN),
];

/// Units that are busy for a smaller share of the time do not lack capacity.
const IDLE_BELOW: f64 = 0.6;

/// Returns a table for each panel with a row for each point, or a single table if there is no
/// horizontal axis.
pub(super) fn capacity(view: &View<'_>) -> Vec<Sheet> {
    let report = view.report;
    let variant = report.plan.reference().unwrap_or(0);
    let caption = format!("time of a request under {}", report.plan.variants[variant].name);
    let Some(x) = report.plan.x() else {
        let mut table = Sheet::new(1, heading(report, "where"));
        for panel in &view.panels {
            let name = panel.name.as_str();
            let name = if name.is_empty() { "all requests" } else { name };
            table.add(row(report, name, panel.points[0], variant));
        }
        return vec![table.about("", &caption)];
    };
    let tables = view.panels.iter().map(|panel| {
        let mut table = Sheet::new(1, heading(report, &report.plan.axes[x].label));
        for &point in &panel.points {
            table.add(row(report, report.x_name(point), point, variant));
        }
        table.about(&panel.name, &caption)
    });
    tables.collect()
}

fn heading(report: &Report, first: &str) -> Vec<Cell> {
    let mut heading = vec![first.into()];
    heading.extend(bound(report).map(|_| "no contention, %".into()));
    heading.extend(COLUMNS.iter().map(|(heading, _)| (*heading).into()));
    heading
}

fn row(report: &Report, name: &str, point: usize, variant: usize) -> Vec<Cell> {
    let value = |variant: usize, metric: &Metric| {
        let estimate = report.estimate(point, variant, metric);
        let text = estimate.map(|estimate| metric.unit.shown(estimate.mean));
        Cell::Text(text.unwrap_or_else(|| "–".to_owned()))
    };
    let mut cells = vec![Cell::name(name)];
    cells.extend(bound(report).map(|bound| value(bound, &ATTAINMENT)));
    cells.extend(COLUMNS.iter().map(|(_, metric)| value(variant, metric)));
    cells
}

/// Returns the variant without contention, if the plan has one.
fn bound(report: &Report) -> Option<usize> {
    (0..report.plan.variants.len()).find(|&variant| report.is_bound(variant))
}

/// Returns a warning for each panel with points at which even the bound is below the asked
/// attainment.
pub(super) fn warnings(report: &Report) -> Vec<String> {
    let Some(bound) = bound(report) else { return Vec::new() };
    report.panels().iter().filter_map(|panel| warning(report, panel, bound)).collect()
}

fn warning(report: &Report, panel: &Panel, bound: usize) -> Option<String> {
    let mean = |point, metric| report.estimate(point, bound, metric).map(|e| e.mean);
    let low = |&point: &usize| mean(point, &ATTAINMENT).is_some_and(|share| share < ASKED);
    let points: Vec<usize> = panel.points.iter().copied().filter(low).collect();
    let range = |metric: &'static Metric| {
        let values = || points.iter().filter_map(|&point| mean(point, metric));
        let (least, most) = (values().fold(1.0, f64::min), values().fold(0.0, f64::max));
        let (low, high) = (format!("{:.0}", least * 100.0), format!("{:.0}", most * 100.0));
        (most, if low == high { format!("{low} %") } else { format!("{low} to {high} %") })
    };
    if points.is_empty() {
        return None;
    }
    let names: Vec<&str> = points.iter().map(|&point| report.x_name(point)).collect();
    let at = names.join(", ");
    let place = match (panel.name.as_str(), at.as_str()) {
        ("", "") => String::new(),
        ("", at) => format!("at {at}: "),
        (panel, "") => format!("{panel}: "),
        (panel, at) => format!("{panel}, at {at}: "),
    };
    let (_, in_time) = range(&ATTAINMENT);
    let (busiest, busy) = range(&UNITS_BUSY);
    let cause = if busiest < IDLE_BELOW {
        "; units are idle so long that batches, the objective or the placement decide, not load"
    } else {
        ""
    };
    Some(format!(
        "Capacity: {place}no network policy can serve {:.0} % in time. Without contention \
         {in_time} are, and units are busy {busy} of the time{cause}.",
        ASKED * 100.0
    ))
}
