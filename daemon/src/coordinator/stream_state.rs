//! The state of one stream to the coordinator. Time comes in with each message.

use std::time::Duration;

use laxity_policy::{Span, Time};
use laxity_wire::v1::{self, Welcome, from_daemon::Message};

use super::port_loads::PortLoads;

/// Shortest heartbeat period that is accepted.
const HEARTBEAT_MIN: Duration = Duration::from_millis(10);
const HEARTBEAT_MAX: Duration = Duration::from_secs(60);
/// Heartbeats without a message after which the coordinator counts as dead.
const SILENCE_HEARTBEATS: u32 = 3;

/// The state of a stream that the coordinator has welcomed.
#[derive(Debug)]
pub struct StreamState {
    pub(super) heartbeat: Duration,
    pub(super) heard: Time,
    pub(super) spoke: Time,
    pub(super) ack: Option<v1::Epoch>,
    pub(super) reply: Option<Message>,
    pub(super) reported: u64,
    /// The sequence of the last report that asks for an order.
    pub(super) owed: u64,
    pub(super) considered: u64,
    pub(super) ordered: bool,
    pub(super) snapshot_at: Time,
    pub(super) snapshot_wanted: bool,
    pub(super) port_loads: PortLoads,
}

impl StreamState {
    pub(super) fn new(now: Time, welcome: &Welcome) -> Self {
        let heartbeat = match welcome.heartbeat_ns {
            0 => Duration::from_secs(1),
            ns => Duration::from_nanos(ns).clamp(HEARTBEAT_MIN, HEARTBEAT_MAX),
        };
        Self {
            heartbeat,
            heard: now,
            spoke: now,
            ack: None,
            reply: None,
            reported: 0,
            owed: 0,
            considered: 0,
            ordered: false,
            snapshot_at: now,
            snapshot_wanted: false,
            port_loads: PortLoads::default(),
        }
    }

    /// Reports whether the coordinator has considered every report that asks for an order.
    pub(super) const fn is_up_to_date(&self) -> bool {
        self.ordered && self.considered >= self.owed
    }

    /// Returns when the stream ends if the coordinator sends nothing until then.
    pub fn silent_at(&self) -> Time {
        self.heard + Span((self.heartbeat * SILENCE_HEARTBEATS).as_nanos() as u64)
    }

    pub fn beat_at(&self) -> Time {
        self.spoke + Span(self.heartbeat.as_nanos() as u64)
    }
}
