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
    /// A setting that is checked only at the start is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The configuration asks for the GPU.
    #[cfg(feature = "compute")]
    #[error(
        "device = \"cuda\": the GPU cannot be used (was this built with --features cuda, and \
        does CUDA_VISIBLE_DEVICES leave one?): {0}"
    )]
    Gpu(candle_core::Error),
    /// The weights can't be read, or don't fit the model.
    #[cfg(feature = "compute")]
    #[error("cannot have the model's weights: {0}")]
    Weights(crate::model::computed::WeightsError),
    /// The configuration needs a model that computes.
    #[cfg(not(feature = "compute"))]
    #[error("this laxity-engine was built without a model that computes: give [timing]")]
    NoCompute,
    /// The file of prompts whose KV is present from the start is wrong.
    #[error("timing.holds is {path}: {problem}", path = .path.display())]
    Holds {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The prompts of that file do not fit.
    #[error("kv.blocks is too small for timing.holds")]
    HoldsRoom,
    /// The model refuses those prompts.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The record can't be written.
    #[error("cannot write the record {path}: {cause}", path = .path.display())]
    Record {
        /// Path of the record.
        path: PathBuf,
        /// The cause.
        cause: io::Error,
    },
    /// The address is in use, or not one of this host.
    #[error("cannot listen on {address} (peers.listen): {cause}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        cause: io::Error,
    },
    /// The NCCL plugin can't be used.
    #[error("cannot use the NCCL plugin (peers.nccl_plugin): {0}")]
    Plugin(PluginError),
    /// The system gives this process no more threads.
    #[error("no thread for {purpose}: {cause}")]
    Thread {
        /// What the thread is for.
        purpose: &'static str,
        /// The cause.
        cause: io::Error,
    },
}

impl StartError {
    /// Makes the error of a thread that did not start.
    pub(crate) fn thread(purpose: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |cause| Self::Thread { purpose, cause }
    }
}
