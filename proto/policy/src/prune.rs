//! The requests that cannot be served in time: steps 2 and 3 of MFS Algorithm 1 (Appendix B).
//!
//! Step 1 ([`red`](crate::red)) gives the order `σ` of the active batches. `L_i(u)` are the bytes
//! that batch `i` has still to move through port `u`, and `S(u)` those of all batches before it:
//!
//! ```text
//! F̂_i = now + (compute left of those ahead of i on its unit, and of i)
//!           + max over u in ports(i) of (S(u) + L_i(u)) / rate(u)     instant, ns
//! while F̂_i > D_i^Lo, drops are left and a candidate loads u*
//!     u* = the port at which that maximum is taken
//!     r* = the candidate that loads u* most, of the requests of batches 1 … i
//!     H  = H ∪ {r*}, and ℓ_{r*} leaves the loads of its batch
//! S  = S + L_i
//! ```
//!
//! A request in `H` is demoted to the scavenger, never dropped. The link decides which of its flows
//! are demoted (a request that computes already keeps its early stages).
//!
//! The paper is ambiguous or contradictory in some points. This module reads them so:
//!
//! 1. *`B`* names both the bandwidth and the drop budget. Here the bandwidth is each port's rate,
//!    and the drop budget is [`PruneLimits::drops`].
//! 2. *The bottleneck* is the port of batch `i` that takes the most time, not the most bytes. Line
//!    11 takes the argmax over all ports and ignores that rates differ, so it could prune for a
//!    port that the batch never uses. Of equal times the smaller [`PortId`] wins.
//! 3. *Candidates.* The text of step 3 prunes "within the batch", lines 8 and 12 from the pool of
//!    all batches so far. This module follows the listing. Of equal loads the first of these rules
//!    decides: a request that does not compute yet (its demotion frees the most and stalls no
//!    batch), the request that comes later in `σ` (its batch is less urgent), the larger id.
//! 4. *Line 18*, as printed, estimates again only when an earlier batch lost a request. A batch
//!    that lost a request of its own would prune until the budget is spent. Here `F̂_i` is
//!    estimated after each pruned request.
//! 5. *The earlier batch is estimated again.* Line 17 lowers `S` but not `L_j`. Here `ℓ_{r*}`
//!    leaves `L_j`, so the sums of every batch from `j` on shrink, and their estimates are computed
//!    again once `H` is final. No decision changes, because estimates only fall and `H` only grows:
//!    a feasible batch stays feasible. Each reported [`Estimate`] then follows Algorithm 1 for the
//!    final `H`.
//! 6. *Persistence.* Line 3 starts from an empty `H`. Here a pruned request stays pruned until it
//!    ends, counts against the budget and loads nothing (architecture §4.4). Otherwise each trigger
//!    could restore it and prune another, so the choice of requests would oscillate.
//! 7. *Nothing to prune.* A batch that loads no port has no bottleneck, so the loop stops.
//! 8. *What accumulates.* Delays are "strictly accumulated, no overlap between batches" (step 2).
//!    Communication counts the bytes of every batch that precedes `i` in `σ` (`S`). Computing
//!    counts what is left of the batches before `i` on its own unit, since a unit computes one
//!    batch at a time. Both are added, though they overlap. Computing on other units does not
//!    count, because it runs at the same time: a sum over `σ` would make every batch of a cluster
//!    late. Network stalls of a batch ahead count only as its bytes, if it precedes `i` in `σ` too.
//!
//! [`Doomed::SetAside`] departs from the paper in one point, which its comment explains.

mod pool;
mod traffic_table;

use core::cmp::Ordering;

pub use traffic_table::{
    BatchSlot, LOAD_BYTES_MAX, MEMBERS_MAX, Member, MemberSlot, PortSlot, RATE_MAX, TrafficTable,
};

use pool::{NONE, Pool};
use traffic_table::Sum;

use laxity_types::{PortId, RequestId};

use crate::time::{Span, Time};

/// The treatment of requests that are late even on an idle network, because their computation alone
/// ends after their deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Doomed {
    /// The paper's rule: doomed requests are like any other. A batch that cannot meet `D^Lo` still
    /// causes the heaviest requests of all earlier batches to be pruned in vain, until it loads
    /// nothing or the budget is spent. Pruned requests still count in their batch's RED.
    Counted,
    /// Doomed requests are pruned themselves, the earliest deadline first. No other request is
    /// pruned for a batch that cannot meet `D^Lo` anyhow. RED and `D^Lo` count only members that
    /// are not pruned, so that doomed work never makes a batch urgent (architecture §4.4).
    #[default]
    SetAside,
}

