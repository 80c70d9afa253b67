//! Limits on what one host, and all hosts together, can make the coordinator store or do.

use laxity_policy::prune::MEMBERS_MAX;
use serde::{Deserialize, Serialize};

use crate::nonsense::Nonsense;

/// Limits of the coordinator. Up to half of each total is reserved for hosts in equal parts. All
/// hosts share the rest (`cluster/quota.rs`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    pub hosts_max: usize,
    /// Twice the number of NICs.
    pub ports_per_host_max: usize,
    pub batches_max: usize,
    /// Batches that one host announces. It may take part in four times as many.
    pub batches_per_host_max: usize,
    pub requests_max: usize,
    pub requests_per_host_max: usize,
    /// (Request, port) pairs.
    pub loads_max: usize,
    pub loads_per_host_max: usize,
    pub fetches_max: usize,
    pub fetches_per_host_max: usize,
    pub hosts_per_batch_max: usize,
    /// Events in one report, and requests in these events.
    pub events_per_report_max: usize,
    /// Events of one host per second, sustained. An event that causes more work counts as several
    /// ([`Cluster::take_work`](crate::cluster::Cluster::take_work)).
    pub events_per_s_max: u32,
    pub connections_max: usize,
    pub connections_per_address_max: usize,
    pub message_bytes_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            hosts_max: 4096,
            ports_per_host_max: 128,
            batches_max: 1 << 15,
            batches_per_host_max: 2048,
            requests_max: 1 << 18,
            requests_per_host_max: 1 << 14,
            loads_max: 1 << 21,
            loads_per_host_max: 1 << 17,
            fetches_max: 1 << 16,
            fetches_per_host_max: 1024,
            hosts_per_batch_max: 256,
            events_per_report_max: 8192,
            events_per_s_max: 20_000,
            connections_max: 1 << 14,
            connections_per_address_max: 1 << 12,
            message_bytes_max: laxity_wire::v1::MESSAGE_BYTES_MAX,
        }
    }
}

/// File descriptors that are kept for everything but connections of daemons and operators: the web
/// page and the metrics (64 each), listeners, etcd, the log, and files.
const DESCRIPTORS_RESERVED: usize = 192;

impl Limits {
    /// Returns these limits with at most as many connections as there are file descriptors for. If
    /// `accept` failed, the listener could not even refuse the connections in its backlog.
    #[must_use]
    pub fn within(self, descriptors: usize) -> Self {
        // If there are few descriptors, half of them are reserved.
        let room = descriptors.saturating_sub(DESCRIPTORS_RESERVED).max(descriptors / 2).max(1);
        if self.connections_max <= room {
            return self;
        }
        Self {
            connections_max: room,
            connections_per_address_max: self.connections_per_address_max.min(room * 3 / 4).max(1),
            ..self
        }
    }

    pub(crate) fn check(&self) -> Result<(), Nonsense> {
        for (key, value, most) in [
            ("limits.hosts_max", self.hosts_max, 1 << 16),
            ("limits.ports_per_host_max", self.ports_per_host_max, 256),
            ("limits.batches_max", self.batches_max, 1 << 19),
            ("limits.batches_per_host_max", self.batches_per_host_max, 1 << 19),
            ("limits.requests_max", self.requests_max, MEMBERS_MAX),
            ("limits.requests_per_host_max", self.requests_per_host_max, MEMBERS_MAX),
            ("limits.loads_max", self.loads_max, 1 << 28),
            ("limits.loads_per_host_max", self.loads_per_host_max, 1 << 28),
            ("limits.fetches_max", self.fetches_max, 1 << 19),
            ("limits.fetches_per_host_max", self.fetches_per_host_max, 1 << 19),
            ("limits.hosts_per_batch_max", self.hosts_per_batch_max, 4096),
            ("limits.events_per_report_max", self.events_per_report_max, 1 << 20),
            ("limits.events_per_s_max", self.events_per_s_max as usize, 100_000_000),
            ("limits.connections_max", self.connections_max, 1 << 20),
            ("limits.connections_per_address_max", self.connections_per_address_max, 1 << 20),
            ("limits.message_bytes_max", self.message_bytes_max, 64 << 20),
        ] {
            if value == 0 || value > most {
                return Err(Nonsense::new(key, format!("{value} is not in 1..={most}")));
            }
        }
        if self.message_bytes_max < 4096 {
            let problem = "below 4096 a report does not fit".to_owned();
            return Err(Nonsense::new("limits.message_bytes_max", problem));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_descriptors_for_everything_else() {
        let standard = Limits::default();
        assert_eq!(standard.clone().within(65_536), standard);
        for (descriptors, total) in [(1024, 832), (128, 64), (0, 1)] {
            let within = standard.clone().within(descriptors);
            assert_eq!(within.connections_max, total);
            assert!((1..=total).contains(&within.connections_per_address_max));
        }
    }
}
