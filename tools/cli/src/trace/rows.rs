//! Writes a trace as the JSON of the "Trace Event Format", which Perfetto and Chrome read: complete
//! events (`X`), instants (`i`) and names (`M`).
//!
//! Each port is a process, with rows by stage, layer and level. The engine is another process, with
//! a row for each batch and request. The format has no overlapping slices in a row, so a row with
//! overlapping flows appears several times.

use std::collections::BTreeMap;

use laxity_quantity::Bytes;
use laxity_shm::record::Stage;
use laxity_wire::sentences::level;
use laxity_wire::trace::SubmitOutcome;
use serde_json::{Value, json};

use super::lives::{FlowEnd, Life, Lives, Spell, Spelled};
use super::parts::{PARTS, Parts};
use super::why::{PermittedByKind, us, why};

/// The process number of the engine's rows. Ports have the numbers after it.
const ENGINE: u64 = 1;

fn port_number(life: &Life) -> u64 {
    ENGINE + 1 + u64::from(life.flow.nic) * 2 + u64::from(life.flow.ingress)
}

/// Returns the trace as JSON, with the parts of requests in µs. `nics` has the names of the NICs by
/// number.
pub(super) fn picture(
    lives: &Lives,
    parts: &BTreeMap<u64, Parts>,
    nics: &[String],
    lost: u64,
) -> Value {
    let mut events = Vec::new();
    engine(lives, &mut events);
    ports(lives, nics, &mut events);
    let parts_of = |parts: Parts| PARTS.iter().zip(parts.map(us)).collect::<BTreeMap<_, _>>();
    let requests: BTreeMap<_, _> =
        parts.iter().map(|(request, parts)| (request.to_string(), parts_of(*parts))).collect();
    json!({
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "requests": requests,
            "source": "laxity trace",
            "lost_events": lost,
            "events_of_flows_submitted_before": lives.strays,
        },
    })
}

fn at(lives: &Lives, at_ns: u64) -> f64 {
    us(at_ns.saturating_sub(lives.first_ns))
}

fn named(what: &str, process: u64, row: u64, name: &str, order: u64) -> [Value; 2] {
    [
        json!({"ph": "M", "name": format!("{what}_name"), "pid": process, "tid": row,
            "args": {"name": name}}),
        json!({"ph": "M", "name": format!("{what}_sort_index"), "pid": process, "tid": row,
               "args": {"sort_index": order}}),
    ]
}

/// Places spans into as few rows as possible without overlap, in the order in which they begin.
/// Returns the row of each span.
fn spread(spans: &[(u64, u64)]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..spans.len()).collect();
    order.sort_by_key(|&index| spans[index]);
    let mut ends: Vec<u64> = Vec::new();
    let mut rows = vec![0; spans.len()];
    for index in order {
        let (begin, end) = spans[index];
        let row = ends.iter().position(|last| *last <= begin);
        let row = row.unwrap_or_else(|| {
            ends.push(0);
            ends.len() - 1
        });
        // A span without a duration still occupies its row.
        ends[row] = end.max(begin + 1);
        rows[index] = row;
    }
    rows
}

fn ports(lives: &Lives, nics: &[String], events: &mut Vec<Value>) {
    let ledger = PermittedByKind::of(lives);
    // The key is port, stage, layer and level, which is the order of the rows.
    let mut groups: BTreeMap<(u64, usize, u16, u8), Vec<&Life>> = BTreeMap::new();
    for life in &lives.flows {
        let stage = Stage::from_name(&life.flow.stage);
        let key = (
            port_number(life),
            stage.map_or(Stage::ALL.len(), Stage::index),
            life.flow.layer,
            life.level(),
        );
        groups.entry(key).or_default().push(life);
    }
    let mut row = 0;
    let mut seen = 0;
    for ((process, _, layer, number), flows) in groups {
        let flow = &flows[0].flow;
        if process != seen {
            seen = process;
            let name =
                nics.get(usize::from(flow.nic)).map_or_else(|| flow.nic.to_string(), Clone::clone);
            let direction = if flow.ingress { "ingress" } else { "egress" };
            events.extend(named("process", process, 0, &format!("{name} {direction}"), process));
        }
        let standing = match number {
            0 => "without permit".to_owned(),
            number => level(number),
        };
        let name = format!("{} · layer {layer} · {standing}", flow.stage);
        let spans: Vec<_> =
            flows.iter().map(|life| (life.submitted_ns, life.end_ns(lives.last_ns))).collect();
        let places = spread(&spans);
        let copies = places.iter().max().map_or(0, |most| most + 1);
        for copy in 0..copies {
            let copy = row + 1 + copy as u64;
            events.extend(named("thread", process, copy, &name, copy));
        }
        for (life, place) in flows.iter().zip(places) {
            draw(lives, &ledger, life, row + 1 + place as u64, events);
        }
        row += copies as u64;
    }
}

