//! The report as a table for a terminal.

use comfy_table::{Cell, CellAlignment, Table, presets};

use super::measure::{LabReport, PolicyRun};
use crate::carriage::Carriage;
use crate::collectives::ExchangeLedger;
use crate::config::Engine;
use crate::controller::NONE;
use crate::coordinator::CoordinatorRecord;
use crate::foreign::ForeignRecord;
use crate::ledger::Ledger;
use crate::vllm::restart::RestartReport;

pub const STAGES: [(&str, &str); 3] =
    [("kv_reuse", "reuse"), ("collective", "experts"), ("p2d", "P2D")];

/// Most cores of other work that the notes leave out. Packet processing in the kernel counts as
/// other work and takes 0.05 to 0.15 cores with the defaults.
const OTHER_CORES_MAX: f64 = 0.25;

fn megabytes(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / 1e6)
}

/// Returns the bytes of a stage by DSCP, largest first. `unmarked` stands for DSCP 0.
fn stage(run: &PolicyRun, stage: &str) -> String {
    let Some(by_dscp) = run.stage_bytes.get(stage) else { return "0".to_owned() };
    let mut by_dscp: Vec<(u8, u64)> = by_dscp.iter().map(|(d, b)| (*d, *b)).collect();
    by_dscp.sort_by_key(|&(dscp, bytes)| (std::cmp::Reverse(bytes), dscp));
    let total: u64 = by_dscp.iter().map(|(_, bytes)| bytes).sum();
    let mut text = megabytes(total);
    let shares: Vec<String> = by_dscp
        .into_iter()
        .filter(|&(dscp, bytes)| dscp != 0 && bytes * 200 >= total)
        .map(|(dscp, bytes)| format!("{dscp}:{:.0}%", bytes as f64 * 100.0 / total as f64))
        .collect();
    if !shares.is_empty() {
        text += &format!(" ({})", shares.join(" "));
    }
    text
}

pub fn table(report: &LabReport) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header([
        "policy", "in time", "TTFT mean", "p50", "p95 ms", "exchange ms", "tokens/s", "links",
        "MB of reuse (by DSCP)", "of experts", "of P2D",
    ]);
    for run in &report.runs {
        let cells = [
            run.policy.clone(),
            format!("{:.1} %", run.ttft_slo_attainment * 100.0),
            format!("{:.0}", run.ttft_ms.mean),
            format!("{:.0}", run.ttft_ms.p50),
            format!("{:.0}", run.ttft_ms.p95),
            format!("{:.1}", run.exchange_ms),
            format!("{:.0}", run.tokens_per_s),
            format!("{:.0} %", run.link_utilisation * 100.0),
            stage(run, STAGES[0].0),
            stage(run, STAGES[1].0),
            stage(run, STAGES[2].0),
        ];
        table.add_row(cells.into_iter().enumerate().map(|(column, text)| {
            let numeric = (1..8).contains(&column);
            Cell::new(text).set_alignment(if numeric {
                CellAlignment::Right
            } else {
                CellAlignment::Left
            })
        }));
    }
    format!("{}\n{table}\n{}", heading(report), remarks(report))
}

fn heading(report: &LabReport) -> String {
    let (config, workload) = (&report.config, &report.workload);
    let (statistics, real) = (&workload.statistics, config.serving());
    let mut text = format!(
        "{} requests in {:.0} s, {:.0} tokens on average, {:.0} % shared with others; seed {}, \
         arrivals {}\n\
         the {} engine on {} prefill units of {} hosts and {} decode hosts, ports of {} Mbit/s; \
         objective {} × the request's \
         TTFT alone ({:.0} ms on average)\n\
         model: {} layers of width {}, {} B of KV a token and layer",
        statistics.requests,
        config.duration_s,
        statistics.tokens_mean,
        statistics.reuse * 100.0,
        config.seed,
        workload.arrivals_digest,
        report.engine,
        config.units,
        config.ranks,
        config.decodes,
        config.port_mbit,
        config.slo_scale,
        workload.ideal_ttft_ms,
        real.layers,
        real.hidden,
        real.kv_bytes(),
    );
    text += &match config.engine {
        Engine::Vllm => "\n".to_owned(),
        Engine::Timed | Engine::Real => format!(
            ", {} experts, {} of them a token's; {:.0} B to and from experts elsewhere, a token \
             and layer; alone an exchange takes {:.1} ms, an iteration {:.0} ms\n",
            real.experts,
            real.experts_per_token,
            real.expert_bytes(config.ranks),
            report.alone.exchange_ms,
            report.alone.iteration_ms,
        ),
    };
    if let Some(check) = report.alone.ideal_check {
        text += &format!(
            "{} requests one by one: TTFT {:.2} × the computed one (at most {:.2})\n",
            check.requests, check.measured_over_computed, check.worst
        );
    }
    if let Some(fitting) = &workload.fitting {
        text += &format!(
            "recording: {} requests, the first {} warm the cache; prompts × {:.3}, times × \
             {:.4}\n",
            fitting.recorded, fitting.warm_up, fitting.token_factor, fitting.time_factor
        );
    }
    text.trim_end().to_owned()
}

