//! Explains why a flow waited for a permit: its state at submission, and the permits of other flows
//! on its port meanwhile.
//!
//! The permits also explain a wait for a full window. The window opens when bytes of others are
//! completed, and the policy decides which flow gets the room.

use std::collections::BTreeMap;

use laxity_quantity::Bytes;
use laxity_wire::sentences::{flows, level};
use laxity_wire::trace::SubmitOutcome;

use super::lives::{Life, Lives};

/// A port: the number of the NIC, and whether it is the ingress.
type TracedPort = (u8, bool);
/// The stage and the level of permitted bytes.
type StageLevel = (String, u8);
/// Pairs of a time and the sum of bytes permitted until then.
type PermittedSums = Vec<(u64, u64)>;

#[derive(Debug, Default)]
pub(super) struct PermittedByKind {
    ports: BTreeMap<TracedPort, BTreeMap<StageLevel, PermittedSums>>,
}

impl PermittedByKind {
    pub(super) fn of(lives: &Lives) -> Self {
        let mut permits: Vec<_> = lives
            .flows
            .iter()
            .flat_map(|life| life.permits.iter().map(move |permit| (permit, &life.flow)))
            .collect();
        permits.sort_by_key(|(permit, _)| permit.at_ns);
        let mut ledger = Self::default();
        for (permit, flow) in permits {
            let port = ledger.ports.entry((flow.nic, flow.ingress)).or_default();
            let sums = port.entry((flow.stage.clone(), permit.level)).or_default();
            let before = sums.last().map_or(0, |(_, sum)| *sum);
            sums.push((permit.at_ns, before + permit.bytes));
        }
        ledger
    }

    /// Returns the bytes of each kind that a port permitted after `from_ns` and up to `to_ns`,
    /// largest first.
    fn between(&self, port: TracedPort, from_ns: u64, to_ns: u64) -> Vec<(StageLevel, u64)> {
        let upto = |sums: &[(u64, u64)], limit_ns: u64| {
            let count = sums.partition_point(|(at_ns, _)| *at_ns <= limit_ns);
            count.checked_sub(1).map_or(0, |last| sums[last].1)
        };
        let mut found: Vec<_> = self
            .ports
            .get(&port)
            .into_iter()
            .flatten()
            .map(|(kind, sums)| (kind.clone(), upto(sums, to_ns) - upto(sums, from_ns)))
            .filter(|(_, bytes)| *bytes > 0)
            .collect();
        found.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        found
    }
}

pub(super) fn us(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

pub(super) fn why(ledger: &PermittedByKind, life: &Life, index: usize) -> String {
    let flow = &life.flow;
    let permit = life.permits[index];
    let since_ns = match index {
        0 => life.submitted_ns,
        later => life.permits[later - 1].at_ns,
    };
    let waited = us(permit.at_ns.saturating_sub(since_ns));
    let mut text = match (index, flow.standing) {
        (0, SubmitOutcome::AtOnce) => return "nothing was in its way".to_owned(),
        (0, SubmitOutcome::OnCredit) => return "it went on credit, without asking".to_owned(),
        (0, SubmitOutcome::Observed) => return "mode observe: no permit was asked for".to_owned(),
        (0, SubmitOutcome::BehindOthers) => format!(
            "{waited:.0} µs: {} waited before it, {} of {} were in flight",
            flows(flow.ahead),
            Bytes(flow.in_flight_bytes).about(),
            Bytes(flow.window_bytes).about()
        ),
        (0, SubmitOutcome::WindowFull) => format!(
            "{waited:.0} µs: nobody waited before it, but {} of {} were in flight",
            Bytes(flow.in_flight_bytes).about(),
            Bytes(flow.window_bytes).about()
        ),
        (0, SubmitOutcome::Held) => {
            format!("{waited:.0} µs: its client owed completions")
        }
        _ => format!("{waited:.0} µs after its last permit"),
    };
    let mut meanwhile = ledger.between((flow.nic, flow.ingress), since_ns, permit.at_ns);
    // The flow's own bytes did not make it wait.
    let own = (flow.stage.clone(), permit.level);
    if let Some(entry) = meanwhile.iter_mut().find(|(kind, _)| *kind == own) {
        entry.1 -= permit.bytes.min(entry.1);
    }
    let others: Vec<String> = meanwhile
        .iter()
        .filter(|(_, bytes)| *bytes > 0)
        .map(|((stage, number), bytes)| {
            format!("{} of {stage} at {}", Bytes(*bytes).about(), level(*number))
        })
        .collect();
    if others.is_empty() {
        text.push_str("; nothing else got a permit meanwhile");
    } else {
        text.push_str(&format!("; meanwhile went {}", others.join(", ")));
    }
    text
}
