//! The engine's requests and batches, and the check of its next hint. The table does no I/O and
//! reads no clock. It returns the [`Hint`]s for the daemon.
//!
//! A request or batch that is unknown here need not be wrong. An engine's scheduler may begin a
//! batch in one process while its workers compute the layers in others. The daemon combines them by
//! their numbers. Unknown ids are therefore counted and passed on. A hint that no other process
//! could make right is refused.

use crate::Hint;

use super::bounded::Bounded;
use super::sights::FirstSights;

/// Largest number of remembered requests. The oldest is assumed to have ended when there are more.
/// Ended requests count, too, so that a second end is noticed.
pub const REQUESTS_MAX: usize = 1 << 16;
/// Largest number of remembered batches.
pub const BATCHES_MAX: usize = 1 << 12;
/// Longest stored name of a tenant, in bytes.
pub const TENANT_MAX: usize = 64;

/// The reason why a hint is invalid. Nothing changed, and the daemon got nothing. Fix the caller,
/// or continue, since no transfer depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the texts say what the fields are")]
pub enum HintError {
    /// The id is 0, which means "unknown".
    #[error("0 is no id of a request or batch: it means \"unknown\"")]
    NoId,
    /// The deadline is not in the future.
    #[error(
        "the deadline of request {request} was {late_ns} ns ago; give one in the future, or none"
    )]
    DeadlinePassed { request: u64, late_ns: u64 },
    /// The request has ended.
    #[error("request {request} has ended before; begin it again if its id is used again")]
    RequestEnded { request: u64 },
    /// The batch has no such layer.
    #[error("batch {batch} has no layer {layer}: it has {layers}, counted from 0")]
    UnknownLayer { batch: u64, layer: u16, layers: u16 },
    /// The batch has no layers.
    #[error("batch {batch} cannot have 0 layers")]
    NoLayers { batch: u64 },
}

/// Facts about a request when it begins. Unknown ones are zero or empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Deadline of the first token in CLOCK_MONOTONIC nanoseconds.
    pub deadline_ns: u64,
    /// Number of bytes that the request will move.
    pub bytes: u64,
    /// The engine's own priority. A larger one is more urgent.
    pub priority: i32,
    /// The tenant that the request belongs to.
    pub tenant: Box<str>,
}

#[derive(Debug, Default)]
struct HintedRequest {
    facts: Facts,
    /// The batch that the request joined last, 0 if none.
    batch: u64,
    ended: bool,
    /// The hint about its trace.
    trace: Option<Hint>,
}

#[derive(Clone, Copy, Debug)]
struct HintedBatch {
    layers: u16,
    layer_time_ns: u64,
    /// The batch that this one waits for, 0 if none.
    ahead: u64,
    /// The layer that the batch computes, if it has begun one.
    layer: Option<u16>,
    computed: bool,
}

/// Counters of hints. The layout is that of the end of `lax_hint_stats`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HintCounts {
    /// Requests removed for lack of room before they ended.
    pub requests_evicted: u64,
    /// Batches removed for lack of room.
    pub batches_evicted: u64,
    /// Requests that began again before their end.
    pub requests_begun_twice: u64,
    /// Requests that ended twice.
    pub requests_ended_twice: u64,
    /// Unknown requests that ended.
    pub requests_unknown: u64,
    /// Batches that began again before their end.
    pub batches_begun_twice: u64,
    /// Hints about unknown batches.
    pub batches_unknown: u64,
    /// Invalid layers: refused in hints, replaced in transfers.
    pub layers_unknown: u64,
    /// Layers that began after a later one.
    pub layers_backwards: u64,
    /// Deadlines in the past, refused in requests or left out of transfers.
    pub deadlines_passed: u64,
}

/// The requests and batches of this process.
#[derive(Debug)]
pub struct HintTable {
    requests: Bounded<HintedRequest>,
    batches: Bounded<HintedBatch>,
    pub(super) sights: FirstSights,
    /// Number of hints that were taken.
    pub(super) taken: u64,
    pub(super) counts: HintCounts,
}

impl Default for HintTable {
    fn default() -> Self {
        Self::new()
    }
}