/// Returns the counts other than 0, each with what it counts.
fn counted<const N: usize>(counts: [(u64, &str); N]) -> Vec<String> {
    let some = counts.iter().filter(|(count, _)| *count > 0);
    some.map(|(count, what)| format!("{count} {what}")).collect()
}

fn carried(plugin: &Carriage) -> String {
    let mut text = format!(
        "the NCCL plugin sent {} MB in {} messages",
        megabytes(plugin.payload_bytes),
        plugin.messages
    );
    let by_dscp = plugin.sent_bytes.get("collective");
    for (dscp, bytes) in by_dscp.into_iter().flatten() {
        let name = match dscp {
            0 => "unmarked".to_owned(),
            dscp => format!("DSCP {dscp}"),
        };
        text += &format!(", {} MB {name}", megabytes(*bytes));
    }
    let waits = [(plugin.deferred, "had to wait"), (plugin.overdue, "for as long as they may")];
    [vec![text], counted(waits)].concat().join(", ")
}

fn waited(run: &PolicyRun, exchanged: &ExchangeLedger) -> String {
    let mut text = format!(
        "layers waited for {} exchanges, {:.0} ms each, {:.0} ms a request; with the warm-up {} MB \
         of collectives were due, {} MB came",
        run.exchanges,
        run.exchange_ms,
        run.stages_ms.collective,
        megabytes(exchanged.due_bytes),
        megabytes(exchanged.received_bytes),
    );
    if run.policy != NONE {
        let [permitted, bypassed] =
            [exchanged.permitted_bytes, exchanged.bypassed_bytes].map(megabytes);
        text += &format!(", {permitted} MB with a permit and {bypassed} MB without");
    }
    text
}

fn moved(run: &PolicyRun, kv: &Ledger) -> String {
    let mut text = format!(
        "the connector moved {} MB of KV in {} transfers ({:.0} ms each, of that {:.1} ms posting)",
        megabytes(kv.moved_bytes),
        kv.transfers,
        kv.transfer_ms,
        kv.post_ms,
    );
    if kv.stored_bytes > 0 {
        let [reused, stored] = [kv.reused_bytes, kv.stored_bytes].map(megabytes);
        text += &format!("; prefill hosts put {stored} MB into the store, and read {reused} MB");
    }
    if run.policy != NONE {
        let waits = format!("; {:.0} ms waiting for a permit before", kv.permit_wait_ms);
        text.push_str(&waits);
    }
    let stages = &run.stages_ms;
    let whole = stages.queued + stages.p2d_tail + stages.compute;
    if whole > 0.0 {
        let share = |part: f64| part / whole * 100.0;
        text += &format!(
            "; of the TTFT {:.0} % queueing, {:.0} % waiting for KV, {:.0} % computing",
            share(stages.queued),
            share(stages.p2d_tail),
            share(stages.compute)
        );
    }
    if !kv.checked {
        text += ", BYTES ARE NOT CHECKED: requests were given up";
    }
    let wrong = counted([
        (kv.failed_transfers, "transfers failed"),
        (kv.expired, "requests' KV expired"),
        (run.bytes_lost, "BYTES ARE NOT ACCOUNTED FOR"),
    ]);
    [vec![text], wrong].concat().join(", ")
}

fn beside(foreign: &ForeignRecord) -> String {
    format!(
        "foreign traffic of {:.1} MB/s, measured {:.1}; the rate in force beside it was {:.0} %",
        foreign.asked_bytes_per_s / 1e6,
        foreign.measured_bytes_per_s / 1e6,
        foreign.rate_in_force * 100.0
    )
}

