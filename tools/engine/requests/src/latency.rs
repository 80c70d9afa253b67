//! The duration of a forward pass, for policies that plan ahead.
//!
//! Sums describe an iteration. They omit which request has which length. The error from that is
//! smaller than the error of any model here. A [`Latency`] is linear in HyperFlexis (eq. 1 and 2),
//! a forest in QoServe (§3.3), and a roofline in the simulator.

use crate::Span;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Composition {
    pub prefill_tokens: u32,
    /// Number of pairs of a computed prompt token and a token that it attends to. A chunk of `c`
    /// tokens after `p` has `c · p + c (c + 1) / 2`.
    pub prefill_pairs: u64,
    pub chunks: u32,
    /// Number of requests that decode one token each.
    pub decodes: u32,
    /// Number of tokens that the decoding requests attend to.
    pub decode_context: u64,
}

impl Composition {
    /// Returns the sums with one more chunk of `tokens` after `prefix` tokens.
    pub const fn with_chunk(mut self, prefix: u32, tokens: u32) -> Self {
        let (prefix, count) = (prefix as u64, tokens as u64);
        self.prefill_tokens += tokens;
        self.prefill_pairs += count * prefix + count * (count + 1) / 2;
        self.chunks += 1;
        self
    }

    /// Returns the sums with one more decoded token after `context` tokens.
    pub const fn with_decode(mut self, context: u32) -> Self {
        self.decodes += 1;
        self.decode_context += context as u64 + 1;
        self
    }

    pub const fn is_empty(&self) -> bool {
        self.prefill_tokens == 0 && self.decodes == 0
    }
}

pub trait Latency {
    /// Returns the duration of an iteration, which includes host work.
    fn iteration(&self, of: &Composition) -> Span;
}
