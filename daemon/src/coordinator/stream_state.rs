//! The state of one stream to the coordinator.

use std::time::Duration;

use laxity_wire::v1::{self, Capability, FromDaemon, Welcome, from_daemon::Message};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::port_loads::PortLoads;

/// What this daemon supports beyond the first version.
pub(super) const CAPABILITIES: [Capability; 4] = [
    Capability::OrderDeltas,
    Capability::Fetches,
    Capability::PruneCauses,
    Capability::HostSettings,
];
/// Shortest heartbeat period that is accepted.
const HEARTBEAT_MIN: Duration = Duration::from_millis(10);
const HEARTBEAT_MAX: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct StreamState {
    pub(super) outbound: mpsc::Sender<FromDaemon>,
    /// Whether the coordinator takes reports of fetches.
    pub(super) takes_fetches: bool,
    pub(super) heartbeat: Duration,
    pub(super) heard: Instant,
    pub(super) spoke: Instant,
    pub(super) ack: Option<v1::Epoch>,
    pub(super) letter: Option<Message>,
    pub(super) reported: u64,
    /// The sequence of the last report that asks for an order.
    pub(super) owed: u64,
    pub(super) considered: u64,
    pub(super) ordered: bool,
    pub(super) snapshot_at: Instant,
    pub(super) snapshot_wanted: bool,
    pub(super) port_loads: PortLoads,
}

impl StreamState {
    pub(super) fn new(outbound: mpsc::Sender<FromDaemon>, welcome: &Welcome) -> Self {
        let heartbeat = match welcome.heartbeat_ns {
            0 => Duration::from_secs(1),
            ns => Duration::from_nanos(ns).clamp(HEARTBEAT_MIN, HEARTBEAT_MAX),
        };
        let now = Instant::now();
        let both = v1::common_capabilities(&CAPABILITIES, &welcome.capabilities);
        Self {
            outbound,
            takes_fetches: both.contains(&Capability::Fetches),
            heartbeat,
            heard: now,
            spoke: now,
            ack: None,
            letter: None,
            reported: 0,
            owed: 0,
            considered: 0,
            ordered: false,
            snapshot_at: now,
            snapshot_wanted: false,
            port_loads: PortLoads::new(both.contains(&Capability::HostSettings)),
        }
    }

    /// Reports whether the coordinator has considered every report that asks for an order.
    pub(super) const fn is_up_to_date(&self) -> bool {
        self.ordered && self.considered >= self.owed
    }

    pub(super) const fn has_letters(&self) -> bool {
        self.letter.is_some() || self.ack.is_some()
    }
}
