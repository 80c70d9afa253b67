//! Clients that hold a port's window and complete nothing while others wait.
//!
//! A window is shared. So permitted bytes without a completion keep others from the port, because
//! their process was stopped, polls late or is hostile. The daemon can't distinguish them from
//! bytes that the fabric delays. So an honest client must lose nothing but its owed bytes:
//!
//! * While others wait, a client has [`PATIENCE`] and twice the time of its bytes on the port to
//!   complete a sixteenth of them, or of one window if it has more in flight. After that it is
//!   *silent*: those bytes are *owed*, and don't count in the window.
//! * Nothing of a piece that exceeds the window completes before its end. While only flows of its
//!   own domain wait, it has twice the time that such pieces needed so far ([`PIECE_MAX`] at most).
//! * A client that owes more than a quarter of a window gets no permits on that port until it
//!   owes half of that or less. Its flows are held: owed bytes of collectives hold all its flows, and
//!   owed bytes of other stages hold all but its collectives, as strict priorities in the fabric
//!   do.
//! * Owed bytes are written off after `completion_timeout` ([`super::overdue`]).
//!
//! So a silent client costs others its share of the window once, for [`PATIENCE`]. A client's
//! permitted and uncompleted bytes stay below a window and a quarter, plus its credit. Under
//! `laxity`, bytes for several peers may be four windows, if its domain has the port alone.

use laxity_policy::domains::DOMAINS_MAX;
use laxity_policy::{DomainId, Event, FlowId, Level, Span, Stage, Time};
use tracing::{debug, warn};

use super::Driver;
use super::credit::alone_bytes;
use super::intake::Intake;
use super::on_wire::{OnWire, PATIENCE, WireClass};
use super::ports::DriverPort;
use crate::clients::{AttachedClient, ClientState};
use crate::driver::flows::{Accounting, FlowState, flow_id, split_flow_id};

/// Maximum time that a piece is given to complete. Flows that wait for longer are starved.
const PIECE_MAX: Span = Span::from_millis(1000);

/// The time between warnings about silent clients. Other cases are only counted.
const WARN_EVERY: Span = Span::from_millis(1000);

impl Intake {
    /// Takes the bytes of a silent client out of a port's window. Returns the number of bytes.
    fn set_aside(&mut self, index: u32, state: &mut ClientState, port: u16) -> u64 {
        let since = state.ports[usize::from(port)].since;
        let mut all = 0;
        for lane in 0..state.lanes.count() {
            let wanted = |flow: &FlowState| {
                flow.port() == port
                    && flow.outstanding() > 0
                    && matches!(flow.accounting, Accounting::Link | Accounting::Driver)
                    && flow.touched <= since
            };
            let Some(flows) = state.lanes.get(lane).map(|lane| &lane.flows) else { continue };
            for seq in flows.seqs(wanted) {
                let Some(flow) = state.lanes.at(lane).flows.get_mut(seq) else { continue };
                let (bytes, stage) = (flow.outstanding(), flow.stage);
                let id = flow_id(index, lane, seq);
                flow.accounting =
                    self.ports[usize::from(port)].set_aside(self.now, state.domain, flow, id);
                state.ports[usize::from(port)].owes(self.now, stage, bytes);
                all += bytes;
            }
        }
        state.counters.set_aside_bytes += all;
        self.ports[usize::from(port)].dirty = true;
        state.ports[usize::from(port)].ask(self.now);
        all
    }

    /// Holds or releases the flows of a client whose owed bytes have changed.
    fn settle(&mut self, index: u32, state: &mut ClientState, port: u16) {
        let window = self.ports[usize::from(port)].window_bytes();
        let changes: Vec<_> = state.ports[usize::from(port)].changes(window).collect();
        for (class, hold) in changes {
            state.ports[usize::from(port)].held[class as usize] = hold;
            self.holding |= hold;
            for lane in 0..state.lanes.count() {
                let Some(lane_state) = state.lanes.get(lane) else { continue };
                let waits = |flow: &FlowState| {
                    flow.port() == port
                        && flow.waits()
                        && flow.accounting == Accounting::Link
                        && WireClass::of(flow.stage) == class
                };
                for seq in lane_state.flows.seqs(waits) {
                    let flow = flow_id(index, lane, seq);
                    self.hold(port, state.domain, flow, hold);
                }
            }
        }
    }

    /// Holds or releases a flow of a client with owed bytes.
    fn hold(&mut self, port: u16, domain: DomainId, flow: FlowId, hold: bool) {
        let event = match hold {
            true => Event::FlowHeld { flow },
            false => Event::FlowReleased { flow },
        };
        let port = &mut self.ports[usize::from(port)];
        port.link.handle(self.now, domain, event);
        port.dirty = true;
    }

    /// Accounts for owed bytes that completed. A held flow gets permits again once all its owed
    /// bytes have completed.
    #[cold]
    pub(super) fn paid(
        &mut self,
        id: FlowId,
        state: &mut ClientState,
        port: u16,
        stage: Stage,
        bytes: u64,
    ) {
        let (index, lane, seq) = split_flow_id(id);
        let on_wire = &mut state.ports[usize::from(port)];
        on_wire.paid(stage, bytes);
        let held = on_wire.holds(stage);
        // The completion may have ended the flow.
        if let Some(flow) = state.lanes.at(lane).flows.get_mut(seq)
            && flow.accounting == Accounting::OwedInPart
            && flow.outstanding() == 0
        {
            flow.accounting = Accounting::Link;
            if !held {
                self.hold(port, state.domain, id, false);
            }
        }
        self.settle(index, state, port);
    }
}

