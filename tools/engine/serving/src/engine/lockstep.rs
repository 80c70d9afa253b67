//! Iterations in lockstep with the ranks that share the experts ([`crate::apart::lockstep`]): which
//! ranks take part in the next one, and with which requests.
//!
//! A rank with something to compute begins the next iteration and announces it. A rank that gets
//! the announcement takes part with what it has, at once if it is idle. An iteration ends when all
//! ranks computed its last layer, so no rank is ahead by more than one.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use laxity_client::Hint;
use laxity_requests::iteration::Plan;

use super::Engine;
use super::remote::remaining;
use crate::apart::lockstep::Iteration;
use crate::apart::{Net, Numbers, Words};
use crate::clock;

/// Number and deadline (in ns) of another rank's request.
type Other = (u64, u64);

pub(super) struct Lockstep {
    /// Number of the iteration that is computed, or else of the next one.
    step: u64,
    /// Number of the latest iteration that another rank began.
    called: u64,
    batches: u64,
    others: BTreeMap<u64, Vec<Other>>,
    running: Option<Iteration>,
}

impl Lockstep {
    /// Makes the state for a group of ranks. `first` is the first rank's address.
    pub(super) fn new(first: SocketAddr) -> Self {
        Self {
            step: 1,
            called: 0,
            batches: Numbers::of_group(first).next(),
            others: BTreeMap::new(),
            running: None,
        }
    }

    /// Reports whether another rank began the iteration that is next here.
    pub(super) const fn is_called(&self) -> bool {
        self.called >= self.step
    }

    fn others(&self) -> &[Other] {
        self.others.get(&self.step).map_or(&[], Vec::as_slice)
    }
}

impl Engine {
    pub(super) fn begin_step(&mut self, plan: &Plan) -> Option<Iteration> {
        let lockstep = self.lockstep.as_mut()?;
        let net = self.net.as_ref()?;
        let wanted = plan.chunks.iter().map(|chunk| chunk.request);
        let members = wanted
            .filter(|request| !self.schedulers.is_relegated(*request))
            .filter_map(|request| self.sequences.get(&request));
        let members: Vec<Other> = members.map(|one| (one.id.0, one.deadline_ns())).collect();
        let deadlines = members.iter().chain(lockstep.others());
        let earliest = deadlines.map(|(_, deadline_ns)| *deadline_ns).min();
        let iteration = Iteration {
            step: lockstep.step,
            batch: lockstep.batches + lockstep.step,
            deadline_ns: Arc::new(AtomicU64::new(earliest.unwrap_or(0))),
        };
        let left = |(request, deadline_ns)| (request, remaining(deadline_ns));
        let words =
            Words::Step { step: lockstep.step, members: members.into_iter().map(left).collect() };
        for rank in net.peers.ranks.others() {
            net.say(rank, &words);
        }
        lockstep.running = Some(iteration.clone());
        Some(iteration)
    }

    pub(super) fn hear_step(&mut self, step: u64, members: Vec<(u64, u64)>) {
        let Some(lockstep) = self.lockstep.as_mut() else { return };
        lockstep.called = lockstep.called.max(step);
        let now = clock::now().0;
        let due = |(request, left): (u64, u64)| (request, now.saturating_add(left));
        let members: Vec<Other> = members.into_iter().map(due).collect();
        let running = lockstep.running.as_ref().filter(|one| one.step == step);
        if let Some(running) = running {
            let own = running.deadline_ns.load(Ordering::Relaxed);
            let all = members.iter().map(|(_, deadline_ns)| *deadline_ns);
            let all = all.chain((own > 0).then_some(own)).min();
            running.deadline_ns.store(all.unwrap_or(0), Ordering::Relaxed);
            join(self.net.as_deref(), running.batch, &members);
        }
        lockstep.others.entry(step).or_default().extend(members);
    }

    /// Sends the daemon hints about other ranks' requests in the iteration. Their layers wait for
    /// what this rank sends.
    pub(super) fn join_others(&self) {
        if let Some(lockstep) = &self.lockstep
            && let Some(running) = &lockstep.running
        {
            join(self.net.as_deref(), running.batch, lockstep.others());
        }
    }

    pub(super) fn end_step(&mut self) {
        let Some(lockstep) = self.lockstep.as_mut() else { return };
        let others = lockstep.others.remove(&lockstep.step);
        lockstep.step += 1;
        lockstep.running = None;
        if let Some(net) = &self.net {
            for (request, _) in others.into_iter().flatten() {
                net.carrier.end_request(request);
            }
        }
    }
}

/// Adds other ranks' requests to a batch by hints. This host sends nothing for these requests.
fn join(net: Option<&Net>, batch: u64, members: &[Other]) {
    let Some(net) = net else { return };
    for &(request, deadline_ns) in members {
        net.carrier.hint(Hint::RequestJoin { batch, request, deadline_ns, bytes: 0 });
    }
}
