//! Prefill, decode and experts in different processes.
//!
//! * **Prefill to decode.** The decode process takes a request, keeps blocks for it and sends the
//!   prompt to a prefill process ([`Words::Prefill`]). That sends each layer's KV as soon as the
//!   layer is computed ([`between`], stage `P2d`), at last the first token. The decode process has
//!   a whole model: what a prefill process cannot do, it computes itself.
//! * **KV reuse.** Before it computes a prompt, a process asks others for KV of its beginning
//!   ([`Words::Ask`]). Whoever has some sends it layer by layer (stage `KvReuse`); layer `l` of the
//!   computation waits for layer `l` only.
//! * **Experts.** Of a model with experts a process may hold a share; tokens go to the others' and
//!   come back inside each layer ([`experts`], stage `Collective`). Ranks compute on their own, or
//!   each layer together ([`lockstep`]).
//!
//! Processes are known by the addresses that they listen at.

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
use laxity_requests::iteration::Load;
use laxity_requests::request::{Importance, RequestId};
use serde::{Deserialize, Serialize};

use crate::carry::{Carrier, ReadPart};
use crate::engine::sequence::{Failure, Sampling};
use crate::kv::BlockHash;
use experts::Ranks;
use inbox::Inbox;
use plugin::Plugin;

/// A question for KV of a prompt's beginning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Asked {
    /// For which request.
    pub request: u64,
    /// The blocks, from the first one that is missing: each stands for all before it, too.
    pub hashes: Vec<BlockHash>,
    /// The number of that block.
    pub first: usize,
    /// Time until the first token is due, ns; 0 without an objective.
    pub remaining_ns: u64,
    /// What the asker computes before.
    pub after: Running,
    /// The asker will read it.
    pub reads: bool,
}

impl Asked {
    /// The batch that stands for the computation of a request that needs this KV, at the process
    /// that gives it. No batch or request has the same number.
    #[must_use]
    pub const fn batch(request: u64) -> u64 {
        request | 1 << 46
    }
}

/// What the batches with a prompt took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spent {
    /// Waiting for KV of other processes, ns.
    pub kv_wait_ns: u64,
    /// Waiting for experts of other processes, ns.
    pub exchange_ns: u64,
    /// All, these two included, ns.
    pub all_ns: u64,
}

impl Spent {
    /// Adds a batch.
    pub const fn add(&mut self, other: Self) {
        self.kv_wait_ns += other.kv_wait_ns;
        self.exchange_ns += other.exchange_ns;
        self.all_ns += other.all_ns;
    }
}

/// The batch that a process computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    /// The batch; 0 if there is none.
    pub batch: u64,
    /// The layer that began last.
    pub layer: u16,
    /// Time of a layer, ns; 0 if it is not known.
    pub layer_time_ns: u64,
}

/// What engines say to each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "word")]
pub enum Words {
    /// Compute this prompt.
    Prefill {
        /// Its number, at whoever asks.
        request: u64,
        /// The prompt.
        tokens: Vec<u32>,
        /// Tokens at its beginning whose KV the asker has.
        have: usize,
        /// The asker wants the KV of the rest.
        wants_kv: bool,
        /// How the first token is chosen.
        sampling: Sampling,
        /// Time until the first token is due, ns; 0 without an objective.
        remaining_ns: u64,
        /// Somebody reads along.
        interactive: bool,
        /// Who is given up first.
        importance: Importance,
        /// The how manieth prompt of the asker's it is, whoever computes them.
        ordinal: u64,
        /// The asker's model.
        model: [u8; 16],
    },
    /// The first token of that answer; all KV is under way.
    First {
        /// Which request.
        request: u64,
        /// The token.
        token: u32,
        /// What its batches took.
        spent: Spent,
    },
    /// It will not be computed.
    Failed {
        /// Which request.
        request: u64,
        /// Why.
        why: Failure,
    },
    /// Nobody wants it any more.
    Cancel {
        /// Which request.
        request: u64,
    },
    /// A rank that computes in step with others begins an iteration.
    Step {
        /// Its number.
        step: u64,
        /// Its requests, and the time until their first tokens are due, ns.
        members: Vec<(u64, u64)>,
    },
    /// Who has KV of this?
    Ask(Asked),
    /// A layer began, of the batch that is computed and of those for which KV was asked for
    /// ([`Asked::batch`]).
    Layer {
        /// Which layer.
        layer: u16,
        /// The batches.
        batches: Vec<u64>,
    },
    /// They were computed, or nobody wants them any more.
    Computed {
        /// The batches.
        batches: Vec<u64>,
        /// The requests for which KV was asked for.
        requests: Vec<u64>,
    },
    /// Where the NCCL plugin of a rank listens for the one that hears this.
    Handle {
        /// As the plugin gave it.
        handle: Vec<u8>,
    },
    /// The sender may read a part of what was offered to it.
    Read(ReadPart),
    /// So many blocks are coming.
    Will {
        /// For which request.
        request: u64,
        /// How many; none is an answer, too.
        blocks: usize,
    },
    /// What stands here: after an iteration with prompts of yours, and when that has changed
    /// otherwise.
    Load {
        /// So much.
        load: Load,
        /// Time that the last iteration took, ns; 0 if there was none.
        took_ns: u64,
        /// The latest prompt of yours that is counted in it, by your count.
        latest: u64,
    },
}

/// Where the KV and the first token of a request go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The process.
    pub to: SocketAddr,
    /// The request's number there.
    pub request: u64,
    /// Tokens whose KV was sent, or is there.
    pub sent: usize,
    /// KV is wanted.
    pub wants_kv: bool,
}

