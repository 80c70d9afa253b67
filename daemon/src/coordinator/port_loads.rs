//! Reports of the ports' queues and load, and of the host's settings, to the coordinator.

use std::time::{SystemTime, UNIX_EPOCH};

use laxity_policy::{Tally, Time};
use laxity_wire::v1::{Event, HostSettings, PortLoad, event::Event as Kind};

use crate::config::NicConfig;
use crate::stats::{PortSnapshot, Snapshot};

/// The values that one stream reported last.
#[derive(Debug, Default)]
pub(super) struct PortLoads {
    /// The time of the last reported snapshot.
    at: Time,
    /// One entry for each port, in the order of the daemon's ports.
    told: Vec<Option<Told>>,
    /// The settings that were reported last, without the clock.
    settings: HostSettings,
}

/// What was reported last of a port: the flows that completed, those that missed their deadline,
/// and the rate.
type Told = (u64, u64, u64);

impl PortLoads {
    /// Returns the settings of the host if they differ from those reported last.
    fn settings(&mut self, snapshot: &Snapshot) -> Option<Event> {
        let now = HostSettings {
            level_dscp: snapshot.dscp[..levels(snapshot)]
                .iter()
                .chain(snapshot.dscp.last())
                .map(|dscp| u32::from(*dscp))
                .collect(),
            marking: snapshot.marking.name().to_owned(),
            mode: snapshot.mode.name().to_owned(),
            bypass: snapshot.bypass,
            ..HostSettings::default()
        };
        if self.settings == now {
            return None;
        }
        self.settings.clone_from(&now);
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let clock_ns = u64::try_from(clock.as_nanos()).unwrap_or_default();
        Some(Event { event: Some(Kind::HostSettings(HostSettings { clock_ns, ..now })) })
    }

    /// Returns the state of the ports, unless this snapshot was reported before.
    pub(super) fn news(&mut self, snapshot: &Snapshot, nics: &[NicConfig]) -> Vec<Event> {
        if snapshot.at <= self.at {
            return Vec::new();
        }
        self.at = snapshot.at;
        self.told.resize(snapshot.ports.len(), None);
        let ports = snapshot.ports.iter().zip(&mut self.told);
        let load = |(index, (port, told)): (usize, (&PortSnapshot, &mut Option<Told>))| {
            let link = &port.link;
            let bytes = |tallies: &[Tally]| tallies.iter().map(|tally| tally.bytes).collect();
            let configured = nics.get(index / 2).map(|nic| nic.rate.bytes_per_s);
            let counted = || port.counters.stages.iter();
            let completed: u64 = counted().map(|stage| stage.completed_flows).sum();
            let missed: u64 = counted().map(|stage| stage.deadline_misses).sum();
            // The coordinator has the configured rate until another one was reported.
            let rate = port.rate;
            let is_news = configured != Some(rate) || told.is_some_and(|(.., told)| told != rate);
            // What was counted before the stream is not news: an earlier stream has reported it.
            let before =
                told.replace((completed, missed, rate)).unwrap_or((completed, missed, rate));
            let load = Kind::PortLoad(PortLoad {
                port: index as u32,
                rate_bytes_per_s: is_news.then_some(rate),
                queued_bytes: link.waiting_by_stage.iter().map(|tally| tally.bytes).sum(),
                load_permille: (link.rho.clamp(0.0, 1.0) * 1000.0) as u32,
                queued_level_bytes: bytes(&link.waiting_by_level),
                queued_stage_bytes: bytes(&link.waiting_by_stage),
                completed_flows: completed.saturating_sub(before.0),
                missed_flows: missed.saturating_sub(before.1),
                foreign_bytes_per_s: port.residual.map_or(0, |it| it.capacity.foreign_rate),
            });
            Event { event: Some(load) }
        };
        let loads: Vec<Event> = ports.enumerate().map(load).collect();
        loads.into_iter().chain(self.settings(snapshot)).collect()
    }
}

/// Returns how many levels the ports have, apart from the scavenger.
fn levels(snapshot: &Snapshot) -> usize {
    snapshot.ports.first().map_or(0, |port| usize::from(port.levels))
}