/// The value of [`PruneLimits::pace`] that leaves estimates unchanged.
pub const PACE_UNIT: u32 = 1024;

/// The limits of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PruneLimits<'a> {
    /// Number of requests that may still be pruned, for each budget.
    pub drops: &'a [usize],
    /// The treatment of doomed requests.
    pub doomed: Doomed,
    /// Factor for the estimated communication time, in parts of [`PACE_UNIT`].
    pub pace: u32,
}

/// The values that a run needs about one batch of `σ`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// The batch's slot in the traffic table.
    pub batch: BatchSlot,
    /// When the batch would be done without network delays: `now` plus the computation left of the
    /// batches ahead of it on its unit, and of the batch itself.
    pub ready: Time,
    /// `D_i^Lo`, by which the batch has to be done. [`Time::NEVER`] means that it is never late.
    pub limit: Time,
    /// The earliest deadline among the requests that count in the batch's RED.
    pub first_due: Time,
    /// The budget of requests that may be pruned for the batch, as an index of
    /// [`PruneLimits::drops`].
    pub budget: u16,
}

/// `F̂_i` as its parts, so that only [`Estimate::finish`] needs a division.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// When the computation of the batch ends, see [`Turn::ready`].
    pub ready: Time,
    /// The port `u*` at which the batch waits longest, `None` if it loads none.
    pub bottleneck: Option<PortId>,
    /// `S(u*) + L_i(u*)`, in bytes.
    pub bytes: u64,
    /// `rate(u*)`, in bytes per second.
    pub rate: u64,
    /// Correction of the communication time, see [`PruneLimits::pace`].
    pub pace: u32,
}

impl Estimate {
    /// Returns how long the batch communicates, before [`PruneLimits::pace`] applies.
    #[must_use]
    pub const fn communication(&self) -> Span {
        if self.bytes == 0 { Span::ZERO } else { Span::transfer(self.bytes, self.rate) }
    }

    /// Returns `F̂_i`.
    pub fn finish(&self) -> Time {
        if self.bytes == 0 {
            return self.ready;
        }
        let work = u128::from(self.bytes) * 1_000_000_000 * u128::from(self.pace);
        let speed = u128::from(self.rate) * u128::from(PACE_UNIT);
        let ns = if speed == 0 { u128::MAX } else { work.div_ceil(speed) };
        self.ready + Span(u64::try_from(ns).unwrap_or(u64::MAX))
    }

    /// Reports whether `F̂_i > limit`, without a division.
    pub fn is_later_than(&self, limit: Time) -> bool {
        if limit == Time::NEVER {
            return false;
        }
        if self.ready > limit || self.bytes == 0 {
            return self.ready > limit;
        }
        let work = u128::from(self.bytes) * 1_000_000_000 * u128::from(self.pace);
        let speed = u128::from(self.rate) * u128::from(PACE_UNIT);
        work > u128::from(limit.since(self.ready).0) * speed
    }
}

/// A request that a run put into `H`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pruning {
    /// The request.
    pub request: RequestId,
    /// The request's slot in the traffic table.
    pub member: MemberSlot,
    /// The batch for which the request was pruned, as an index into `σ`.
    pub turn: usize,
    /// The bottleneck that the request loaded most; `None` if the request was doomed by itself.
    pub port: Option<PortId>,
}

/// Runs steps 2 and 3. Between runs it keeps only its allocations.
#[derive(Debug, Default)]
pub struct Pruner {
    /// `S` by port slot. While batch `i` has its turn, it is `S + L_i`.
    total: Vec<u64>,
    /// Index into `σ` by batch slot.
    positions: Vec<u32>,
    /// Candidates of the ports that were a bottleneck in this run.
    pools: Vec<Pool>,
    /// Index into `pools` by port slot.
    pool_of: Vec<u32>,
    pruned: Vec<Pruning>,
    /// Number of requests that may still be pruned, for each budget.
    drops_left: Vec<usize>,
    estimates: Vec<Estimate>,
    /// The last turn in which an earlier batch lost a request.
    last_loss: usize,
    window: Window,
}

