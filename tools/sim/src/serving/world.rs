//! A run: its parts and its event loop. [`Setup`] has the constants, and each other part owns its
//! state.

use laxity_policy::{LinkConfig, PolicyKind, RequestId, Time};

use super::batch::Batches;
use super::disciplines::{self, UnitLatency};
use super::event::Happening;
use super::flow::Flows;
use super::grants::Receivers;
use super::hosts::Hosts;
use super::line::WaitingRequests;
use super::measure::Measure;
use super::order::Coordinator;
use super::prefixes::Prefixes;
use super::request::{self, RequestState};
use super::residual::WatchedPort;
use super::router::{PrefixSource, Router};
use super::setup::Setup;
use super::unit::PrefillUnit;
use super::{Inputs, SimError};
use crate::agenda::Agenda;
use crate::compute::Compute;
use crate::network::{Network, PortId};
use crate::outcome::Outcome;
use crate::scenario::{Placement, Scenario};

#[derive(Clone, Copy, Debug)]
pub(super) enum Tag {
    Flow(u32),
    Collective(u32),
    Burst(u32),
}

impl Tag {
    pub(super) const fn pack(self) -> u32 {
        match self {
            Self::Flow(slot) => slot,
            Self::Collective(piece) => 1 << 31 | piece,
            Self::Burst(port) => 1 << 30 | port,
        }
    }

    const fn unpack(tag: u32) -> Self {
        match tag >> 30 {
            0 => Self::Flow(tag),
            1 => Self::Burst(tag & !(1 << 30)),
            _ => Self::Collective(tag & !(1 << 31)),
        }
    }
}

#[derive(Debug)]
pub(super) struct World<'a> {
    pub(super) setup: Setup<'a>,
    pub(super) now: Time,
    pub(super) agenda: Agenda<Happening>,
    pub(super) network: Network,
    /// Bytes of collectives that drained without the network, by port.
    pub(super) counted: Vec<u64>,
    pub(super) hosts: Hosts,
    pub(super) coordinator: Option<Coordinator>,
    pub(super) router: Router,
    pub(super) prefixes: Prefixes,
    pub(super) units: Vec<PrefillUnit>,
    pub(super) batches: Batches,
    pub(super) requests: Vec<RequestState>,
    pub(super) sources: Vec<PrefixSource>,
    pub(super) flows: Flows,
    pub(super) receivers: Receivers,
    /// Ports whose counters are read, if any are.
    pub(super) watched: Vec<WatchedPort>,
    pub(super) measure: Measure,
    pub(super) arrived: usize,
}

impl<'a> World<'a> {
    pub(super) fn new(
        scenario: &'a Scenario,
        inputs: &'a Inputs,
        compute: Compute,
    ) -> Result<Self, SimError> {
        let list = &inputs.requests.list;
        let mut network = Network::default();
        let setup = Setup::new(scenario, inputs, compute, &mut network)?;
        if scenario.policy.kind == PolicyKind::TwoClass99 {
            let share = f64::from(LinkConfig::default().scavenger_permille) / 1000.0;
            network.guarantee(scenario.network.levels_on_wire - 1, share);
        }
        if list.is_empty() {
            return Err(SimError::Mismatch("workload: no request arrives".into()));
        }
        let layout = &setup.layout;
        let rates = (0..2 * layout.ranks)
            .map(|port| (port, layout.rank_rate))
            .chain((0..layout.decodes).map(|d| (layout.decode_ingress(d).0, layout.decode_rate)));
        let warm_up = (list.len() as f64 * scenario.workload.warm_up) as usize;
        // There is a line before each rank. A unit that computes one request after the other has a
        // single line.
        let lines = if setup.striped { 1 } else { layout.ranks_per_unit };
        let latency = UnitLatency::of(&setup);
        let unit = || PrefillUnit {
            lines: (0..lines)
                .map(|_| disciplines::discipline(&scenario.serving, &latency))
                .map(WaitingRequests::new)
                .collect(),
            ..PrefillUnit::default()
        };
        Ok(Self {
            now: Time::ZERO,
            agenda: Agenda::default(),
            counted: vec![0; 2 * layout.ranks as usize],
            hosts: Hosts::new(scenario, layout.ranks, layout.rank_rate)?,
            coordinator: Coordinator::new(scenario, rates)?,
            router: Router::new(&scenario.serving, layout, setup.striped, scenario.seed),
            prefixes: Prefixes::new(&setup),
            units: (0..layout.units).map(|_| unit()).collect(),
            batches: Batches::default(),
            requests: request::all(&setup),
            sources: Vec::new(),
            flows: Flows::default(),
            receivers: Receivers::new(2 * layout.ranks + layout.decodes),
            watched: Vec::new(),
            measure: Measure::after(list[warm_up.min(list.len() - 1)].arrival),
            arrived: 0,
            setup,
            network,
        })
    }

    pub(super) fn run(&mut self) {
        self.run_observed(|_| {});
        #[cfg(debug_assertions)]
        self.check_conservation();
    }

