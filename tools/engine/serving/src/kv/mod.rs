//! The KV cache: which block is whose. What is in the blocks belongs to the model
//! ([`crate::model::KvCache`]).

pub mod blocks;

pub use blocks::{BlockHash, Blocks, SharedBlocks, chain};
