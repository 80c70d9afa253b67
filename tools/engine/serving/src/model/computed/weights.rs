//! Weights, which are drawn from a seed under the names that Hugging Face uses.
//!
//! They are uniform with the variance `1 / fan_in`. Each tensor has a random stream that its name
//! and the seed determine. So a process with some of the experts draws the same ones as a process
//! with all.

use candle_core::{Device, Result, Tensor};
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng as _;
use sha2::{Digest as _, Sha256};

/// Weights that are drawn with this seed.
#[derive(Clone, Copy)]
pub struct Weights(pub u64);

impl Weights {
    /// Returns a matrix `[out, in]`.
    pub fn matrix(self, name: &str, out: usize, width: usize, device: &Device) -> Result<Tensor> {
        let mut hash = Sha256::new();
        hash.update(self.0.to_le_bytes());
        hash.update(name.as_bytes());
        let mut random = ChaCha8Rng::from_seed(hash.finalize().into());
        let most = (3.0 / width as f32).sqrt();
        let numbers: Vec<f32> =
            (0..out * width).map(|_| (random.random::<f32>() * 2.0 - 1.0) * most).collect();
        Tensor::from_vec(numbers, (out, width), device)
    }
}
