//! The tables of `laxity cluster`. Names come from other machines, so characters that could control
//! a terminal are escaped.

use laxity_wire::v1::{
    BatchStatus, ExplainResponse, HostStatus, ListHostsResponse, Neighbour, Policy, PolicyRevision,
    PortStatus, TenantStatus,
};
use laxity_wire::view::{Queue, by_level, by_stage, direction};

use laxity_cli::table::{align_numbers, bytes, table};

/// Escapes control characters, and those that rearrange or hide text, as `\u{…}`.
pub(crate) fn clean(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        // Bidirectional controls, zero-width characters and separators (Unicode, general categories
        // Cf, Zl, Zp).
        let hidden = matches!(
            c,
            '\u{ad}'
                | '\u{61c}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        );
        if c.is_control() || hidden {
            shown.extend(c.escape_unicode());
        } else {
            shown.push(c);
        }
    }
    shown
}

pub(crate) fn span(ns: u64) -> String {
    let ms = ns as f64 / 1e6;
    match ms {
        ms if ms < 1.0 => format!("{ms:.2} ms"),
        ms if ms < 10.0 => format!("{ms:.1} ms"),
        ms if ms < 1000.0 => format!("{ms:.0} ms"),
        ms if ms < 10_000.0 => format!("{:.1} s", ms / 1e3),
        ms if ms < 120_000.0 => format!("{:.0} s", ms / 1e3),
        ms if ms < 7.2e6 => format!("{:.0} min", ms / 6e4),
        ms if ms < 1.728e8 => format!("{:.0} h", ms / 3.6e6),
        ms => format!("{:.0} days", ms / 8.64e7),
    }
}

fn until(ns: Option<i64>) -> String {
    match ns {
        None => "none".into(),
        Some(ns) if ns < 0 => format!("{} ago", span(ns.unsigned_abs())),
        Some(ns) => format!("in {}", span(ns.unsigned_abs())),
    }
}

fn state(host: &HostStatus) -> &'static str {
    match (host.drained, host.connected) {
        (true, true) => "drained",
        (true, false) => "drained, gone",
        (false, true) => "connected",
        (false, false) if host.left => "stopped",
        (false, false) => "gone",
    }
}

fn waiting(host: &HostStatus) -> u64 {
    let ports = host.ports.iter();
    ports.fold(0, |sum, port| sum.saturating_add(port.queued_bytes))
}

fn late(host: &HostStatus) -> String {
    match host.completed_flows {
        0 => "-".into(),
        all => format!("{:.1} %", 100.0 * host.missed_flows as f64 / all as f64),
    }
}

fn load(port: &PortStatus) -> String {
    format!("{:.0} %", f64::from(port.load_permille) / 10.0)
}

fn port_name(port: &PortStatus) -> String {
    format!("{} {}", clean(&port.port), direction(port.direction))
}

pub(crate) fn hosts(told: &ListHostsResponse) -> String {
    let connected = told.hosts.iter().filter(|host| host.connected).count();
    let headline = format!(
        "{connected} of {} hosts connected; term {}, {} runs{}",
        told.hosts.len(),
        told.term,
        told.run,
        if told.leading { "" } else { "; this coordinator does not lead" }
    );
    if told.hosts.is_empty() {
        return format!(
            "{headline}\nNo daemon has come yet: name this coordinator in the daemons' \
             configuration."
        );
    }
    let mut table = table(&[
        "host", "state", "heard", "batches", "requests", "waiting", "busiest", "late", "refused",
    ]);
    for host in &told.hosts {
        let busiest = host.ports.iter().max_by_key(|port| port.load_permille);
        table.add_row(vec![
            clean(&host.host),
            state(host).to_owned(),
            host.silent_ns.map_or_else(|| "never".into(), |ns| format!("{} ago", span(ns))),
            host.batches.to_string(),
            host.requests.to_string(),
            bytes(waiting(host)),
            busiest
                .map_or_else(|| "-".into(), |port| format!("{} {}", port_name(port), load(port))),
            late(host),
            host.refused_events.to_string(),
        ]);
    }
    align_numbers(&mut table, 2);
    let mut lines = vec![headline, table.to_string()];
    lines.extend(told.hosts.iter().filter_map(drained));
    lines.extend(tenants(&told.tenants));
    lines.join("\n")
}

