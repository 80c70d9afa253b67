//! Helpers for tests of lanes.

#![allow(dead_code, reason = "each test binary uses some of it")]

use laxity_client::{Client, Flow, Lane, Stage, Ticket};
use laxity_shm::layout::Geometry;

use crate::daemon::{TestDaemon, eventually};

pub(crate) fn flow(bytes: u64) -> Flow {
    Flow { stage: Stage::KvReuse, bytes, layer: 1, batch: 1, request: 1, ..Flow::default() }
}

/// Collects all permits. Returns their sum, and whether any was bypassed.
pub(crate) fn drain(lane: &mut Lane, ticket: &mut Ticket) -> (u64, bool) {
    let (mut bytes, mut bypassed) = (0, false);
    while !ticket.is_done() {
        let permit = lane.wait(ticket);
        bytes += permit.bytes;
        bypassed |= permit.bypassed;
    }
    (bytes, bypassed)
}

/// Submits a flow of `bytes` and collects its permits.
pub(crate) fn send(lane: &mut Lane, bytes: u64) -> (u64, bool) {
    let mut ticket = lane.submit(&flow(bytes));
    drain(lane, &mut ticket)
}

/// Sends until a flow is scheduled.
pub(crate) fn is_scheduled_in_the_end(lane: &mut Lane) {
    eventually("a flow is scheduled", || !send(lane, 1).1);
}

/// Returns a daemon, and a client of it with a lane.
pub(crate) fn attached() -> (TestDaemon, Client, Lane) {
    attached_to(Geometry::default())
}

pub(crate) fn attached_to(geometry: Geometry) -> (TestDaemon, Client, Lane) {
    let daemon = TestDaemon::with(geometry);
    let client = Client::attach(daemon.options());
    let lane = client.lane();
    (daemon, client, lane)
}
