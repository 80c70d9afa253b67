//! The allocation of the KV cache's blocks. Their content belongs to the model
//! ([`crate::model::KvCache`]).

pub mod blocks;

pub use blocks::{BlockHash, Blocks, SharedBlocks, chain};
