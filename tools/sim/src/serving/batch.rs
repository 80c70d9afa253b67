//! A batch: what a unit computes together, and how far it is.

use std::ops::{Index, IndexMut};

use laxity_policy::{BatchId, BatchSpec, PortId, RequestId, Span, Time};

use super::hosts::Progress;

/// Part of a request that a batch computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    pub(super) request: u32,
    /// Tokens computed.
    pub(super) tokens: u32,
    /// Tokens of the prompt before them.
    pub(super) before: u32,
    /// The first part of its request: brings what is reused.
    pub(super) first: bool,
    /// The last part: the first token follows.
    pub(super) last: bool,
}

/// What a unit does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing to do.
    #[default]
    Idle,
    /// KV blocks of this layer are not there.
    Stalled,
    /// Attention; with ring attention its exchange too.
    Attention,
    /// Tokens go to their experts, which compute.
    Experts,
    /// Results come back.
    Combine,
    /// A dense layer, or experts without exchange.
    Mlp,
    /// Output of the first token.
    Head,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// Counts from one; a slot is used again, an id is not.
    pub(super) id: u64,
    pub(super) unit: u32,
    pub(super) members: Vec<Member>,
    /// Tokens by rank of the unit.
    pub(super) tokens: Vec<u64>,
    /// Pairs of tokens that attend to each other, by rank.
    pub(super) pairs: Vec<u64>,
    /// Members by rank.
    pub(super) seats: Vec<u32>,
    /// Tokens that the discipline of a rank allows, once it was asked.
    pub(super) budgets: Vec<Option<u32>>,
    /// Tokens that its members attend to, all together.
    pub(super) context: u64,
    /// Members that the coordinator knows of.
    pub(super) announced: usize,
    pub(super) layer: u16,
    pub(super) started: Option<Time>,
    pub(super) finished: bool,
    pub(super) ahead: Option<BatchId>,
    /// Stage-1 flows that are not there yet, by layer.
    pub(super) reuse_left: Vec<u32>,
    /// When those that are there were complete, by layer.
    pub(super) reuse_complete: Vec<Time>,
    /// Layers of which stage-1 flows were issued.
    pub(super) fetched: u16,
    /// Stage-3 flows under way.
    pub(super) last_stage_left: u32,
    /// Hosts whose link knows it.
    pub(super) hosts: Vec<u32>,
    /// Attention of a layer with and without KV cache, on the slowest rank.
    pub(super) attention_ns: [u64; 2],
    /// Estimated, for hints.
    pub(super) layer_ns: u64,
    pub(super) stalled_ns: u64,
    pub(super) collective_ns: u64,
    pub(super) computed_ns: u64,
    /// What the coordinator was told that its requests bring.
    pub(super) loads: Vec<(RequestId, PortId, u64)>,
}

impl Batch {
    pub(super) fn policy_id(&self) -> BatchId {
        BatchId(self.id)
    }

    pub(super) fn progress(&self, layers: u16) -> Progress {
        Progress {
            spec: BatchSpec {
                batch: self.policy_id(),
                layers,
                layer_time: Span(self.layer_ns),
            },
            layer: self.layer,
            started: self.started.is_some(),
            finished: self.finished,
            ahead: self.ahead,
        }
    }

    /// Makes the slot ready for another batch, keeping its memory.
    fn reset(&mut self, id: u64, unit: u32, ranks: usize, layers: u16) {
        let mut fresh = Self {
            id,
            unit,
            members: core::mem::take(&mut self.members),
            tokens: core::mem::take(&mut self.tokens),
            pairs: core::mem::take(&mut self.pairs),
            seats: core::mem::take(&mut self.seats),
            budgets: core::mem::take(&mut self.budgets),
            reuse_left: core::mem::take(&mut self.reuse_left),
            reuse_complete: core::mem::take(&mut self.reuse_complete),
            hosts: core::mem::take(&mut self.hosts),
            loads: core::mem::take(&mut self.loads),
            ..Self::default()
        };
        fresh.members.clear();
        fresh.hosts.clear();
        fresh.loads.clear();
        for list in [&mut fresh.tokens, &mut fresh.pairs] {
            list.clear();
            list.resize(ranks, 0);
        }
        fresh.seats.clear();
        fresh.seats.resize(ranks, 0);
        fresh.budgets.clear();
        fresh.budgets.resize(ranks, None);
        fresh.reuse_left.clear();
        fresh.reuse_left.resize(usize::from(layers), 0);
        fresh.reuse_complete.clear();
        fresh.reuse_complete.resize(usize::from(layers), Time::ZERO);
        *self = fresh;
    }
}

/// Batches by slot. A slot is used again, an id is not.
#[derive(Debug, Default)]
pub(super) struct Batches {
    slots: Vec<Batch>,
    free: Vec<u32>,
    /// How many there have been.
    seen: u64,
}

impl Batches {
    /// The slot of a new, empty batch of a unit with so many lines.
    pub(super) fn open(&mut self, unit: u32, lines: usize, layers: u16) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Batch::default());
            (self.slots.len() - 1) as u32
        });
        self.seen += 1;
        let id = self.seen;
        self[slot].reset(id, unit, lines, layers);
        slot
    }

    /// Nothing of the batch is left.
    pub(super) fn close(&mut self, slot: u32) {
        self[slot].finished = false;
        self.free.push(slot);
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = &Batch> {
        self.slots.iter()
    }
}

impl Index<u32> for Batches {
    type Output = Batch;

    fn index(&self, slot: u32) -> &Batch {
        &self.slots[slot as usize]
    }
}

impl IndexMut<u32> for Batches {
    fn index_mut(&mut self, slot: u32) -> &mut Batch {
        &mut self.slots[slot as usize]
    }
}

/// Pairs of a part of a prompt: each of `tokens` attends to all before it and itself.
pub(super) fn pairs(tokens: u32, before: u32) -> u64 {
    let (tokens, before) = (u64::from(tokens), u64::from(before));
    tokens * before + tokens * (tokens + 1) / 2
}
