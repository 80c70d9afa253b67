//! The state of a port that disciplines read: its flows, its batches, its queues and its load.

use laxity_types::{Layer, Level, PeerId, RequestId};

use super::backlog_rate::{BacklogRate, HORIZON};
use super::batch_table::BatchTable;
use super::flows::{Flow, FlowTable, SlotId};
use super::held_up::HeldUp;
use super::in_flight::InFlight;
use super::late_reuse::LateReuse;
use super::peers::Peers;
use super::piece_rate::PieceRate;
use super::queue::Queues;
use crate::config::LinkConfig;
use crate::mlu::LoadMeter;
use crate::rmlq::Ladder;
use crate::time::{Span, Time};

/// The state of a port that a discipline can read.
#[derive(Debug)]
pub(crate) struct Port {
    /// The settings, with the rate and the window in force.
    pub(crate) config: LinkConfig,
    /// The configured rate, by which disciplines estimate, except in [`Port::delivery_time`]. What
    /// others send does not lower it: with the rate in force, requests were given up that came in
    /// time (docs/notes/foreign-traffic.md).
    pub(crate) full_rate: u64,
    pub(crate) ladder: Ladder,
    pub(crate) load: LoadMeter,
    pub(crate) flows: FlowTable,
    pub(crate) batches: BatchTable,
    pub(crate) queues: Queues,
    pub(super) in_flight: InFlight,
    pub(super) peers: Peers,
    /// `H`: the pruned requests, in ascending order.
    pub(crate) pruned: Vec<RequestId>,
    /// Which level KV reuse has because some was late.
    pub(crate) late_reuse: LateReuse,
    /// Whether P2D has the level of collectives because these leave no room below.
    pub(crate) held_up: HeldUp,
    /// The mean rate of pieces larger than the window.
    pub(super) piece_rate: PieceRate,
    /// How fast the port delivers while flows wait for its window.
    pub(super) backlog_rate: BacklogRate,
}

impl Port {
    pub(crate) fn new(config: LinkConfig, held_up_from: Option<Level>) -> Self {
        let mut batches = BatchTable::new();
        batches.set_max(config.batches_max, config.requests_max);
        Self {
            ladder: Ladder::new(config.levels, config.threshold_scale, config.threshold_base),
            load: LoadMeter::new(config.rate, config.load_time_constant),
            full_rate: config.rate,
            config,
            flows: FlowTable::default(),
            batches,
            queues: Queues::new(),
            in_flight: InFlight::default(),
            peers: Peers::default(),
            pruned: Vec::new(),
            late_reuse: LateReuse::default(),
            held_up: HeldUp::new(held_up_from),
            piece_rate: PieceRate::default(),
            backlog_rate: BacklogRate::default(),
        }
    }

    /// Changes the configuration. Flows and batches stay, and the load measurement restarts. With a
    /// new rate the measurement of pieces restarts, too.
    pub(crate) fn set_config(&mut self, config: LinkConfig, held_up_from: Option<Level>) {
        if config.rate != self.config.rate {
            self.piece_rate = PieceRate::default();
        }
        if config.rate != self.full_rate {
            self.backlog_rate.pause();
            self.peers.forget_rates();
        }
        self.ladder = Ladder::new(config.levels, config.threshold_scale, config.threshold_base);
        self.load = LoadMeter::new(config.rate, config.load_time_constant);
        self.batches.set_max(config.batches_max, config.requests_max);
        self.full_rate = config.rate;
        self.config = config;
        self.held_up = HeldUp::new(held_up_from);
    }

    /// Returns how long a flow needs that goes in one piece and exceeds the window, by what earlier
    /// ones needed. Returns `None` for any other flow.
    pub(crate) fn piece_time(&self, flow: &Flow) -> Option<Span> {
        let rate = || self.piece_rate.on(self.config.rate);
        self.is_oversized(flow).then(|| Span::transfer(flow.remaining, rate()))
    }

    /// Returns how long `bytes` to a peer take that are cut, behind those in flight that go before
    /// `level`: the next windows at the rate at which the peer, or the port where bytes are not
    /// bounded by peer, delivers at present (`backlog_rate.rs`), and the rest at the port's rate.
    pub(crate) fn delivery_time(&self, now: Time, peer: PeerId, level: Level, bytes: u64) -> Span {
        let (window, full) = (self.config.window_bytes, self.full_rate);
        let (ahead, rate) = match self.config.peer_window_bytes {
            // What exceeds a window are whole pieces, which may be about to end, or bytes that
            // other receivers hold up.
            0 => (
                self.in_flight.at_or_above(level).min(window),
                self.backlog_rate.on(now, window, full),
            ),
            _ => (self.peers.at_or_above(peer, level), self.peers.rate(now, peer, window, full)),
        };
        let all = bytes.saturating_add(ahead);
        let next = all.min(window.saturating_mul(HORIZON));
        Span::transfer(next, rate) + Span::transfer(all - next, full)
    }

    /// Reports whether a flow goes in one piece and exceeds the window.
    pub(crate) fn is_oversized(&self, flow: &Flow) -> bool {
        flow.spec.whole && flow.remaining > self.config.window_bytes
    }

    /// Reports whether admission has pruned the request.
    pub(crate) fn is_pruned(&self, request: RequestId) -> bool {
        !self.pruned.is_empty() && self.pruned.binary_search(&request).is_ok()
    }

    /// Returns the `RLI` of an early-stage flow of the batch.
    pub(crate) fn rli(&self, batch: SlotId, layer: Layer) -> u32 {
        self.batches.batch(batch).rli(layer)
    }
}