impl HintTable {
    /// Makes an empty table.
    pub fn new() -> Self {
        Self::with(REQUESTS_MAX, BATCHES_MAX)
    }

    fn with(requests: usize, batches: usize) -> Self {
        Self {
            requests: Bounded::new(requests),
            batches: Bounded::new(batches),
            sights: FirstSights::new(requests),
            taken: 0,
            counts: HintCounts::default(),
        }
    }

    /// Returns the numbers of remembered requests and batches.
    pub fn sizes(&self) -> (usize, usize) {
        (self.requests.len(), self.batches.len())
    }

    /// Takes a request at `now`, and passes what follows from it to `say`.
    ///
    /// # Errors
    /// [`HintError::DeadlinePassed`], [`HintError::NoId`].
    pub fn request_begin(
        &mut self,
        now: u64,
        request: u64,
        mut facts: Facts,
        say: &mut dyn FnMut(Hint),
    ) -> Result<(), HintError> {
        if request == 0 {
            return Err(HintError::NoId);
        }
        if facts.deadline_ns != 0 && facts.deadline_ns <= now {
            self.counts.deadlines_passed += 1;
            return Err(HintError::DeadlinePassed { request, late_ns: now - facts.deadline_ns });
        }
        if facts.tenant.len() > TENANT_MAX {
            let end = (0..=TENANT_MAX).rfind(|&end| facts.tenant.is_char_boundary(end));
            facts.tenant = facts.tenant[..end.unwrap_or(0)].into();
        }
        self.taken += 1;
        let (mut batch, mut trace) = (0, None);
        if let Some(before) = self.requests.get(request).filter(|r| !r.ended) {
            self.counts.requests_begun_twice += 1;
            (batch, trace) = (before.batch, before.trace);
            if batch != 0 {
                say(join(batch, request, &facts));
            }
        }
        self.put(request, HintedRequest { facts, batch, ended: false, trace }, say);
        Ok(())
    }

    fn put(&mut self, request: u64, what: HintedRequest, say: &mut dyn FnMut(Hint)) {
        if let Some((evicted, was)) = self.requests.insert(request, what)
            && !was.ended
        {
            self.counts.requests_evicted += 1;
            say(Hint::RequestEnd { request: evicted });
        }
    }

    /// Takes a hint and passes it to `say`, with the facts about a request that joins a batch.
    ///
    /// # Errors
    /// The hint has no id ([`HintError::NoId`]), its request has ended
    /// ([`HintError::RequestEnded`]), or its layer does not exist ([`HintError::UnknownLayer`],
    /// [`HintError::NoLayers`]). A refused hint changes nothing.
    pub fn tell(&mut self, mut hint: Hint, say: &mut dyn FnMut(Hint)) -> Result<(), HintError> {
        if hint.ids().contains(&0) {
            return Err(HintError::NoId);
        }
        match &mut hint {
            Hint::BatchBegin { batch, layers, layer_time_ns } => {
                self.batch_begin(*batch, *layers, *layer_time_ns, say)?;
            }
            Hint::RequestJoin { batch, request, deadline_ns, bytes } => {
                if let Some(known) = self.requests.get_mut(*request) {
                    if known.ended {
                        return Err(HintError::RequestEnded { request: *request });
                    }
                    known.batch = *batch;
                    (*deadline_ns, *bytes) = (known.facts.deadline_ns, known.facts.bytes);
                }
                self.look_up(*batch);
            }
            Hint::RequestEnd { request } => self.request_end(*request, say)?,
            Hint::RequestTrace { request, .. } => {
                if let Some(known) = self.requests.get_mut(*request).filter(|known| !known.ended) {
                    known.trace = Some(hint);
                }
            }
            Hint::BatchQueued { batch, ahead } => {
                if let Some(known) = self.look_up(*batch) {
                    known.ahead = *ahead;
                }
            }
            Hint::LayerBegin { batch, layer } => self.layer_begin(*batch, *layer)?,
            Hint::ComputeEnd { batch } => {
                if let Some(known) = self.look_up(*batch) {
                    known.computed = true;
                }
            }
            Hint::BatchEnd { batch } => {
                self.look_up(*batch);
                self.batches.remove(*batch);
            }
        }
        self.taken += 1;
        say(hint);
        Ok(())
    }

