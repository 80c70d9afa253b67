//! The location of each model's weights on a node: GPU, host memory, disk or remote (Maestro
//! §III-C, Algorithm 1).
//!
//! To activate a model, the least recently used idle models move from the GPU to host memory. The
//! least recently used ones there move to disk, or are deleted if the disk is full. Weights are in
//! one tier at a time, because the listing moves and doesn't copy.
//!
//! Algorithm 1 leaves these points open:
//! * Algorithm 1 doesn't check for room in host memory. Here models then move from host memory to
//!   disk. A model larger than host memory moves to disk directly.
//! * Models in use or in loading can't leave. If no other can leave, the activation fails with the
//!   missing bytes and moves nothing.
//! * A model that leaves the GPU sleeps: its context stays there and counts. If memory is still
//!   short, sleeping models lose their contexts, the least recently used first.
//! * The time of an activation is that of leaving weights on the same link, plus bytes over the
//!   slowest tier's rate (§III-C), plus the context's if it is missing. The listing offloads before
//!   it loads.

use std::sync::Arc;

use crate::Span;
use crate::workflow::{ModelId, ModelSpec, NodeSpec, Readiness};

pub type Move = (ModelId, Readiness);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Activation {
    /// Models that leave first, in order.
    pub moves: Vec<Move>,
    pub from: Option<Readiness>,
    pub takes: Span,
}

#[derive(Clone, Copy, Debug)]
struct WeightsEntry {
    at: Readiness,
    /// Sequence number of the last use.
    used: u64,
    /// Number of stages that use the model, also during loading.
    users: u32,
}

#[derive(Clone, Debug)]
pub struct Residency {
    spec: NodeSpec,
    table: Arc<[ModelSpec]>,
    models: Vec<WeightsEntry>,
    clock: u64,
    /// Bytes of host memory that KV uses.
    pub(super) host_kv: u64,
}

impl Residency {
    /// Creates the state of an empty node. Models are on disk while there is room, in the order of
    /// the table, and then remote.
    pub fn new(spec: NodeSpec, table: Arc<[ModelSpec]>) -> Self {
        let mut left = spec.disk;
        let models = table
            .iter()
            .map(|model| {
                let at = if model.weights <= left {
                    left -= model.weights;
                    Readiness::Disk
                } else {
                    Readiness::Remote
                };
                WeightsEntry { at, used: 0, users: 0 }
            })
            .collect();
        Self { spec, table, models, clock: 0, host_kv: 0 }
    }

    pub fn at(&self, model: ModelId) -> Readiness {
        self.models.get(usize::from(model.0)).map_or(Readiness::Remote, |place| place.at)
    }

    /// Reports whether stages use a model or wait for its loading.
    pub fn is_used(&self, model: ModelId) -> bool {
        self.models.get(usize::from(model.0)).is_some_and(|place| place.users > 0)
    }

    pub fn acquire(&mut self, model: ModelId) {
        self.clock += 1;
        let clock = self.clock;
        if let Some(place) = self.models.get_mut(usize::from(model.0)) {
            place.users += 1;
            place.used = clock;
        }
    }

    pub fn release(&mut self, model: ModelId) {
        if let Some(place) = self.models.get_mut(usize::from(model.0)) {
            place.users = place.users.saturating_sub(1);
        }
    }

    /// Returns the bytes on the GPU: `M_res` of §III-C without `M_other`. The paper's `M_ctx` of a
    /// running model has to contain its weights, or its rule isn't safe.
    pub fn on_gpu(&self) -> u64 {
        self.sum(|at, model| match at {
            Readiness::Running => model.weights + model.context,
            Readiness::Sleeping => model.context,
            _ => 0,
        })
    }

    pub fn in_host(&self) -> u64 {
        self.host_kv
            + self.sum(|at, model| match at {
                Readiness::Sleeping | Readiness::Host => model.weights,
                _ => 0,
            })
    }

    pub fn on_disk(&self) -> u64 {
        self.sum(|at, model| if at == Readiness::Disk { model.weights } else { 0 })
    }

    fn sum(&self, of: impl Fn(Readiness, &ModelSpec) -> u64) -> u64 {
        self.models.iter().zip(&*self.table).map(|(place, model)| of(place.at, model)).sum()
    }

    /// Returns the least recently used idle model for which `is` holds, other than `but`.
    fn oldest(&self, but: ModelId, is: impl Fn(Readiness) -> bool) -> Option<ModelId> {
        self.models
            .iter()
            .enumerate()
            .filter(|(index, place)| {
                place.users == 0 && is(place.at) && *index != usize::from(but.0)
            })
            .min_by_key(|(_, place)| place.used)
            .map(|(index, _)| ModelId(index as u16))
    }