/// Number of turns whose sums [`Window`] copies at a time.
const WINDOW_TURNS: usize = 64;

/// A copy of `L_i` of the next few batches, in consecutive memory.
///
/// `σ` visits the batches in an order that the processor cannot predict. A run over thousands of
/// batches would spend most of its time waiting for memory. In a loop that only copies, the
/// processor waits for many reads at once. A copy is still valid at the batch's turn, because no
/// request is pruned before the turn of its batch.
#[derive(Debug, Default)]
struct Window {
    sums: Vec<Sum>,
    /// The end of each turn's sums in `sums`.
    ends: Vec<u32>,
    /// Position in `σ` of the first turn in the window.
    first: usize,
}

impl Window {
    fn clear(&mut self) {
        self.sums.clear();
        self.ends.clear();
        self.first = 0;
    }

    /// Returns the sums of the batch at `position`. Callers must pass ascending positions.
    fn of(&mut self, traffic: &TrafficTable, turns: &[Turn], position: usize) -> &[Sum] {
        if position >= self.first + self.ends.len() {
            self.clear();
            self.first = position;
            for turn in turns[position..].iter().take(WINDOW_TURNS) {
                self.sums.extend_from_slice(traffic.sums(turn.batch));
                self.ends.push(self.sums.len() as u32);
            }
        }
        let index = position - self.first;
        let begin = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.sums[begin as usize..self.ends[index] as usize]
    }
}

/// The port at which a batch waits longest, of those compared so far.
#[derive(Clone, Copy)]
struct Worst {
    port: PortSlot,
    bytes: u64,
    rate: u64,
}

impl Pruner {
    /// Runs over `turns`, which are all batches in the order of `σ`, and marks pruned requests in
    /// `traffic`. [`Pruner::pruned`] and [`Pruner::estimates`] return the outcome.
    pub fn run(&mut self, traffic: &mut TrafficTable, turns: &[Turn], limits: &PruneLimits<'_>) {
        self.reset(traffic, turns);
        self.drops_left.clear();
        self.drops_left.extend(limits.drops);
        for (position, turn) in turns.iter().enumerate() {
            let mut worst = self.charge(traffic, turns, position);
            let set_aside = limits.doomed == Doomed::SetAside;
            let budget = usize::from(turn.budget);
            if set_aside && self.drops_left[budget] > 0 && turn.first_due < turn.ready {
                self.prune_doomed(traffic, position, turn);
                worst = self.worst(traffic, turn.batch);
            }
            let mut estimate = estimate(traffic, turn, worst, limits);
            let in_vain = set_aside && turn.limit < turn.ready;
            while !in_vain && self.drops_left[budget] > 0 && estimate.is_later_than(turn.limit) {
                let Some(Worst { port, .. }) = worst else { break };
                let Some(member) = self.heaviest(traffic, port, position) else { break };
                self.prune(traffic, member, position, Some(port));
                self.drops_left[budget] -= 1;
                worst = self.worst(traffic, turn.batch);
                estimate = self::estimate(traffic, turn, worst, limits);
            }
            self.estimates.push(estimate);
        }
        self.estimate_again(traffic, turns, limits);
    }

    /// Returns the requests that the last run put into `H`, in that order.
    pub fn pruned(&self) -> &[Pruning] {
        &self.pruned
    }

    /// Returns the estimates of the last run, in the order of its turns.
    pub fn estimates(&self) -> &[Estimate] {
        &self.estimates
    }

    fn reset(&mut self, traffic: &TrafficTable, turns: &[Turn]) {
        self.pruned.clear();
        self.estimates.clear();
        self.last_loss = 0;
        self.window.clear();
        self.total.clear();
        self.total.resize(traffic.rates().len(), 0);
        self.pools.clear();
        self.pool_of.clear();
        self.pool_of.resize(traffic.rates().len(), NONE);
        self.positions.clear();
        self.positions.resize(traffic.batch_slots(), NONE);
        for (position, turn) in turns.iter().enumerate() {
            self.positions[turn.batch as usize] = position as u32;
        }
    }

    /// Adds `L_i` to `S` and returns `u*`. Only this loop runs over all traffic.
    fn charge(&mut self, traffic: &TrafficTable, turns: &[Turn], position: usize) -> Option<Worst> {
        let rates = traffic.rates();
        let mut worst = None;
        for sum in self.window.of(traffic, turns, position) {
            let bytes = &mut self.total[sum.port as usize];
            *bytes += sum.bytes;
            let port = Worst { port: sum.port, bytes: *bytes, rate: rates[sum.port as usize] };
            keep_worse(traffic, &mut worst, port);
        }
        worst
    }

