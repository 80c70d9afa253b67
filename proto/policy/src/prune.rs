//! Which requests cannot be served in time: steps 2 and 3 of MFS Algorithm 1 (Appendix B).
//!
//! Given the order `σ` of the active batches (step 1, [`red`](crate::red)), with `L_i(u)` the bytes
//! that batch `i` has still to move through port `u` and `S(u)` those of all batches before it:
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
//! Whoever is in `H` is demoted to the scavenger, never dropped; which of its flows are demoted
//! is the link's decision (a request that computes already keeps its early stages).
//!
//! Where the paper is ambiguous or at odds with itself, this is how it is read:
//!
//! 1. *`B`* names both the bandwidth and the drop budget. Here: each port's rate, and
//!    [`PruneLimits::drops`].
//! 2. *The bottleneck* is sought among the ports that batch `i` loads, and by time, not bytes:
//!    line 11 takes the argmax over all ports and ignores that rates differ, and would prune for
//!    the sake of a port that the batch never touches. Equal times: the smaller [`PortId`].
//! 3. *Candidates.* The text of step 3 prunes "within the batch", lines 8 and 12 from the pool
//!    of all batches so far. The listing is followed. Equal loads fall on, in this order: a
//!    request that does not compute yet (its demotion frees the most and stalls nobody), the one
//!    that comes later in `σ` (the less urgent batch pays), the larger id.
//! 4. *Line 18*, as printed, estimates again only when an earlier batch lost a request; a batch
//!    that lost its own would prune on until the budget is spent. `F̂_i` is estimated after
//!    each loss.
//! 5. *The earlier batch is estimated again.* Line 17 lowers `S` and forgets `L_j`. Here `ℓ_{r*}`
//!    leaves `L_j`, so that the prefix of every batch from `j` on shrinks, and their estimates
//!    are taken again once `H` is final. This changes no decision, because estimates only fall
//!    and `H` only grows: a feasible batch stays so. It changes what is reported: each
//!    [`Estimate`] is what Algorithm 1 would say of the batch, given all of `H`.
//! 6. *Persistence.* Line 3 starts from an empty `H`. Here a pruned request stays pruned, counts
//!    against the budget and loads nothing, until it ends (architecture §4.4): otherwise each
//!    trigger would take it back and prune another, and the victims would flap.
//! 7. *Nothing to prune.* A batch that loads no port (any more) has no bottleneck; the loop stops.
//! 8. *What accumulates.* Delays are "strictly accumulated, no overlap between batches" (step 2).
//!    Taken is: of communication, the bytes of every batch that precedes `i` in `σ` (`S`); of
//!    computing, what is left of the batches that `i` is queued behind on its own unit, since a
//!    unit computes one batch at a time; and both after each other, though they overlap. Not
//!    taken is the computing of batches on other units, which goes on at the same time: summed
//!    over `σ` it would make every batch of a cluster late. Nor is the time that a batch ahead
//!    will stall for the network, except for its bytes, if it precedes `i` in `σ` too.
//!
//! [`Doomed::SetAside`] departs from the paper on one point, and says why.

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

/// What becomes of requests that would be late on an idle network, because computing alone
/// takes them past their deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Doomed {
    /// The paper: they are like any other. A batch that can no longer meet `D^Lo` still has the
    /// heaviest requests of all earlier batches pruned for it, in vain, until it loads nothing
    /// or the budget is gone; and pruned requests still count in their batch's RED.
    Counted,
    /// They are pruned themselves, the earliest deadline first, and nobody is pruned for the
    /// sake of a batch that cannot meet `D^Lo` anyhow. RED and `D^Lo` are those of the members
    /// that are not pruned: doomed work never sets a batch's urgency (architecture §4.4).
    #[default]
    SetAside,
}

/// `pace` of an estimate that is taken as it is: estimates are scaled in parts of this.
pub const PACE_UNIT: u32 = 1024;

/// What one run is bound by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PruneLimits {
    /// How many requests may still be pruned.
    pub drops: usize,
    /// What becomes of doomed requests.
    pub doomed: Doomed,
    /// By what the estimated communication time is multiplied, in parts of [`PACE_UNIT`].
    pub pace: u32,
}

/// One batch of `σ`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Which.
    pub batch: BatchSlot,
    /// When it would be done if nobody waited for the network: `now` plus what is left to
    /// compute of the batches ahead of it on its unit, and of itself.
    pub ready: Time,
    /// `D_i^Lo`, by which it has to be done. [`Time::NEVER`]: it is never late.
    pub limit: Time,
    /// The earliest deadline among its requests.
    pub first_due: Time,
}

