//! Places each request on the instance with the least load: prompt tokens to compute, or KV tokens
//! on decode instances, those on their way included. Equal instances take turns.

use std::collections::{BTreeMap, VecDeque};

use crate::Time;
use crate::dispatch::{Decision, Dispatch, Event, Role};
use crate::ledger::{InstanceTable, Row, Targets};
use crate::request::{InstanceId, RequestId, Spec};

/// The policy that chooses the least loaded instance.
#[derive(Clone, Debug, Default)]
pub struct LeastLoaded {
    ledger: InstanceTable,
    held: VecDeque<(Spec, bool)>,
    /// When each instance last got a request, in placements.
    turns: BTreeMap<InstanceId, u64>,
    placements: u64,
}

impl LeastLoaded {
    fn least(&self, decode: bool) -> Option<InstanceId> {
        // On an instance with both phases, one decode counts as much as one prompt token.
        let load = |row: &Row| match row.role {
            Role::Decode => row.decodes().1,
            Role::Whole => row.prompts().tokens + row.decodes().0,
            Role::Prefill => row.prompts().tokens,
        };
        let turn = |instance| self.turns.get(&instance).copied().unwrap_or(0);
        self.ledger
            .rows()
            .filter(|(_, row)| (row.role == Role::Decode) == decode)
            .min_by(|(x, a), (y, b)| load(a).total_cmp(&load(b)).then(turn(*x).cmp(&turn(*y))))
            .map(|(instance, _)| instance)
    }

    fn leave(&mut self, request: RequestId) {
        self.ledger.leave(request);
        self.held.retain(|(other, _)| other.id != request);
    }
}

impl Dispatch for LeastLoaded {
    fn handle(&mut self, now: Time, event: &Event) {
        match event {
            Event::Arrived(spec) => self.held.push_back((*spec, false)),
            Event::Prefilled { spec, .. } => {
                self.ledger.leave(spec.id);
                self.held.push_back((*spec, true));
            }
            Event::Up { instance, role } => self.ledger.up(now, *instance, *role),
            Event::Down { instance, lost } => {
                self.ledger.down(*instance, lost);
                for spec in lost {
                    self.leave(spec.id);
                    self.held.push_back((*spec, false));
                }
            }
            Event::Load { instance, load, .. } => self.ledger.report(now, *instance, *load),
            Event::Finished { request, .. } | Event::Cancelled(request) => self.leave(*request),
        }
    }

    fn poll_decision(&mut self, _: Time) -> Option<Decision> {
        let at = (0..self.held.len()).find(|at| self.least(self.held[*at].1).is_some())?;
        let (spec, decode) = self.held.remove(at)?;
        let instance = self.least(decode)?;
        self.ledger.place(&spec, Targets::of(&spec).tpot, instance);
        self.placements += 1;
        self.turns.insert(instance, self.placements);
        Some(Decision::Place { request: spec.id, instance })
    }

    fn waiting(&self) -> usize {
        self.held.len()
    }
}
