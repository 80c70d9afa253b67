//! The model that computes: a decoder-only transformer on candle.
//!
//! A token's arithmetic does not depend on what is computed beside it (see [`linear`] and
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
pub use weights::WeightsError;
