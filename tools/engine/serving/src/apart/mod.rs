//! Prefill, decode and experts in different processes.
//!
//! * **Prefill to decode.** The decode process accepts a request, reserves blocks for it and sends
//!   the prompt to a prefill process ([`Words::Prefill`]). The prefill process sends each layer's
//!   KV as soon as the layer is computed ([`between`], stage `P2d`), and the first token last. The
//!   decode process has a complete model and computes a prompt itself if a prefill process cannot.
//! * **KV reuse.** Before a process computes a prompt, it asks others for KV of its beginning
//!   ([`Words::Ask`]). A process that has some sends it layer by layer (stage `KvReuse`). Layer `l`
//!   of the computation only waits for layer `l` of the KV.
//! * **Experts.** A process may hold a share of a model's experts. Tokens go to the other processes
//!   and come back inside each layer ([`experts`], stage `Collective`). Ranks compute on their own,
//!   or each layer together ([`lockstep`]).
//!
//! A process is identified by the address at which it listens.

pub mod between;
pub mod experts;
pub mod inbox;
pub mod lockstep;
pub mod plugin;
pub mod reuse;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use laxity_client::Hint;
use laxity_requests::request::Importance;
use serde::{Deserialize, Serialize};

use crate::carry::{Carrier, ReadPart};
use crate::engine::sequence::Failure;
use crate::kv::BlockHash;
use experts::Ranks;
use inbox::Inbox;
use plugin::Plugin;

/// A question for KV of a prompt's beginning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefixQuery {
    /// Number of the request that needs the KV.
    pub request: u64,
    /// Hashes of the blocks, from the first missing one. A hash covers all tokens before it, too.
    pub hashes: Vec<BlockHash>,
    /// Index of the first missing block.
    pub first: usize,
    /// Time until the first token is due, in ns. 0 without an objective.
    pub remaining_ns: u64,
    /// The batch that the asker computes before this request.
    pub after: Running,
    /// Whether the asker reads the KV, instead of the giver sending it.
    pub reads: bool,
}

impl PrefixQuery {
    /// Returns the batch number under which the giver of KV schedules it, in place of the batch
    /// that needs it. No batch or request has this number.
    pub const fn batch(request: u64) -> u64 {
        request | 1 << 46
    }
}

/// Times of the batches that computed a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spent {
    /// Time that was spent on waiting for KV of other processes, in ns.
    pub kv_wait_ns: u64,
    /// Time that was spent on waiting for experts of other processes, in ns.
    pub exchange_ns: u64,
    /// Time of the batches, including both waits, in ns.
    pub all_ns: u64,
}

impl Spent {
    pub const fn add(&mut self, other: Self) {
        self.kv_wait_ns += other.kv_wait_ns;
        self.exchange_ns += other.exchange_ns;
        self.all_ns += other.all_ns;
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    /// Number of the batch, or 0 if there is none.
    pub batch: u64,
    pub layer: u16,
    /// Time of a layer, in ns. 0 if it is not known.
    pub layer_time_ns: u64,
}

/// A prompt that another process should compute.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefillAsk {
    /// Number of the request at the asker.
    pub request: u64,
    pub tokens: Vec<u32>,
    /// Tokens at the beginning whose KV the asker has.
    pub have: usize,
    /// Whether the asker wants the KV of the other tokens.
    pub wants_kv: bool,
    /// Time until the first token is due, in ns. 0 without an objective.
    pub remaining_ns: u64,
    /// Whether a reader waits for each token.
    pub interactive: bool,
    pub importance: Importance,
    pub model: [u8; 16],
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "word")]
pub enum Words {
    /// A prompt that the receiver should compute.
    Prefill(PrefillAsk),
    /// The first token of an answer. All KV was sent before.
    First {
        request: u64,
        token: u32,
        /// Times of the batches that computed the prompt.
        spent: Spent,
    },
    /// A request that will not be computed.
    Failed { request: u64, why: Failure },
    /// A request whose answer is not wanted any more.
    Cancel { request: u64 },
    /// The start of an iteration of ranks in lockstep.
    Step {
        step: u64,
        /// Requests of the sender, with the time until their first tokens are due, in ns.
        members: Vec<(u64, u64)>,
    },
    /// A question for KV of a prompt's beginning.
    Ask(PrefixQuery),
    /// The start of a layer, in the batch that is computed and in those that stand for requested KV
    /// ([`PrefixQuery::batch`]).
    Layer { layer: u16, batches: Vec<u64> },
    /// The end of batches, which were computed or are not wanted any more.
    Computed { batches: Vec<u64>, requests: Vec<u64> },
    /// The handle at which the NCCL plugin of the sender listens for the receiver of this message.
    Handle { handle: Vec<u8> },
    /// A request of the asker for a part of the offered KV, which its daemon permitted.
    Read(ReadPart),
    Will {
        request: u64,
        /// Number of blocks that will come. It may be 0.
        blocks: usize,
    },
}

