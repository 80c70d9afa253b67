//! Overdue bytes: permitted and not completed within `completion_timeout`.
//!
//! Overdue bytes are written off. Their flow leaves the link. Otherwise its next chunks would fill
//! the window for another `completion_timeout`. The client sends the rest of the flow unscheduled,
//! as scavenger. Before that, a client that keeps others waiting is [silent](super::silence).
//! [`super::trust`] decides what follows for clients and owners, and this module carries it out.
//!
//! *Suspicion.* Many clients of one owner could each hold a port's window in turn. If an owner's
//! clients owe more than [`OWED_WINDOWS`] allows on one port, those that completed nothing for
//! [`LATELY`] are unscheduled, and so are new ones. Each port counts alone, because a job with a
//! process per NIC may be slow on all ports. A client counts with one window at most: it may have
//! more in flight to many peers, but delays others by its patience only once.

use laxity_policy::{Level, Span};
use laxity_shm::consumer::Wake;
use laxity_shm::producer::SlotRef;

use crate::clients::{AttachedClient, ClientState};
use crate::config::Mode;
use crate::driver::Driver;
use crate::driver::ends::Rest;
use crate::driver::flows::{Accounting, FlowState};
use crate::driver::intake::Intake;
use crate::driver::trust::{Loss, WINDOW, part};
use crate::owner::Owner;

/// Clients of an owner may owe this many windows, times [`SharedLink::windows_max`]. So suspicion
/// needs five slow clients, or 17 where the port may have four windows in flight.
///
/// [`SharedLink::windows_max`]: laxity_policy::SharedLink::windows_max
const OWED_WINDOWS: u64 = 4;
/// A client that completed bytes within this time is not suspected.
const LATELY: Span = Span::from_millis(100);

impl Intake {
    /// Writes off bytes of a lane that were permitted a `timeout` ago and not completed.
    pub fn write_off(&mut self, index: u32, client: &mut AttachedClient, lane: u16) {
        let timeout = self.trust.timeout;
        let since = self.now - timeout;
        let overdue = |flow: &FlowState| flow.outstanding() > 0 && flow.touched < since;
        for seq in client.state.lanes.at(lane).flows.seqs(overdue) {
            let Some(flow) = client.state.lanes.at(lane).flows.get_mut(seq).copied() else {
                continue;
            };
            let bytes = flow.outstanding();
            client.state.counters.written_off_bytes += bytes;
            // Owed bytes count as a loss when the flow ends ([`Intake::cancel`]).
            if matches!(flow.accounting, Accounting::Link | Accounting::Driver) {
                let window = self.ports[usize::from(flow.port())].window_bytes();
                client.state.lost.add(self.now, bytes, window, timeout);
            }
            self.bypass_rest(index, client, lane, seq);
        }
        self.judge(index, client);
    }

    /// Distrusts a client that has lost too much.
    fn judge(&mut self, index: u32, client: &mut AttachedClient) {
        client.state.lost.forget(self.now);
        if client.state.distrusted || !client.state.lost.is_too_much() {
            return;
        }
        client.state.lost = Loss::default();
        client.state.distrusted = true;
        self.trust.strike(self.now, &client.state.identity.owner);
        client.set_room();
        self.release_flows(index, client);
    }

    /// Accounts for a client that leaves: its bytes in flight are abandoned if they kept others
    /// waiting, and so are bytes that it owes only since a moment ago. Other owed bytes are lost.
    pub fn leaves(&mut self, state: &ClientState) {
        let timeout = self.trust.timeout;
        let owner = &state.identity.owner;
        let mut lost = state.lost;
        for (on_wire, port) in state.ports.iter().zip(&self.ports) {
            let owed = on_wire.owed() - on_wire.owed_lately(self.now);
            lost.add(self.now, owed, port.window_bytes(), timeout);
        }
        if lost.is_too_much() && !state.distrusted {
            self.trust.strike(self.now, owner);
        }
        for (index, (on_wire, port)) in state.ports.iter().zip(&self.ports).enumerate() {
            let window = port.window_bytes();
            let kept = if on_wire.kept_others(self.now) { on_wire.outstanding } else { 0 };
            let bytes = kept.saturating_add(on_wire.owed_lately(self.now));
            if bytes > 0 {
                let stopped = on_wire.stopped(self.now);
                self.trust.abandon(stopped, owner, index, part(bytes.min(window), window));
            }
        }
    }

    /// Takes a client that is no longer scheduled out of the links, so that its waiting flows go
    /// out. Flows that are fully permitted stay until completion, unless the mode is `off`.
    pub fn release_flows(&mut self, index: u32, client: &mut AttachedClient) {
        let off = client.mode == Mode::Off;
        self.release_those(index, client, |flow| off || flow.waits());
    }

