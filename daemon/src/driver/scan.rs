//! Which lanes the scheduler looks at, and when.
//!
//! Hot clients in every round. Whoever has been silent for some thousand rounds is cold and looked
//! at once in a few rounds, since most processes are silent most of the time and each look costs
//! the others. New lanes show in a bitmap of their client, which is read now and then. With very
//! many lanes the clients ring doorbells instead.

use laxity_policy::Time;
use laxity_shm::sleep::now_ns;
use laxity_shm::sync::heavy_fence;

use super::record_sink::RecordSink;
use super::{BEAT, Driver};
use crate::clients::{BUDGET, Client};

/// Empty rounds after which a client is looked at in turns only.
const COLD_AFTER: u32 = 4096;
/// Rounds over the hot clients between looks at a cold one; turns in which each cold one is looked
/// at however long the rounds are, and each client's claims.
const ROUNDS_PER_COLD: u64 = 8;
const TURNS_PER_COLD: usize = 32;
const TURNS_PER_REFRESH: usize = 16;

/// What a sweep came to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Swept {
    /// Records taken.
    pub(super) records: usize,
    /// No lane has more that was there when the sweep began.
    pub(super) is_all: bool,
}

impl Driver {
    /// One look at every hot client, and now and then at a cold one. Returns the number of records.
    #[inline]
    pub(super) fn round(&mut self) -> usize {
        self.intake.counters.rounds += 1;
        let mut records = self.scan_hot();
        if self.intake.counters.rounds.is_multiple_of(ROUNDS_PER_COLD) || self.order.hot.is_empty()
        {
            records += self.scan_cold();
        }
        records
    }

    #[inline]
    fn scan_hot(&mut self) -> usize {
        let mut records = 0;
        let mut at = 0;
        while let Some(&index) = self.order.hot.get(at) {
            let taken = self.scan(index);
            records += taken;
            if taken == 0 && self.cools(index) {
                self.order.cool(at);
            } else {
                at += 1;
            }
        }
        records
    }

    /// Looks at the next cold client.
    fn scan_cold(&mut self) -> usize {
        let Some(index) = self.order.take_cold() else {
            return 0;
        };
        let taken = self.scan(index);
        if taken > 0 {
            self.order.warm(index);
        }
        taken
    }

    /// Takes records of one client.
    #[inline]
    pub(super) fn scan(&mut self, index: u32) -> usize {
        let Some(client) = self.clients[index as usize].as_mut() else {
            return 0;
        };
        let Client {
            state,
            served,
            idle_scans,
            budget,
            ..
        } = client;
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

    /// What no turn may be without, however long its rounds are: a look at some of the cold
    /// clients, and at some claims. Returns the number of records.
    pub(super) fn between_turns(&mut self) -> usize {
        let mut records = 0;
        for _ in 0..self.order.cold.len().div_ceil(TURNS_PER_COLD) {
            records += self.scan_cold();
        }
        records + self.refresh_some()
    }

    /// Looks for newly claimed lanes of the next few clients, and after the last of them whether
    /// there are so many over all that doorbells pay. Returns the number of records that this
    /// brought up.
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
        if self
            .order
            .count_lanes(clients.map(|client| client.lanes).sum())
        {
            for client in self.clients.iter_mut().flatten() {
                client.served.set_doorbell(self.order.doorbells());
            }
            heavy_fence();
            return self.sweep_lanes().records;
        }
        0
    }

    /// Looks at every lane of every client, whatever claims and doorbells say.
    pub(super) fn sweep_lanes(&mut self) -> Swept {
        let mut swept = Swept {
            records: 0,
            is_all: true,
        };
        for index in 0..self.clients.len() as u32 {
            let taken = self.sweep(index);
            swept.records += taken;
            swept.is_all &= taken < BUDGET;
            if taken > 0 {
                self.warm(index);
            }
        }
        swept
    }

    /// Looks at every lane of one client; how many records that brought up, `BUDGET` or more if
    /// there may be others.
    fn sweep(&mut self, index: u32) -> usize {
        let Some(client) = self.clients[index as usize].as_mut() else {
            return 0;
        };
        if client.state.released {
            return 0;
        }
        client.refresh();
        let Client { state, served, .. } = client;
        let mut sink = RecordSink::new(&mut self.intake, index, state);
        let taken = served.sweep_into(BUDGET, &mut sink);
        if let Some((lane, violation)) = sink.violation {
            self.quarantine(index, lane, &violation);
        }
        taken
    }

    /// Takes what a client left behind that says nothing more. What it sent is accounted for,
    /// however late it told of it.
    pub(super) fn sweep_up(&mut self, index: u32) {
        let Some(client) = self.clients[index as usize].as_mut() else {
            return;
        };
        client.refresh();
        // As much as there can be: its memory may be lent to somebody who goes on writing.
        let slots = usize::from(client.served.region().geometry().slots);
        let most = client.lanes.max(1) * slots;
        let mut taken = 0;
        while taken <= most {
            match self.sweep(index) {
                0 => break,
                some => taken += some,
            }
            // The others must not take this for the end of the daemon.
            self.intake.now = Time(now_ns());
            if self.intake.now.since(self.beaten) >= BEAT {
                self.beat();
            }
        }
    }

    /// The client is looked at in every round again.
    pub(super) fn warm(&mut self, index: u32) {
        if let Some(client) = self.clients[index as usize].as_mut() {
            client.idle_scans = 0;
        }
        self.order.warm(index);
    }
}
