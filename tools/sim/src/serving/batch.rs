//! A batch of a prefill unit, and its progress.

use std::ops::{Index, IndexMut};

use laxity_policy::{BatchId, BatchSpec, PortId, RequestId, Span, Time};

use super::hosts::BatchProgress;

#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    pub(super) request: u32,
    pub(super) tokens: u32,
    pub(super) before: u32,
    /// Whether this is the first part of its request. The first part brings the reused tokens.
    pub(super) first: bool,
    pub(super) last: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Step {
    #[default]
    Idle,
    Stalled,
    Attention,
    Experts,
    Combine,
    Mlp,
    Head,
}

#[derive(Debug, Default)]
pub(super) struct Batch {
    /// Id, counted from one. Unlike a slot, an id is not reused.
    pub(super) id: u64,
    pub(super) unit: u32,
    pub(super) members: Vec<Member>,
    pub(super) tokens: Vec<u64>,
    pub(super) pairs: Vec<u64>,
    pub(super) seats: Vec<u32>,
    /// Tokens that the discipline of a rank allows, or `None` before it was queried.
    pub(super) budgets: Vec<Option<u32>>,
    pub(super) context: u64,
    pub(super) announced: usize,
    pub(super) layer: u16,
    pub(super) started: Option<Time>,
    pub(super) finished: bool,
    pub(super) ahead: Option<BatchId>,
    pub(super) reuse_left: Vec<u32>,
    pub(super) reuse_complete: Vec<Time>,
    pub(super) fetched: u16,
    pub(super) last_stage_left: u32,
    pub(super) hosts: Vec<u32>,
    /// Time of attention on the slowest rank, for layers with and without a KV cache.
    pub(super) attention_ns: [u64; 2],
    pub(super) layer_ns: u64,
    pub(super) stalled_ns: u64,
    pub(super) collective_ns: u64,
    pub(super) computed_ns: u64,
    pub(super) loads: Vec<(RequestId, PortId, u64)>,
}

impl Batch {
    pub(super) fn policy_id(&self) -> BatchId {
        BatchId(self.id)
    }

    /// Returns the tokens of the line that has most of them.
    pub(super) fn most_tokens(&self) -> u64 {
        self.tokens.iter().copied().max().unwrap_or(0)
    }

    pub(super) fn progress(&self, layers: u16) -> BatchProgress {
        BatchProgress {
            spec: BatchSpec { batch: self.policy_id(), layers, layer_time: Span(self.layer_ns) },
            layer: self.layer,
            started: self.started.is_some(),
            finished: self.finished,
            ahead: self.ahead,
        }
    }

    fn reset(&mut self, id: u64, unit: u32, ranks: usize, layers: u16) {
        fn filled<T: Clone>(list: &mut Vec<T>, count: usize, value: T) -> Vec<T> {
            let mut list = core::mem::take(list);
            list.clear();
            list.resize(count, value);
            list
        }
        let layers = usize::from(layers);
        self.members.clear();
        self.hosts.clear();
        self.loads.clear();
        *self = Self {
            id,
            unit,
            members: core::mem::take(&mut self.members),
            tokens: filled(&mut self.tokens, ranks, 0),
            pairs: filled(&mut self.pairs, ranks, 0),
            seats: filled(&mut self.seats, ranks, 0),
            budgets: filled(&mut self.budgets, ranks, None),
            reuse_left: filled(&mut self.reuse_left, layers, 0),
            reuse_complete: filled(&mut self.reuse_complete, layers, Time::ZERO),
            hosts: core::mem::take(&mut self.hosts),
            loads: core::mem::take(&mut self.loads),
            ..Self::default()
        };
    }
}

/// Batches by slot. A slot is reused, but an id is not.
#[derive(Debug, Default)]
pub(super) struct Batches {
    slots: Vec<Batch>,
    free: Vec<u32>,
    seen: u64,
}

impl Batches {
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

/// Returns the pairs of a prompt's part. Each of `tokens` attends to itself and to all before it.
pub(super) fn pairs(tokens: u32, before: u32) -> u64 {
    let (tokens, before) = (u64::from(tokens), u64::from(before));
    tokens * before + tokens * (tokens + 1) / 2
}
