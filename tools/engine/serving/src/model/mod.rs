//! What the engine asks of a model, and the two things that answer: one computes, one takes time.
//!
//! * [`computed`] (feature `compute`): a decoder-only transformer, dense (as Llama) or with experts
//!   (as Mixtral), over a paged KV cache. It needs a tensor library.
//! * [`timed`]: takes the time that a model of this shape would take. KV and activations are
//!   patterns of the right size.
//!
//! In both, a token's answer does not depend on what is computed beside it: greedy answers are the
//! same whatever the batch, the chunks and the cache hits were. That holds on CPUs; on CUDA nobody
//! promises it.

#[cfg(feature = "compute")]
pub mod computed;
pub mod shape;
pub mod timed;

use std::fmt::Debug;
use std::sync::Arc;

use thiserror::Error;

pub use shape::ModelShape;
pub use timed::TimedModel;

/// A batch, or a part of one, that cannot be computed. The engine computes its requests again or
/// gives them up.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct ModelError(String);

impl ModelError {
    /// Says why.
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

/// What a model returns.
pub type Result<T> = std::result::Result<T, ModelError>;

/// Returns a [`ModelError`] from the function around it.
macro_rules! fail {
    ($($why:tt)*) => {
        return Err($crate::model::ModelError::new(format!($($why)*)))
    };
}
pub(crate) use fail;

/// A model with its KV cache.
pub trait Model: Debug + Send + Sync {
    /// Its sizes.
    fn shape(&self) -> &ModelShape;

    /// Sixteen bytes that stand for its sizes and weights: KV of another model is of no use.
    fn identity(&self) -> [u8; 16];

    /// Its KV cache.
    fn kv(&self) -> &dyn KvCache;

    /// The experts that it holds. Another thread computes them for other processes.
    fn experts(&self) -> Arc<dyn Experts>;

    /// Computes a mixed batch: pieces of prompts beside single tokens of running answers. Returns
    /// the outputs (a number for each token of the vocabulary) of the last token of each piece that
    /// wants it, in order.
    ///
    /// # Errors
    /// A piece does not fit the model or the cache, or a peer is gone.
    fn forward(
        &self,
        pieces: &[Piece],
        watch: &mut dyn Watch,
        peers: &mut dyn ExpertPeers,
    ) -> Result<Vec<Vec<f32>>>;
}

/// The KV of all layers, in blocks.
pub trait KvCache: Debug {
    /// Tokens of a block.
    fn block_tokens(&self) -> usize;

    /// Bytes of a token in a layer.
    fn token_bytes(&self) -> usize;

    /// Returns the KV of `tokens` tokens in a layer, from token `first` of a sequence with these
    /// blocks.
    ///
    /// # Errors
    /// A block is not there, or the blocks hold fewer tokens.
    fn export(&self, layer: usize, blocks: &[u32], first: usize, tokens: usize) -> Result<Vec<u8>>;

    /// Writes what [`KvCache::export`] returned into a sequence with these blocks. Returns the
    /// number of tokens.
    ///
    /// # Errors
    /// The bytes are no whole tokens, or more than the blocks hold, or there is no such layer.
    fn import(&self, layer: usize, blocks: &[u32], first: usize, bytes: &[u8]) -> Result<usize>;
}

/// A sequence's part of a batch.
#[derive(Clone, Debug)]
pub struct Piece {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Position of the first.
    pub start: usize,
    /// The sequence's blocks, which reach as far as these tokens.
    pub blocks: Vec<u32>,
    /// Whether the output of the last token is wanted.
    pub wants_output: bool,
}

/// Checks that pieces fit a model.
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

/// Is told between layers: KV comes in before a layer and goes out after it.
pub trait Watch {
    /// A layer is about to be computed. The KV that it reads has to be there when this returns.
    ///
    /// # Errors
    /// It will never be.
    fn before_layer(&mut self, layer: usize, kv: &dyn KvCache) -> Result<()>;

    /// A layer was computed. The KV of the batch's tokens is there.
    ///
    /// # Errors
    /// The batch has to be given up.
    fn after_layer(&mut self, layer: usize, kv: &dyn KvCache) -> Result<()>;
}

/// Nobody watches.
#[derive(Clone, Copy, Debug)]
pub struct Unwatched;

impl Watch for Unwatched {
    fn before_layer(&mut self, _layer: usize, _kv: &dyn KvCache) -> Result<()> {
        Ok(())
    }

    fn after_layer(&mut self, _layer: usize, _kv: &dyn KvCache) -> Result<()> {
        Ok(())
    }
}

/// Rows for one expert, as they go to the process that holds it, and as they come back.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertRows {
    /// Which expert.
    pub expert: usize,
    /// `rows × hidden` numbers of 32 bits.
    pub rows: Vec<u32>,
}

/// The experts that a process holds.
pub trait Experts: Debug + Send + Sync {
    /// Returns what experts of a layer make of rows: the same experts with as many rows.
    ///
    /// # Errors
    /// An expert is not here, or the rows are not of this model.
    fn run(&self, layer: usize, groups: Vec<ExpertRows>) -> Result<Vec<ExpertRows>>;
}

/// Where the experts are that this process does not hold.
pub trait ExpertPeers {
    /// Sends rows. [`ExpertPeers::collect`] returns the answers. Both are called once a layer, also
    /// without rows.
    ///
    /// # Errors
    /// A peer is gone.
    fn dispatch(&mut self, layer: usize, groups: Vec<ExpertRows>) -> Result<()>;

    /// Returns what the experts made of the rows: the same experts with as many rows.
    ///
    /// # Errors
    /// A peer is gone.
    fn collect(&mut self, layer: usize) -> Result<Vec<ExpertRows>>;
}

/// All experts are held here.
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

/// Returns the token with the highest output, the lowest of those that tie.
#[must_use]
pub fn greedy(outputs: &[f32]) -> u32 {
    let mut best = 0;
    for (token, output) in outputs.iter().enumerate() {
        if *output > outputs[best] {
            best = token;
        }
    }
    best as u32
}

/// Stands for sizes and weights together.
fn identity(shape: &ModelShape, weights: &[u8]) -> [u8; 16] {
    use sha2::{Digest as _, Sha256};
    let sizes = ModelShape {
        // Another name, or another path to the same weights, makes no other model.
        name: String::new(),
        weights: shape::WeightsSource::default(),
        ..shape.clone()
    };
    let mut hash = Sha256::new();
    hash.update(format!("{sizes:?}"));
    hash.update(weights);
    let mut identity = [0; 16];
    identity.copy_from_slice(&hash.finalize()[..16]);
    identity
}