/// Draws a flow: a slice from its submission to its end, a slice in it for the wait, and an instant
/// for each permit.
fn draw(lives: &Lives, ledger: &PermittedByKind, life: &Life, row: u64, events: &mut Vec<Value>) {
    let flow = &life.flow;
    let process = port_number(life);
    let end_ns = life.end_ns(lives.last_ns);
    let begin = at(lives, life.submitted_ns);
    let whose = match (flow.request, flow.batch) {
        (0, 0) => format!("of process {}", flow.pid),
        (0, batch) => format!("of batch {batch}"),
        (request, _) => format!("of request {request}"),
    };
    let outcome = match life.ended {
        Some(FlowEnd::Complete(at_ns)) if flow.deadline_ns != 0 && at_ns > flow.deadline_ns => {
            "late"
        }
        Some(FlowEnd::Complete(_)) => "complete",
        Some(FlowEnd::Cancelled(_)) => "given up",
        None => "under way at the end of the trace",
    };
    let first_ns = life.permits.first().map(|permit| permit.at_ns);
    let mut args = json!({
        // As text: a browser's numbers have 53 bits.
        "flow": flow.flow.to_string(),
        "bytes": flow.bytes, "batch": flow.batch, "request": flow.request, "process": flow.pid,
        "outcome": outcome,
        "waited_us": us(first_ns.unwrap_or(end_ns).saturating_sub(life.submitted_ns)),
        "why": match (life.permits.is_empty(), flow.standing) {
            (false, _) => why(ledger, life, 0),
            (true, SubmitOutcome::Observed) => "mode observe: no permit was asked for".to_owned(),
            (true, _) => "it had no permit before it ended, or the trace did".to_owned(),
        },
    });
    if flow.deadline_ns != 0 {
        args["deadline_us"] = json!(at(lives, flow.deadline_ns));
        let left = flow.deadline_ns as f64 - end_ns as f64;
        args["left_until_deadline_us"] = json!(left / 1000.0);
    }
    let name = format!("{} {whose}", Bytes(flow.bytes).about());
    events.push(json!({
        "ph": "X", "cat": "flow", "name": name, "pid": process, "tid": row,
        "ts": begin, "dur": at(lives, end_ns) - begin, "args": args,
    }));
    let waited_until = first_ns.unwrap_or(end_ns);
    if waited_until > life.submitted_ns && flow.standing != SubmitOutcome::Observed {
        events.push(json!({
            "ph": "X", "cat": "wait", "name": "waits", "pid": process, "tid": row,
            "ts": begin, "dur": at(lives, waited_until) - begin,
        }));
    }
    for (index, permit) in life.permits.iter().enumerate() {
        events.push(json!({
            "ph": "i", "s": "t", "cat": "permit", "name": "permit", "pid": process, "tid": row,
            "ts": at(lives, permit.at_ns),
            "args": {"bytes": permit.bytes, "level": level(permit.level),
                "why": why(ledger, life, index)},
        }));
    }
}

fn engine(lives: &Lives, events: &mut Vec<Value>) {
    if lives.spells.is_empty() {
        return;
    }
    events.extend(named("process", ENGINE, 0, "engine", 0));
    let mut rows: BTreeMap<(bool, u64), Vec<&Spell>> = BTreeMap::new();
    for spell in &lives.spells {
        rows.entry(spell.what.key()).or_default().push(spell);
    }
    let trace_id = |request: u64| lives.traces.get(&request).map(|(id, _)| id);
    for (row, ((is_request, id), spells)) in rows.into_iter().enumerate() {
        let row = row as u64 + 1;
        let kind = if is_request { "request" } else { "batch" };
        events.extend(named("thread", ENGINE, row, &format!("{kind} {id}"), row));
        for spell in spells {
            let (name, args) = match spell.what {
                Spelled::Layer { batch, layer } => {
                    (format!("layer {layer}"), json!({"batch": batch}))
                }
                Spelled::Queued { batch, ahead } => {
                    (format!("waits for batch {ahead}"), json!({"batch": batch}))
                }
                Spelled::Request { batch, request, deadline_ns } => (
                    format!("in batch {batch}"),
                    match deadline_ns {
                        0 => json!({"batch": batch, "trace_id": trace_id(request)}),
                        due => json!({"batch": batch, "trace_id": trace_id(request),
                            "deadline_us": at(lives, due)}),
                    },
                ),
            };
            let begin = at(lives, spell.begin_ns);
            events.push(json!({
                "ph": "X", "cat": "hint", "name": name, "pid": ENGINE, "tid": row,
                "ts": begin, "dur": at(lives, spell.end_ns) - begin, "args": args,
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overlaps_lies_in_rows_of_its_own_and_what_follows_does_not() {
        assert_eq!(spread(&[(0, 10), (5, 6), (10, 20), (6, 7)]), [0, 1, 0, 1]);
        assert_eq!(spread(&[(3, 3), (3, 3)]), [0, 1]);
        assert_eq!(spread(&[]), [0_usize; 0]);
    }
}
