//! Sizes of linear attention in the form of Gated DeltaNet (Yang, Kautz, Hatamizadeh, "Gated Delta
//! Networks", arXiv:2412.06464). A short convolution precedes the heads.

use serde::{Deserialize, Serialize};

use super::document::{Document, FileError};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearAttention {
    pub key_heads: u32,
    pub value_heads: u32,
    pub key_dim: u32,
    pub value_dim: u32,
    pub convolution: u32,
    pub state_bytes_per_value: f64,
}

impl LinearAttention {
    pub(super) fn check(&self, document: &Document) -> Result<(), FileError> {
        for (field, size) in [
            ("key_heads", self.key_heads),
            ("value_heads", self.value_heads),
            ("key_dim", self.key_dim),
            ("value_dim", self.value_dim),
            ("convolution", self.convolution),
        ] {
            if !(1..=1 << 16).contains(&size) {
                return Err(document.wrong(&format!("linear_attention.{field}"), "1 to 65536"));
            }
        }
        if !(0.25..=8.0).contains(&self.state_bytes_per_value) {
            return Err(document.wrong("linear_attention.state_bytes_per_value", "0.25 to 8"));
        }
        Ok(())
    }

    pub(crate) fn mixed_width(&self) -> u64 {
        2 * u64::from(self.key_heads) * u64::from(self.key_dim) + self.value_width()
    }

    pub(crate) fn value_width(&self) -> u64 {
        u64::from(self.value_heads) * u64::from(self.value_dim)
    }

    /// Returns the columns of the layer's input projection: the input of the convolution, the
    /// output gate, and two numbers per value head (decay and learning rate).
    pub(crate) fn projected_width(&self) -> u64 {
        self.mixed_width() + self.value_width() + 2 * u64::from(self.value_heads)
    }

    pub(super) fn state_bytes(&self, bytes_per_value: f64) -> u64 {
        let state = self.value_width() * u64::from(self.key_dim);
        let inputs = u64::from(self.convolution - 1) * self.mixed_width();
        (state as f64 * self.state_bytes_per_value + inputs as f64 * bytes_per_value) as u64
    }

    pub(super) fn parameters(&self, hidden: u64) -> u64 {
        hidden * (self.projected_width() + self.value_width())
            + u64::from(self.convolution) * self.mixed_width()
    }
}
