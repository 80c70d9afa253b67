//! How a request's time divides: queueing, computing, and waits for its traffic by stage. Waiting
//! for a flow's first permit and waiting for the network are separate parts. The network's part
//! includes posting, and waits for further permits of a flow that is permitted in pieces.

use std::collections::{BTreeMap, BTreeSet};

use laxity_shm::record::Stage;
use laxity_wire::trace::SubmitOutcome;

use super::lives::{Life, Lives, Spell, Spelled};

/// The parts of a request's time. A moment counts for the first part that applies. `compute` is the
/// time in layers of the request's batches, `queue` the other time until its last layer ended, and
/// `rest` the time after it.
pub(super) const PARTS: [&str; 9] = [
    "kv_reuse_network", "kv_reuse_permit", "collective_network", "collective_permit",
    "p2d_network", "p2d_permit", "compute", "queue", "rest",
];
const COMPUTE: usize = 6;
const QUEUE: usize = 7;
const REST: usize = 8;

/// Nanoseconds of each of [`PARTS`].
pub(super) type Parts = [u64; PARTS.len()];

/// Begin and end of a span, and the index of the part that it belongs to.
type PartSpan = (u64, u64, usize);

/// A request that ended in the trace, with the layers and flows that it waited for.
pub(super) struct Ended<'a> {
    pub(super) request: u64,
    /// The request's first hint in the trace.
    pub(super) begin_ns: u64,
    /// The request's last hint in the trace.
    pub(super) end_ns: u64,
    /// 0 if the request has no deadline.
    pub(super) deadline_ns: u64,
    /// The layers of its batches between these two hints, with their numbers.
    pub(super) layers: Vec<(&'a Spell, u16)>,
    /// Its own flows, and the flows of its batches that name no request.
    pub(super) flows: Vec<&'a Life>,
}

/// Returns the requests that ended in the trace, by their numbers.
pub(super) fn ended(lives: &Lives) -> Vec<Ended<'_>> {
    let mut requests: BTreeMap<u64, Vec<(&Spell, u64, u64)>> = BTreeMap::new();
    let mut layers: BTreeMap<u64, Vec<(&Spell, u16)>> = BTreeMap::new();
    for spell in &lives.spells {
        match spell.what {
            Spelled::Request { batch, request, deadline_ns } => {
                requests.entry(request).or_default().push((spell, batch, deadline_ns));
            }
            Spelled::Layer { batch, layer } => {
                layers.entry(batch).or_default().push((spell, layer));
            }
            Spelled::Queued { .. } => {}
        }
    }
    let mut flows: BTreeMap<(u64, u64), Vec<&Life>> = BTreeMap::new();
    for life in &lives.flows {
        let batch = if life.flow.request == 0 { life.flow.batch } else { 0 };
        flows.entry((life.flow.request, batch)).or_default().push(life);
    }
    requests.retain(|_, spells| spells.iter().all(|(spell, ..)| spell.has_ended));
    let ended = requests.into_iter().map(|(request, spells)| {
        let begin_ns = spells.iter().map(|(spell, ..)| spell.begin_ns).min().unwrap_or(0);
        let end_ns = spells.iter().map(|(spell, ..)| spell.end_ns).max().unwrap_or(0);
        let deadline_ns = spells.iter().map(|(.., deadline_ns)| *deadline_ns).max().unwrap_or(0);
        let batches: BTreeSet<u64> = spells.iter().map(|(_, batch, _)| *batch).collect();
        let batches = || batches.iter().copied().filter(|batch| *batch != 0);
        let keys = batches().map(|batch| (0, batch)).chain([(request, 0)]);
        let flows = keys.filter_map(|key| flows.get(&key)).flatten().copied().collect();
        let layers = batches().filter_map(|batch| layers.get(&batch)).flatten();
        // A batch may have computed layers before the request joined it.
        let shared = layers.filter(|(it, _)| it.end_ns > begin_ns && it.begin_ns < end_ns);
        let layers = shared.copied().collect();
        Ended { request, begin_ns, end_ns, deadline_ns, layers, flows }
    });
    ended.collect()
}