/// `F̂_i`, kept as its parts: the division is only made for those who ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// When it has computed, see [`Turn::ready`].
    pub ready: Time,
    /// The port `u*` at which the batch waits longest, `None` if it loads none.
    pub bottleneck: Option<PortId>,
    /// `S(u*) + L_i(u*)`, in bytes.
    pub bytes: u64,
    /// `rate(u*)`, in bytes per second.
    pub rate: u64,
    /// See [`PruneLimits::pace`].
    pub pace: u32,
}

impl Estimate {
    /// How long the batch communicates, before [`PruneLimits::pace`].
    #[must_use]
    pub const fn communication(&self) -> Span {
        if self.bytes == 0 {
            Span::ZERO
        } else {
            Span::transfer(self.bytes, self.rate)
        }
    }

    /// `F̂_i`.
    #[must_use]
    pub fn finish(&self) -> Time {
        if self.bytes == 0 {
            return self.ready;
        }
        let work = u128::from(self.bytes) * 1_000_000_000 * u128::from(self.pace);
        let speed = u128::from(self.rate) * u128::from(PACE_UNIT);
        let ns = if speed == 0 {
            u128::MAX
        } else {
            work.div_ceil(speed)
        };
        self.ready + Span(u64::try_from(ns).unwrap_or(u64::MAX))
    }

    /// `F̂_i > limit`, without the division.
    #[must_use]
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

/// One request that was put into `H`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pruning {
    /// Who.
    pub request: RequestId,
    /// Where the request lies in the table.
    pub member: MemberSlot,
    /// For which batch, as an index into `σ`.
    pub turn: usize,
    /// The bottleneck that it loaded most; `None` if it was doomed by itself.
    pub port: Option<PortId>,
}

/// Runs steps 2 and 3. It keeps nothing between runs but its allocations.
#[derive(Debug, Default)]
pub struct Pruner {
    /// `S`, and `S + L_i` while batch `i` has its turn. By port slot.
    total: Vec<u64>,
    /// Index into `σ` by batch slot.
    positions: Vec<u32>,
    /// Candidates of the ports that were a bottleneck in this run.
    pools: Vec<Pool>,
    /// Index into `pools` by port slot.
    pool_of: Vec<u32>,
    pruned: Vec<Pruning>,
    estimates: Vec<Estimate>,
    /// The last turn in which an earlier batch lost a request.
    last_loss: usize,
    window: Window,
}

/// Turns whose sums are read together: see [`Window`].
const WINDOW_TURNS: usize = 64;

/// `L_i` of the next few batches, copied next to each other.
///
/// `σ` visits the batches in an order that memory knows nothing of, so each visit waits for memory,
/// and that is what a run over thousands of batches would cost. A loop that does nothing but copy
/// has the processor wait for many of them at once. The copies stay true for their turn: nobody is
/// pruned whose batch did not have its turn yet.
#[derive(Debug, Default)]
struct Window {
    sums: Vec<Sum>,
    /// Where each turn's sums end.
    ends: Vec<u32>,
    /// Position of the first turn in it.
    first: usize,
}

impl Window {
    fn clear(&mut self) {
        self.sums.clear();
        self.ends.clear();
        self.first = 0;
    }

    /// The sums of the batch at `position`; positions are asked for in ascending order.
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

/// The port at which a batch waits longest, so far.
#[derive(Clone, Copy)]
struct Worst {
    port: PortSlot,
    bytes: u64,
    rate: u64,
}

impl Pruner {
    /// Runs over `turns`, which are all batches in the order of `σ`, and marks in `traffic` who is
    /// pruned. The outcome is in [`Pruner::pruned`] and [`Pruner::estimates`].
    pub fn run(&mut self, traffic: &mut TrafficTable, turns: &[Turn], limits: &PruneLimits) {
        self.reset(traffic, turns);
        for (position, turn) in turns.iter().enumerate() {
            let mut worst = self.charge(traffic, turns, position);
            let set_aside = limits.doomed == Doomed::SetAside;
            let drops_left = self.pruned.len() < limits.drops;
            if set_aside && drops_left && turn.first_due < turn.ready {
                self.prune_doomed(traffic, position, turn, limits);
                worst = self.worst(traffic, turn.batch);
            }
            let mut estimate = estimate(traffic, turn, worst, limits);
            let in_vain = set_aside && turn.limit < turn.ready;
            while !in_vain && self.pruned.len() < limits.drops && estimate.is_later_than(turn.limit)
            {
                let Some(Worst { port, .. }) = worst else {
                    break;
                };
                let Some(member) = self.heaviest(traffic, port, position) else {
                    break;
                };
                self.prune(traffic, member, position, Some(port));
                worst = self.worst(traffic, turn.batch);
                estimate = self::estimate(traffic, turn, worst, limits);
            }
            self.estimates.push(estimate);
        }
        self.estimate_again(traffic, turns, limits);
    }

