//! Weights: drawn from a seed, or read from safetensors with Hugging Face's names.
//!
//! Drawn weights are uniform with the variance `1 / fan_in`. Each tensor has a random stream that
//! its name and the seed determine. So a process with some of the experts draws the same ones as a
//! process with all.

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng as _;
use sha2::{Digest as _, Sha256};
use thiserror::Error;

use crate::model::shape::WeightsSource;

#[derive(Debug, Error)]
pub enum WeightsError {
    #[error("{path}: {cause}")]
    File { path: PathBuf, cause: candle_core::Error },
    #[error(
        "no tensor `{0}` in the safetensors files; they need Hugging Face's names (Llama's, or \
         Mixtral's with model.moe)"
    )]
    Missing(String),
    #[error("tensor `{name}` is {found:?} in the file, and {wanted:?} by the sizes in [model]")]
    Shape { name: String, found: Vec<usize>, wanted: Vec<usize> },
    #[error("no memory for the KV cache (kv.blocks): {0}")]
    Memory(candle_core::Error),
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

pub enum Weights {
    Drawn(u64),
    Read(HashMap<String, Tensor>),
}

impl Weights {
    /// Opens a source.
    ///
    /// # Errors
    /// Fails if a file cannot be read.
    pub fn open(source: &WeightsSource) -> Result<Self, WeightsError> {
        match source {
            WeightsSource::Seed(seed) => Ok(Self::Drawn(*seed)),
            WeightsSource::Safetensors(paths) => {
                let mut all = HashMap::new();
                for path in paths {
                    let tensors = candle_core::safetensors::load(path, &Device::Cpu);
                    all.extend(
                        tensors
                            .map_err(|cause| WeightsError::File { path: path.clone(), cause })?,
                    );
                }
                Ok(Self::Read(all))
            }
        }
    }

    /// Returns a matrix `[out, in]`.
    ///
    /// # Errors
    /// Fails if no tensor has this name and shape.
    pub fn matrix(
        &self,
        name: &str,
        out: usize,
        width: usize,
        device: &Device,
    ) -> Result<Tensor, WeightsError> {
        match self {
            Self::Drawn(seed) => {
                let mut random = stream(*seed, name);
                let most = (3.0 / width as f32).sqrt();
                let numbers: Vec<f32> =
                    (0..out * width).map(|_| (random.random::<f32>() * 2.0 - 1.0) * most).collect();
                Ok(Tensor::from_vec(numbers, (out, width), device)?)
            }
            Self::Read(tensors) => read(tensors, name, &[out, width], device),
        }
    }

    /// Returns the factors of a norm. Drawn weights have ones.
    ///
    /// # Errors
    /// Fails if no tensor has this name and width.
    pub fn norm(&self, name: &str, width: usize, device: &Device) -> Result<Tensor, WeightsError> {
        match self {
            Self::Drawn(_) => Ok(Tensor::ones(width, DType::F32, device)?),
            Self::Read(tensors) => read(tensors, name, &[width], device),
        }
    }

    /// Returns sixteen bytes that identify these weights, because processes with other weights must
    /// not share KV. For files it is a hash over norms and corners of all tensors by name.
    ///
    /// # Errors
    /// Fails if a tensor cannot be read.
    pub fn identity(&self) -> Result<[u8; 16], WeightsError> {
        let mut hash = Sha256::new();
        match self {
            Self::Drawn(seed) => hash.update(seed.to_le_bytes()),
            Self::Read(tensors) => {
                let mut names: Vec<&String> = tensors.keys().collect();
                names.sort();
                for name in names {
                    let tensor = &tensors[name];
                    hash.update(name.as_bytes());
                    let flat = tensor.flatten_all()?.to_dtype(DType::F32)?;
                    let some: Vec<f32> = flat.narrow(0, 0, flat.elem_count().min(64))?.to_vec1()?;
                    some.iter().for_each(|number| hash.update(number.to_le_bytes()));
                    let sum: f32 = flat.sqr()?.sum_all()?.to_scalar()?;
                    hash.update(sum.to_le_bytes());
                }
            }
        }
        let mut identity = [0; 16];
        identity.copy_from_slice(&hash.finalize()[..16]);
        Ok(identity)
    }
}

fn stream(seed: u64, name: &str) -> ChaCha8Rng {
    let mut hash = Sha256::new();
    hash.update(seed.to_le_bytes());
    hash.update(name.as_bytes());
    ChaCha8Rng::from_seed(hash.finalize().into())
}

fn read(
    tensors: &HashMap<String, Tensor>,
    name: &str,
    wanted: &[usize],
    device: &Device,
) -> Result<Tensor, WeightsError> {
    let tensor = tensors.get(name).ok_or_else(|| WeightsError::Missing(name.to_owned()))?;
    if tensor.dims() != wanted {
        return Err(WeightsError::Shape {
            name: name.to_owned(),
            found: tensor.dims().to_vec(),
            wanted: wanted.to_vec(),
        });
    }
    Ok(tensor.to_dtype(DType::F32)?.to_device(device)?.contiguous()?)
}
