//! The bytes that each request puts on each port: `M` of MFS Algorithm 1, kept as sparse sums.
//!
//! The paper gives every batch a dense traffic matrix and adds the matrices at each trigger. A
//! request loads a few of the cluster's ports. So each request keeps a short list of its loads
//! (`ℓ_r`), each batch the sum of its members' lists (`L_i`), and each port the list of the
//! requests that load it. Every change updates all three lists, so that a trigger adds up only `S`.
//!
//! The numbers come from other processes. They are clamped so that no sum can overflow, and what
//! was added can be subtracted again exactly. A port that no request loads is removed, unless its
//! rate was reported, so that invented port numbers cannot fill the table for good.

use std::collections::BTreeMap;

use laxity_types::{PortId, RequestId};

use crate::time::Time;

/// Maximum bytes that count for one request on one port, 16 TiB. With [`MEMBERS_MAX`] requests a
/// port's sum is at most 2^63.
pub const LOAD_BYTES_MAX: u64 = 1 << 44;
/// Maximum number of requests in a table: see [`LOAD_BYTES_MAX`].
pub const MEMBERS_MAX: usize = 1 << 19;
/// Maximum rate of a port, 1 PiB/s. It keeps `rate · time` inside 128 bits.
pub const RATE_MAX: u64 = 1 << 50;

/// Index of a batch in the table. Reused after [`TrafficTable::close_batch`].
pub type BatchSlot = u32;
/// Index of a request in the table. Reused after [`TrafficTable::leave`].
pub type MemberSlot = u32;
/// Index of a port in the table. Reused once no request loads the port, unless its rate was
/// reported.
pub type PortSlot = u32;

/// The bytes of a batch on one port, over its members that are not pruned. Never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) port: PortSlot,
    pub(super) bytes: u64,
}

/// The bytes of one request on one port, and its index in the port's list.
#[derive(Clone, Copy, Debug)]
struct Load {
    port: PortSlot,
    at: u32,
    bytes: u64,
}

/// An entry of a port's list, for one [`Load`] of a request. The entry has all values that rank the
/// request among those that load the port, so that ranking them reads one list in order.
#[derive(Clone, Copy, Debug)]
pub(super) struct PortUser {
    pub(super) request: RequestId,
    pub(super) weight: Weight,
    pub(super) member: MemberSlot,
    pub(super) batch: BatchSlot,
}

/// A request's bytes on a port. Of equal bytes, a request that does not compute is greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Weight(u64);

impl Weight {
    const fn new(bytes: u64, started: bool) -> Self {
        Self(bytes << 1 | !started as u64)
    }

    pub(super) const fn bytes(self) -> u64 {
        self.0 >> 1
    }
}

#[derive(Debug)]
struct PortTraffic {
    id: PortId,
    users: Vec<PortUser>,
    /// Whether the port's rate was reported. Such a port stays even if no request loads it.
    reported: bool,
}

/// The properties of a request that the feasibility check uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The request's id.
    pub request: RequestId,
    /// When the first token is due, [`Time::NEVER`] if the request has no deadline.
    pub deadline: Time,
    /// Whether the request computes already, so that its early stages cannot be deferred.
    pub started: bool,
    /// Whether the request is in `H`. Its bytes then count in no sum.
    pub pruned: bool,
}

#[derive(Debug)]
struct MemberEntry {
    member: Member,
    batch: BatchSlot,
    /// Index into the batch's members.
    seat: u32,
    /// Loads in ascending order of port slots. The length is fixed: a completed load is zero.
    loads: Vec<Load>,
}

#[derive(Debug, Default)]
struct BatchEntry {
    /// Bytes per port in ascending order of port slots, without zeros.
    sums: Vec<Sum>,
    members: Vec<MemberSlot>,
}

/// Traffic of all active batches.
#[derive(Debug, Default)]
pub struct TrafficTable {
    default_rate: u64,
    ports_max: usize,
    port_slots: BTreeMap<PortId, PortSlot>,
    ports: Vec<PortTraffic>,
    /// Bytes per second by port slot. The inner loop reads only this list, so it is not in `ports`.
    rates: Vec<u64>,
    free_ports: Vec<PortSlot>,
    batches: Vec<BatchEntry>,
    free_batches: Vec<BatchSlot>,
    members: Vec<MemberEntry>,
    free_members: Vec<MemberSlot>,
    load_count: usize,
}

impl TrafficTable {
    /// Creates a table for at most `ports_max` ports at a time. A port whose rate was not reported
    /// has `default_rate` bytes per second.
    pub fn new(default_rate: u64, ports_max: usize) -> Self {
        Self { default_rate: default_rate.min(RATE_MAX), ports_max, ..Self::default() }
    }