    fn put(&mut self, model: ModelId, to: Readiness, moves: &mut Vec<Move>) {
        if let Some(place) = self.models.get_mut(usize::from(model.0)) {
            place.at = to;
            moves.push((model, to));
        }
    }

    /// Makes room for `bytes` in host memory. Returns whether there is enough.
    fn host_room(&mut self, bytes: u64, but: ModelId, moves: &mut Vec<Move>) -> bool {
        if self.host_kv.saturating_add(bytes) > self.spec.host {
            return false;
        }
        while self.in_host() + bytes > self.spec.host {
            let in_host = |at| matches!(at, Readiness::Sleeping | Readiness::Host);
            let Some(victim) = self.oldest(but, in_host) else { return false };
            self.drop_to_disk(victim, moves);
        }
        true
    }

    /// Moves a model to disk, or deletes it if the disk is full.
    fn drop_to_disk(&mut self, victim: ModelId, moves: &mut Vec<Move>) {
        let size = self.table[usize::from(victim.0)].weights;
        let fits = self.on_disk() + size <= self.spec.disk;
        let to = if fits { Readiness::Disk } else { Readiness::Remote };
        self.put(victim, to, moves);
    }

    /// Moves an idle model's weights to host memory, or to disk without its context if there is no
    /// room. Returns the time that the weights take to leave.
    pub fn sleep(&mut self, victim: ModelId, moves: &mut Vec<Move>) -> Span {
        let size = self.table[usize::from(victim.0)].weights;
        if self.host_room(size, victim, moves) {
            self.put(victim, Readiness::Sleeping, moves);
        } else {
            self.drop_to_disk(victim, moves);
        }
        Span::transfer(size, self.spec.host_rate)
    }

    /// Drops the weights of a model that was moving to host memory. They are then on disk if there
    /// is room, else remote.
    pub fn stop(&mut self, victim: ModelId, moves: &mut Vec<Move>) {
        // Without room in host memory it was moving to disk, and there is nothing to drop.
        if matches!(self.at(victim), Readiness::Sleeping | Readiness::Host) {
            self.drop_to_disk(victim, moves);
        }
    }

    /// Removes a sleeping model's context. Its weights stay in host memory.
    pub fn evict(&mut self, victim: ModelId, moves: &mut Vec<Move>) {
        self.put(victim, Readiness::Host, moves);
    }

    /// Returns the time to load a model onto a GPU with room (§III-C: `T_act ≈ Size / BW_tier`).
    pub fn loading(&self, model: ModelId) -> Span {
        let Some(of) = self.table.get(usize::from(model.0)) else { return Span::ZERO };
        let rate = match self.at(model) {
            Readiness::Running => return Span::ZERO,
            Readiness::Sleeping | Readiness::Host => self.spec.host_rate,
            Readiness::Disk => self.spec.disk_rate.min(self.spec.host_rate),
            Readiness::Remote => self.spec.remote_rate.min(self.spec.host_rate),
        };
        let context =
            if self.at(model) == Readiness::Sleeping { Span::ZERO } else { Span(of.context_start) };
        Span::transfer(of.weights, rate) + context
    }

    /// Activates a model by Algorithm 1. KV uses `kv` bytes of the GPU. Returns the bytes that are
    /// lacking if too little memory can be freed. Nothing has moved then.
    pub fn activate(&mut self, model: ModelId, kv: u64) -> Result<Activation, u64> {
        let before = self.models.clone();
        // The model counts as used, so that models that leave the GPU don't push it out of host
        // memory.
        if let Some(place) = self.models.get_mut(usize::from(model.0)) {
            place.users += 1;
        }
        let activation = self.try_activate(model, kv);
        match activation {
            Ok(_) => self.release(model),
            Err(_) => self.models = before,
        }
        activation
    }