impl DriverPort {
    /// Takes the bytes of `flow` out of the window, though they are not completed. Returns the
    /// flow's new accounting.
    fn set_aside(
        &mut self,
        now: Time,
        domain: DomainId,
        flow: &FlowState,
        id: FlowId,
    ) -> Accounting {
        let bytes = flow.outstanding();
        match flow.accounting {
            Accounting::Link => {
                self.link.handle(now, domain, Event::BytesWrittenOff { flow: id, bytes });
                if !flow.waits() {
                    return Accounting::Owed;
                }
                self.link.handle(now, domain, Event::FlowHeld { flow: id });
                Accounting::OwedInPart
            }
            Accounting::Driver => {
                self.link.write_off(now, domain, flow.peer(), Level(flow.level), bytes);
                Accounting::Owed
            }
            same => same,
        }
    }

    /// Reports whether a piece of this client exceeds the window and may still be on its way.
    fn awaits_piece(&self, now: Time, client: &ClientState, port: u16) -> bool {
        let window = self.window_bytes();
        let link = self.link.link(client.domain);
        let needs = |bytes| link.piece_time(bytes).times(2).min(PIECE_MAX) + PATIENCE;
        (0..client.lanes.count()).filter_map(|lane| client.lanes.get(lane)).any(|lane| {
            lane.flows.iter().any(|flow| {
                let on_wire = flow.port() == port && flow.outstanding() > window;
                on_wire && now.since(flow.touched) < needs(flow.outstanding())
            })
        })
    }

    /// Returns how long a client may take to complete a part of `bytes` while others wait.
    fn patience(&self, bytes: u64) -> Span {
        let config = self.link.config();
        let on_wire = Span::transfer(bytes.min(alone_bytes(config)), config.rate);
        Span(PATIENCE.0.saturating_add(on_wire.0.saturating_mul(2)))
    }
}

impl Driver {
    /// Updates whether flows of any client are held for owed bytes.
    pub(super) fn note_holds(&mut self) {
        let held = |client: &AttachedClient| client.state.ports.iter().any(OnWire::is_held);
        self.intake.holding &= self.clients.iter().flatten().any(held);
    }

    /// Checks for silent clients and takes their bytes out of the window.
    pub(super) fn look_for_silence(&mut self) {
        let now = self.intake.now;
        self.silence.looked = now;
        let mut silenced = false;
        for port in 0..self.intake.ports.len() {
            // A held client waits for its own completions, so it does not count as waiting.
            let free = |client: &&AttachedClient| !client.state.ports[port].is_held();
            let mut waiting = [0; DOMAINS_MAX];
            for client in self.clients.iter().flatten().filter(free) {
                waiting[usize::from(client.state.domain.0)] += client.state.waiting;
            }
            for index in 0..self.clients.len() {
                let Some(client) = self.clients[index].as_mut().filter(|c| !c.state.released)
                else {
                    continue;
                };
                let state = &self.intake.ports[port];
                let on_wire = &mut client.state.ports[port];
                if on_wire.outstanding == 0 {
                    continue;
                }
                let own = match on_wire.is_held() {
                    true => 0,
                    false => client.state.waiting,
                };
                // Others of its domain wait for its bytes, or scavenged flows of other domains do,
                // or its domain holds more than its part while flows of other domains wait.
                let domain = client.state.domain;
                let waits = waiting[usize::from(domain.0)] > own && !state.link.is_idle(domain)
                    || state.link.keeps_scavengers_waiting(domain);
                let keeps_domains = state.link.keeps_others_waiting(domain);
                let silent = (waits || keeps_domains)
                    && on_wire.is_silent(now, state.window_bytes(), |bytes| state.patience(bytes));
                if silent && (keeps_domains || !state.awaits_piece(now, &client.state, port as u16))
                {
                    // The client may have reported completions that were not read yet.
                    self.sweep_up(index as u32);
                    silenced |= self.silence(index, port);
                }
            }
        }
        if silenced {
            self.suspect();
        }
    }

    /// Takes a silent client's bytes out of the window, unless completions have come meanwhile.
    /// Returns whether it did.
    fn silence(&mut self, index: usize, port: usize) -> bool {
        let Some(client) = self.clients[index].as_mut().filter(|c| !c.state.released) else {
            return false;
        };
        let (now, state) = (self.intake.now, &self.intake.ports[port]);
        let on_wire = &mut client.state.ports[port];
        if !on_wire.is_silent(now, state.window_bytes(), |bytes| state.patience(bytes)) {
            return false;
        }
        let port = port as u16;
        let bytes = self.intake.set_aside(index as u32, &mut client.state, port);
        self.intake.settle(index as u32, &mut client.state, port);
        let state = &self.intake.ports[usize::from(port)];
        let identity = &client.state.identity;
        let (name, side) = (state.name(), state.direction());
        if bytes > 0 && now.since(self.silence.warned) >= WARN_EVERY {
            self.silence.warned = now;
            warn!(
                client = %identity.name, id = identity.id.0, pid = identity.pid,
                uid = identity.owner.uid, nic = name, direction = side, bytes,
                "a client completes nothing while others wait; its permitted bytes no longer count \
                 in the window, and it gets no permits until it completes them (`laxity status` \
                 lists the owed bytes of each client)"
            );
        } else {
            debug!(client = %identity.name, nic = name, direction = side, bytes, "silent");
        }
        true
    }
}