    /// Changes the values of [`TrafficTable::new`]. Ports beyond a smaller `ports_max` stay.
    pub fn configure(&mut self, default_rate: u64, ports_max: usize) {
        self.default_rate = default_rate.min(RATE_MAX);
        self.ports_max = ports_max;
        for (port, rate) in self.ports.iter().zip(&mut self.rates) {
            if !port.reported {
                *rate = self.default_rate;
            }
        }
    }

    /// Adds a batch without members.
    pub fn open_batch(&mut self) -> BatchSlot {
        self.free_batches.pop().unwrap_or_else(|| {
            self.batches.push(BatchEntry::default());
            (self.batches.len() - 1) as BatchSlot
        })
    }

    /// Removes a batch and its members. The slot may be used again.
    pub fn close_batch(&mut self, batch: BatchSlot) {
        while let Some(&last) = self.batches[batch as usize].members.last() {
            self.leave(last);
        }
        self.free_batches.push(batch);
    }

    /// Adds a request with the bytes that it will move through each port. Bytes for a port that is
    /// listed twice add up. Returns the request's slot, and the number of `ports` that did not fit
    /// into the table.
    pub fn join(
        &mut self,
        batch: BatchSlot,
        member: Member,
        ports: &[(PortId, u64)],
    ) -> (MemberSlot, usize) {
        let mut refused = 0;
        let mut loads = Vec::with_capacity(ports.len());
        for &(port, bytes) in ports.iter().filter(|(_, bytes)| *bytes > 0) {
            match self.intern(port) {
                Some(port) => loads.push(Load { port, at: 0, bytes: bytes.min(LOAD_BYTES_MAX) }),
                None => refused += 1,
            }
        }
        loads.sort_unstable_by_key(|load| load.port);
        loads.dedup_by(|twice, kept| {
            let same = twice.port == kept.port;
            if same {
                kept.bytes = (kept.bytes + twice.bytes).min(LOAD_BYTES_MAX);
            }
            same
        });
        self.load_count += loads.len();

        let slot = self.free_members.pop().unwrap_or(self.members.len() as MemberSlot);
        for load in &mut loads {
            let users = &mut self.ports[load.port as usize].users;
            load.at = users.len() as u32;
            users.push(PortUser {
                request: member.request,
                weight: Weight::new(load.bytes, member.started),
                member: slot,
                batch,
            });
        }
        let members = &mut self.batches[batch as usize].members;
        let seat = members.len() as u32;
        members.push(slot);
        if !member.pruned {
            let sums = &mut self.batches[batch as usize].sums;
            for load in &loads {
                add(sums, load.port, load.bytes);
            }
        }
        let entry = MemberEntry { member, batch, seat, loads };
        match self.members.get_mut(slot as usize) {
            Some(reused) => *reused = entry,
            None => self.members.push(entry),
        }
        (slot, refused)
    }

    /// Removes a request. The slot may be used again.
    pub fn leave(&mut self, slot: MemberSlot) {
        let entry = &mut self.members[slot as usize];
        let loads = core::mem::take(&mut entry.loads);
        let batch = &mut self.batches[entry.batch as usize];
        if !entry.member.pruned {
            for load in &loads {
                subtract(&mut batch.sums, load.port, load.bytes);
            }
        }
        let seat = entry.seat;
        batch.members.swap_remove(seat as usize);
        if let Some(&moved) = batch.members.get(seat as usize) {
            self.members[moved as usize].seat = seat;
        }
        for load in &loads {
            self.unlist(load);
        }
        self.load_count -= loads.len();
        self.free_members.push(slot);
    }

    /// Takes `bytes` of the request off its load on `port`, because they have passed the port.
    pub fn moved(&mut self, slot: MemberSlot, port: PortId, bytes: u64) {
        let Some(&port) = self.port_slots.get(&port) else { return };
        let entry = &mut self.members[slot as usize];
        let Ok(index) = entry.loads.binary_search_by_key(&port, |load| load.port) else { return };
        let load = &mut entry.loads[index];
        let gone = bytes.min(load.bytes);
        load.bytes -= gone;
        self.ports[port as usize].users[load.at as usize].weight =
            Weight::new(load.bytes, entry.member.started);
        if !entry.member.pruned {
            subtract(&mut self.batches[entry.batch as usize].sums, port, gone);
        }
    }

    /// Marks the request as computing.
    pub fn started(&mut self, slot: MemberSlot) {
        let entry = &mut self.members[slot as usize];
        entry.member.started = true;
        for load in &entry.loads {
            self.ports[load.port as usize].users[load.at as usize].weight =
                Weight::new(load.bytes, true);
        }
    }

