//! The KV cache: which block is whose ([`blocks`], pure bookkeeping), and the numbers in them ([`pages`]).

pub mod blocks;
pub mod pages;

pub use blocks::{BlockHash, Blocks, chain};
pub use pages::Pages;
