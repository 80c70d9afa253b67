//! Hints of the inference engine, which the transfer library doesn't have.

use laxity_shm::record::Record;

/// A hint. Ids are the application's own. 0 means "unknown" in a flow and is invalid here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// A batch was formed.
    BatchBegin {
        /// The batch's id.
        batch: u64,
        /// Number of layers of the model.
        layers: u16,
        /// Expected time of a layer without contention, in nanoseconds. 0 if unknown.
        layer_time_ns: u64,
    },
    /// A request is a member of a batch.
    RequestJoin {
        /// The batch's id.
        batch: u64,
        /// The request's id.
        request: u64,
        /// Deadline of the first token in CLOCK_MONOTONIC nanoseconds. 0 if unknown.
        deadline_ns: u64,
        /// Number of bytes that the request will move. 0 if unknown.
        bytes: u64,
    },
    /// A request has its first token, or was aborted.
    RequestEnd {
        /// The request's id.
        request: u64,
    },
    /// A batch waits until another one has run.
    BatchQueued {
        /// Id of the batch that waits.
        batch: u64,
        /// Id of the batch that runs.
        ahead: u64,
    },
    /// A batch begins to compute a layer.
    LayerBegin {
        /// The batch's id.
        batch: u64,
        /// The layer's number.
        layer: u16,
    },
    /// A batch has computed its last layer.
    ComputeEnd {
        /// The batch's id.
        batch: u64,
    },
    /// A batch is over, and nothing of it is left to do.
    BatchEnd {
        /// The batch's id.
        batch: u64,
    },
}

impl Hint {
    /// Returns the ids of the hint's requests and batches. A hint with one id returns it twice.
    pub(crate) fn ids(self) -> [u64; 2] {
        match self {
            Self::RequestJoin { batch, request, .. } => [batch, request],
            Self::BatchQueued { batch, ahead } => [batch, ahead],
            Self::RequestEnd { request } => [request; 2],
            Self::BatchBegin { batch, .. }
            | Self::LayerBegin { batch, .. }
            | Self::ComputeEnd { batch }
            | Self::BatchEnd { batch } => [batch; 2],
        }
    }

    pub(crate) fn record(self) -> Record {
        match self {
            Self::BatchBegin { batch, layers, layer_time_ns } => {
                Record::BatchBegin { batch, layers, layer_time_ns }
            }
            Self::RequestJoin { batch, request, deadline_ns, bytes } => {
                Record::RequestJoin { batch, request, deadline_ns, bytes }
            }
            Self::RequestEnd { request } => Record::RequestEnd { request },
            Self::BatchQueued { batch, ahead } => Record::BatchQueued { batch, ahead },
            Self::LayerBegin { batch, layer } => Record::LayerBegin { batch, layer },
            Self::ComputeEnd { batch } => Record::ComputeEnd { batch },
            Self::BatchEnd { batch } => Record::BatchEnd { batch },
        }
    }
}