fn restarted(restart: &RestartReport) -> String {
    format!(
        "vLLM of {} was killed and started again: {} of its {} requests failed, and {} of others; \
         asked again, {} had their tokens",
        restart.host,
        restart.failed,
        restart.requests,
        restart.failed_elsewhere,
        restart.right_again
    )
}

fn followed(said: &CoordinatorRecord, hosts: usize) -> String {
    let fate = if said.killed { " (killed on the way)" } else { "" };
    let fetches = match said.fetches {
        0 => String::new(),
        fetches => format!(", {fetches} fetches"),
    };
    format!(
        "with a coordinator{fate}: {} orders applied, {} refused, {} reports, {} events \
         refused{fetches}; {} of {hosts} hosts follow it at the end",
        said.orders, said.refused_orders, said.reports, said.refused_events, said.following,
    )
}

fn remark(run: &PolicyRun) -> String {
    let answers = if run.answers_different.is_empty() {
        format!("{} answers, the same as alone", run.answers_compared)
    } else {
        let numbers: Vec<String> =
            run.answers_different.iter().take(8).map(u64::to_string).collect();
        format!(
            "{} of {} answers are NOT those that the requests got alone (requests {})",
            run.answers_different.len(),
            run.answers_compared,
            numbers.join(", ")
        )
    };
    let [permitted, bypassed] = [run.scheduled_bytes, run.bypassed_bytes].map(megabytes);
    let mut notes = vec![answers, format!("{permitted} MB with a permit, {bypassed} MB without")];
    let failed: usize = run.errors.values().sum();
    let why = run.errors.keys().next();
    notes.extend(why.map(|why| format!("{failed} requests failed ({why})")));
    notes.extend(counted([
        ((run.requests - run.completed - failed) as u64, "requests unfinished"),
        (run.prefilled_after_all, "prompts computed by decode hosts"),
        (run.batches_failed, "batches failed"),
    ]));
    notes.extend(run.kv.as_ref().map(|kv| moved(run, kv)));
    notes.extend(run.plugin.as_ref().map(carried));
    notes.extend(run.collectives.as_ref().map(|exchanged| waited(run, exchanged)));
    if run.policy != NONE && run.unscheduled_ms > 0.0 {
        let longest = run.unscheduled_ms;
        notes.push(format!("unscheduled for {longest:.0} ms (the longest at any host)"));
    }
    notes.extend(counted([(run.daemon_restarts.into(), "daemons restarted")]));
    notes.extend(run.restart.as_ref().map(restarted));
    notes.extend(run.coordinator.as_ref().map(|said| followed(said, run.hosts.len())));
    notes.extend(run.foreign.as_ref().map(beside));
    notes.extend(counted([(run.fabric_drops, "packets dropped")]));
    let other = run.busy_cores - run.lab_cores;
    if other > OTHER_CORES_MAX {
        notes.push(format!("other work took {other:.2} cores"));
    }
    format!("{}: {}", run.policy, notes.join("; "))
}

fn remarks(report: &LabReport) -> String {
    let mut lines: Vec<String> = report.runs.iter().map(remark).collect();
    if report.runs.iter().any(|run| run.buffers_unbounded) {
        lines.push(
            "sockets have the kernel's own buffers: not to be compared with runs where the lab \
             could set them"
                .to_owned(),
        );
    }
    let cores = report.machine.cores as f64;
    if report.runs.iter().any(|run| run.busy_cores > 0.85 * cores) {
        lines.push(
            "processors were busy for most of a run, with this or with other work: what is \
             measured is theirs as much as the links'"
                .to_owned(),
        );
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::super::measure::tests::example;
    use super::*;

    #[test]
    fn the_table_shows_attainment_bytes_by_stage_and_answers_that_differ() {
        let text = table(&example());
        assert!(text.contains("33.3 %"), "{text}");
        assert!(text.contains("0.0 (46:67% 10:33%)"), "{text}");
        assert!(text.contains("NOT those"), "{text}");
        assert!(text.contains("1 requests failed (503: not now)"), "{text}");
        assert!(text.contains("0.0 MB without"), "{text}");
    }

    #[test]
    fn the_notes_name_other_work_that_took_more_than_a_quarter_of_a_core() {
        let mut report = example();
        report.runs[0].lab_cores = 0.5;
        for (busy_cores, noted) in [(0.7, false), (0.8, true)] {
            report.runs[0].busy_cores = busy_cores;
            let text = table(&report);
            assert_eq!(text.contains("other work took 0.30 cores"), noted, "{text}");
        }
    }
}