    /// Returns `u*` of a batch whose bytes `total` contains already.
    fn worst(&self, traffic: &TrafficTable, batch: BatchSlot) -> Option<Worst> {
        let rates = traffic.rates();
        let mut worst = None;
        for sum in traffic.sums(batch) {
            let slot = sum.port as usize;
            let port = Worst { port: sum.port, bytes: self.total[slot], rate: rates[slot] };
            keep_worse(traffic, &mut worst, port);
        }
        worst
    }

    /// Prunes the requests of the batch whose computation alone ends after their deadline.
    fn prune_doomed(&mut self, traffic: &mut TrafficTable, position: usize, turn: &Turn) {
        let mut doomed: Vec<(Time, RequestId, MemberSlot)> = traffic
            .members_of(turn.batch)
            .iter()
            .map(|&slot| (traffic.member(slot), slot))
            .filter(|(member, _)| !member.pruned && member.deadline < turn.ready)
            .map(|(member, slot)| (member.deadline, member.request, slot))
            .collect();
        doomed.sort_unstable();
        let budget = usize::from(turn.budget);
        for (_, _, member) in doomed.into_iter().take(self.drops_left[budget]) {
            self.prune(traffic, member, position, None);
            self.drops_left[budget] -= 1;
        }
    }

    /// Puts a request into `H`.
    fn prune(
        &mut self,
        traffic: &mut TrafficTable,
        member: MemberSlot,
        turn: usize,
        port: Option<PortSlot>,
    ) {
        traffic.take_out(member, &mut self.total);
        let loser = self.positions[traffic.batch_of(member) as usize] as usize;
        if loser < turn {
            self.last_loss = turn;
        }
        let request = traffic.member(member).request;
        let port = port.map(|port| traffic.port_id(port));
        self.pruned.push(Pruning { request, member, turn, port });
    }

    /// Returns `r*`: the request that loads `port` most, of the batches up to `position`.
    fn heaviest(
        &mut self,
        traffic: &TrafficTable,
        port: PortSlot,
        position: usize,
    ) -> Option<MemberSlot> {
        let known = self.pool_of[port as usize];
        let index = if known == NONE {
            self.pools.push(Pool::of_port(traffic, port, position, &self.positions));
            self.pool_of[port as usize] = (self.pools.len() - 1) as u32;
            self.pools.len() - 1
        } else {
            known as usize
        };
        self.pools[index].take_heaviest(traffic, position)
    }

    /// Recomputes the estimates of the batches before the last turn in which an earlier batch lost
    /// a request. Later estimates include all of `H` already.
    fn estimate_again(&mut self, traffic: &TrafficTable, turns: &[Turn], limits: &PruneLimits<'_>) {
        self.total.fill(0);
        self.window.clear();
        for (position, turn) in turns[..self.last_loss].iter().enumerate() {
            let worst = self.charge(traffic, turns, position);
            self.estimates[position] = estimate(traffic, turn, worst, limits);
        }
    }
}

/// Keeps the port whose bytes take longer. It compares fractions exactly, without a division. A
/// port with rate zero takes longest.
fn keep_worse(traffic: &TrafficTable, worst: &mut Option<Worst>, port: Worst) {
    let Some(kept) = *worst else {
        *worst = Some(port);
        return;
    };
    let new = u128::from(port.bytes) * u128::from(kept.rate);
    let old = u128::from(kept.bytes) * u128::from(port.rate);
    let worse = match new.cmp(&old) {
        Ordering::Greater => true,
        Ordering::Equal => traffic.port_id(port.port) < traffic.port_id(kept.port),
        Ordering::Less => false,
    };
    if worse {
        *worst = Some(port);
    }
}

fn estimate(
    traffic: &TrafficTable,
    turn: &Turn,
    worst: Option<Worst>,
    limits: &PruneLimits<'_>,
) -> Estimate {
    Estimate {
        ready: turn.ready,
        bottleneck: worst.map(|worst| traffic.port_id(worst.port)),
        bytes: worst.map_or(0, |worst| worst.bytes),
        rate: worst.map_or(0, |worst| worst.rate),
        pace: limits.pace,
    }
}
