//! The report as a table for a terminal.

use std::fmt::Write as _;

use comfy_table::{Cell, CellAlignment, Table, presets};

use super::measure::{LabReport, PolicyRun};
use crate::carriage::Carriage;
use crate::config::Collectives;

fn megabytes(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / 1e6)
}

/// Bytes by DSCP, most urgent first, `-` for unmarked.
fn classes(report: &LabReport, run: &PolicyRun) -> String {
    let mut shown: Vec<u8> = report.config.level_dscp.clone();
    shown.dedup();
    shown.extend([report.config.scavenger_dscp, 0]);
    let total = run.fabric_bytes.values().sum::<u64>().max(1);
    let mut text = String::new();
    for dscp in shown {
        let bytes = run.fabric_bytes.get(&dscp).copied().unwrap_or(0);
        let percent = bytes as f64 * 100.0 / total as f64;
        if percent >= 0.05 {
            let name = if dscp == 0 {
                "unmarked".to_owned()
            } else {
                dscp.to_string()
            };
            let separator = if text.is_empty() { "" } else { " " };
            write!(text, "{separator}{name}:{percent:.0}%").expect("a String takes all");
        }
    }
    text
}

/// The table, and what one has to know to read it.
#[must_use]
pub fn table(report: &LabReport) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header([
        "policy",
        "in time",
        "TTFT mean",
        "p50",
        "p99 ms",
        "collective mean",
        "p99 ms",
        "earliness",
        "links",
        "fabric bytes by DSCP",
    ]);
    for run in &report.runs {
        let cells = [
            run.policy.clone(),
            format!("{:.1} %", run.ttft_slo_attainment * 100.0),
            format!("{:.0}", run.ttft_ms.mean),
            format!("{:.0}", run.ttft_ms.p50),
            format!("{:.0}", run.ttft_ms.p99),
            format!("{:.1}", run.collective_ms.mean),
            format!("{:.1}", run.collective_ms.p99),
            format!("{:.2}", run.earliness),
            format!("{:.0} %", run.link_utilisation * 100.0),
            classes(report, run),
        ];
        table.add_row(cells.into_iter().enumerate().map(|(column, text)| {
            let numeric = (1..9).contains(&column);
            Cell::new(text).set_alignment(if numeric {
                CellAlignment::Right
            } else {
                CellAlignment::Left
            })
        }));
    }
    format!("{}\n{table}\n{}", heading(report), remarks(report))
}

/// What arrived and how it was scaled.
fn heading(report: &LabReport) -> String {
    let (config, workload, scaling) = (&report.config, &report.workload, &report.scaling);
    let statistics = &workload.statistics;
    let mut text = format!(
        "{} requests in {:.0} s (load {:.2}), {:.0} tokens on average, {:.0} % reused, {:.0} % \
         fetch from another unit; seed {}, arrivals {}\n\
         {} prefill units of {} hosts, {} decode hosts, ports of {} Mbit/s; SLO {} × the \
         request's contention-free TTFT ({:.0} ms on average)\n\
         scaled: {} layers, per token and layer {:.0} B of KV and {:.0} B of all-to-all at each \
         rank, compute {:.1} ms + {:.1} µs per token; collectives {:.0} % of an uncontended \
         layer\n",
        statistics.requests,
        config.duration_s,
        workload.offered_load,
        statistics.tokens_mean,
        statistics.reuse * 100.0,
        workload.fetched_share * 100.0,
        config.seed,
        workload.arrivals_digest,
        config.units,
        config.ranks,
        config.decodes,
        config.port_mbit,
        config.slo_scale,
        workload.ideal_ttft_ms,
        scaling.scaling.layers,
        scaling.scaling.kv_bytes_per_token,
        2.0 * scaling.scaling.collective_bytes_per_token,
        scaling.scaling.layer_base_us / 1e3,
        scaling.scaling.layer_token_us,
        scaling.comm_share * 100.0,
    );
    if let Some(fitting) = &workload.fitting {
        writeln!(
            text,
            "recording: {} requests, the first {} warm the cache; prompts × {:.3}, times × {:.4}",
            fitting.recorded, fitting.warm_up, fitting.token_factor, fitting.time_factor
        )
        .expect("a String takes all");
    }
    if config.collectives == Collectives::NcclPlugin {
        let name = report.runs.iter().find_map(|run| run.plugin.as_ref());
        writeln!(
            text,
            "all-to-alls go through the NCCL net plugin {}",
            name.map_or("", |plugin| &plugin.name)
        )
        .expect("a String takes all");
    }
    if let Some(check) = scaling.ideal_check {
        writeln!(
            text,
            "{} requests one by one: TTFT {:.2} × the computed one, all-to-all {:.1} ms",
            check.requests, check.measured_over_computed, check.collective_ms
        )
        .expect("a String takes all");
    }
    text.trim_end().to_owned()
}