    fn try_activate(&mut self, model: ModelId, kv: u64) -> Result<Activation, u64> {
        let Some(&of) = self.table.get(usize::from(model.0)) else { return Err(u64::MAX) };
        let from = self.at(model);
        let mut moves = Vec::new();
        let mut leaving = Span::ZERO;
        let new = match from {
            Readiness::Running => 0,
            Readiness::Sleeping => of.weights,
            _ => of.weights + of.context,
        };
        loop {
            let wanted = self.on_gpu() + new + kv + self.spec.other;
            if wanted <= self.spec.gpu {
                break;
            }
            if let Some(victim) = self.oldest(model, |at| at == Readiness::Running) {
                leaving = leaving + self.sleep(victim, &mut moves);
            } else if let Some(victim) = self.oldest(model, |at| at == Readiness::Sleeping) {
                self.evict(victim, &mut moves);
            } else {
                return Err(wanted - self.spec.gpu);
            }
        }
        if matches!(from, Readiness::Disk | Readiness::Remote) {
            // The weights go through host memory if there is room, and directly otherwise.
            let _through = self.host_room(of.weights, model, &mut moves);
        }
        let takes = leaving + self.loading(model);
        self.clock += 1;
        let clock = self.clock;
        if let Some(place) = self.models.get_mut(usize::from(model.0)) {
            place.at = Readiness::Running;
            place.used = clock;
        }
        Ok(Activation { moves, from: Some(from), takes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn model(weights: u64) -> ModelSpec {
        let (context, kv_per_token) = (1, 1);
        ModelSpec { weights, context, kv_per_token, context_start: 100, ..ModelSpec::default() }
    }

    fn node(gpu: u64, host: u64, disk: u64) -> NodeSpec {
        NodeSpec {
            gpu,
            other: 2,
            host,
            disk,
            host_rate: 1_000_000_000,
            disk_rate: 100_000_000,
            remote_rate: 10_000_000,
            slots: 1,
            ..NodeSpec::default()
        }
    }

    const A: ModelId = ModelId(0);
    const B: ModelId = ModelId(1);
    const C: ModelId = ModelId(2);

    #[test]
    fn the_least_recently_used_model_leaves_for_host_memory_and_comes_back_fast() {
        let mut of = Residency::new(node(30, 100, 100), [10, 12, 14].map(model).into());
        // 10 bytes from disk at 0.1 bytes per ns take 100 ns, and the context takes 100 ns.
        assert_eq!(of.activate(A, 0).unwrap().takes, Span(200));
        of.activate(B, 0).unwrap();
        let third = of.activate(C, 0).unwrap();
        // A leaves in 10 ns, then B in 12 ns, because 2 + 1 + 1 + 15 + 13 > 30.
        assert_eq!(third.moves[0], (A, Readiness::Sleeping));
        assert_eq!(of.at(C), Readiness::Running);
        let back = of.activate(A, 0).unwrap();
        assert_eq!(back.from, Some(Readiness::Sleeping));
        assert!(back.takes < Span(100), "{:?}", back.takes);
    }

    #[test]
    fn without_room_in_host_memory_the_cascade_goes_to_disk_and_beyond() {
        let mut of = Residency::new(node(20, 12, 11), [10, 11, 12].map(model).into());
        assert_eq!([of.at(A), of.at(B)], [Readiness::Disk, Readiness::Remote]);
        for model in [A, B, C] {
            of.activate(model, 0).unwrap();
        }
        // B moved to host memory, and A moved from there to disk.
        assert_eq!(of.at(C), Readiness::Running);
        assert_eq!(of.at(A), Readiness::Disk);
        assert!(matches!(of.at(B), Readiness::Sleeping | Readiness::Remote));
    }

    #[test]
    fn a_model_in_use_stays_and_a_refusal_moves_nothing() {
        let mut of = Residency::new(node(20, 100, 100), [10, 12, 1].map(model).into());
        of.activate(A, 0).unwrap();
        of.acquire(A);
        let refused = of.activate(B, 0).unwrap_err();
        assert_eq!(refused, 2 + 11 + 13 - 20);
        assert_eq!([of.at(A), of.at(B)], [Readiness::Running, Readiness::Disk]);
        of.release(A);
        assert!(of.activate(B, 0).is_ok());
    }

    proptest! {
        #[test]
        fn no_tier_ever_holds_more_than_it_can(
            sizes in prop::collection::vec(1u64..40, 1..6),
            (gpu, host, disk) in (10u64..80, 0u64..80, 0u64..80),
            wants in prop::collection::vec((0usize..6, 0u64..30, prop::bool::ANY), 0..40),
        ) {
            let spec = node(gpu, host, disk);
            let mut of = Residency::new(spec, sizes.iter().map(|size| model(*size)).collect());
            let mut held: Vec<ModelId> = Vec::new();
            for (want, kv, hold) in wants {
                let want = ModelId((want % sizes.len()) as u16);
                let models = || (0..sizes.len()).map(|m| ModelId(m as u16));
                let before: Vec<Readiness> = models().map(|m| of.at(m)).collect();
                match of.activate(want, kv) {
                    Ok(_) => {
                        prop_assert_eq!(of.at(want), Readiness::Running);
                        prop_assert!(of.on_gpu() + kv + spec.other <= spec.gpu);
                        if hold {
                            of.acquire(want);
                            held.push(want);
                        }
                    }
                    Err(_) => {
                        let after: Vec<Readiness> = models().map(|m| of.at(m)).collect();
                        prop_assert_eq!(before, after);
                        for model in held.drain(..) {
                            of.release(model);
                        }
                    }
                }
                prop_assert!(held.iter().all(|model| of.at(*model) == Readiness::Running));
                prop_assert!(of.in_host() <= spec.host);
                prop_assert!(of.on_disk() <= spec.disk);
            }
        }
    }
}
