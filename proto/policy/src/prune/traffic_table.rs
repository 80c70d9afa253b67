//! Who loads which port with how many bytes: `M` of MFS Algorithm 1, kept as sparse sums.
//!
//! The paper gives every batch a dense traffic matrix and adds the matrices up at each trigger.
//! A request loads a handful of the cluster's ports, so here each request keeps its own short list
//! (`ℓ_r`), each batch the sum of its members' lists (`L_i`), and each port the list of the
//! requests that load it. All three follow every change, so that a trigger over thousands of
//! batches adds nothing up but `S`.
//!
//! The numbers come from other processes. They are clamped so that no sum can overflow, which
//! lets what was added be subtracted again exactly, and a port that nobody loads any more is
//! forgotten, so that invented port numbers cannot fill the table for good.

use std::collections::BTreeMap;

use laxity_types::{PortId, RequestId};

use crate::time::Time;

/// Most bytes that one request is believed to put on one port, 16 TiB. With
/// [`MEMBERS_MAX`] requests a port's sum stays below 2^63.
pub const LOAD_BYTES_MAX: u64 = 1 << 44;
/// Most requests that a table may hold: see [`LOAD_BYTES_MAX`].
pub const MEMBERS_MAX: usize = 1 << 19;
/// Fastest port that is believed, 1 PiB/s. It keeps `rate · time` inside 128 bits.
pub const RATE_MAX: u64 = 1 << 50;

/// Where a batch lies in the table. Reused after [`TrafficTable::close_batch`].
pub type BatchSlot = u32;
/// Where a request lies in the table. Reused after [`TrafficTable::leave`].
pub type MemberSlot = u32;
/// Where a port lies in the table. Reused once nothing loads it.
pub type PortSlot = u32;

/// The bytes that a batch puts on one port, over its members that are not pruned. Never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) port: PortSlot,
    pub(super) bytes: u64,
}

/// The bytes that one request puts on one port, and where the port's list says so.
#[derive(Clone, Copy, Debug)]
struct Load {
    port: PortSlot,
    at: u32,
    bytes: u64,
}

/// One line of a port's list: the other end of a [`Load`], with all that ranks the request
/// among those that load the port, so that ranking them reads one list from end to end.
#[derive(Clone, Copy, Debug)]
pub(super) struct User {
    pub(super) request: RequestId,
    pub(super) weight: Weight,
    pub(super) member: MemberSlot,
    pub(super) batch: BatchSlot,
}

/// What a request loads a port with, and, of equal loads, whether it does not compute yet.
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
struct Port {
    id: PortId,
    users: Vec<User>,
    /// Its rate was reported, so it stays though nobody loads it.
    reported: bool,
}

/// A request as the feasibility check sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name.
    pub request: RequestId,
    /// When its first token is due, [`Time::NEVER`] if it has no deadline.
    pub deadline: Time,
    /// It computes already, so its early stages can no longer be deferred.
    pub started: bool,
    /// It is in `H`: its bytes count in no sum.
    pub pruned: bool,
}

#[derive(Debug)]
struct MemberEntry {
    member: Member,
    batch: BatchSlot,
    /// Index into the batch's members.
    seat: u32,
    /// Ascending by port slot. Fixed in length; bytes that were moved leave a zero.
    loads: Vec<Load>,
}

#[derive(Debug, Default)]
struct BatchEntry {
    /// Ascending by port slot, no zeros.
    sums: Vec<Sum>,
    members: Vec<MemberSlot>,
}

/// Traffic of all active batches.
#[derive(Debug)]
pub struct TrafficTable {
    default_rate: u64,
    ports_max: usize,
    port_slots: BTreeMap<PortId, PortSlot>,
    ports: Vec<Port>,
    /// Bytes per second by port slot, apart from `ports` because the inner loop reads only this.
    rates: Vec<u64>,
    free_ports: Vec<PortSlot>,
    batches: Vec<BatchEntry>,
    free_batches: Vec<BatchSlot>,
    members: Vec<MemberEntry>,
    free_members: Vec<MemberSlot>,
    load_count: usize,
}

impl TrafficTable {
    /// A table for at most `ports_max` ports at a time. A port of which no rate was reported has
    /// `default_rate` bytes per second.
    #[must_use]
    pub fn new(default_rate: u64, ports_max: usize) -> Self {
        Self {
            default_rate: default_rate.min(RATE_MAX),
            ports_max,
            port_slots: BTreeMap::new(),
            ports: Vec::new(),
            rates: Vec::new(),
            free_ports: Vec::new(),
            batches: Vec::new(),
            free_batches: Vec::new(),
            members: Vec::new(),
            free_members: Vec::new(),
            load_count: 0,
        }
    }

    /// Changes what [`TrafficTable::new`] was given. Ports beyond a smaller `ports_max` stay.
    pub fn configure(&mut self, default_rate: u64, ports_max: usize) {
        self.default_rate = default_rate.min(RATE_MAX);
        self.ports_max = ports_max;
        for (port, rate) in self.ports.iter().zip(&mut self.rates) {
            if !port.reported {
                *rate = self.default_rate;
            }
        }
    }