    fn request_end(&mut self, request: u64, say: &mut dyn FnMut(Hint)) -> Result<(), HintError> {
        self.sights.forget(request);
        let ended = HintedRequest { ended: true, ..HintedRequest::default() };
        match self.requests.get_mut(request) {
            Some(known) if known.ended => {
                self.counts.requests_ended_twice += 1;
                return Err(HintError::RequestEnded { request });
            }
            Some(known) => *known = ended,
            None => {
                self.counts.requests_unknown += 1;
                self.put(request, ended, say);
            }
        }
        Ok(())
    }

    fn batch_begin(
        &mut self,
        batch: u64,
        layers: u16,
        layer_time_ns: u64,
        say: &mut dyn FnMut(Hint),
    ) -> Result<(), HintError> {
        if layers == 0 {
            self.counts.layers_unknown += 1;
            return Err(HintError::NoLayers { batch });
        }
        if self.batches.get(batch).is_some() {
            self.counts.batches_begun_twice += 1;
        }
        let known = HintedBatch { layers, layer_time_ns, ahead: 0, layer: None, computed: false };
        if let Some((batch, _)) = self.batches.insert(batch, known) {
            self.counts.batches_evicted += 1;
            say(Hint::BatchEnd { batch });
        }
        Ok(())
    }

    fn layer_begin(&mut self, batch: u64, layer: u16) -> Result<(), HintError> {
        let Some(known) = self.look_up(batch) else { return Ok(()) };
        let layers = known.layers;
        if layer >= layers {
            self.counts.layers_unknown += 1;
            return Err(HintError::UnknownLayer { batch, layer, layers });
        }
        let before = known.layer.replace(layer);
        known.ahead = 0;
        self.counts.layers_backwards += u64::from(before > Some(layer));
        Ok(())
    }

    /// Returns the batch of a hint. Counts an unknown one.
    fn look_up(&mut self, batch: u64) -> Option<&mut HintedBatch> {
        let known = self.batches.get_mut(batch);
        if known.is_none() {
            self.counts.batches_unknown += 1;
        }
        known
    }

    /// Returns the facts about a request that has not ended.
    pub fn facts(&self, request: u64) -> Option<&Facts> {
        let known = self.requests.get(request).filter(|known| !known.ended);
        known.map(|known| &known.facts)
    }

    /// Returns the batch of a request, 0 if unknown.
    pub fn batch_of(&self, request: u64) -> u64 {
        let known = self.requests.get(request).filter(|known| !known.ended);
        known.map_or(0, |known| known.batch)
    }

    /// Returns the number of layers of a batch, and the layer that it computes.
    pub fn layers(&self, batch: u64) -> Option<(u16, Option<u16>)> {
        self.batches.get(batch).map(|known| (known.layers, known.layer))
    }

    /// Passes all remembered requests and batches to `say`, for a new daemon.
    pub fn retell(&self, say: &mut dyn FnMut(Hint)) {
        let batches = self.batches.by_age();
        for &(batch, known) in &batches {
            say(Hint::BatchBegin {
                batch,
                layers: known.layers,
                layer_time_ns: known.layer_time_ns,
            });
        }
        for (request, known) in self.requests.by_age() {
            if !known.ended && known.batch != 0 {
                say(join(known.batch, request, &known.facts));
            }
            known.trace.map(&mut *say);
        }
        for (batch, known) in batches {
            if known.ahead != 0 {
                let ahead = known.ahead;
                say(Hint::BatchQueued { batch, ahead });
            }
            if let Some(layer) = known.layer {
                say(Hint::LayerBegin { batch, layer });
            }
            if known.computed {
                say(Hint::ComputeEnd { batch });
            }
        }
    }
}

fn join(batch: u64, request: u64, facts: &Facts) -> Hint {
    Hint::RequestJoin { batch, request, deadline_ns: facts.deadline_ns, bytes: facts.bytes }
}

#[cfg(test)]
mod tests;
