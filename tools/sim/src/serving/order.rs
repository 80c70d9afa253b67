//! The coordinator of the simulator: order and pruning of batches by `laxity_policy::admission`.

use std::collections::BTreeSet;

use laxity_policy::admission::{Admission, AdmissionAction, AdmissionConfig, AdmissionEvent};
use laxity_policy::{BatchId, Order, PolicyKind, PortId, RequestId, Span, Time};

use super::SimError;
use crate::scenario::{Part, Scenario};

#[derive(Debug)]
pub(super) struct Coordinator {
    admission: Admission,
    by_arrival: bool,
    /// Rank of each batch in the order. Batches are sorted by id.
    ranks: Vec<(BatchId, u32)>,
    order: Order,
    /// Relegated requests. They are in `H` of every order.
    given_up: BTreeSet<RequestId>,
    changes: u64,
    pub(super) due: Option<Time>,
}

impl Coordinator {
    /// Creates the coordinator, or returns `None` if the policy has no order.
    pub(super) fn new(
        scenario: &Scenario,
        rates: impl Iterator<Item = (u32, f64)>,
    ) -> Result<Option<Self>, SimError> {
        let policy = &scenario.policy;
        let knows = matches!(policy.kind, PolicyKind::Mfs | PolicyKind::Laxity);
        if policy.no_contention || !knows {
            return Ok(None);
        }
        let pruning = !policy.without.contains(&Part::Pruning);
        let config = AdmissionConfig {
            drop_budget: if pruning { policy.drop_budget } else { 0 },
            debounce: Span((policy.debounce_ms * 1e6) as u64),
            ports_max: 1 << 20,
            ..AdmissionConfig::for_policy(policy.kind)
        };
        let mut admission =
            Admission::new(config).map_err(|cause| SimError::Policy(cause.to_string()))?;
        for (port, rate) in rates {
            admission.handle(
                Time::ZERO,
                AdmissionEvent::PortRate { port: PortId(port), bytes_per_second: rate as u64 },
            );
        }
        Ok(Some(Self {
            admission,
            by_arrival: policy.without.contains(&Part::Red),
            ranks: Vec::new(),
            order: Order::default(),
            given_up: BTreeSet::new(),
            changes: 0,
            due: None,
        }))
    }

    pub(super) fn handle(&mut self, now: Time, event: AdmissionEvent) {
        self.admission.handle(now, event);
    }

    /// Returns the time of the next [`Coordinator::run`], if the agenda has no event for it.
    pub(super) fn next_due(&mut self) -> Option<Time> {
        let due = self.admission.next_deadline()?;
        (self.due != Some(due)).then(|| {
            self.due = Some(due);
            due
        })
    }

    /// Runs if a run is due, and returns the requests that are pruned now.
    pub(super) fn run(&mut self, now: Time) -> Option<&[RequestId]> {
        self.due = None;
        let AdmissionAction::OrderChanged(order) = self.admission.poll_action(now)?;
        self.order = order;
        self.ranks.clear();
        if self.by_arrival {
            self.order.sigma.sort_unstable();
        }
        let ranked = self.order.sigma.iter().zip(0..).map(|(&batch, rank)| (batch, rank));
        self.ranks.extend(ranked);
        self.ranks.sort_unstable();
        Some(&self.order.pruned)
    }

    pub(super) const fn epoch(&self) -> u64 {
        self.order.epoch + self.changes
    }

    pub(super) fn give_up(&mut self, request: RequestId) {
        self.changes += u64::from(self.given_up.insert(request));
    }

    /// Records that a request has its first token. Orders that still contain it do no harm.
    pub(super) fn ended(&mut self, now: Time, request: RequestId) {
        self.given_up.remove(&request);
        self.handle(now, AdmissionEvent::RequestEnded { request });
    }

    pub(super) fn order_for(&self, batches: impl Iterator<Item = BatchId>) -> Order {
        let rank = |batch: BatchId| {
            let at = self.ranks.binary_search_by_key(&batch, |ranked| ranked.0).ok()?;
            Some((self.ranks[at].1, batch))
        };
        let mut ranked: Vec<_> = batches.filter_map(rank).collect();
        ranked.sort_unstable();
        let mut pruned = self.order.pruned.clone();
        if !self.given_up.is_empty() {
            pruned.extend(&self.given_up);
            pruned.sort_unstable();
            pruned.dedup();
        }
        Order {
            epoch: self.epoch(),
            sigma: ranked.into_iter().map(|(_, batch)| batch).collect(),
            pruned,
        }
    }
}