    /// Sets the rate of a port in bytes per second. Returns false if the table of ports is full.
    pub fn set_rate(&mut self, port: PortId, rate: u64) -> bool {
        let Some(slot) = self.intern(port) else { return false };
        self.ports[slot as usize].reported = true;
        self.rates[slot as usize] = rate.min(RATE_MAX);
        true
    }

    /// Returns the request at `slot`.
    pub fn member(&self, slot: MemberSlot) -> &Member {
        &self.members[slot as usize].member
    }

    /// Returns the batch that the request at `slot` is a member of.
    pub fn batch_of(&self, slot: MemberSlot) -> BatchSlot {
        self.members[slot as usize].batch
    }

    /// Returns the members of a batch, in no particular order.
    pub fn members_of(&self, batch: BatchSlot) -> &[MemberSlot] {
        &self.batches[batch as usize].members
    }

    /// Returns the number of (request, port) pairs in the table.
    pub const fn load_count(&self) -> usize {
        self.load_count
    }

    /// Returns the number of batch slots, used or free.
    pub(super) fn batch_slots(&self) -> usize {
        self.batches.len()
    }

    pub(super) fn port_id(&self, port: PortSlot) -> PortId {
        self.ports[port as usize].id
    }

    /// Returns the rates by port slot.
    pub(super) fn rates(&self) -> &[u64] {
        &self.rates
    }

    pub(super) fn users(&self, port: PortSlot) -> &[PortUser] {
        &self.ports[port as usize].users
    }

    /// Returns `L_i`, the bytes of the batch on each port.
    pub(super) fn sums(&self, batch: BatchSlot) -> &[Sum] {
        &self.batches[batch as usize].sums
    }

    /// Puts the request into `H`: takes its bytes out of its batch's sums and out of `total`, which
    /// are the caller's sums by port slot.
    pub(super) fn take_out(&mut self, slot: MemberSlot, total: &mut [u64]) {
        let entry = &mut self.members[slot as usize];
        debug_assert!(!entry.member.pruned, "a request is pruned once");
        entry.member.pruned = true;
        let sums = &mut self.batches[entry.batch as usize].sums;
        for load in &entry.loads {
            subtract(sums, load.port, load.bytes);
            total[load.port as usize] -= load.bytes;
        }
    }

    /// Returns the slot of a port and adds the port if need be, or `None` if the table is full.
    fn intern(&mut self, id: PortId) -> Option<PortSlot> {
        if let Some(&slot) = self.port_slots.get(&id) {
            return Some(slot);
        }
        if self.port_slots.len() >= self.ports_max {
            return None;
        }
        let port = PortTraffic { id, users: Vec::new(), reported: false };
        let slot = match self.free_ports.pop() {
            Some(slot) => {
                self.ports[slot as usize] = port;
                self.rates[slot as usize] = self.default_rate;
                slot
            }
            None => {
                self.ports.push(port);
                self.rates.push(self.default_rate);
                (self.ports.len() - 1) as PortSlot
            }
        };
        self.port_slots.insert(id, slot);
        Some(slot)
    }

    /// Removes a load from its port's list, and the port from the table if it was the last load.
    fn unlist(&mut self, load: &Load) {
        let port = &mut self.ports[load.port as usize];
        port.users.swap_remove(load.at as usize);
        if let Some(&moved) = port.users.get(load.at as usize) {
            let loads = &mut self.members[moved.member as usize].loads;
            if let Ok(index) = loads.binary_search_by_key(&load.port, |other| other.port) {
                loads[index].at = load.at;
            }
        }
        if port.users.is_empty() && !port.reported {
            self.port_slots.remove(&port.id);
            self.free_ports.push(load.port);
        }
    }
}

fn add(sums: &mut Vec<Sum>, port: PortSlot, bytes: u64) {
    match sums.binary_search_by_key(&port, |sum| sum.port) {
        Ok(index) => sums[index].bytes += bytes,
        Err(index) => sums.insert(index, Sum { port, bytes }),
    }
}

