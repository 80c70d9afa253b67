//! The model that computes: a decoder-only transformer on candle.
//!
//! The arithmetic of a token does not depend on the rest of its batch (see [`linear`] and
//! [`attention`]).

pub mod attention;
pub mod decoder;
pub mod experts;
pub mod linear;
pub mod pages;
#[cfg(test)]
mod reference;
pub mod weights;

pub use decoder::Decoder;
pub use pages::Pages;
