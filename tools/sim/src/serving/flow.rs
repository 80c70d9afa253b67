//! Flows of KV cache and of weights that are under way.

use laxity_policy::{FlowId, Level, Stage};

use super::hosts::Hosts;

/// Where a flow ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum To {
    Rank(u32),
    Decode(u32),
}

/// One flow.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flow {
    pub(super) request: u32,
    pub(super) batch: u32,
    pub(super) layer: u16,
    pub(super) stage: Stage,
    pub(super) from: u32,
    pub(super) to: To,
    /// Bytes that are not there yet.
    pub(super) left: u64,
    /// Permitted and not on the network.
    pub(super) unsent: u64,
    /// On the network.
    pub(super) sending: u64,
    pub(super) level: Level,
    pub(super) weight: f32,
    /// The link forgot it: its bytes are landed.
    pub(super) at_once: bool,
    /// Tells the flows of a slot apart.
    pub(super) generation: u32,
}

impl Flow {
    /// As links know it.
    pub(super) const fn id(&self, slot: u32) -> FlowId {
        FlowId((self.generation as u64) << 32 | slot as u64)
    }

    #[cfg(test)]
    pub(super) const fn weight(&self) -> f32 {
        self.weight
    }
}

/// Which host decides over the flow: the one that posts it.
pub(super) const fn host_of(flow: &Flow) -> u32 {
    match flow.to {
        To::Rank(reader) => Hosts::ingress(reader),
        To::Decode(_) => Hosts::egress(flow.from),
    }
}

/// Flows by slot. A slot is used again; its generation tells its flows apart.
#[derive(Debug, Default)]
pub(super) struct Flows {
    slots: Vec<Option<Flow>>,
    free: Vec<u32>,
    generation: u32,
}

impl Flows {
    /// The slot of a new flow, which gets a generation of its own.
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
        self.slots[slot as usize]
            .as_mut()
            .expect("the slot of a living flow")
    }

    /// The flow is over.
    pub(super) fn take(&mut self, slot: u32) -> Flow {
        self.free.push(slot);
        self.slots[slot as usize]
            .take()
            .expect("the slot of a living flow")
    }

    #[cfg(any(test, debug_assertions))]
    pub(super) fn iter(&self) -> impl Iterator<Item = &Flow> {
        self.slots.iter().flatten()
    }

    /// With their slots.
    #[cfg(test)]
    pub(super) fn enumerate(&self) -> impl Iterator<Item = (usize, &Flow)> {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(slot, flow)| Some((slot, flow.as_ref()?)))
    }
}