/// Returns the parts of a request. Their sum is the time from its first hint in the trace to its
/// last.
pub(super) fn parts(of: &Ended<'_>, last_ns: u64) -> Parts {
    sum(&spans((of.begin_ns, of.end_ns), &of.layers, &of.flows, last_ns))
}

/// Returns the spans of all parts of a request, from its layers and flows (see [`Ended`]).
fn spans(
    (begin_ns, end_ns): (u64, u64),
    layers: &[(&Spell, u16)],
    flows: &[&Life],
    last_ns: u64,
) -> Vec<PartSpan> {
    let mut begins: BTreeMap<u16, u64> = BTreeMap::new();
    for (spell, layer) in layers {
        let begin = begins.entry(*layer).or_insert(spell.begin_ns);
        *begin = spell.begin_ns.min(*begin);
    }
    let needed_ns = |least: u16| begins.range(least..).map(|(_, begin_ns)| *begin_ns).min();
    let first_ns = needed_ns(0).unwrap_or(end_ns);
    let computed_ns = layers.iter().map(|(spell, _)| spell.end_ns).max().unwrap_or(end_ns);
    // Without layers nothing says when a request was computed, so all of its flows count.
    let p2d_ns = if layers.is_empty() { 0 } else { computed_ns };
    let mut spans = vec![(0, computed_ns, QUEUE), (computed_ns, end_ns, REST)];
    spans.extend(layers.iter().map(|(spell, _)| (spell.begin_ns, spell.end_ns, COMPUTE)));
    for life in flows {
        // A block of a later layer delays the batch only from that layer on.
        let (part, blocks) = match Stage::from_name(&life.flow.stage) {
            Some(Stage::KvReuse) => {
                let needed_ns = needed_ns(life.flow.layer).unwrap_or(computed_ns);
                (0, [(0, first_ns), (needed_ns, computed_ns)])
            }
            Some(Stage::Collective) => (2, [(first_ns, computed_ns), (0, 0)]),
            Some(Stage::P2d) => (4, [(p2d_ns, end_ns), (0, 0)]),
            _ => continue,
        };
        let ended_ns = life.end_ns(last_ns);
        let permitted_ns = match life.permits.first() {
            _ if life.flow.standing == SubmitOutcome::Observed => life.submitted_ns,
            Some(permit) => permit.at_ns,
            None => ended_ns,
        };
        for (from_ns, to_ns) in blocks {
            let within = |begin: u64, end: u64, part| (begin.max(from_ns), end.min(to_ns), part);
            spans.push(within(permitted_ns, ended_ns, part));
            spans.push(within(life.submitted_ns, permitted_ns, part + 1));
        }
    }
    let within = |&(from, to, part): &PartSpan| (from.max(begin_ns), to.min(end_ns), part);
    spans.iter().map(within).filter(|(from, to, _)| from < to).collect()
}

/// Adds up the spans. At each moment the span of the first part counts.
fn sum(spans: &[PartSpan]) -> Parts {
    let mut turns: Vec<(u64, i64, usize)> =
        spans.iter().flat_map(|&(from, to, part)| [(from, 1, part), (to, -1, part)]).collect();
    turns.sort_unstable();
    let (mut parts, mut open, mut since_ns) = ([0; PARTS.len()], [0_i64; PARTS.len()], 0);
    for (at_ns, change, part) in turns {
        if let Some(first) = open.iter().position(|count| *count > 0) {
            parts[first] += at_ns - since_ns;
        }
        open[part] += change;
        since_ns = at_ns;
    }
    parts
}

/// Returns a line about all requests, or `None` without any.
pub(super) fn line(parts: &BTreeMap<u64, Parts>) -> Option<String> {
    let total = |index: usize| parts.values().map(|parts| parts[index]).sum::<u64>() as f64;
    let whole = (0..PARTS.len()).map(total).sum::<f64>();
    let named = PARTS.iter().enumerate().map(|(index, name)| {
        format!("{} {:.0} %", name.replace('_', " "), 100.0 * total(index) / whole)
    });
    (whole > 0.0).then(|| {
        let mean_ms = whole / parts.len() as f64 / 1e6;
        let named = Vec::from_iter(named).join(", ");
        format!("{} requests of {mean_ms:.1} ms on average: {named}", parts.len())
    })
}
