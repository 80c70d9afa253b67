//! The report as one self-contained page, without scripts, for light and dark themes.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::measure::{LabReport, PolicyRun};
use super::plot;
use super::table::STAGES;

const STYLE: &str = include_str!("report.css");

fn legend(report: &LabReport) -> Markup {
    html! {
        div.legend {
            @for (number, run) in report.runs.iter().enumerate() {
                span {
                    i style=(format!("background:{}", plot::css_colour(number))) {}
                    (run.policy)
                }
            }
        }
    }
}

/// Returns the points of the cumulative distribution for these percentiles.
fn cumulative(percentiles: &[f64]) -> Vec<(f64, f64)> {
    percentiles.iter().enumerate().map(|(i, &value)| (value, i as f64 / 100.0)).collect()
}

pub fn html(report: &LabReport) -> String {
    let title = format!("Laxity lab, {} engine", report.engine);
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
                p.lead { (lead(report)) }
                (numbers(report))
                div.plots { (figures(report)) }
                (background(report))
            }
        }
    };
    page.into_string()
}

fn lead(report: &LabReport) -> String {
    let (config, workload) = (&report.config, &report.workload);
    format!(
        "{} requests over {:.0} s, asked of the {} engine on {} prefill unit(s) of {} hosts and {} \
         decode hosts, the same for every policy (seed {}, arrivals {}). A request is in time if \
         its first token comes within {} × what it took alone, {:.0} ms on average.",
        workload.statistics.requests,
        config.duration_s,
        report.engine,
        config.units,
        config.ranks,
        config.decodes,
        config.seed,
        workload.arrivals_digest,
        config.slo_scale,
        workload.ideal_ttft_ms,
    )
}

fn bytes_of(run: &PolicyRun, stage: &str) -> u64 {
    run.stage_bytes.get(stage).map_or(0, |by_dscp| by_dscp.values().sum())
}

fn numbers(report: &LabReport) -> Markup {
    let best = report.runs.iter().map(|run| run.ttft_slo_attainment).fold(0.0, f64::max);
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
                        @for (name, _) in STAGES { td { (megabytes(bytes_of(run, name))) } }
                        td { (megabytes(run.bypassed_bytes)) }
                        td { (run.requests - run.completed) }
                        td { (run.answers_different.len()) " of " (run.answers_compared) }
                    }
                }
            }
        } }
    }
}

fn figures(report: &LabReport) -> Markup {
    let figure = |title, explanation, horizontal, range, mark, of: fn(&PolicyRun) -> &Vec<f64>| {
        let series: Vec<_> = report.runs.iter().map(|run| cumulative(of(run))).collect();
        let svg = plot::shares(horizontal, "requests", range, mark, &series);
        html! { section { h2 { (title) } p { (explanation) } (legend(report)) (PreEscaped(svg)) } }
    };
    let end = |of: fn(&PolicyRun) -> f64| report.runs.iter().map(of).fold(0.0, f64::max);
    let scale = report.config.slo_scale;
    let slowest = (2.0 * scale).min(end(|run| run.slowdown.p99)).max(scale + 1.0);
    html! {
        (figure(
            "Time to first token",
            "From when a request was due to its first token at the client; cumulative.",
            "TTFT, ms", (0.0, end(|run| run.ttft_ms.p99)), None, |run| &run.percentiles.ttft_ms,
        ))
        (figure(
            "Slowdown",
            "Time to first token over that of the same request alone; right of the line the \
             deadline was missed. Cumulative.",
            "× alone", (0.0, slowest), Some(scale), |run| &run.percentiles.slowdown,
        ))
        (figure(
            "Earliness",
            "Time left at the first token over the objective; left of 0 the deadline was missed. \
             Cumulative.",
            "(deadline − first token) / objective", (-2.0, 1.0), Some(0.0),
            |run| &run.percentiles.earliness,
        ))
    }
}

fn background(report: &LabReport) -> Markup {
    let machine = &report.machine;
    let configuration = serde_json::to_string_pretty(&report.config).unwrap_or_default();
    let real = report.config.serving();
    html! {
        details {
            summary { "What was served, and where it ran" }
            p {
                (real.layers) " layers of width " (real.hidden) ", "
                (real.kv_bytes()) " bytes of KV a token and layer"
                @if real.experts > 0 {
                    ", " (real.experts) " experts of width " (real.ffn) ", "
                    (real.experts_per_token) " of them a token's, "
                    (format!("{:.0}", real.expert_bytes(report.config.ranks)))
                    " bytes to and from experts elsewhere, a token and layer. Alone an exchange \
                        takes "
                    (format!("{:.1}", report.alone.exchange_ms)) " ms and an iteration "
                    (format!("{:.0}", report.alone.iteration_ms)) " ms"
                }
                ". Ports of " (report.config.port_mbit) " Mbit/s on "
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
        assert_eq!(page.matches("<svg").count(), 3);
        assert!(!page.contains("<script") && !page.contains("src=") && !page.contains("@import"));
        assert!(!page.contains("no plot"), "every plot could be drawn");
        assert!(page.contains("1 of 2"), "answers that differ are counted");
    }
}
