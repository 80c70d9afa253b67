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
//!   come back inside each layer ([`experts`], stage `Collective`).
//!
//! Processes are known by the addresses that they listen at.

pub mod between;
pub mod experts;
pub mod inbox;
pub mod reuse;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use laxity_requests::iteration::Load;
use laxity_requests::request::{Importance, RequestId};
use serde::{Deserialize, Serialize};

use crate::carry::Carrier;
use crate::engine::sequence::{Failure, Sampling};
use crate::kv::BlockHash;
use experts::Ranks;
use inbox::Inbox;

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
    /// Who has KV of this?
    Ask(Asked),
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
    /// Bytes that the NIC takes, a second, where that is known.
    pub bytes_per_s: Option<f64>,
}

impl Net {
    /// Time that bytes take on the wire, ns; 0 where the NIC's rate is not known.
    #[must_use]
    pub fn wire_ns(&self, bytes: usize) -> u64 {
        self.bytes_per_s
            .map_or(0, |rate| (bytes as f64 / rate * 1e9) as u64)
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
        use sha2::{Digest as _, Sha256};
        let mut hash = Sha256::new();
        hash.update(listens.map_or(String::new(), |address| address.to_string()));
        hash.update(std::process::id().to_le_bytes());
        let hash = hash.finalize();
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