/// Returns the table of tenants, or `None` if there is only one, without its own drop budget.
fn tenants(tenants: &[TenantStatus]) -> Option<String> {
    if let [] | [TenantStatus { drop_budget: None, .. }] = tenants {
        return None;
    }
    let mut table = table(&["tenant", "drop_budget", "hosts", "batches", "requests", "pruned"]);
    for tenant in tenants {
        table.add_row(vec![
            clean(&tenant.tenant),
            tenant.drop_budget.map_or_else(|| "shared".into(), |own| own.to_string()),
            tenant.hosts.to_string(),
            tenant.batches.to_string(),
            tenant.requests.to_string(),
            tenant.pruned.to_string(),
        ]);
    }
    align_numbers(&mut table, 1);
    Some(table.to_string())
}

/// Returns a line with who drained a host, when and why. `None` if it is not drained.
fn drained(host: &HostStatus) -> Option<String> {
    let note = host.drain.as_ref()?;
    let mut line = format!("{}: drained {} ago", clean(&host.host), span(note.age_ns));
    if !note.author.is_empty() {
        line.push_str(&format!(" by {}", clean(&note.author)));
    }
    if !note.comment.is_empty() {
        line.push_str(&format!(": {}", clean(&note.comment)));
    }
    Some(line)
}

fn split(queues: &[Queue]) -> String {
    let full = queues.iter().filter(|queue| queue.bytes > 0);
    let parts: Vec<String> =
        full.map(|queue| format!("{} {}", queue.name, bytes(queue.bytes))).collect();
    if parts.is_empty() { "-".into() } else { parts.join(", ") }
}

pub(crate) fn host(host: &HostStatus) -> String {
    let mut lines = vec![format!(
        "{}: {}, tenant {}, {}, {} batches, {} requests, {} fetches",
        clean(&host.host),
        state(host),
        clean(&host.tenant),
        if host.software.is_empty() { "release unknown".into() } else { clean(&host.software) },
        host.batches,
        host.requests,
        host.fetches,
    )];
    lines.extend(drained(host));
    let heard = host.silent_ns.map_or_else(|| "never".into(), |ns| format!("{} ago", span(ns)));
    let applied = host
        .applied
        .map_or_else(|| "none".into(), |epoch| format!("{}/{}", epoch.term, epoch.sequence));
    lines.push(format!(
        "heard {heard}; {} reports, {} events, {} refused; {} orders, {} merged into later ones, \
         newest applied {applied}; {} of {} flows late",
        host.reports,
        host.events,
        host.refused_events,
        host.orders,
        host.coalesced_orders,
        host.missed_flows,
        host.completed_flows,
    ));
    let mut table =
        table(&["port", "rate", "others send", "load", "waiting", "by level", "by stage"]);
    for port in &host.ports {
        table.add_row(vec![
            port_name(port),
            format!("{}/s", bytes(port.rate_bytes_per_s)),
            match port.foreign_bytes_per_s {
                0 => "-".into(),
                rate => format!("{}/s", bytes(rate)),
            },
            load(port),
            bytes(port.queued_bytes),
            split(&by_level(&port.queued_level_bytes)),
            split(&by_stage(&port.queued_stage_bytes)),
        ]);
    }
    lines.push(table.to_string());
    lines.join("\n")
}

pub(crate) fn batches(listed: &[BatchStatus], total: u32, filtered: bool) -> String {
    let headline = match (listed.len(), filtered) {
        (0, true) => format!("None of the {total} active batches matches."),
        (0, false) if total == 0 => "No batch is active.".into(),
        (n, true) => format!("{n} of {total} active batches"),
        (n, false) if (n as u32) < total => {
            format!("The first {n} of {total} active batches (--limit shows more)")
        }
        (n, false) => format!("{n} active batches"),
    };
    if listed.is_empty() {
        return headline;
    }
    let mut table = table(&[
        "place", "batch", "owner", "hosts", "requests", "pruned", "state", "due (RED)", "verdict",
    ]);
    for batch in listed {
        let progress = match (batch.started, batch.layers) {
            (false, _) => "waits".into(),
            (true, 0) => "computes".into(),
            (true, layers) => format!("layer {}/{layers}", batch.layer),
        };
        table.add_row(vec![
            batch.rank.map_or_else(|| "-".into(), |rank| rank.to_string()),
            batch.batch.to_string(),
            clean(&batch.owner),
            batch.hosts.len().to_string(),
            batch.requests.to_string(),
            batch.pruned.to_string(),
            progress,
            until(batch.red_remaining_ns),
            if batch.feasible { "in time" } else { "LATE" }.to_owned(),
        ]);
    }
    for column in [0, 3, 4, 5] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(comfy_table::CellAlignment::Right);
        }
    }
    format!("{headline}\n{table}")
}

