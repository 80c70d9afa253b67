//! A sequence: the tokens of a request, as far as they are known, and what of it is in the KV
//! cache.

use laxity_requests::Time;
use laxity_requests::request::{ApplicationId, ClassId, Importance, RequestId, Slo, Spec};
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng as _;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::apart::Spent;
use crate::kv::{BlockHash, chain};
use crate::model::greedy;

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0: always the likeliest. Else outputs are divided by it.
    pub temperature: f32,
    /// Of the random choice; the same seed gives the same tokens.
    pub seed: u64,
}

impl Sampling {
    /// The token after `position` tokens.
    #[must_use]
    pub fn choose(&self, outputs: &[f32], position: usize) -> u32 {
        let best = greedy(outputs);
        if self.temperature <= 0.0 {
            return best;
        }
        let most = outputs[best as usize];
        let weight = |output: &f32| f64::from((output - most) / self.temperature).exp();
        let sum: f64 = outputs.iter().map(weight).sum();
        // A stream for each token, so that where it is chosen (and how often) does not matter.
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        random.set_stream(position as u64);
        let mut left = random.random::<f64>() * sum;
        for (token, output) in outputs.iter().enumerate() {
            left -= weight(output);
            if left <= 0.0 {
                return token as u32;
            }
        }
        best
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// It said so.
    Stop,
    /// It may not be longer.
    Length,
}

/// Why there is no answer, or not all of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// It would never fit.
    TooLong,
    /// Something that it needs is gone; again later may work.
    Unavailable(String),
    /// The engine is at fault.
    Internal(String),
}

/// What a request gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// A token.
    Token(u32),
    /// The end.
    Finished(Reason),
    /// No end will come.
    Failed(Failure),
}

/// What is asked for.
#[derive(Debug)]
pub struct Submission {
    /// What its client calls it.
    pub name: Option<Box<str>>,
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Most tokens of the answer.
    pub output_max: u32,
    /// When it came to the front door.
    pub arrival: Time,
    /// Which prefill process a router has chosen.
    pub prefill: Option<usize>,
    /// What was promised.
    pub slo: Slo,
    /// Who is given up first.
    pub importance: Importance,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// The token that ends an answer; none if it is to be as long as it may.
    pub stop: Option<u32>,
    /// Where the answer goes. Room for all of it, so that the engine never waits; closed when
    /// nobody wants it any more.
    pub outlet: mpsc::Sender<Output>,
}

impl Submission {
    /// The room that an answer needs.
    #[must_use]
    pub const fn room(output_max: u32) -> usize {
        output_max as usize + 2
    }
}

/// Who hears of a sequence's tokens.
#[derive(Clone, Debug)]
pub enum Outlet {
    /// The endpoint of this process.
    Here(mpsc::Sender<Output>),
    /// Another process, which the KV goes to, too.
    Away(crate::apart::Destination),
}

/// A sequence at this instance.
#[derive(Debug)]
pub struct Sequence {
    /// Its request.
    pub id: RequestId,
    /// What its client calls it.
    pub name: Option<Box<str>>,
    /// Prompt, then answer.
    pub tokens: Vec<u32>,
    /// Of those, the prompt.
    pub prompt: usize,
    /// Most tokens of the answer.
    pub output_max: u32,
    /// Its blocks.
    pub blocks: Vec<u32>,
    /// Tokens whose KV is in them.
    pub computed: usize,
    /// Its full blocks that were made findable.
    pub published: usize,
    /// The hashes of its full blocks, as far as they were needed.
    pub hashes: Vec<BlockHash>,
    /// What the batches with its prompt took.
    pub spent: Spent,
    /// Batches with it that failed.
    pub failures: u32,
    /// When it came to the front door.
    pub arrival: Time,
    /// Which prefill process a router has chosen.
    pub prefill: Option<usize>,
    /// What was promised.
    pub slo: Slo,
    /// Who is given up first.
    pub importance: Importance,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// What ends it.
    pub stop: Option<u32>,
    /// Who hears of it.
    pub outlet: Outlet,
}

impl Sequence {
    /// Whether anybody still wants it.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        match &self.outlet {
            Outlet::Here(outlet) => !outlet.is_closed(),
            Outlet::Away(_) => true,
        }
    }

    /// When its first token is due.
    #[must_use]
    pub const fn deadline_ns(&self) -> u64 {
        self.slo.deadline(self.arrival, 0).0
    }

    /// The hashes of its first `count` blocks, which are full.
    pub fn hashes(&mut self, count: usize, block_tokens: usize, model: &[u8; 16]) -> &[BlockHash] {
        while self.hashes.len() < count {
            let before = self.hashes.last().unwrap_or(model);
            let from = self.hashes.len() * block_tokens;
            let next = chain(
                before,
                &self.tokens[from..from + block_tokens],
                block_tokens,
            );
            self.hashes.extend(next);
        }
        &self.hashes[..count]
    }

    /// Full blocks of its prompt that may come from elsewhere: one token at least is computed here,
    /// which gives the first output.
    #[must_use]
    pub const fn reusable(&self, block_tokens: usize) -> usize {
        (self.prompt - 1) / block_tokens
    }

    /// As the scheduler knows it, with `ready` tokens whose KV is here.
    #[must_use]
    pub fn spec(&self, ready: usize) -> Spec {
        Spec {
            id: self.id,
            arrival: self.arrival,
            prompt: self.prompt as u32,
            output_max: self.output_max,
            ready: ready as u32,
            generated: self.generated() as u32,
            class: ClassId(u16::from(!self.slo.is_interactive())),
            application: ApplicationId::default(),
            importance: self.importance,
            slo: self.slo,
        }
    }

    /// Tokens of the answer so far.
    #[must_use]
    pub fn generated(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// Takes a token; whether the answer ends with it, and why.
    pub fn push(&mut self, token: u32) -> Option<Reason> {
        self.tokens.push(token);
        if self.stop == Some(token) {
            Some(Reason::Stop)
        } else if self.generated() >= self.output_max as usize {
            Some(Reason::Length)
        } else {
            None
        }
    }

    /// Tells the endpoint of this process something.
    pub fn tell(&self, output: Output) {
        if let Outlet::Here(outlet) = &self.outlet {
            // There is room for all of it; one that is closed hears nothing and is noticed
            // elsewhere.
            let _ = outlet.try_send(output);
        }
    }
}