    /// Takes a client's flows out of the links of NICs that are gone. Those that wait go out, and
    /// nothing can complete the others.
    pub fn release_absent(&mut self, index: u32, client: &mut AttachedClient) {
        let absent: Vec<bool> = self.ports.iter().map(|port| port.is_absent).collect();
        if !absent.contains(&true) {
            return;
        }
        self.release_those(index, client, |flow| absent[usize::from(flow.port())]);
    }

    fn release_those(
        &mut self,
        index: u32,
        client: &mut AttachedClient,
        wanted: impl Fn(&FlowState) -> bool,
    ) {
        for lane in 0..client.state.lanes.count() {
            for seq in client.state.lanes.at(lane).flows.seqs(&wanted) {
                self.bypass_rest(index, client, lane, seq);
            }
        }
    }

    /// Ends a flow in the driver and in its link. Its client gets a permit for the rest.
    fn bypass_rest(&mut self, index: u32, client: &mut AttachedClient, lane: u16, seq: u64) {
        let Some(flow) = client.state.lanes.at(lane).flows.get_mut(seq).copied() else { return };
        if flow.waits() {
            let at = SlotRef { slot: flow.slot, tag: flow.seq };
            client.state.counters.bypassed_bytes += flow.bytes - flow.permitted;
            // An unscheduled flow must not overtake scheduled ones, so it goes as scavenger. A
            // client that withdrew the flow does not see this permit.
            let level = Level::SCAVENGER.0;
            if let Some(consumer) = client.served.consumer(lane)
                && let Ok(Wake::Needed) = consumer.permit(at, flow.bytes, level, true)
            {
                self.wakes.push((index, lane));
            }
        }
        self.cancel(index, &mut client.state, (lane, seq), Rest::Unscheduled);
    }
}

/// The number of flow entries that one run visits.
const WRITE_OFF_PLACES: usize = 4096;

impl Driver {
    /// Ends distrust that is over, and distrusts clients that have lost too much.
    fn forgive(&mut self) {
        for owner in self.intake.trust.forgive(self.intake.now) {
            let clients = self.clients.iter_mut().flatten();
            for client in clients.filter(|client| client.state.identity.owner == owner) {
                client.state.distrusted = false;
                client.set_room();
            }
        }
        for (index, client) in self.clients.iter_mut().enumerate() {
            if let Some(client) = client {
                self.intake.judge(index as u32, client);
            }
        }
    }

    /// Reports whether the clients of an owner owe more than [`OWED_WINDOWS`] of one port.
    fn owes_too_much(&self, owner: &Owner) -> bool {
        (self.intake.ports.iter().enumerate()).any(|(index, port)| {
            let clients = self.clients.iter().flatten();
            let owed = clients
                .filter(|client| client.state.identity.owner == *owner)
                .filter_map(|client| client.state.ports.get(index))
                .map(|on_wire| part(on_wire.owed(), port.window_bytes()).min(WINDOW))
                .sum::<u64>();
            owed > OWED_WINDOWS * WINDOW * u64::from(port.link.windows_max())
        })
    }

    /// Reports whether clients of an owner that completed nothing lately are unscheduled.
    pub(super) fn suspects(&self, owner: &Owner) -> bool {
        self.intake.holding && self.owes_too_much(owner)
    }

    /// Updates which clients are suspected.
    pub(super) fn suspect(&mut self) {
        for index in 0..self.clients.len() {
            let Some(client) = self.clients[index].as_ref() else { continue };
            let state = &client.state;
            let since = self.intake.now - LATELY;
            let suspected = state.completed < since && self.suspects(&state.identity.owner);
            if let Some(client) = self.clients[index].as_mut()
                && client.state.suspected != suspected
            {
                client.state.suspected = suspected;
                client.set_room();
                if suspected {
                    self.intake.release_flows(index as u32, client);
                }
            }
        }
    }

    /// Visits the next few thousand flow entries and writes off overdue bytes.
    pub(super) fn write_off(&mut self) {
        self.forgive();
        self.note_holds();
        self.suspect();
        let (mut index, mut lane) = self.overdue.at;
        let mut places = 0;
        // One run visits each client at most once.
        for _ in 0..=self.clients.len() {
            let client = (self.clients.get_mut(index as usize)).and_then(Option::as_mut);
            if let Some(client) = client
                && client.state.flows > 0
            {
                while lane < client.state.lanes.count() && places < WRITE_OFF_PLACES {
                    let flows = client.state.lanes.get(lane).map(|lane| &lane.flows);
                    if let Some(flows) = flows.filter(|flows| !flows.is_empty()) {
                        places += flows.places();
                        self.intake.write_off(index, client, lane);
                    }
                    lane += 1;
                }
                if places >= WRITE_OFF_PLACES {
                    break;
                }
            }
            (index, lane) = (index + 1, 0);
            if index as usize >= self.clients.len() {
                index = 0;
            }
        }
        self.overdue.at = (index, lane);
    }
}