pub(crate) fn explanation(told: &ExplainResponse) -> String {
    let mut lines = Vec::new();
    if let Some(batch) = &told.status {
        lines.push(format!(
            "Batch {} of {} ({} hosts, {} requests), announced {} ago; decided {} ago.",
            batch.batch,
            clean(&batch.owner),
            batch.hosts.len(),
            batch.requests,
            span(batch.age_ns),
            span(told.decided_ago_ns),
        ));
        lines.push(String::new());
    }
    lines.extend(told.text.iter().map(|line| format!("  {}", clean(line))));
    let Some(batch) = &told.status else { return lines.join("\n") };
    let mut order = table(&["batch", "due (RED)", ""]);
    let row = |other: &Neighbour, mark: &str| {
        vec![other.batch.to_string(), until(other.red_remaining_ns), mark.to_owned()]
    };
    let this = Neighbour { batch: batch.batch, red_remaining_ns: batch.red_remaining_ns };
    order.add_rows(told.before.iter().map(|other| row(other, "")));
    order.add_row(row(&this, "<- this one"));
    order.add_rows(told.after.iter().map(|other| row(other, "")));
    lines.push(format!("\nAround it in the order:\n{order}"));
    if !told.pruned.is_empty() {
        let mut pruned = table(&["pruned request", "for batch", "at", "left there", "due"]);
        for request in &told.pruned {
            let at = request.port.as_ref().map_or_else(
                || "computing alone".into(),
                |port| {
                    format!(
                        "{} {} of {}",
                        clean(&port.port),
                        direction(port.direction),
                        clean(&port.host)
                    )
                },
            );
            pruned.add_row(vec![
                request.request.to_string(),
                request.for_batch.to_string(),
                at,
                bytes(request.bytes),
                until(request.remaining_ns),
            ]);
        }
        lines.push(format!("\n{pruned}"));
    }
    lines.join("\n")
}

/// Returns the policy as pairs of key and value, in the form that `policy set` takes.
pub(crate) fn pairs(revision: &PolicyRevision) -> Vec<(&'static str, String)> {
    revision.policy.as_ref().map_or_else(Vec::new, policy)
}

pub(crate) fn policy(policy: &Policy) -> Vec<(&'static str, String)> {
    let number = |value: Option<u32>| value.map(|value| value.to_string());
    let nanos = |value: Option<u64>| value.map(|ns| laxity_quantity::Nanos(ns).to_string());
    let all = [
        ("policy", policy.policy.as_deref().map(clean)),
        ("drop_budget", number(policy.drop_budget)),
        ("debounce", nanos(policy.debounce_ns)),
        ("rank_margin", nanos(policy.rank_margin_ns)),
        ("correction_permille", number(policy.correction_permille)),
    ];
    let known = all.into_iter();
    known.filter_map(|(key, value)| Some((key, value?))).collect()
}

/// Returns a line with who made a revision, when and why.
pub(crate) fn revision_line(revision: &PolicyRevision) -> String {
    let mut line = format!(
        "revision {} by {}, {} ago",
        revision.revision,
        clean(&revision.author),
        span(revision.age_ns)
    );
    if !revision.comment.is_empty() {
        line.push_str(": ");
        line.push_str(&clean(&revision.comment));
    }
    line
}

pub(crate) fn revision(revision: &PolicyRevision) -> String {
    let pairs = pairs(revision);
    let lines = pairs.iter().map(|(key, value)| format!("  {key} = {value}"));
    let lines: Vec<String> = lines.collect();
    format!("{}\n{}", revision_line(revision), lines.join("\n"))
}

