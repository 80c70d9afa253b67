//! The model: a decoder-only transformer, dense (as Llama) or with experts (as Mixtral), over a paged KV cache.
//!
//! A token's arithmetic does not depend on what is computed beside it (see [`linear`] and [`attention`]), so that greedy outputs are the same
//! whatever the batch, the chunks and the cache hits were. That holds on CPUs; on CUDA nobody promises it.

pub mod attention;
pub mod decoder;
pub mod experts;
pub mod linear;
#[cfg(test)]
mod reference;
pub mod shape;
pub mod weights;

pub use decoder::{Model, Piece, Watch};
pub use experts::{AllLocal, ExpertBank, ExpertPeers};
pub use shape::ModelShape;
