//! What the inference engine knows and the transfer library does not.

use laxity_shm::record::Record;

/// A hint. Ids are the application's own; 0 means "unknown" in a flow and is not to be used here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// A batch was formed.
    BatchBegin {
        /// Which.
        batch: u64,
        /// Layers of the model.
        layers: u16,
        /// Expected time of a layer without contention, nanoseconds; 0 if unknown.
        layer_time_ns: u64,
    },
    /// A request is a member of a batch.
    RequestJoin {
        /// Which batch.
        batch: u64,
        /// Which request.
        request: u64,
        /// When its first token is due, absolute CLOCK_MONOTONIC nanoseconds; 0 if unknown.
        deadline_ns: u64,
        /// Bytes that it will move, 0 if unknown.
        bytes: u64,
    },
    /// A request has its first token, or was aborted.
    RequestEnd {
        /// Which.
        request: u64,
    },
    /// A batch waits behind another.
    BatchQueued {
        /// The one that waits.
        batch: u64,
        /// The one that runs.
        ahead: u64,
    },
    /// A batch now computes a layer.
    LayerBegin {
        /// Which batch.
        batch: u64,
        /// Which layer.
        layer: u16,
    },
    /// A batch has computed its last layer.
    ComputeEnd {
        /// Which batch.
        batch: u64,
    },
    /// Nothing of a batch is left.
    BatchEnd {
        /// Which batch.
        batch: u64,
    },
}

impl Hint {
    /// The requests and batches that it names; one of them stands twice where there is one only.
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
            Self::BatchBegin {
                batch,
                layers,
                layer_time_ns,
            } => Record::BatchBegin {
                batch,
                layers,
                layer_time_ns,
            },
            Self::RequestJoin {
                batch,
                request,
                deadline_ns,
                bytes,
            } => Record::RequestJoin {
                batch,
                request,
                deadline_ns,
                bytes,
            },
            Self::RequestEnd { request } => Record::RequestEnd { request },
            Self::BatchQueued { batch, ahead } => Record::BatchQueued { batch, ahead },
            Self::LayerBegin { batch, layer } => Record::LayerBegin { batch, layer },
            Self::ComputeEnd { batch } => Record::ComputeEnd { batch },
            Self::BatchEnd { batch } => Record::BatchEnd { batch },
        }
    }
}
