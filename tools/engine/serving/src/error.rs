//! Why a process can't start to serve. Each text names the setting to change.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use thiserror::Error;

use crate::apart::plugin::PluginError;
use crate::config::ConfigError;
use crate::model::ModelError;

/// The reason why a process can't start to serve. The texts contain their causes.
#[derive(Debug, Error)]
pub enum StartError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The configuration asks for the GPU.
    #[cfg(feature = "compute")]
    #[error(
        "device = \"cuda\": the GPU cannot be used (was this built with --features cuda, and \
        does CUDA_VISIBLE_DEVICES leave one?): {0}"
    )]
    Gpu(candle_core::Error),
    /// There is too little memory for the weights or the KV cache.
    #[cfg(feature = "compute")]
    #[error("no memory for the model's weights and KV cache (kv.blocks): {0}")]
    Weights(candle_core::Error),
    #[cfg(not(feature = "compute"))]
    #[error("this laxity-engine was built without a model that computes: give [timing]")]
    NoCompute,
    #[error("timing.holds is {path}: {problem}", path = .path.display())]
    Holds { path: PathBuf, problem: String },
    #[error("kv.blocks is too small for timing.holds")]
    HoldsRoom,
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("cannot listen on {address} (peers.listen): {cause}")]
    Listen { address: SocketAddr, cause: io::Error },
    #[error("cannot use the NCCL plugin (peers.nccl_plugin): {0}")]
    Plugin(PluginError),
    #[error("no thread for {purpose}: {cause}")]
    Thread { purpose: &'static str, cause: io::Error },
}

impl StartError {
    pub(crate) fn thread(purpose: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |cause| Self::Thread { purpose, cause }
    }
}
