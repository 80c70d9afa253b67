//! What workers tell each other and the controller besides the data itself: JSON, one object per
//! line.
//!
//! Control does not cross the shaped fabric (real deployments give it a path or class of its own)
//! but unix sockets, which reach across network namespaces. It is a stream per pair of workers,
//! so messages of one sender arrive in order. No clock is assumed to be shared: a deadline is
//! the time that is left.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::carrier::CarrierRecord;
use crate::frame::Head;

/// From one worker to another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Message {
    /// Leader to the ranks of its unit: a request became a member of a batch that has not begun.
    Join {
        /// The batch.
        batch: u64,
        /// The request.
        request: u64,
        /// The batch that runs meanwhile, 0 if none.
        behind: u64,
    },
    /// Leader to the ranks of its unit: the batch is complete and runs after the one before.
    Start {
        /// The batch.
        batch: u64,
    },
    /// Rank to the rank that holds its share of a prefix: send the KV of every layer.
    Fetch {
        /// For which batch.
        batch: u64,
        /// For which request.
        request: u64,
        /// To which host.
        to: usize,
        /// Bytes of each layer.
        layer_bytes: u64,
        /// Time left until the request's first token is due, ns; negative if it has passed.
        remaining_ns: i64,
    },
    /// Progress, for the daemons of hosts that serve a batch or are about to.
    Progress(Progress),
    /// Reader to holder, as a NIC asks another for what it reads: send these bytes of a flow.
    Read {
        /// To which host.
        to: usize,
        /// The flow, and from where on.
        head: Head,
        /// How many.
        bytes: u64,
    },
    /// Rank to the ranks of its unit, once: where its NCCL plugin listens for that one.
    Handle {
        /// Which host listens.
        from: usize,
        /// The plugin's handle.
        handle: Vec<u8>,
    },
    /// Receiver to sender: these bytes of these flows have arrived.
    Arrived(Vec<(u64, u64)>),
    /// Decode to the ranks of a request's unit: its KV cache is complete.
    Finished {
        /// The request.
        request: u64,
    },
}

/// What the engine tells the scheduler besides flows: the hints of the client's interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Progress {
    /// A batch exists.
    BatchBegin {
        /// Which.
        batch: u64,
        /// Layers of the model.
        layers: u16,
        /// What a layer takes without contention, ns.
        layer_time_ns: u64,
    },
    /// A request is a member of a batch.
    RequestJoin {
        /// Of which batch.
        batch: u64,
        /// Which request.
        request: u64,
        /// Time left until its first token is due, ns.
        remaining_ns: i64,
        /// Bytes that it will move through the port in all.
        bytes: u64,
    },
    /// A batch waits behind another.
    BatchQueued {
        /// The one that waits.
        batch: u64,
        /// The one that runs.
        ahead: u64,
    },
    /// A batch begins a layer.
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
    /// A request has its first token.
    RequestEnd {
        /// Which request.
        request: u64,
    },
    /// Nothing of a batch is left.
    BatchEnd {
        /// Which batch.
        batch: u64,
    },
}

/// From the controller to a worker, on its standard input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum WorkerCommand {
    /// Every worker listens: connect to the others.
    Connect,
    /// Time begins at this reading of CLOCK_MONOTONIC, ns.
    Begin(u64),
    /// Report and exit.
    Finish,
}

/// From a worker to the controller, on its standard output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Notice {
    /// Listening.
    Listening,
    /// Connected to the others.
    Connected,
    /// Decode has the KV cache of a request, at this reading of CLOCK_MONOTONIC, ns.
    Finished {
        /// The request.
        request: u64,
        /// When.
        at_ns: u64,
    },
    /// What was measured; the last notice of a worker.
    Report(Box<WorkerReport>),
}

/// What one worker measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerReport {
    /// The host.
    pub host: usize,
    /// Duration of every all-to-all phase at this rank, ns: from its own first byte submitted to
    /// the last byte received.
    pub collective_ns: Vec<u64>,
    /// Batches that this rank ran.
    pub batches: Vec<BatchRecord>,
    /// Payload and marks.
    pub traffic: Traffic,
    /// How the client library fared; zero without a daemon.
    pub client: ClientRecord,
    /// What the NCCL plugin did; none where there is none.
    #[serde(default)]
    pub carrier: Option<CarrierRecord>,
}

