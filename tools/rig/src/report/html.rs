//! The report as one self-contained page: no script, nothing fetched, light and dark.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::measure::{LabReport, PolicyRun};
use super::plot;

const STYLE: &str = "
:root { color-scheme: light dark; --grid: #8884; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 82rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 0 0 .3rem; }
p.lead { margin-top: .3rem; opacity: .8; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1.2rem; }
section { border: 1px solid var(--soft); border-radius: .6rem; padding: 1rem; overflow-x: auto; }
section p { margin: .2rem 0 .6rem; font-size: .9rem; opacity: .8; }
svg { width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--soft); }
th:first-child, td:first-child { text-align: left; } tr.best td { font-weight: 600; } td { \
white-space: nowrap; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .4rem 0; font-size: .9rem; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: .2em; margin-right: \
.4em; }
div.wide { overflow-x: auto; }
details { margin-top: 1.5rem; } pre { overflow-x: auto; font-size: .85rem; }
";

pub(super) fn legend<'a>(names: impl IntoIterator<Item = &'a str>) -> Markup {
    html! {
        div.legend {
            @for (number, name) in names.into_iter().enumerate() {
                span { i style=(format!("background:{}", plot::css_colour(number))) {} (name) }
            }
        }
    }
}

fn policies(report: &LabReport) -> Markup {
    legend(report.runs.iter().map(|run| run.policy.as_str()))
}

/// A sample's percentiles as the points of its distribution.
pub(super) fn cumulative(percentiles: &[f64]) -> Vec<(f64, f64)> {
    percentiles
        .iter()
        .enumerate()
        .map(|(i, &value)| (value, i as f64 / 100.0))
        .collect()
}

/// Far enough right to see where every run's tail is, not its last sample.
fn right_end(report: &LabReport, of: impl Fn(&PolicyRun) -> f64) -> f64 {
    report.runs.iter().map(of).fold(0.0, f64::max)
}

pub(super) fn figure(title: &str, explanation: &str, legend: &Markup, svg: String) -> Markup {
    html! {
        section { h2 { (title) } p { (explanation) } (legend) (PreEscaped(svg)) }
    }
}

/// The page.
#[must_use]
pub fn html(report: &LabReport) -> String {
    page(
        "Laxity lab",
        &lead(report),
        &html! {
            (numbers(report))
            div.plots { (figures(report)) }
            (background(report))
        },
    )
}

/// A page around what it says.
pub(super) fn page(title: &str, lead: &str, body: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { (title) }
                p.lead { (lead) }
                (body)
            }
        }
    };
    page.into_string()
}

fn lead(report: &LabReport) -> String {
    let (config, workload) = (&report.config, &report.workload);
    format!(
        "{} requests over {:.0} s on {} prefill units of {} hosts and {} decode hosts, the same \
         for every policy (seed {}, arrivals {}). A request is in time if its first token comes \
         within {} × its own contention-free TTFT, {:.0} ms on average.",
        workload.statistics.requests,
        config.duration_s,
        config.units,
        config.ranks,
        config.decodes,
        config.seed,
        workload.arrivals_digest,
        config.slo_scale,
        workload.ideal_ttft_ms,
    )
}

fn numbers(report: &LabReport) -> Markup {
    let best = report
        .runs
        .iter()
        .map(|run| run.ttft_slo_attainment)
        .fold(0.0, f64::max);
    html! {
        table {
            thead { tr {
                th { "policy" } th { "in time" } th { "TTFT mean" } th { "p50" } th { "p99, ms" }
                th { "all-to-all mean" } th { "p99, ms" } th { "earliness" } th { "links" }
                th { "queued" } th { "KV stall" } th { "P2D tail, ms" }
                th { "unscheduled, ms" } th { "without permit, MB" }
            } }
            tbody {
                @for run in &report.runs {
                    tr class=[(run.ttft_slo_attainment >= best).then_some("best")] {
                        td { (run.policy) }
                        td { (format!("{:.1} %", run.ttft_slo_attainment * 100.0)) }
                        td { (format!("{:.0}", run.ttft_ms.mean)) }
                        td { (format!("{:.0}", run.ttft_ms.p50)) }
                        td { (format!("{:.0}", run.ttft_ms.p99)) }
                        td { (format!("{:.1}", run.collective_ms.mean)) }
                        td { (format!("{:.1}", run.collective_ms.p99)) }
                        td { (format!("{:.2}", run.earliness)) }
                        td { (format!("{:.0} %", run.link_utilisation * 100.0)) }
                        td { (format!("{:.0}", run.stages_ms.queued)) }
                        td { (format!("{:.1}", run.stages_ms.kv_reuse_stall)) }
                        td { (format!("{:.1}", run.stages_ms.p2d_tail)) }
                        td { (format!("{:.0}", run.unscheduled_ms)) }
                        td { (format!("{:.1}", run.bypassed_bytes as f64 / 1e6)) }
                    }
                }
            }
        }
    }
}

