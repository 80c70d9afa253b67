//! The interface of models, with two implementations: one computes, and one only takes time.
//!
//! * [`computed`] (feature `compute`): a decoder-only transformer, dense (like Llama) or with
//!   experts (like Mixtral), over a paged KV cache. It needs a tensor library.
//! * [`timed`]: takes the time that a model of this shape would take. KV and activations are
//!   patterns of the right size.
//!
//! In both, a token's answer does not depend on the rest of its batch. Greedy answers are the same
//! for all batches, chunks and cache hits. This holds on CPUs, but not necessarily on CUDA.

#[cfg(feature = "compute")]
pub mod computed;
pub mod shape;
pub mod timed;

use std::sync::Arc;

use thiserror::Error;

pub use shape::ModelShape;
pub use timed::TimedModel;

/// The reason why a batch, or part of one, cannot be computed. The engine computes its requests
/// again or gives them up.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct ModelError(String);

impl ModelError {
    pub fn new(why: impl Into<String>) -> Self {
        Self(why.into())
    }
}

#[cfg(feature = "compute")]
impl From<candle_core::Error> for ModelError {
    fn from(error: candle_core::Error) -> Self {
        Self(error.to_string())
    }
}

pub type Result<T> = std::result::Result<T, ModelError>;

/// Returns a [`ModelError`] from the function around it.
macro_rules! fail {
    ($($why:tt)*) => {
        return Err($crate::model::ModelError::new(format!($($why)*)))
    };
}
pub(crate) use fail;

pub trait Model: Send + Sync {
    fn shape(&self) -> &ModelShape;

    /// Returns sixteen bytes that identify sizes and weights. KV of another model cannot be used.
    fn identity(&self) -> [u8; 16];

    fn kv(&self) -> &dyn KvCache;

    /// Returns the experts that the model holds. Another thread computes them for other processes.
    fn experts(&self) -> Arc<dyn Experts>;

    /// Computes a mixed batch: pieces of prompts, and single tokens of answers. Returns the outputs
    /// of the last token of each piece that wants them, in order. The outputs are one number for
    /// each token of the vocabulary.
    /// Fails if a piece does not fit the model or the cache, or a peer is gone.
    fn forward(
        &self,
        pieces: &[Piece],
        watch: &mut dyn Watch,
        peers: &mut dyn ExpertPeers,
    ) -> Result<Vec<Vec<f32>>>;
}

/// The KV cache of all layers, divided into blocks.
pub trait KvCache {
    fn block_tokens(&self) -> usize;

    /// Returns the bytes of a token in a layer.
    fn token_bytes(&self) -> usize;

    /// Returns the KV of `tokens` tokens in a layer, from token `first` of a sequence with these
    /// blocks.
    /// Fails if a block does not exist, or the blocks hold fewer tokens.
    fn export(&self, layer: usize, blocks: &[u32], first: usize, tokens: usize) -> Result<Vec<u8>>;

    /// Writes what [`KvCache::export`] returned into a sequence with these blocks. Returns the
    /// number of tokens.
    /// Fails if the bytes are not whole tokens, exceed the blocks, or the layer does not exist.
    fn import(&self, layer: usize, blocks: &[u32], first: usize, bytes: &[u8]) -> Result<usize>;
}

/// The part of a sequence that is in a batch.
#[derive(Clone, Debug)]
pub struct Piece {
    pub tokens: Vec<u32>,
    pub start: usize,
    /// Blocks of the sequence, up to the last of these tokens at least.
    pub blocks: Vec<u32>,
    /// Whether the caller wants the output of the last token.
    pub wants_output: bool,
}

fn check_pieces(shape: &ModelShape, pieces: &[Piece]) -> Result<()> {
    for piece in pieces {
        let (count, start) = (piece.tokens.len(), piece.start);
        if count == 0 || start + count > shape.context {
            let context = shape.context;
            fail!("a piece of {count} tokens from {start}: the context is {context}");
        }
        if let Some(token) = piece.tokens.iter().find(|t| **t as usize >= shape.vocab) {
            fail!("token {token} is none of {}", shape.vocab);
        }
    }
    Ok(())
}

/// Callbacks between layers. KV arrives before a layer and is sent after it.
pub trait Watch {
    /// Called before a layer is computed. Returns when the KV that the layer reads is there.
    /// Fails if the KV will never arrive.
    fn before_layer(&mut self, _layer: usize, _kv: &dyn KvCache) -> Result<()> {
        Ok(())
    }

    /// Called after a layer was computed, with the KV of the batch's tokens in place.
    /// Fails if the batch has to be given up.
    fn after_layer(&mut self, _layer: usize, _kv: &dyn KvCache) -> Result<()> {
        Ok(())
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Unwatched;

impl Watch for Unwatched {}

/// Rows for one expert on their way to the process that holds it, or their outputs on the way back.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertRows {
    pub expert: usize,
    /// The numbers of all rows: `rows × hidden` numbers of 32 bits.
    pub rows: Vec<u32>,
}

pub trait Experts: Send + Sync {
    /// Returns the outputs of experts of a layer: the same experts with as many rows.
    /// Fails if an expert is not held here, or the rows do not fit the model.
    fn run(&self, layer: usize, groups: Vec<ExpertRows>) -> Result<Vec<ExpertRows>>;
}

/// The connection to the experts that this process does not hold.
pub trait ExpertPeers {
    /// Sends rows. [`ExpertPeers::collect`] returns the outputs. Both are called once for each
    /// layer, even without rows.
    fn dispatch(&mut self, layer: usize, groups: Vec<ExpertRows>) -> Result<()>;

    /// Returns the outputs for the rows: the same experts with as many rows.
    fn collect(&mut self, layer: usize) -> Result<Vec<ExpertRows>>;
}

/// The peers of a process that holds all experts.
#[derive(Clone, Copy, Debug)]
pub struct AllLocal;

impl ExpertPeers for AllLocal {
    fn dispatch(&mut self, layer: usize, groups: Vec<ExpertRows>) -> Result<()> {
        match groups.first() {
            Some(group) => fail!("expert {} of layer {layer} is held nowhere", group.expert),
            None => Ok(()),
        }
    }

    fn collect(&mut self, _layer: usize) -> Result<Vec<ExpertRows>> {
        Ok(Vec::new())
    }
}

/// Returns the token with the highest output, or the lowest token of several.
pub fn greedy(outputs: &[f32]) -> u32 {
    let mut best = 0;
    for (token, output) in outputs.iter().enumerate() {
        if *output > outputs[best] {
            best = token;
        }
    }
    best as u32
}

/// Returns bytes that identify sizes and weights together.
fn identity(shape: &ModelShape, weights: &[u8]) -> [u8; 16] {
    use sha2::{Digest as _, Sha256};
    let sizes = ModelShape {
        // A model is the same under another name or with another path to its weights.
        name: String::new(),
        weights: shape::WeightsSource::default(),
        ..shape.clone()
    };
    let mut hash = Sha256::new();
    hash.update(format!("{sizes:?}"));
    hash.update(weights);
    *hash.finalize().first_chunk().expect("a hash has 32 bytes")
}
