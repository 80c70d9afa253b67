//! The report as one self-contained HTML page without scripts or external files, in light and dark.

mod figures;

use std::ops::Deref;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::palette::{self, Look};
use super::view::View as Shown;
use super::{Report, capacity, metric, table};
use crate::run::Timing;

const STYLE: &str = "
:root { color-scheme: light dark; --grid: #8883; --soft: #8886; --card: #8881; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 84rem; margin: 2.5rem auto; padding: 0 \
1.2rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0; } h2 { font-size: 1.25rem; margin: 0 0 .2rem; }
h3 { font-size: 1rem; margin: .9rem 0 .1rem; font-weight: 600; }
p.question { font-size: 1.15rem; margin: .4rem 0 1rem; } p.lead { opacity: .75; margin: .3rem 0; \
max-width: 62rem; }
ul.findings { border-left: .25rem solid #d92d20; background: var(--card); padding: .8rem 1rem \
.8rem 2.2rem; border-radius: 0 .5rem .5rem 0; }
section { border: 1px solid var(--grid); border-radius: .7rem; padding: 1.1rem 1.2rem; margin: \
1.4rem 0; overflow-x: auto; }
section > p { margin: .1rem 0 .5rem; font-size: .92rem; opacity: .75; max-width: 62rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); \
gap: .6rem 1.6rem; }
figure { margin: 0; } figcaption { font-weight: 600; font-size: .95rem; text-align: center; }
figcaption small { font-weight: 400; opacity: .7; }
svg { width: 100%; height: auto; } svg polyline { stroke-linejoin: round; stroke-linecap: round; }
svg polyline, svg polygon, svg circle, svg rect { transition: opacity .15s; }
.legend { display: flex; flex-wrap: wrap; gap: .15rem 1.1rem; margin: .3rem 0 .6rem; font-size: \
.92rem; }
.legend span { cursor: default; white-space: nowrap; }
.legend svg { width: 28px; height: 10px; margin-right: .45em; vertical-align: middle; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; font-size: \
.92rem; }
th, td { padding: .22rem .7rem; text-align: right; border-bottom: 1px solid var(--grid); \
white-space: nowrap; }
th { font-weight: 600; vertical-align: bottom; } td.name, th.name { text-align: left; }
details { margin: 1rem 0; } summary { cursor: pointer; font-weight: 600; } pre { overflow-x: auto; \
font-size: .85rem; }
p.failed { border-left: .25rem solid #d92d20; padding-left: .8rem; }
@media print { section { break-inside: avoid; } body { margin: 0; max-width: none; } }
";

/// Values that all parts of a page share.
struct View<'a> {
    shown: Shown<'a>,
    looks: Vec<Look>,
}

impl<'a> Deref for View<'a> {
    type Target = Shown<'a>;

    fn deref(&self) -> &Shown<'a> {
        &self.shown
    }
}

impl View<'_> {
    /// Returns the names of the variants with their line symbols.
    fn legend(&self) -> Markup {
        let names = self.report.plan.variants.iter().map(|v| v.name.as_str());
        html! {
            div.legend {
                @for (number, (name, look)) in names.zip(&self.looks).enumerate() {
                    span class=(palette::class(number)) { (PreEscaped(palette::key(look))) (name) }
                }
            }
        }
    }

    fn variants(&self) -> std::ops::Range<usize> {
        0..self.report.plan.variants.len()
    }
}

/// Returns the page, with timings of this machine if `with_timing` is set.
pub fn page(report: &Report, with_timing: bool) -> String {
    let looks = palette::looks(report);
    let colours = palette::style(&looks);
    let view = View { shown: Shown::whole(report), looks };
    let plan = &report.plan;
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (plan.title) }
                style { (PreEscaped(STYLE)) (PreEscaped(colours)) }
            }
            body {
                h1 { (plan.title) }
                p.question { (plan.question) }
                (findings(report))
                p.lead { (lead(report)) }
                (incomplete(report))
                @for metric in &plan.plot.metrics { (figures::over_x(&view, metric)) }
                (times(&view))
                (distributions(&view))
                (numbers(report))
                @if with_timing { (timing(&report.timing)) }
                (background(report))
            }
        }
    };
    page.into_string()
}

/// Returns the distributions, folded if there are many panels.
fn distributions(view: &View<'_>) -> Markup {
    let body = figures::distributions(view);
    html! {
        @if view.panels.len() > 6 {
            details {
                summary { "Distributions of " (view.panels.len()) " points" }
                (body)
            }
        } @else { (body) }
    }
}

/// Returns the tables of the report, which are the same as on a terminal.
fn numbers(report: &Report) -> Markup {
    html! {
        @if !report.runs.is_empty() {
            section {
                h2 { "Numbers" }
                p { "Means over seeds ± half a 95 % confidence interval." }
                @for sheet in table::all(report) { (sheet.html()) }
            }
        }
    }
}

/// Returns the tables that show whether capacity or the network decides.
fn times(view: &View<'_>) -> Markup {
    let report = view.report;
    html! {
        @if !report.runs.is_empty() {
            section {
                h2 { "Where the time goes" }
                p { "Means over seeds, and the attainment without contention. Where that is low, \
                    no network policy can help." }
                @for sheet in capacity::capacity(view) { (sheet.html()) }
            }
        }
    }
}

fn findings(report: &Report) -> Markup {
    let findings = report.findings();
    html! {
        @if !findings.is_empty() { ul.findings { @for finding in &findings { li { (finding) } } } }
    }
}

fn lead(report: &Report) -> String {
    let plan = &report.plan;
    let seeds = match plan.seeds.len() {
        1 => "one seed: how far noise alone goes is unknown".to_owned(),
        count => {
            format!("{count} seeds each; bands and ± are 95 % confidence intervals over them")
        }
    };
    let requests = report
        .runs
        .iter()
        .map(|run| (metric::REQUESTS.of)(&run.outcome))
        .fold(f64::INFINITY, f64::min);
    let requests = if requests.is_finite() {
        format!(" A run counts at least {requests:.0} requests after its warm-up.")
    } else {
        String::new()
    };
    let count = |count: usize, what: &str| match count {
        1 => format!("1 {what}"),
        count => format!("{count} {what}s"),
    };
    format!(
        "{}, {}, {seeds}.{requests} All variants see the same arrivals. Simulated: \
         virtual time, the scheduler's own decision code.",
        count(report.points.len(), "point"),
        count(plan.variants.len(), "variant"),
    )
}

fn incomplete(report: &Report) -> Markup {
    html! {
        @if report.missing > 0 {
            p.failed { (report.missing) " runs of this plan have not been run: what follows is \
                about the others." }
        }
        @if !report.failures.is_empty() {
            div {
                p.failed { (report.failures.len()) " runs failed; what follows is about the \
                    others." }
                ul { @for (failure, count) in report.kinds_of_failures() {
                    li { (count) " × " (failure.problem) ", first " (report.failure_name(failure)) }
                } }
            }
        }
    }
}

fn timing(timing: &Timing) -> Markup {
    html! { section { h2 { "What it took" } p { (timing) } } }
}

/// Returns the information that is needed to repeat the runs.
fn background(report: &Report) -> Markup {
    html! {
        details open {
            summary { "The plan" }
            p.lead {
                "laxity-sim " (env!("CARGO_PKG_VERSION")) ". Fields that the plan does not name \
                 have "
                "their defaults. The same plan gives the same numbers on any machine: save this as \
                 a file "
                "and run it with " code { "laxity sim run FILE" } "."
            }
            pre { (report.plan.to_toml()) }
        }
    }
}