fn figures(report: &LabReport) -> Markup {
    let names: Vec<String> = report.runs.iter().map(|run| run.policy.clone()).collect();
    let attainment = vec![
        report
            .runs
            .iter()
            .map(|run| run.ttft_slo_attainment)
            .collect(),
    ];
    let series = |of: fn(&PolicyRun) -> &Vec<f64>| -> Vec<Vec<(f64, f64)>> {
        report.runs.iter().map(|run| cumulative(of(run))).collect()
    };
    let ttft_end = right_end(report, |run| run.ttft_ms.p99);
    let collective_end = right_end(report, |run| run.collective_ms.p99);
    let none = html! {};
    html! {
        (figure(
            "Requests in time",
            "Share of all requests whose first token came before its deadline.",
            &none,
            plot::bars("requests", &names, &attainment, false),
        ))
        (figure(
            "Time to first token",
            "Arrival to the last byte of KV cache at decode; cumulative.",
            &policies(report),
            plot::shares("TTFT, ms", "requests", (0.0, ttft_end), None,
                &series(|run| &run.percentiles.ttft_ms)),
        ))
        (figure(
            "Collectives",
            "Duration of an all-to-all phase at a rank, which blocks its layer; cumulative.",
            &policies(report),
            plot::shares("all-to-all, ms", "phases", (0.0, collective_end), None,
                &series(|run| &run.percentiles.collective_ms)),
        ))
        (figure(
            "Earliness",
            "Time left at the first token over the SLO; left of 0 the deadline was missed. \
             Cumulative.",
            &policies(report),
            plot::shares("(deadline − finish) / SLO", "requests", (-2.0, 1.0), Some(0.0),
                &series(|run| &run.percentiles.earliness)),
        ))
        (by_class(report, &names))
        (by_host(report))
    }
}

/// Shares of the bytes that the switch's ports sent, by class.
fn by_class(report: &LabReport, names: &[String]) -> Markup {
    let mut dscps: Vec<u8> = report.config.level_dscp.clone();
    dscps.dedup();
    dscps.extend([report.config.scavenger_dscp, 0]);
    let label = |dscp: &u8| match dscp {
        0 => "unmarked".to_owned(),
        dscp if *dscp == report.config.scavenger_dscp => format!("{dscp} (scavenger)"),
        dscp => dscp.to_string(),
    };
    let labels: Vec<String> = dscps.iter().map(label).collect();
    let share = |run: &PolicyRun, dscp: &u8| {
        let total = run.fabric_bytes.values().sum::<u64>().max(1) as f64;
        run.fabric_bytes.get(dscp).copied().unwrap_or(0) as f64 / total
    };
    let values: Vec<Vec<f64>> = dscps
        .iter()
        .map(|dscp| report.runs.iter().map(|run| share(run, dscp)).collect())
        .collect();
    figure(
        "Bytes by DSCP",
        "As the switch's queues counted them, headers and acknowledgements included.",
        &legend(labels.iter().map(String::as_str)),
        plot::bars("bytes", names, &values, true),
    )
}

fn by_host(report: &LabReport) -> Markup {
    let hosts: Vec<String> = report
        .runs
        .first()
        .map(|run| run.hosts.iter().map(|host| host.host.clone()).collect())
        .unwrap_or_default();
    let values: Vec<Vec<f64>> = report
        .runs
        .iter()
        .map(|run| {
            run.hosts
                .iter()
                .map(|host| host.egress.max(host.ingress))
                .collect()
        })
        .collect();
    figure(
        "Utilisation by host",
        "The busier direction of each host's link over the whole run. unit0 is the victim that \
         holds the hot prefixes.",
        &policies(report),
        plot::bars("of the rate", &hosts, &values, false),
    )
}

/// What one needs to judge or repeat the numbers.
fn background(report: &LabReport) -> Markup {
    let machine = &report.machine;
    let configuration = serde_json::to_string_pretty(&report.config).unwrap_or_default();
    let scaling = serde_json::to_string_pretty(&report.scaling).unwrap_or_default();
    html! {
        details {
            summary { "How it was scaled, and where it ran" }
            p {
                "Ratios are those of MFS §2.2 and §6.2; sizes and times are scaled to ports of "
                (report.config.port_mbit) " Mbit/s on " (machine.cores) " cores ("
                (machine.model) ", Linux " (machine.kernel) "). Processors busy during the runs: "
                (report.runs.iter().map(|run| format!("{} {:.2} ({:.2} by the lab \
                    itself)", run.policy, run.busy_cores, run.lab_cores))
                    .collect::<Vec<_>>().join(", ")) "."
            }
            pre { (scaling) }
            pre { (configuration) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::measure::tests::example;
    use super::*;

    #[test]
    fn the_page_needs_nothing_from_elsewhere_and_shows_every_plot() {
        let page = html(&example());
        assert!(page.starts_with("<!DOCTYPE html>"));
        assert_eq!(page.matches("<svg").count(), 6);
        assert!(!page.contains("<script") && !page.contains("src=") && !page.contains("@import"));
        assert!(!page.contains("no plot"), "every plot could be drawn");
        assert!(page.contains("prefers-color-scheme") || page.contains("color-scheme: light dark"));
    }
}