/// What one rank noted of one batch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchRecord {
    /// Its requests.
    pub requests: Vec<u64>,
    /// When its first layer began, CLOCK_MONOTONIC ns.
    pub begun_ns: u64,
    /// When its last layer ended.
    pub computed_ns: u64,
    /// Time in which it waited for reused KV.
    pub kv_stall_ns: u64,
    /// Time in which it waited for all-to-alls.
    pub collective_ns: u64,
}

/// Payload bytes, without heads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Handed to TCP, by stage and DSCP.
    pub sent: BTreeMap<String, BTreeMap<u8, u64>>,
    /// Handed to the NCCL plugin, by stage: it chooses the DSCP of each message.
    #[serde(default)]
    pub carried: BTreeMap<String, u64>,
    /// Received for the first time, by stage.
    pub received: BTreeMap<String, u64>,
    /// Received again.
    pub duplicated: u64,
    /// Left out: a flow went on behind a gap, or never ended.
    pub missing: u64,
    /// Not the bytes that were sent.
    pub corrupted: u64,
}

impl Traffic {
    /// Counts what went another way, too.
    pub fn add(&mut self, other: &Self) {
        for (stage, by_dscp) in &other.sent {
            let sent = self.sent.entry(stage.clone()).or_default();
            for (&dscp, &bytes) in by_dscp {
                *sent.entry(dscp).or_default() += bytes;
            }
        }
        for (sums, more) in [
            (&mut self.carried, &other.carried),
            (&mut self.received, &other.received),
        ] {
            for (stage, bytes) in more {
                *sums.entry(stage.clone()).or_default() += bytes;
            }
        }
        self.duplicated += other.duplicated;
        self.missing += other.missing;
        self.corrupted += other.corrupted;
    }
}

/// What the client library counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientRecord {
    /// Bytes that went out with a permit.
    pub scheduled_bytes: u64,
    /// Bytes that went out without one because there was no daemon, or it did not answer.
    pub bypassed_bytes: u64,
    /// Time without a scheduler, ns.
    pub unscheduled_ns: u64,
    /// Daemons that were attached to after the first.
    pub reattaches: u64,
}

/// A line of JSON.
///
/// # Panics
/// Never: the messages of this file always have a JSON form.
#[must_use]
pub fn line<T: Serialize>(message: &T) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).expect("messages have a JSON form");
    line.push(b'\n');
    line
}

/// Cuts whole lines out of a growing buffer and reads each.
///
/// # Errors
/// A line is not the expected message: the two ends are not the same program.
pub fn lines<T: for<'a> Deserialize<'a>>(
    buffer: &mut Vec<u8>,
) -> Result<Vec<T>, serde_json::Error> {
    let Some(end) = buffer.iter().rposition(|&byte| byte == b'\n') else {
        return Ok(Vec::new());
    };
    let rest = buffer.split_off(end + 1);
    let whole = std::mem::replace(buffer, rest);
    whole[..end]
        .split(|&byte| byte == b'\n')
        .map(serde_json::from_slice)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_cut_anywhere_arrive_whole_and_in_order() {
        let sent = [
            Message::Join {
                batch: 1,
                request: 2,
                behind: 0,
            },
            Message::Arrived(vec![(1, 2), (3, 4)]),
            Message::Progress(Progress::LayerBegin { batch: 1, layer: 3 }),
        ];
        let stream: Vec<u8> = sent.iter().flat_map(line).collect();
        for cut in 0..stream.len() {
            let mut buffer = stream[..cut].to_vec();
            let mut got: Vec<Message> = lines(&mut buffer).unwrap();
            buffer.extend_from_slice(&stream[cut..]);
            got.extend(lines::<Message>(&mut buffer).unwrap());
            assert_eq!(got, sent);
            assert!(buffer.is_empty());
        }
    }
}