/// Returns revisions, newest first, each with its difference to the one before.
pub(crate) fn history(revisions: &[PolicyRevision]) -> String {
    let mut lines = Vec::new();
    for (index, one) in revisions.iter().enumerate() {
        let before = revisions.get(index + 1).map(pairs);
        let changed: Vec<String> = match before {
            None => pairs(one).into_iter().map(|(key, value)| format!("{key}={value}")).collect(),
            Some(before) => pairs(one)
                .into_iter()
                .filter(|pair| !before.contains(pair))
                .map(|(key, value)| {
                    let old = before.iter().find(|(known, _)| *known == key);
                    let old = old.map_or("?", |(_, value)| value.as_str());
                    format!("{key}: {old} -> {value}")
                })
                .collect(),
        };
        lines.push(revision_line(one));
        lines.push(format!(
            "  {}",
            if changed.is_empty() { "nothing changed".into() } else { changed.join(", ") }
        ));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use laxity_wire::v1;

    #[test]
    fn a_drained_host_is_shown_with_who_took_it_out_and_why() {
        let status = v1::HostStatus {
            host: "prefill-3".into(),
            drained: true,
            drain: Some(v1::DrainNote {
                author: "laxity://operator/ann".into(),
                comment: "its NIC flaps".into(),
                age_ns: 180_000_000_000,
            }),
            ..v1::HostStatus::default()
        };
        let told = v1::ListHostsResponse {
            hosts: vec![status, v1::HostStatus::default()],
            ..v1::ListHostsResponse::default()
        };
        let said = "prefill-3: drained 3 min ago by laxity://operator/ann: its NIC flaps";
        assert!(hosts(&told).lines().any(|line| line == said), "{}", hosts(&told));
        assert!(host(&told.hosts[0]).contains(said));
        assert_eq!(drained(&told.hosts[1]), None);
    }

    #[test]
    fn tenants_are_shown_with_their_budgets_if_there_is_more_to_say_than_one_name() {
        let tenant = |name: &str, drop_budget| TenantStatus {
            tenant: name.into(),
            pruned: 7,
            drop_budget,
            ..TenantStatus::default()
        };
        assert_eq!(tenants(&[tenant("default", None)]), None);
        let told = tenants(&[tenant("a\u{1b}", Some(16)), tenant("b", None)]).expect("a table");
        let rows: Vec<Vec<&str>> =
            told.lines().map(|line| line.split_whitespace().collect()).collect();
        assert!(rows.contains(&vec!["a\\u{1b}", "16", "0", "0", "0", "7"]), "{told}");
        assert!(rows.contains(&vec!["b", "shared", "0", "0", "0", "7"]), "{told}");
    }

    #[test]
    fn what_a_daemon_calls_itself_does_not_steer_the_terminal() {
        assert_eq!(clean("a\u{1b}[2Jb\r\n"), "a\\u{1b}[2Jb\\u{d}\\u{a}");
        assert_eq!(clean("\u{202e}x\u{9b}31m"), "\\u{202e}x\\u{9b}31m");
        assert_eq!(clean("prefill-0 ü 漢"), "prefill-0 ü 漢");
    }

    #[test]
    fn spans_keep_their_unit_readable() {
        assert_eq!(span(0), "0.00 ms");
        assert_eq!(span(12_300_000), "12 ms");
        assert_eq!(span(83_000_000_000), "83 s");
        assert_eq!(span(3_600_000_000_000), "60 min");
        assert_eq!(until(Some(-2_500_000)), "2.5 ms ago");
        assert_eq!(until(Some(i64::MIN)), "106752 days ago");
    }

    #[test]
    fn history_says_what_each_revision_changed() {
        let of = |number: u64, drop_budget: u32| PolicyRevision {
            revision: number,
            policy: Some(Policy {
                policy: Some("laxity".into()),
                drop_budget: Some(drop_budget),
                debounce_ns: Some(3_000_000),
                ..Policy::default()
            }),
            author: "alice".into(),
            comment: String::new(),
            age_ns: 0,
        };
        let text = history(&[of(3, 8), of(2, 64), of(1, 64)]);
        assert!(text.contains("drop_budget: 64 -> 8"), "{text}");
        assert!(text.contains("nothing changed"), "{text}");
        assert!(text.contains("policy=laxity, drop_budget=64, debounce=3ms"), "{text}");
    }
}