fn subtract(sums: &mut Vec<Sum>, port: PortSlot, bytes: u64) {
    let Ok(index) = sums.binary_search_by_key(&port, |sum| sum.port) else {
        debug_assert_eq!(bytes, 0, "only what was added is subtracted");
        return;
    };
    sums[index].bytes -= bytes;
    if sums[index].bytes == 0 {
        sums.remove(index);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl TrafficTable {
        /// Asserts that the three lists of loads agree.
        fn assert_consistent(&self) {
            for (slot, port) in self.ports.iter().enumerate() {
                for (at, user) in port.users.iter().enumerate() {
                    let entry = &self.members[user.member as usize];
                    let port = slot as u32;
                    let load = entry.loads.iter().find(|load| load.port == port).unwrap();
                    assert_eq!((load.at, entry.batch), (at as u32, user.batch));
                    assert_eq!(Weight::new(load.bytes, entry.member.started), user.weight);
                }
            }
            let listed: usize = self.ports.iter().map(|port| port.users.len()).sum();
            assert_eq!(listed, self.load_count);
            for (at, batch) in self.batches.iter().enumerate() {
                let mut sums = BTreeMap::new();
                for (seat, &slot) in batch.members.iter().enumerate() {
                    let entry = &self.members[slot as usize];
                    assert_eq!((entry.batch, entry.seat), (at as u32, seat as u32));
                    for load in entry.loads.iter().filter(|_| !entry.member.pruned) {
                        *sums.entry(load.port).or_insert(0) += load.bytes;
                    }
                }
                sums.retain(|_, bytes| *bytes > 0);
                let kept: Vec<_> = batch.sums.iter().map(|sum| (sum.port, sum.bytes)).collect();
                assert_eq!(kept, sums.into_iter().collect::<Vec<_>>());
            }
        }
    }

    fn member(pruned: bool) -> Member {
        Member { request: RequestId(1), deadline: Time(9), started: false, pruned }
    }

    #[test]
    fn a_port_that_nobody_loads_is_forgotten_and_its_slot_starts_afresh() {
        let mut traffic = TrafficTable::new(10, 1);
        let batch = traffic.open_batch();
        let (first, refused) = traffic.join(batch, member(false), &[(PortId(7), 5)]);
        assert_eq!(refused, 0);
        let (_, refused) = traffic.join(batch, member(false), &[(PortId(8), 5)]);
        assert_eq!(refused, 1, "the table holds one port");
        traffic.leave(first);
        assert!(traffic.set_rate(PortId(8), 3));
        assert_eq!(traffic.rates(), [3]);
    }

    #[test]
    fn absurd_loads_and_rates_are_clamped() {
        let mut traffic = TrafficTable::new(u64::MAX, 4);
        let batch = traffic.open_batch();
        let port = PortId(1);
        traffic.join(batch, member(false), &[(port, u64::MAX), (port, u64::MAX), (port, 1)]);
        assert_eq!(traffic.sums(batch), [Sum { port: 0, bytes: LOAD_BYTES_MAX }]);
        assert_eq!(traffic.rates(), [RATE_MAX]);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Join(usize, bool, Vec<(PortId, u64)>),
        Leave(usize),
        Moved(usize, u32, u64),
        Started(usize),
        TakeOut(usize),
        Reopen(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let ports = proptest::collection::vec(((0..6_u32).prop_map(PortId), 0..50_u64), 0..6);
        let step = prop_oneof![
            4 => (0..3_usize, any::<bool>(), ports).prop_map(|(b, p, l)| Step::Join(b, p, l)),
            2 => (0..9_usize).prop_map(Step::Leave),
            2 => (0..9_usize, 0..7_u32, 0..60_u64).prop_map(|(m, p, b)| Step::Moved(m, p, b)),
            1 => (0..9_usize).prop_map(Step::Started),
            1 => (0..9_usize).prop_map(Step::TakeOut),
            1 => (0..3_usize).prop_map(Step::Reopen),
        ];
        proptest::collection::vec(step, 0..60)
    }

    proptest! {
        #[test]
        fn loads_sums_and_port_lists_always_agree(steps in steps()) {
            let mut traffic = TrafficTable::new(10, 5);
            let mut batches: Vec<_> = (0..3).map(|_| traffic.open_batch()).collect();
            for step in steps {
                let alive: Vec<_> =
                    batches.iter().flat_map(|&b| traffic.members_of(b).to_vec()).collect();
                let pick = |nth: usize| alive.get(nth % alive.len().max(1)).copied();
                match step {
                    Step::Join(batch, pruned, ports) => {
                        traffic.join(batches[batch], member(pruned), &ports);
                    }
                    Step::Leave(nth) => pick(nth).into_iter().for_each(|m| traffic.leave(m)),
                    Step::Moved(nth, port, bytes) => {
                        pick(nth).into_iter().for_each(|m| traffic.moved(m, PortId(port), bytes));
                    }
                    Step::Started(nth) => pick(nth).into_iter().for_each(|m| traffic.started(m)),
                    Step::TakeOut(nth) => {
                        if let Some(m) = pick(nth).filter(|&m| !traffic.member(m).pruned) {
                            traffic.take_out(m, &mut [u64::MAX; 8]);
                        }
                    }
                    Step::Reopen(batch) => {
                        traffic.close_batch(batches[batch]);
                        batches[batch] = traffic.open_batch();
                    }
                }
                traffic.assert_consistent();
            }
        }
    }
}
