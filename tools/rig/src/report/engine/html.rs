//! The report of the real engine as a page, made of the same parts as the replay's.

use maud::{Markup, html};

use super::measure::{EngineReport, EngineRun};
use super::table::STAGES;
use crate::report::html::{cumulative, figure, legend, page};
use crate::report::plot;

/// The page.
#[must_use]
pub fn html(report: &EngineReport) -> String {
    page(
        &format!("Laxity lab, {} engine", report.engine),
        &lead(report),
        &html! {
            (numbers(report))
            div.plots { (figures(report)) }
            (background(report))
        },
    )
}

fn lead(report: &EngineReport) -> String {
    let (config, workload) = (&report.config, &report.workload);
    format!(
        "{} requests over {:.0} s, asked of the {} engine on {} prefill unit(s) of {} hosts and {} \
         decode hosts, the same for every policy \
         (seed {}, arrivals {}). A request is in time if its first token comes within {} × what it \
         took alone, {:.0} ms on average.",
        workload.statistics.requests,
        config.duration_s,
        report.engine,
        config.units,
        config.ranks,
        config.decodes,
        config.seed,
        workload.arrivals_digest,
        config.slo_scale,
        report.alone.ttft_ms.mean,
    )
}

fn numbers(report: &EngineReport) -> Markup {
    let best = report
        .runs
        .iter()
        .map(|run| run.ttft_slo_attainment)
        .fold(0.0, f64::max);
    let megabytes = |bytes: u64| format!("{:.1}", bytes as f64 / 1e6);
    html! {
        div.wide { table {
            thead { tr {
                th { "policy" } th { "in time" } th { "TTFT mean" } th { "p50" } th { "p95, ms" }
                th { "exchange" } th { "KV wait, ms" } th { "tokens/s" } th { "links" }
                @for (_, name) in STAGES { th { (name) ", MB" } }
                th { "without permit, MB" } th { "failed" } th { "other answers" }
            } }
            tbody {
                @for run in &report.runs {
                    tr class=[(run.ttft_slo_attainment >= best).then_some("best")] {
                        td { (run.policy) }
                        td { (format!("{:.1} %", run.ttft_slo_attainment * 100.0)) }
                        td { (format!("{:.0}", run.ttft_ms.mean)) }
                        td { (format!("{:.0}", run.ttft_ms.p50)) }
                        td { (format!("{:.0}", run.ttft_ms.p95)) }
                        td { (format!("{:.1}", run.exchange_ms)) }
                        td { (format!("{:.1}", run.kv_wait_ms)) }
                        td { (format!("{:.0}", run.tokens_per_s)) }
                        td { (format!("{:.0} %", run.link_utilisation * 100.0)) }
                        @for (name, _) in STAGES { td { (megabytes(run.stage_bytes.get(name).map_or(0, |by_dscp| by_dscp.values().sum()))) } }
                        td { (megabytes(run.bypassed_bytes)) }
                        td { (run.requests - run.completed) }
                        td { (run.answers_different.len()) " of " (run.answers_compared) }
                    }
                }
            }
        } }
    }
}

fn policies(report: &EngineReport) -> Markup {
    legend(report.runs.iter().map(|run| run.policy.as_str()))
}

