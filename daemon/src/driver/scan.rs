//! Scanning of lanes.
//!
//! Every round scans the hot clients. A client without a record for some thousand rounds is cold,
//! and a round scans one cold client at most. Most processes are silent most of the time, and each
//! scan delays the others. A bitmap of each client shows newly claimed lanes and is read now and
//! then. If there are very many lanes, a client also increments the lane's doorbell for each
//! record, and a scan reads only lanes whose doorbell has changed.

use laxity_policy::DomainId;
use laxity_shm::sync::heavy_fence;

use super::Driver;
use super::record_sink::RecordSink;
use crate::clients::{AttachedClient, BUDGET};

/// Empty rounds after which a client is cold.
const COLD_AFTER: u32 = 4096;
/// Rounds over the hot clients between two scans of a cold client.
const ROUNDS_PER_COLD: u64 = 8;
/// Turns in which every cold client is scanned at least once, however long the rounds are.
const TURNS_PER_COLD: usize = 32;
/// Turns in which the newly claimed lanes of every client are read once.
const TURNS_PER_REFRESH: usize = 16;

#[derive(Clone, Copy, Debug)]
pub(super) struct Swept {
    pub(super) records: usize,
    /// Whether every record that was there at the start of the sweep was read.
    pub(super) is_all: bool,
}

impl Driver {
    /// Scans every hot client, and sometimes a cold one. Returns the number of records.
    #[inline]
    pub(super) fn round(&mut self) -> usize {
        self.intake.counters.status.rounds += 1;
        let mut records = self.scan_hot();
        if self.intake.counters.status.rounds.is_multiple_of(ROUNDS_PER_COLD)
            || self.order.hot.is_empty()
        {
            records += self.scan_cold();
        }
        records
    }

    #[inline]
    fn scan_hot(&mut self) -> usize {
        let mut records = 0;
        let mut at = 0;
        let domains = self.domains.attached();
        let several = domains > 1;
        self.intake.hint_time.set_domains(domains);
        self.domain_records.begin(several);
        if several && !self.order.hot.is_empty() {
            // Another client is the first of the next round.
            self.order.hot.rotate_left(1);
        }
        while let Some(&index) = self.order.hot.get(at) {
            let domain = self.domain_of(index);
            if !self.domain_records.may_read(domain) {
                at += 1;
                continue;
            }
            let taken = self.scan(index);
            self.domain_records.add(domain, taken);
            records += taken;
            if taken == 0 && self.cools(index) {
                self.order.cool(at);
            } else {
                at += 1;
            }
        }
        records
    }

    fn domain_of(&self, index: u32) -> DomainId {
        let client = self.clients.get(index as usize).and_then(Option::as_ref);
        client.map_or(DomainId::default(), |client| client.state.domain)
    }

    fn scan_cold(&mut self) -> usize {
        let Some(index) = self.order.take_cold() else { return 0 };
        let taken = self.scan(index);
        if taken > 0 {
            self.order.warm(index);
        }
        taken
    }

    #[inline]
    pub(super) fn scan(&mut self, index: u32) -> usize {
        let Some(client) = self.clients[index as usize].as_mut() else { return 0 };
        let AttachedClient { state, served, idle_scans, budget, .. } = client;
        if state.released {
            return 0;
        }
        let mut sink = RecordSink::new(&mut self.intake, index, state);
        let taken = served.scan_into(*budget, &mut sink);
        if taken > 0 {
            *idle_scans = 0;
        }
        if let Some((lane, violation)) = sink.violation {
            self.quarantine(index, lane, &violation);
        }
        taken
    }

    fn cools(&mut self, index: u32) -> bool {
        match self.clients[index as usize].as_mut() {
            Some(client) => {
                client.idle_scans = client.idle_scans.saturating_add(1);
                client.idle_scans >= COLD_AFTER
            }
            None => true,
        }
    }

    /// Scans some cold clients and reads some claims, however long the rounds of a turn are.
    /// Returns the number of records.
    pub(super) fn between_turns(&mut self) -> usize {
        let mut records = 0;
        for _ in 0..self.order.cold.len().div_ceil(TURNS_PER_COLD) {
            records += self.scan_cold();
        }
        records + self.refresh_some()
    }

    /// Reads which lanes the next few clients claim. After the last client, it switches doorbells
    /// on or off by the number of lanes. Returns the records that the sweep of a switch consumed.
    fn refresh_some(&mut self) -> usize {
        for _ in 0..self.clients.len().div_ceil(TURNS_PER_REFRESH) {
            if let Some(Some(client)) = self.clients.get_mut(self.order.next_refresh) {
                client.refresh();
            }
            self.order.next_refresh += 1;
            if self.order.next_refresh >= self.clients.len() {
                self.order.next_refresh = 0;
                return self.switch_doorbells();
            }
        }
        0
    }

    fn switch_doorbells(&mut self) -> usize {
        let clients = self.clients.iter().flatten();
        if self.order.count_lanes(clients.map(|client| client.lanes).sum()) {
            for client in self.clients.iter_mut().flatten() {
                client.served.set_doorbell(self.order.doorbells());
            }
            heavy_fence();
            return self.sweep_lanes().records;
        }
        0
    }

    /// Reads which lanes are claimed, and scans all lanes of every client, regardless of doorbells.
    pub(super) fn sweep_lanes(&mut self) -> Swept {
        let mut swept = Swept { records: 0, is_all: true };
        self.domain_records.begin(self.domains.are_several());
        for index in 0..self.clients.len() as u32 {
            let domain = self.domain_of(index);
            if !self.domain_records.may_read(domain) {
                swept.is_all = false;
                continue;
            }
            let taken = self.sweep(index);
            self.domain_records.add(domain, taken);
            swept.records += taken;
            swept.is_all &= taken < BUDGET;
            if taken > 0 {
                self.warm(index);
            }
        }
        swept
    }

    /// Scans every lane of one client. Returns the number of records, which is `BUDGET` or more if
    /// there may be others.
    fn sweep(&mut self, index: u32) -> usize {
        let Some(client) = self.clients[index as usize].as_mut() else { return 0 };
        if client.state.released {
            return 0;
        }
        client.refresh();
        let AttachedClient { state, served, .. } = client;
        let mut sink = RecordSink::new(&mut self.intake, index, state);
        let taken = served.sweep_into(BUDGET, &mut sink);
        if let Some((lane, violation)) = sink.violation {
            self.quarantine(index, lane, &violation);
        }
        taken
    }

    /// Reads all remaining records of a client that has left, so that late completions count.
    pub(super) fn sweep_up(&mut self, index: u32) {
        let Some(client) = self.clients[index as usize].as_mut() else { return };
        client.refresh();
        // The number is bounded, because another process may share the memory and go on writing.
        let slots = usize::from(client.served.region().geometry().slots);
        let most = client.lanes.max(1) * slots;
        let mut taken = 0;
        while taken <= most {
            match self.sweep(index) {
                0 => break,
                some => taken += some,
            }
            // A long sweep must neither delay other clients nor look like a stall to them.
            self.scan_hot();
            self.attend_to_others();
        }
    }

    /// Makes a client hot, so that every round scans it.
    pub(super) fn warm(&mut self, index: u32) {
        if let Some(client) = self.clients[index as usize].as_mut() {
            client.idle_scans = 0;
        }
        self.order.warm(index);
    }
}