    pub(super) fn run_observed(&mut self, mut look: impl FnMut(&Self)) {
        self.agenda.push(self.requests[0].arrival, Happening::Arrival);
        self.schedule_bursts();
        self.schedule_readings();
        while self.measure.served < self.requests.len() as u64 {
            let drained = self.network.next_end(self.now);
            let next = match (drained, self.agenda.next()) {
                (Some(a), Some(b)) => a.min(b),
                (Some(at), None) | (None, Some(at)) => at,
                (None, None) => unreachable!("what is not served waits for something"),
            };
            self.now = next.max(self.now);
            while let Some((_, tag)) = self.network.pop_ended(self.now) {
                self.measure.events += 1;
                match Tag::unpack(tag) {
                    Tag::Flow(slot) => self.sent(slot),
                    Tag::Collective(piece) => self.collective_drained(piece),
                    Tag::Burst(_) => {}
                }
                look(self);
            }
            while let Some(happening) = self.agenda.pop(self.now) {
                // Readings are no work of the cluster.
                let is_reading = matches!(happening, Happening::Reading { .. });
                self.measure.events += u64::from(!is_reading);
                self.happens(happening);
                look(self);
            }
        }
    }

    fn happens(&mut self, happening: Happening) {
        match happening {
            Happening::Arrival => self.arrive(),
            Happening::Step { unit, step } => self.step_ended(unit, step),
            Happening::Wake { host } => {
                self.hosts.woken(host, self.now);
                self.poll(host);
            }
            Happening::Order => {
                self.run_order();
                self.schedule_order();
            }
            Happening::Delivered { flow } => self.delivered(flow),
            Happening::Burst { port } => self.burst(port),
            Happening::Reading { server } => self.read_counters(server),
        }
    }

    fn arrive(&mut self) {
        let number = self.arrived;
        self.arrived += 1;
        if let Some(next) = self.requests.get(self.arrived) {
            self.agenda.push(next.arrival, Happening::Arrival);
        }
        self.measure.at(self.now);
        let requests = &self.setup.inputs.requests;
        let route = self.router.route(&self.setup.layout, &self.prefixes.caches, requests, number);
        let unit = self.setup.layout.unit_of(route.rank);
        let fetched = self.setup.over_the_network(&route);
        let request = &mut self.requests[number];
        request.rank = route.rank;
        request.reused = route.reused;
        request.fetched = fetched;
        request.to_compute = request.prompt - route.reused;
        request.first_source = self.sources.len() as u32;
        request.sources = route.sources.len() as u32;
        self.sources.extend_from_slice(&route.sources);
        self.router.queued[route.rank as usize] += u64::from(request.to_compute);
        let bytes = u64::from(request.prompt) * self.setup.kv_bytes_all_layers;
        let decode = match self.setup.scenario.serving.placement {
            Placement::NetworkCost => self.cheapest_decode(route.rank, bytes),
            _ => self.router.place(number, bytes),
        };
        self.requests[number].decode = decode;
        self.prefixes.use_blocks(&self.setup, number, &route);
        self.enqueue(unit, number as u32);
    }

    pub(super) fn try_end(&mut self, number: u32) {
        let request = self.requests[number as usize];
        let Some(prefilled) = request.prefilled else { return };
        if request.last_stage_left > 0 {
            return;
        }
        let mut first_token = prefilled;
        if request.last_arrival > Time::ZERO {
            first_token = first_token.max(request.last_arrival + self.setup.latency);
        }
        let bytes = u64::from(request.prompt) * self.setup.kv_bytes_all_layers;
        self.router.decode_load[request.decode as usize] -= bytes;
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.ended(self.now, RequestId(u64::from(number) + 1));
        }
        self.measure.served(&request, prefilled, first_token);
    }

    pub(super) fn outcome(&self) -> Outcome {
        let seconds = self.now.0 as f64 / 1e9;
        let busy = |port: u32| {
            let id = PortId(port);
            let bytes = self.network.carried(id, self.now) + self.counted[port as usize] as f64;
            if seconds > 0.0 { bytes / (self.setup.layout.rank_rate * seconds) } else { 0.0 }
        };
        let ports = 2 * self.setup.layout.ranks;
        Outcome {
            port_busy_mean: (0..ports).map(busy).sum::<f64>() / f64::from(ports),
            port_busy_most: (0..ports).map(busy).fold(0.0, f64::max),
            ..self.measure.outcome(self.setup.layout.units, self.now.0)
        }
    }

    #[cfg(debug_assertions)]
    fn check_conservation(&self) {
        let carried = |port: u32| {
            let id = PortId(port);
            let counted = self.counted.get(port as usize).copied().unwrap_or(0);
            self.network.carried(id, self.now) + counted as f64
        };
        // Ungoverned traffic belongs to no request.
        let ungoverned = self.setup.scenario.network.ungoverned_share > 0.0;
        if ungoverned || self.setup.regime == super::hosts::Regime::Alone {
            return;
        }
        let ranks = self.setup.layout.ranks;
        let sent: f64 = (0..ranks).map(|rank| carried(2 * rank)).sum();
        let received: f64 = (0..ranks).map(|rank| carried(2 * rank + 1)).sum::<f64>()
            + (0..self.setup.layout.decodes)
                .map(|decode| carried(self.setup.layout.decode_ingress(decode).0))
                .sum::<f64>();
        let crate::outcome::StageBytes { kv_reuse, collective, p2d } = self.measure.bytes;
        let wanted = (kv_reuse + collective + p2d) as f64;
        // Shares of a collective are rounded down to whole bytes on each side separately.
        let slack = 1e-6 * wanted + 1e6;
        assert!((sent - wanted).abs() <= slack, "{wanted} bytes were to be sent, {sent} were");
        assert!((received - sent).abs() <= slack, "{sent} bytes were sent, {received} arrived");
    }
}