/// The destination of a request's KV and first token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    pub to: SocketAddr,
    /// Number of the request at that process.
    pub request: u64,
    /// Tokens whose KV was sent, or that the process had.
    pub sent: usize,
    pub wants_kv: bool,
}

#[derive(Clone, Debug, Default)]
pub struct PeerAddresses {
    pub prefill: Vec<SocketAddr>,
    pub reuse: Vec<SocketAddr>,
    pub ranks: Ranks,
}

pub struct Net {
    pub carrier: Carrier,
    /// Payloads that arrived and are not used yet.
    pub inbox: Arc<Inbox>,
    pub peers: PeerAddresses,
    /// Longest wait of a computation for another process.
    pub patience: Duration,
    /// Longest wait for one process to say whether it has KV.
    pub ask_patience: Duration,
    /// Whether this process reads KV of others, instead of them sending it.
    pub reads: bool,
    /// The plugin for the exchanges of ranks in lockstep, if the carrier does not send them.
    pub plugin: Option<Plugin>,
    /// Rate of the NIC, in bytes per second, if known.
    pub bytes_per_s: Option<f64>,
    pub running: Arc<Mutex<Running>>,
    /// Time that this process waited for others so far, in ns: for KV, and for experts.
    pub waited: Arc<(AtomicU64, AtomicU64)>,
}

impl Net {
    /// Returns the time that bytes take on the wire, in ns. 0 if the NIC's rate is not known.
    pub fn wire_ns(&self, bytes: usize) -> u64 {
        self.bytes_per_s.map_or(0, |rate| (bytes as f64 / rate * 1e9) as u64)
    }

    pub fn running(&self) -> MutexGuard<'_, Running> {
        // No statement leaves the state inconsistent, so a poisoned lock can be used.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waited_for(&self, since: Instant, sum: &AtomicU64, metric: &'static str) {
        let waited = since.elapsed();
        sum.fetch_add(waited.as_nanos() as u64, Ordering::Relaxed);
        metrics::histogram!(metric).record(waited.as_secs_f64());
    }

    pub fn waited_for_experts(&self, since: Instant) {
        self.waited_for(since, &self.waited.1, "laxity_engine_exchange_seconds");
    }

    pub fn waited(&self) -> Spent {
        Spent {
            kv_wait_ns: self.waited.0.load(Ordering::Relaxed),
            exchange_ns: self.waited.1.load(Ordering::Relaxed),
            all_ns: 0,
        }
    }

    /// Announces to the daemon that a layer of batches began.
    pub fn begin_layer(&self, layer: u16, batches: &[u64]) {
        for &batch in batches {
            self.carrier.hint(Hint::LayerBegin { batch, layer });
        }
    }

    /// Announces to the daemon that batches and requests have nothing more to send.
    pub fn end_batches(&self, batches: &[u64], requests: &[u64]) {
        for &batch in batches {
            self.carrier.hint(Hint::ComputeEnd { batch });
            self.carrier.end_batch(batch);
        }
        for &request in requests {
            self.carrier.end_request(request);
        }
    }

    pub fn say(&self, to: SocketAddr, words: &Words) {
        match serde_json::to_string(words) {
            Ok(line) => self.carrier.say(to, line),
            Err(error) => tracing::error!("words that are no JSON: {error}"),
        }
    }
}

/// A generator of numbers for requests and batches. No other process generates the same ones.
pub struct Numbers {
    next: u64,
}

impl Numbers {
    /// Makes the generator of the process that listens at an address, or else of this process id.
    pub fn of(listens: Option<SocketAddr>) -> Self {
        let address = listens.map_or(String::new(), |address| address.to_string());
        Self::of_text(&format!("{address} {}", std::process::id()))
    }

    /// Makes a generator that all processes of a group share, named by the first one's address.
    pub fn of_group(first: SocketAddr) -> Self {
        Self::of_text(&format!("group of {first}"))
    }

    fn of_text(text: &str) -> Self {
        use sha2::{Digest as _, Sha256};
        let hash = Sha256::digest(text);
        // Two processes rarely get the same tag. It is odd because 0 means "unknown" to the daemon.
        let tag = u64::from(u16::from_le_bytes([hash[0], hash[1]])) | 1;
        Self { next: tag << 47 }
    }

    pub const fn next(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}