    /// A new batch without members.
    pub fn open_batch(&mut self) -> BatchSlot {
        self.free_batches.pop().unwrap_or_else(|| {
            self.batches.push(BatchEntry::default());
            (self.batches.len() - 1) as BatchSlot
        })
    }

    /// Forgets a batch and its members. The slot may be given out again.
    pub fn close_batch(&mut self, batch: BatchSlot) {
        while let Some(&last) = self.batches[batch as usize].members.last() {
            self.leave(last);
        }
        self.free_batches.push(batch);
    }

    /// Adds a request that will move so many bytes through these ports. Bytes for one port that
    /// are named twice add up. Returns its slot and how many of `ports` were refused because
    /// the table of ports is full.
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
                Some(port) => loads.push(Load {
                    port,
                    at: 0,
                    bytes: bytes.min(LOAD_BYTES_MAX),
                }),
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

        let slot = self
            .free_members
            .pop()
            .unwrap_or(self.members.len() as MemberSlot);
        for load in &mut loads {
            let users = &mut self.ports[load.port as usize].users;
            load.at = users.len() as u32;
            users.push(User {
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
        let entry = MemberEntry {
            member,
            batch,
            seat,
            loads,
        };
        match self.members.get_mut(slot as usize) {
            Some(reused) => *reused = entry,
            None => self.members.push(entry),
        }
        (slot, refused)
    }

    /// Forgets a request. The slot may be given out again.
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

    /// `bytes` of the request have passed `port`: they load it no longer.
    pub fn moved(&mut self, slot: MemberSlot, port: PortId, bytes: u64) {
        let Some(&port) = self.port_slots.get(&port) else {
            return;
        };
        let entry = &mut self.members[slot as usize];
        let Ok(index) = entry.loads.binary_search_by_key(&port, |load| load.port) else {
            return;
        };
        let load = &mut entry.loads[index];
        let gone = bytes.min(load.bytes);
        load.bytes -= gone;
        self.ports[port as usize].users[load.at as usize].weight =
            Weight::new(load.bytes, entry.member.started);
        if !entry.member.pruned {
            subtract(&mut self.batches[entry.batch as usize].sums, port, gone);
        }
    }

    /// The request computes now.
    pub fn started(&mut self, slot: MemberSlot) {
        let entry = &mut self.members[slot as usize];
        entry.member.started = true;
        for load in &entry.loads {
            self.ports[load.port as usize].users[load.at as usize].weight =
                Weight::new(load.bytes, true);
        }
    }

    /// The port has so many bytes per second. False if the table of ports is full.
    pub fn set_rate(&mut self, port: PortId, rate: u64) -> bool {
        let Some(slot) = self.intern(port) else {
            return false;
        };
        self.ports[slot as usize].reported = true;
        self.rates[slot as usize] = rate.min(RATE_MAX);
        true
    }

    /// The request at `slot`.
    #[must_use]
    pub fn member(&self, slot: MemberSlot) -> &Member {
        &self.members[slot as usize].member
    }

    /// The batch that the request at `slot` is a member of.
    #[must_use]
    pub fn batch_of(&self, slot: MemberSlot) -> BatchSlot {
        self.members[slot as usize].batch
    }

    /// The members of a batch, in no particular order.
    #[must_use]
    pub fn members_of(&self, batch: BatchSlot) -> &[MemberSlot] {
        &self.batches[batch as usize].members
    }

    /// How many (request, port) pairs are held.
    #[must_use]
    pub const fn load_count(&self) -> usize {
        self.load_count
    }

    /// How many batch slots there are, open or not.
    pub(super) fn batch_slots(&self) -> usize {
        self.batches.len()
    }

    pub(super) fn port_id(&self, port: PortSlot) -> PortId {
        self.ports[port as usize].id
    }

    /// Rates by port slot.
    pub(super) fn rates(&self) -> &[u64] {
        &self.rates
    }

    pub(super) fn users(&self, port: PortSlot) -> &[User] {
        &self.ports[port as usize].users
    }

    /// `L_i`.
    pub(super) fn sums(&self, batch: BatchSlot) -> &[Sum] {
        &self.batches[batch as usize].sums
    }

    /// Puts the request into `H`: takes its bytes out of its batch's sums and out of `total`, the
    /// sums by port slot that the caller keeps.
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

    /// The slot of a port, new if need be; `None` if there are too many.
    fn intern(&mut self, id: PortId) -> Option<PortSlot> {
        if let Some(&slot) = self.port_slots.get(&id) {
            return Some(slot);
        }
        if self.port_slots.len() >= self.ports_max {
            return None;
        }
        let port = Port {
            id,
            users: Vec::new(),
            reported: false,
        };
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

    /// Takes a load off its port's list, and the port off the table if it was the last.
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
        /// The three views of the same loads agree.
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
        Member {
            request: RequestId(1),
            deadline: Time(9),
            started: false,
            pruned,
        }
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
        traffic.join(
            batch,
            member(false),
            &[(port, u64::MAX), (port, u64::MAX), (port, 1)],
        );
        assert_eq!(
            traffic.sums(batch),
            [Sum {
                port: 0,
                bytes: LOAD_BYTES_MAX
            }]
        );
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
