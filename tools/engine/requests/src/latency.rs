//! How long a forward pass takes, as a policy that plans ahead asks it.
//!
//! An iteration is described by four sums; what they leave out (which request has which length)
//! moves the time of an iteration by less than any of the models here is off. Linear in HyperFlexis
//! (eq. 1 and 2), a forest in QoServe (§3.3), the roofline of the simulator in virtual time: each
//! is a [`Latency`].

use crate::Span;

/// What is in an iteration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Composition {
    /// Prompt tokens that are computed.
    pub prefill_tokens: u32,
    /// Pairs of those tokens and the tokens that each attends to, its own prefix included: a chunk
    /// of `c` tokens after `p` has `c · p + c (c + 1) / 2`.
    pub prefill_pairs: u64,
    /// Prompt chunks.
    pub chunks: u32,
    /// Requests that decode one token each.
    pub decodes: u32,
    /// Tokens that those attend to, in all.
    pub decode_context: u64,
}

impl Composition {
    /// With a chunk of `tokens` after `prefix` tokens.
    #[must_use]
    pub const fn with_chunk(mut self, prefix: u32, tokens: u32) -> Self {
        let (prefix, count) = (prefix as u64, tokens as u64);
        self.prefill_tokens += tokens;
        self.prefill_pairs += count * prefix + count * (count + 1) / 2;
        self.chunks += 1;
        self
    }

    /// With a request that decodes a token after `context`.
    #[must_use]
    pub const fn with_decode(mut self, context: u32) -> Self {
        self.decodes += 1;
        self.decode_context += context as u64 + 1;
        self
    }

    /// Nothing is computed.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.prefill_tokens == 0 && self.decodes == 0
    }
}

/// A model of an instance's time.
pub trait Latency {
    /// How long such an iteration takes, host work included.
    fn iteration(&self, of: &Composition) -> Span;
}

impl<L: Latency + ?Sized> Latency for &L {
    fn iteration(&self, of: &Composition) -> Span {
        (**self).iteration(of)
    }
}

impl<L: Latency + ?Sized> Latency for std::sync::Arc<L> {
    fn iteration(&self, of: &Composition) -> Span {
        (**self).iteration(of)
    }
}

impl<L: Latency + ?Sized> Latency for Box<L> {
    fn iteration(&self, of: &Composition) -> Span {
        (**self).iteration(of)
    }
}