    /// Who was put into `H` by the last run, in that order.
    #[must_use]
    pub fn pruned(&self) -> &[Pruning] {
        &self.pruned
    }

    /// The estimates of the last run, in the order of its turns.
    #[must_use]
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

    /// Adds `L_i` to `S` and finds `u*`. The one loop that runs over all traffic.
    fn charge(&mut self, traffic: &TrafficTable, turns: &[Turn], position: usize) -> Option<Worst> {
        let rates = traffic.rates();
        let mut worst = None;
        for sum in self.window.of(traffic, turns, position) {
            let bytes = &mut self.total[sum.port as usize];
            *bytes += sum.bytes;
            let port = Worst {
                port: sum.port,
                bytes: *bytes,
                rate: rates[sum.port as usize],
            };
            keep_worse(traffic, &mut worst, port);
        }
        worst
    }

    /// `u*` of a batch that was charged already.
    fn worst(&self, traffic: &TrafficTable, batch: BatchSlot) -> Option<Worst> {
        let rates = traffic.rates();
        let mut worst = None;
        for sum in traffic.sums(batch) {
            let slot = sum.port as usize;
            let port = Worst {
                port: sum.port,
                bytes: self.total[slot],
                rate: rates[slot],
            };
            keep_worse(traffic, &mut worst, port);
        }
        worst
    }

    /// Prunes those of the batch that computing alone makes late.
    fn prune_doomed(
        &mut self,
        traffic: &mut TrafficTable,
        position: usize,
        turn: &Turn,
        limits: &PruneLimits,
    ) {
        let mut doomed: Vec<(Time, RequestId, MemberSlot)> = traffic
            .members_of(turn.batch)
            .iter()
            .map(|&slot| (traffic.member(slot), slot))
            .filter(|(member, _)| !member.pruned && member.deadline < turn.ready)
            .map(|(member, slot)| (member.deadline, member.request, slot))
            .collect();
        doomed.sort_unstable();
        let drops_left = limits.drops.saturating_sub(self.pruned.len());
        for (_, _, member) in doomed.into_iter().take(drops_left) {
            self.prune(traffic, member, position, None);
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
        self.pruned.push(Pruning {
            request,
            member,
            turn,
            port,
        });
    }

    /// `r*`: the request that loads `port` most, of the batches up to `position`.
    fn heaviest(
        &mut self,
        traffic: &TrafficTable,
        port: PortSlot,
        position: usize,
    ) -> Option<MemberSlot> {
        let known = self.pool_of[port as usize];
        let index = if known == NONE {
            self.pools
                .push(Pool::of_port(traffic, port, position, &self.positions));
            self.pool_of[port as usize] = (self.pools.len() - 1) as u32;
            self.pools.len() - 1
        } else {
            known as usize
        };
        self.pools[index].take_heaviest(traffic, position)
    }

    /// Takes the estimates again that were taken before the last loss of an earlier batch: those
    /// after it know all of `H` already.
    fn estimate_again(&mut self, traffic: &TrafficTable, turns: &[Turn], limits: &PruneLimits) {
        self.total.fill(0);
        self.window.clear();
        for (position, turn) in turns[..self.last_loss].iter().enumerate() {
            let worst = self.charge(traffic, turns, position);
            self.estimates[position] = estimate(traffic, turn, worst, limits);
        }
    }
}

/// Keeps the port whose bytes take longer. Compared as fractions, exactly and without division;
/// a port with rate zero takes for ever.
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
    limits: &PruneLimits,
) -> Estimate {
    Estimate {
        ready: turn.ready,
        bottleneck: worst.map(|worst| traffic.port_id(worst.port)),
        bytes: worst.map_or(0, |worst| worst.bytes),
        rate: worst.map_or(0, |worst| worst.rate),
        pace: limits.pace,
    }
}
