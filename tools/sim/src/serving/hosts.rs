//! The daemons of the simulator: one link of `laxity-policy` for each port that a host arbitrates.
//!
//! A host arbitrates what it sends (egress of its ranks: P2D and collectives) and what it reads
//! (ingress of its ranks: KV reuse), like `laxityd`. Contention elsewhere, at the rank that is read
//! from or the decode rank, is left to the fabric, which distinguishes only classes.
//!
//! A link receives hints before a flow of the batch has to wait, and at layer boundaries while
//! flows wait. An idle link receives none.

use laxity_policy::{
    Action, BatchId, BatchSpec, Event, FlowId, FlowSpec, Layer, Level, Link, LinkConfig, Order,
    PeerId, Permit, PolicyKind, Span, Stage, Time,
};

use super::SimError;
use crate::scenario::{Grants, Part, Scenario};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Regime {
    /// No contention: each transfer takes as long as on an idle network.
    Alone,
    /// No daemon: everything is sent at once, in a class by stage.
    Static,
    Grants,
    Daemons,
}

impl Regime {
    pub(super) fn of(scenario: &Scenario) -> Self {
        match scenario.policy.kind {
            _ if scenario.policy.no_contention => Self::Alone,
            _ if scenario.policy.grants != Grants::Off => Self::Grants,
            PolicyKind::Fair | PolicyKind::TwoClass | PolicyKind::TwoClass99 => Self::Static,
            _ => Self::Daemons,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Told {
    batch: BatchId,
    layer_time: Span,
    layer: u16,
    finished: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct BatchProgress {
    pub(super) spec: BatchSpec,
    pub(super) layer: u16,
    pub(super) started: bool,
    pub(super) finished: bool,
    pub(super) ahead: Option<BatchId>,
}

#[derive(Debug)]
pub(super) struct Host {
    link: Link,
    told: Vec<Told>,
    order_epoch: u64,
    wake: Time,
}

/// All hosts: egress of rank `r` at `2r`, ingress at `2r + 1`.
#[derive(Debug)]
pub(super) struct Hosts {
    hosts: Vec<Host>,
    /// Number of waiting flows by host. Stored together, because it is read most often.
    waiting: Vec<u32>,
    /// Bytes that each host permitted.
    permitted: Vec<u64>,
    /// Class on the wire, by [`Level::row`].
    classes: [u8; Level::ROWS],
    without_layers: bool,
}

pub(super) fn link_config(scenario: &Scenario, rate: f64) -> LinkConfig {
    let (policy, network) = (&scenario.policy, &scenario.network);
    let without_mlu = policy.without.contains(&Part::Mlu);
    LinkConfig {
        policy: policy.kind,
        rate: rate as u64,
        chunk_bytes: network.chunk_bytes,
        window_bytes: network.window_bytes,
        overcommit: network.overcommit,
        peer_window_bytes: network.peer_window_bytes,
        levels: policy.levels,
        // Unreachable thresholds leave every P2D flow at the lowest level.
        threshold_scale: if without_mlu { 1e30 } else { policy.threshold_scale },
        threshold_base: policy.threshold_base,
        granularity: policy.granularity,
        ..LinkConfig::default()
    }
}

/// Returns the class of each level for a fabric with `on_wire` classes, including the scavenger's.
/// The highest levels have classes of their own and the others share one. Even with two classes,
/// collectives (`P_2`) are separate from lower levels.
pub(super) fn classes(levels: u8, on_wire: u8) -> [u8; Level::ROWS] {
    let last = on_wire.max(2) - 1;
    let mut table = [last; Level::ROWS];
    for level in 1..=levels {
        table[Level(level).row()] = match last {
            1 | 2 => u8::from(level > 2),
            _ => (level - 1).min(last - 1),
        };
    }
    table
}

impl Hosts {
    pub(super) fn new(scenario: &Scenario, ranks: u32, rate: f64) -> Result<Self, SimError> {
        let config = link_config(scenario, rate);
        let links = if Regime::of(scenario) == Regime::Daemons { 2 * ranks } else { 1 };
        let host = |link| Host { link, told: Vec::new(), order_epoch: 0, wake: Time::NEVER };
        let hosts: Result<Vec<Host>, _> =
            (0..links).map(|_| Link::new(config.clone()).map(host)).collect();
        let hosts = hosts.map_err(|cause| SimError::Policy(cause.to_string()))?;
        Ok(Self {
            waiting: vec![0; hosts.len()],
            permitted: vec![0; hosts.len()],
            hosts,
            classes: classes(scenario.policy.levels, scenario.network.levels_on_wire),
            without_layers: scenario.policy.without.contains(&Part::Rli),
        })
    }

    pub(super) const fn egress(rank: u32) -> u32 {
        2 * rank
    }

    pub(super) const fn ingress(rank: u32) -> u32 {
        2 * rank + 1
    }

    pub(super) fn class(&self, level: Level) -> u8 {
        self.classes[level.row()]
    }

    pub(super) fn level_alone(&self, host: u32, now: Time, spec: &FlowSpec) -> Level {
        self.hosts[host as usize].link.level_alone(now, spec)
    }

    pub(super) fn collective_level(&self, host: u32, now: Time, bytes: u64) -> Level {
        let spec = FlowSpec::anonymous(FlowId(u64::MAX), Stage::Collective, bytes);
        self.level_alone(host, now, &FlowSpec { whole: true, ..spec })
    }

    pub(super) fn waits(&self, host: u32) -> bool {
        self.waiting[host as usize] > 0
    }

    /// Returns the permit of a flow that need not wait and may be sent whole.
    pub(super) fn permit_at_once(
        &mut self,
        host: u32,
        now: Time,
        spec: &FlowSpec,
    ) -> Option<Permit> {
        let link = &mut self.hosts[host as usize].link;
        let permit = link.peek_permit(now, spec).filter(|permit| permit.last)?;
        link.commit_permit(now, spec, permit);
        self.permitted[host as usize] += permit.bytes;
        Some(permit)
    }

    pub(super) fn add_in_flight(&mut self, host: u32, now: Time, level: Level, bytes: u64) {
        let (stage, all) = (Stage::Collective, PeerId(0));
        self.hosts[host as usize].link.add_in_flight(now, stage, all, level, bytes);
        self.permitted[host as usize] += bytes;
    }

    /// Lets the link know of bytes that were sent without it.
    pub(super) fn note_sent(&mut self, host: u32, now: Time, level: Level, bytes: u64) {
        self.add_in_flight(host, now, level, bytes);
        self.permitted[host as usize] -= bytes;
        self.remove_in_flight(host, now, level, bytes);
    }

    /// Returns the bytes that a host permitted, and those of them that are in flight.
    pub(super) fn usage(&self, host: u32) -> (u64, u64) {
        let host = host as usize;
        (self.permitted[host], self.hosts[host].link.in_flight_bytes())
    }

    #[cfg(test)]
    pub(super) fn rate(&self, host: u32) -> u64 {
        self.hosts[host as usize].link.config().rate
    }

    pub(super) fn set_capacity(&mut self, host: u32, rate: u64, window_bytes: u64) {
        self.hosts[host as usize].link.set_capacity(rate, window_bytes);
    }

    pub(super) fn remove_in_flight(&mut self, host: u32, now: Time, level: Level, bytes: u64) {
        self.remove_in_flight_to(host, now, PeerId(0), level, bytes);
    }

    pub(super) fn remove_in_flight_to(
        &mut self,
        host: u32,
        now: Time,
        peer: PeerId,
        level: Level,
        bytes: u64,
    ) {
        self.hosts[host as usize].link.remove_in_flight(now, peer, level, bytes);
    }

    pub(super) fn handle(&mut self, host: u32, now: Time, event: Event) {
        self.hosts[host as usize].link.handle(now, event);
        self.recount(host);
    }

    pub(super) fn poll(&mut self, host: u32, now: Time) -> Option<Action> {
        let action = self.hosts[host as usize].link.poll_action(now);
        if let Some(Action::Permit { bytes, .. }) = action {
            self.permitted[host as usize] += bytes;
        }
        self.recount(host);
        action
    }

    fn recount(&mut self, host: u32) {
        self.waiting[host as usize] = self.hosts[host as usize].link.waiting_flows() as u32;
    }

    /// Returns the time at which the host must be polled, if that is earlier than its next event.
    pub(super) fn next_wake(&mut self, host: u32, now: Time) -> Option<Time> {
        let host = &mut self.hosts[host as usize];
        let due = host.link.next_deadline()?.max(now);
        (due < host.wake || host.wake <= now).then(|| {
            host.wake = due;
            due
        })
    }

    pub(super) fn woken(&mut self, host: u32, now: Time) {
        let host = &mut self.hosts[host as usize];
        if host.wake <= now {
            host.wake = Time::NEVER;
        }
    }

    /// Sends a batch's changes to a link. Returns true if the batch was new to the link.
    pub(super) fn tell(&mut self, host: u32, now: Time, progress: &BatchProgress) -> bool {
        let without_layers = self.without_layers;
        let host = &mut self.hosts[host as usize];
        let id = progress.spec.batch;
        let known = host.told.iter().position(|told| told.batch == id);
        let at = known.unwrap_or_else(|| {
            host.link.handle(now, Event::BatchBegan(progress.spec));
            if let Some(ahead) = progress.ahead {
                host.link.handle(now, Event::BatchQueued { batch: id, ahead });
            }
            // The link's current order does not contain the batch.
            host.order_epoch = 0;
            host.told.push(Told {
                batch: id,
                layer_time: progress.spec.layer_time,
                layer: u16::MAX,
                finished: false,
            });
            host.told.len() - 1
        });
        let told = &mut host.told[at];
        if told.layer_time != progress.spec.layer_time {
            // The batch has grown since the last update.
            told.layer_time = progress.spec.layer_time;
            host.link.handle(now, Event::BatchBegan(progress.spec));
        }
        if progress.started && told.layer != progress.layer && !progress.finished {
            told.layer = progress.layer;
            let layer = Layer(if without_layers { 0 } else { progress.layer });
            host.link.handle(now, Event::LayerBegan { batch: id, layer });
        }
        if progress.finished && !told.finished {
            told.finished = true;
            host.link.handle(now, Event::ComputeFinished { batch: id });
        }
        known.is_none()
    }

    pub(super) fn batches(&self, host: u32) -> impl Iterator<Item = BatchId> + '_ {
        self.hosts[host as usize].told.iter().map(|told| told.batch)
    }

    /// Reports whether the link has not received this order.
    pub(super) fn lacks_order(&self, host: u32, epoch: u64) -> bool {
        self.hosts[host as usize].order_epoch != epoch
    }

    pub(super) fn tell_order(&mut self, host: u32, now: Time, order: Order) {
        let host = &mut self.hosts[host as usize];
        host.order_epoch = order.epoch;
        host.link.handle(now, Event::OrderChanged(order));
    }

    pub(super) fn forget(&mut self, host: u32, now: Time, batch: BatchId) -> bool {
        let host = &mut self.hosts[host as usize];
        let Some(at) = host.told.iter().position(|told| told.batch == batch) else { return false };
        host.told.swap_remove(at);
        host.link.handle(now, Event::BatchEnded { batch });
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_classes_keep_collectives_above_the_rest_and_the_scavenger_below() {
        let row = |table: &[u8; Level::ROWS], level: u8| table[Level(level).row()];
        for (levels, on_wire, wanted) in [
            (8, 2, [0, 0, 1, 1, 1, 1, 1, 1]),
            (8, 3, [0, 0, 1, 1, 1, 1, 1, 1]),
            (8, 4, [0, 1, 2, 2, 2, 2, 2, 2]),
            (8, 8, [0, 1, 2, 3, 4, 5, 6, 6]),
            (8, 9, [0, 1, 2, 3, 4, 5, 6, 7]),
        ] {
            let table = classes(levels, on_wire);
            let got: Vec<u8> = (1..=levels).map(|level| row(&table, level)).collect();
            assert_eq!(got, wanted, "{on_wire} classes");
            assert_eq!(table[Level::SCAVENGER.row()], on_wire - 1);
        }
    }
}