/// Which other processes there are for what.
#[derive(Clone, Debug, Default)]
pub struct Peers {
    /// Who computes prompts.
    pub prefill: Vec<SocketAddr>,
    /// Who may have KV.
    pub reuse: Vec<SocketAddr>,
    /// Who holds which experts.
    pub ranks: Ranks,
}

/// The way to other processes, and what came from them.
#[derive(Clone, Debug)]
pub struct Net {
    /// Sends.
    pub carrier: Carrier,
    /// Keeps what came until it is waited for.
    pub inbox: Arc<Inbox>,
    /// Who is there.
    pub peers: Peers,
    /// How long a computation waits for another process.
    pub patience: Duration,
    /// How long one process may take to say whether it has KV.
    pub ask_patience: Duration,
    /// KV of others is read, not sent by them.
    pub reads: bool,
    /// What carries the exchanges of ranks in step, if not the carrier.
    pub plugin: Option<Plugin>,
    /// Bytes that the NIC takes, a second, where that is known.
    pub bytes_per_s: Option<f64>,
    /// What is computed here.
    pub running: Arc<Mutex<Running>>,
    /// What this process waited for others so far, ns: for KV, and for experts.
    pub waited: Arc<(AtomicU64, AtomicU64)>,
}

impl Net {
    /// Time that bytes take on the wire, ns; 0 where the NIC's rate is not known.
    #[must_use]
    pub fn wire_ns(&self, bytes: usize) -> u64 {
        self.bytes_per_s
            .map_or(0, |rate| (bytes as f64 / rate * 1e9) as u64)
    }

    /// What is computed here, to be read or set.
    pub fn running(&self) -> MutexGuard<'_, Running> {
        // Valid after every statement.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a wait for KV of others.
    pub fn waited_for_kv(&self, since: Instant) {
        let waited = since.elapsed();
        let ns = waited.as_nanos() as u64;
        self.waited.0.fetch_add(ns, Ordering::Relaxed);
        metrics::histogram!("laxity_engine_kv_wait_seconds").record(waited.as_secs_f64());
    }

    /// Adds a wait for experts of others.
    pub fn waited_for_experts(&self, since: Instant) {
        let waited = since.elapsed();
        let ns = waited.as_nanos() as u64;
        self.waited.1.fetch_add(ns, Ordering::Relaxed);
        metrics::histogram!("laxity_engine_exchange_seconds").record(waited.as_secs_f64());
    }

    /// What this process waited for others so far.
    #[must_use]
    pub fn waited(&self) -> Spent {
        Spent {
            kv_wait_ns: self.waited.0.load(Ordering::Relaxed),
            exchange_ns: self.waited.1.load(Ordering::Relaxed),
            all_ns: 0,
        }
    }

    /// Tells whoever schedules KV for these batches that a layer of them began: the daemon of the
    /// process that gave it, or the one here if it is read.
    pub fn layer_began(&self, giver: SocketAddr, layer: u16, batches: &[u64]) {
        if self.reads {
            self.begin_layer(layer, batches);
        } else {
            let batches = batches.to_vec();
            self.say(giver, &Words::Layer { layer, batches });
        }
    }

    /// Tells the same that batches were computed, for these requests.
    pub fn computed(&self, giver: SocketAddr, batches: Vec<u64>, requests: Vec<u64>) {
        if self.reads {
            self.end_batches(&batches, &requests);
        } else {
            self.say(giver, &Words::Computed { batches, requests });
        }
    }

    /// Tells the daemon that a layer of batches began.
    pub fn begin_layer(&self, layer: u16, batches: &[u64]) {
        for &batch in batches {
            self.carrier.hint(Hint::LayerBegin { batch, layer });
        }
    }

    /// Tells the daemon that batches and requests have nothing more to send.
    pub fn end_batches(&self, batches: &[u64], requests: &[u64]) {
        for &batch in batches {
            self.carrier.hint(Hint::ComputeEnd { batch });
            self.carrier.end_batch(batch);
        }
        for &request in requests {
            self.carrier.end_request(request);
        }
    }

    /// Says something.
    pub fn say(&self, to: SocketAddr, words: &Words) {
        match serde_json::to_string(words) {
            Ok(line) => self.carrier.say(to, line),
            Err(error) => tracing::error!("words that are no JSON: {error}"),
        }
    }
}

/// The numbers that this process gives: no other has the same.
#[derive(Debug)]
pub struct Numbers {
    next: u64,
}

impl Numbers {
    /// Numbers of the process that listens at an address (or, alone, of this process id).
    #[must_use]
    pub fn of(listens: Option<SocketAddr>) -> Self {
        let address = listens.map_or(String::new(), |address| address.to_string());
        Self::of_text(&format!("{address} {}", std::process::id()))
    }

    /// Numbers that all processes of a group give alike, by the address of the first.
    #[must_use]
    pub fn of_group(first: SocketAddr) -> Self {
        Self::of_text(&format!("group of {first}"))
    }

    fn of_text(text: &str) -> Self {
        use sha2::{Digest as _, Sha256};
        let hash = Sha256::digest(text);
        // Two of 65 536 would have to agree; 0 means "unknown" to the daemon.
        let tag = u64::from(u16::from_le_bytes([hash[0], hash[1]])) | 1;
        Self { next: tag << 47 }
    }

    /// The next.
    pub const fn next(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The next, as a request's.
    pub const fn request(&mut self) -> RequestId {
        RequestId(self.next())
    }
}