/// What the plugin did.
fn carried(plugin: &Carriage) -> String {
    let payload: u64 = plugin.payload_bytes.values().sum();
    let mut text = format!(
        "; the plugin sent {} MB in {} messages",
        megabytes(payload),
        plugin.messages
    );
    let by_dscp = plugin.sent_bytes.get("collective");
    for (dscp, bytes) in by_dscp.into_iter().flatten() {
        let name = match dscp {
            0 => "unmarked".to_owned(),
            dscp => format!("DSCP {dscp}"),
        };
        write!(text, ", {} MB {name}", megabytes(*bytes)).expect("a String takes all");
    }
    if plugin.deferred > 0 {
        write!(text, ", {} had to wait", plugin.deferred).expect("a String takes all");
    }
    if plugin.overdue > 0 {
        write!(text, ", {} for as long as they may", plugin.overdue).expect("a String takes all");
    }
    if plugin.buffers_unbounded > 0 {
        write!(
            text,
            ", with the kernel's own buffers at {} hosts: not to be compared with runs over the \
             lab's own connections",
            plugin.buffers_unbounded
        )
        .expect("a String takes all");
    }
    text
}

/// What went wrong, if something did, and whether every byte arrived.
fn remarks(report: &LabReport) -> String {
    let mut text = String::new();
    for run in &report.runs {
        let mut note = format!("{}: {} MB sent", run.policy, megabytes(run.bytes_sent));
        let exact = run.bytes_sent == run.bytes_received
            && run.bytes_duplicated + run.bytes_missing + run.bytes_corrupted == 0;
        note += if exact {
            ", each byte received once"
        } else {
            ""
        };
        if !exact {
            write!(
                note,
                ", {} MB received, {} bytes twice, {} left out, {} corrupted",
                megabytes(run.bytes_received),
                run.bytes_duplicated,
                run.bytes_missing,
                run.bytes_corrupted
            )
            .expect("a String takes all");
        }
        if run.completed < run.requests {
            let unfinished = run.requests - run.completed;
            write!(note, "; {unfinished} requests unfinished").expect("a String takes all");
        }
        if run.unscheduled_ms > 0.0 || run.bypassed_bytes > 0 {
            write!(
                note,
                "; unscheduled for {:.0} ms (the longest at any host), {} MB without a permit",
                run.unscheduled_ms,
                megabytes(run.bypassed_bytes)
            )
            .expect("a String takes all");
        }
        if let Some(plugin) = &run.plugin {
            note += &carried(plugin);
        }
        if run.daemon_restarts > 0 {
            write!(note, "; {} daemons restarted", run.daemon_restarts)
                .expect("a String takes all");
        }
        if let Some(said) = &run.coordinator {
            let fate = if said.killed {
                " (killed on the way)"
            } else {
                ""
            };
            let fetches = match said.fetches {
                0 => String::new(),
                fetches => format!(
                    ", {} waits of {fetches} fetches ({} for as long as they may)",
                    said.fetches_held, said.fetches_ahead
                ),
            };
            write!(
                note,
                "; with a coordinator{fate}: {} orders applied, {} refused, {} reports, {} events \
                 refused{fetches}, {} of {} hosts \
                 follow it at the end",
                said.orders,
                said.refused_orders,
                said.reports,
                said.refused_events,
                said.following,
                run.hosts.len()
            )
            .expect("a String takes all");
        }
        if run.fabric_drops > 0 {
            write!(note, "; {} packets dropped", run.fabric_drops).expect("a String takes all");
        }
        writeln!(text, "{note}").expect("a String takes all");
    }
    let cores = report.machine.cores as f64;
    if report
        .runs
        .iter()
        .any(|run| run.busy_cores - run.lab_cores > 0.5 * cores)
    {
        writeln!(
            text,
            "the machine was busy with other work: repeat on a quiet one to compare"
        )
        .expect("a String takes all");
    }
    text.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::measure::tests::example;
    use super::*;

    #[test]
    fn the_table_shows_attainment_and_what_went_wrong() {
        let text = table(&example());
        assert!(text.contains("50.0 %"), "{text}");
        assert!(text.contains("46:100%"), "{text}");
        assert!(text.contains("1 requests unfinished"), "{text}");
        assert!(text.contains("each byte received once"), "{text}");
        assert!(text.contains("unscheduled for 2 ms"), "{text}");
    }
}
