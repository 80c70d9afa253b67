//! Flows of KV cache that are under way.

use laxity_policy::{FlowId, Level, Stage};

use super::hosts::Hosts;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum To {
    Rank(u32),
    Decode(u32),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Flow {
    pub(super) request: u32,
    pub(super) batch: u32,
    pub(super) layer: u16,
    pub(super) stage: Stage,
    pub(super) from: u32,
    pub(super) to: To,
    /// Bytes that have not arrived.
    pub(super) left: u64,
    /// Bytes that are permitted and not on the network.
    pub(super) unsent: u64,
    pub(super) sending: u64,
    pub(super) level: Level,
    pub(super) weight: f32,
    /// Whether the link counts the flow's bytes as launched and no longer tracks the flow.
    pub(super) at_once: bool,
    pub(super) generation: u32,
}

impl Flow {
    pub(super) const fn id(&self, slot: u32) -> FlowId {
        FlowId((self.generation as u64) << 32 | slot as u64)
    }
}

pub(super) const fn host_of(flow: &Flow) -> u32 {
    match flow.to {
        To::Rank(reader) => Hosts::ingress(reader),
        To::Decode(_) => Hosts::egress(flow.from),
    }
}

/// Flows by slot. A slot is reused, and the generation distinguishes its flows.
#[derive(Debug, Default)]
pub(super) struct Flows {
    slots: Vec<Option<Flow>>,
    free: Vec<u32>,
    generation: u32,
}

impl Flows {
    pub(super) fn add(&mut self, flow: Flow) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as u32
        });
        self.generation = self.generation.wrapping_add(1) & 0x7fff_ffff;
        let generation = self.generation;
        self.slots[slot as usize] = Some(Flow { generation, ..flow });
        slot
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> &mut Flow {
        self.slots[slot as usize].as_mut().expect("the slot of a living flow")
    }

    pub(super) fn take(&mut self, slot: u32) -> Flow {
        self.free.push(slot);
        self.slots[slot as usize].take().expect("the slot of a living flow")
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = &Flow> {
        self.slots.iter().flatten()
    }

    #[cfg(test)]
    pub(super) fn enumerate(&self) -> impl Iterator<Item = (usize, &Flow)> {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(slot, flow)| Some((slot, flow.as_ref()?)))
    }
}