fn figures(report: &EngineReport) -> Markup {
    let names: Vec<String> = report.runs.iter().map(|run| run.policy.clone()).collect();
    let attainment = vec![
        report
            .runs
            .iter()
            .map(|run| run.ttft_slo_attainment)
            .collect(),
    ];
    let series = |of: fn(&EngineRun) -> &Vec<f64>| -> Vec<Vec<(f64, f64)>> {
        report.runs.iter().map(|run| cumulative(of(run))).collect()
    };
    let end = |of: fn(&EngineRun) -> f64| report.runs.iter().map(of).fold(0.0, f64::max);
    html! {
        (figure(
            "Requests in time",
            "Share of all requests whose first token came before its deadline.",
            &html! {},
            plot::bars("requests", &names, &attainment, false),
        ))
        (figure(
            "Time to first token",
            "From when a request was due to its first token at the client; cumulative.",
            &policies(report),
            plot::shares("TTFT, ms", "requests", (0.0, end(|run| run.ttft_ms.p99)), None,
                &series(|run| &run.percentiles.ttft_ms)),
        ))
        (figure(
            "Slowdown",
            "Time to first token over that of the same request alone; right of the line the \
             deadline was missed. Cumulative.",
            &policies(report),
            plot::shares("× \
                alone", "requests", (0.0, (2.0 * report.config.slo_scale).min(end(|run| run.slowdown.p99)).max(report.config.slo_scale + 1.0)),
                Some(report.config.slo_scale), &series(|run| &run.percentiles.slowdown)),
        ))
        (figure(
            "Earliness",
            "Time left at the first token over the objective; left of 0 the deadline was missed. \
             Cumulative.",
            &policies(report),
            plot::shares("(deadline − first token) / objective", "requests", (-2.0, 1.0), Some(0.0),
                &series(|run| &run.percentiles.earliness)),
        ))
        (by_class(report, &names, "kv_reuse", "KV reuse"))
        (by_class(report, &names, "collective", "Experts' tokens"))
        (by_class(report, &names, "p2d", "Prefill to decode"))
        (by_host(report))
    }
}

/// What the engines sent of a stage under each policy, by class.
fn by_class(report: &EngineReport, names: &[String], stage: &str, title: &str) -> Markup {
    let mut dscps: Vec<u8> = report.config.level_dscp.clone();
    dscps.dedup();
    dscps.extend([report.config.scavenger_dscp, 0]);
    let labels: Vec<String> = dscps
        .iter()
        .map(|dscp| match dscp {
            0 => "unmarked".to_owned(),
            dscp if *dscp == report.config.scavenger_dscp => format!("{dscp} (scavenger)"),
            dscp => dscp.to_string(),
        })
        .collect();
    let share = |run: &EngineRun, dscp: u8| {
        let by_dscp = run.stage_bytes.get(stage);
        let total = by_dscp.map_or(0, |by_dscp| by_dscp.values().sum::<u64>());
        let bytes = by_dscp.and_then(|by_dscp| by_dscp.get(&dscp)).unwrap_or(&0);
        *bytes as f64 / total.max(1) as f64
    };
    let values: Vec<Vec<f64>> = dscps
        .iter()
        .map(|&dscp| report.runs.iter().map(|run| share(run, dscp)).collect())
        .collect();
    figure(
        title,
        "Payload by DSCP, as the engines counted it.",
        &legend(labels.iter().map(String::as_str)),
        plot::bars("bytes", names, &values, true),
    )
}

fn by_host(report: &EngineReport) -> Markup {
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
        "The busier direction of each host's link over the whole run.",
        &policies(report),
        plot::bars("of the rate", &hosts, &values, false),
    )
}

/// What one needs to judge or repeat the numbers.
fn background(report: &EngineReport) -> Markup {
    let machine = &report.machine;
    let configuration = serde_json::to_string_pretty(&report.config).unwrap_or_default();
    let real = report.config.serving();
    html! {
        details {
            summary { "What was served, and where it ran" }
            p {
                (real.layers) " layers of width " (real.hidden) ", " (real.experts) " experts of \
                    width " (real.ffn) ", "
                (real.experts_per_token) " of them a token's; " (real.kv_bytes()) " bytes of KV \
                    and "
                (format!("{:.0}", real.expert_bytes(report.config.ranks)))
                " bytes to and from experts elsewhere, a token and layer. Alone an exchange takes "
                (format!("{:.1}", report.alone.exchange_ms)) " ms and an iteration "
                (format!("{:.0}", report.alone.iteration_ms)) " ms. Ports \
                    of " (report.config.port_mbit) " Mbit/s on "
                (machine.cores) " cores (" (machine.model) ", Linux " (machine.kernel) "). \
                    Processors busy during the runs: "
                (report.runs.iter().map(|run| format!("{} {:.2} ({:.2} by the lab \
                    itself)", run.policy, run.busy_cores, run.lab_cores))
                    .collect::<Vec<_>>().join(", ")) "."
            }
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
        assert_eq!(page.matches("<svg").count(), 8);
        assert!(!page.contains("<script") && !page.contains("src=") && !page.contains("@import"));
        assert!(!page.contains("no plot"), "every plot could be drawn");
        assert!(page.contains("1 of 2"), "answers that differ are counted");
    }
}
