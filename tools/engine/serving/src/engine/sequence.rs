//! Sequences: the known tokens of a request, and the part of them in the KV cache.

use laxity_requests::Time;
use laxity_requests::request::{ApplicationId, ClassId, Importance, RequestId, Slo, Spec};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::apart::Spent;
use crate::kv::{BlockHash, chain};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    Stop,
    Length,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    TooLong,
    /// A process that the request needs is gone. A later attempt may work.
    Unavailable(String),
    Internal(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    Token(u32),
    Finished(Reason),
    /// The failure of the request. No other output follows.
    Failed(Failure),
}

/// What is wanted of a request, apart from its prompt.
pub struct Submission {
    pub output_max: u32,
    /// Time when the request arrived at the endpoint.
    pub arrival: Time,
    /// Index of the prefill process that a router chose, if any.
    pub prefill: Option<usize>,
    pub slo: Slo,
    pub importance: Importance,
    /// The token that ends an answer. `None` generates the greatest allowed length.
    pub stop: Option<u32>,
    pub outlet: Outlet,
}

pub enum Outlet {
    /// Channel for the answer. It has room for all of it, so that the engine never waits. The
    /// receiver closes it when the answer is not wanted any more.
    Here(mpsc::Sender<Output>),
    /// Another process, which also gets the KV.
    Away(crate::apart::Destination),
}

pub struct Sequence {
    pub id: RequestId,
    /// Tokens of the prompt and then of the answer.
    pub tokens: Vec<u32>,
    pub prompt: usize,
    pub asked: Submission,
    pub blocks: Vec<u32>,
    pub computed: usize,
    pub published: usize,
    /// Hashes of the full blocks, as far as they were needed.
    pub hashes: Vec<BlockHash>,
    /// Times of the batches that computed the prompt.
    pub spent: Spent,
    pub failures: u32,
}

impl Sequence {
    pub fn new(id: RequestId, prompt: Vec<u32>, asked: Submission) -> Self {
        Self {
            id,
            prompt: prompt.len(),
            tokens: prompt,
            asked,
            blocks: Vec::new(),
            computed: 0,
            published: 0,
            hashes: Vec::new(),
            spent: Spent::default(),
            failures: 0,
        }
    }

    pub fn is_wanted(&self) -> bool {
        !matches!(&self.asked.outlet, Outlet::Here(outlet) if outlet.is_closed())
    }

    /// Returns the deadline of the first token, in ns.
    pub const fn deadline_ns(&self) -> u64 {
        self.asked.slo.deadline(self.asked.arrival, 0).0
    }

    /// Returns the hashes of the first `count` blocks, which must be full.
    pub fn hashes(&mut self, count: usize, block_tokens: usize, model: &[u8; 16]) -> &[BlockHash] {
        while self.hashes.len() < count {
            let before = self.hashes.last().unwrap_or(model);
            let from = self.hashes.len() * block_tokens;
            let next = chain(before, &self.tokens[from..from + block_tokens], block_tokens);
            self.hashes.extend(next);
        }
        &self.hashes[..count]
    }

    /// Returns how many full blocks of the prompt may come from elsewhere. At least one token is
    /// computed here, because it gives the first output.
    pub const fn reusable(&self, block_tokens: usize) -> usize {
        (self.prompt - 1) / block_tokens
    }

    /// Returns the request for the scheduler, with `ready` tokens whose KV is here.
    pub fn spec(&self, ready: usize) -> Spec {
        let Submission { output_max, arrival, slo, importance, .. } = self.asked;
        Spec {
            id: self.id,
            arrival,
            prompt: self.prompt as u32,
            output_max,
            ready: ready as u32,
            generated: self.generated() as u32,
            class: ClassId(u16::from(!slo.is_interactive())),
            application: ApplicationId::default(),
            importance,
            slo,
        }
    }

    pub fn generated(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// Adds a token. Returns the reason if the answer ends with it.
    pub fn push(&mut self, token: u32) -> Option<Reason> {
        self.tokens.push(token);
        if self.asked.stop == Some(token) {
            Some(Reason::Stop)
        } else if self.generated() >= self.asked.output_max as usize {
            Some(Reason::Length)
        } else {
            None
        }
    }

    pub fn tell(&self, output: Output) {
        if let Outlet::Here(outlet) = &self.asked.outlet {
            // The channel has room for the complete answer. A closed channel is noticed elsewhere.
            let _ = outlet.try_send(output);
        }
    }
}
