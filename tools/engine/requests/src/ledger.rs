//! What a dispatcher knows of instances: what they reported last, and what it placed on them since.
//!
//! A report is as old as the iteration it ends; placements and ends since are added, so that two
//! decisions between two reports don't both count on the same room (HyperFlexis §5.1 step 5: the
//! dispatcher's own shadow of each worker).

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use crate::Time;
use crate::dispatch::Role;
use crate::iteration::Load;
use crate::request::{InstanceId, RequestId, Slo, Spec};

/// What a request asks for, as schedulers that know two objectives see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Targets {
    /// Time to the first token, ns.
    pub ttft: u64,
    /// Time per token after it, ns.
    pub tpot: u64,
}

impl Targets {
    /// Those of a request. One that has to be complete at some time and no more (no paper with two
    /// objectives has it) has half of its allowance for the first token and half for all that it
    /// may generate.
    #[must_use]
    pub fn of(spec: &Spec) -> Self {
        match spec.slo {
            Slo::Interactive { ttft, tbt } => Self { ttft, tpot: tbt },
            Slo::Batch { ttlt } => Self {
                ttft: ttlt / 2,
                tpot: ttlt / 2 / u64::from(spec.output_max.max(1)),
            },
        }
    }
}

/// Prompts: how many, their tokens, and the sum of the squares of their lengths.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prompts {
    /// How many.
    pub requests: f64,
    /// Their tokens.
    pub tokens: f64,
    /// The sum of their squared lengths.
    pub squares: f64,
}

impl Prompts {
    /// With one more.
    #[must_use]
    pub fn with(self, tokens: u32) -> Self {
        let tokens = f64::from(tokens);
        Self {
            requests: self.requests + 1.0,
            tokens: self.tokens + tokens,
            squares: self.squares + tokens * tokens,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Home {
    instance: InstanceId,
    tokens: u32,
    tpot: u64,
}

/// An instance.
#[derive(Clone, Debug)]
pub struct Row {
    /// For what.
    pub role: Role,
    /// What it reported last.
    pub load: Load,
    /// When.
    pub at: Time,
    /// Whether it ever reported.
    pub reported: bool,
    /// Prompts placed since.
    pub placed: Prompts,
    tpots: BTreeMap<u64, u32>,
    requests: u32,
    tokens: u64,
}

impl Row {
    const fn new(role: Role, at: Time) -> Self {
        let load = Load {
            waiting: 0,
            relegated: 0,
            running: 0,
            decoding: 0,
            prefill_tokens: 0,
            decode_context: 0,
            blocks: 0,
            blocks_free: 0,
        };
        let placed = Prompts {
            requests: 0.0,
            tokens: 0.0,
            squares: 0.0,
        };
        Self {
            role,
            load,
            at,
            reported: false,
            placed,
            tpots: BTreeMap::new(),
            requests: 0,
            tokens: 0,
        }
    }

    /// Prompts that are to be computed. Reports say how many tokens; of lengths they say nothing,
    /// so equal ones are taken.
    #[must_use]
    pub fn prompts(&self) -> Prompts {
        let load = &self.load;
        let tokens = load.prefill_tokens as f64;
        let requests = f64::from(load.waiting + load.running.saturating_sub(load.decoding));
        let squares = if requests > 0.0 {
            tokens * tokens / requests
        } else {
            0.0
        };
        Prompts {
            requests: requests + self.placed.requests,
            tokens: tokens + self.placed.tokens,
            squares: squares + self.placed.squares,
        }
    }

    /// Requests that decode, and tokens that they attend to.
    #[must_use]
    pub fn decodes(&self) -> (f64, f64) {
        if self.role == Role::Decode {
            // KV that is on its way stands in no report.
            let requests = self.requests.max(self.load.decoding);
            let context = self.tokens.max(self.load.decode_context);
            return (f64::from(requests), context as f64);
        }
        (
            f64::from(self.load.decoding),
            self.load.decode_context as f64,
        )
    }

    /// Tokens for which there is room, with blocks of `block_tokens`. Without a report yet: as many
    /// as one wishes, whoever has no room says so.
    #[must_use]
    pub fn room(&self, block_tokens: u32, headroom: f64) -> f64 {
        if !self.reported {
            return f64::INFINITY;
        }
        let load = &self.load;
        let block = f64::from(block_tokens);
        let held = f64::from(load.blocks.saturating_sub(load.blocks_free)) * block;
        // Prompts that wait hold nothing yet; they will.
        let coming = load.prefill_tokens as f64 + self.placed.tokens;
        let used = (held + coming).max(self.tokens as f64);
        f64::from(load.blocks) * block * (1.0 - headroom) - used
    }

    /// Share of its blocks that is held, 0 to 1.
    #[must_use]
    pub fn occupancy(&self) -> f64 {
        let load = &self.load;
        if load.blocks == 0 {
            return 0.0;
        }
        f64::from(load.blocks - load.blocks_free.min(load.blocks)) / f64::from(load.blocks)
    }

    /// The tightest time per token among those that were placed here and have not ended.
    #[must_use]
    pub fn tpot_min(&self) -> Option<u64> {
        self.tpots.keys().next().copied()
    }

    /// Requests that were placed here and have not ended.
    #[must_use]
    pub const fn requests(&self) -> u32 {
        self.requests
    }

    /// It has nothing to do.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let load = &self.load;
        self.requests == 0
            || self.placed.requests == 0.0 && self.reported && load.waiting + load.running == 0
    }
}

/// All instances, and where requests are.
#[derive(Clone, Debug, Default)]
pub struct InstanceTable {
    rows: BTreeMap<InstanceId, Row>,
    homes: FxHashMap<RequestId, Home>,
}

impl InstanceTable {
    /// An instance is ready.
    pub fn up(&mut self, now: Time, instance: InstanceId, role: Role) {
        // One that changes its role may still have what it had before.
        let mut row = Row::new(role, now);
        if let Some(before) = self.rows.remove(&instance) {
            row.tpots = before.tpots;
            row.requests = before.requests;
            row.tokens = before.tokens;
        }
        self.rows.insert(instance, row);
    }

    /// An instance takes no more.
    pub fn down(&mut self, instance: InstanceId, lost: &[Spec]) {
        self.rows.remove(&instance);
        for spec in lost {
            self.homes.remove(&spec.id);
        }
    }

    /// An instance says what stands there.
    pub fn report(&mut self, now: Time, instance: InstanceId, load: Load) {
        if let Some(row) = self.rows.get_mut(&instance) {
            row.load = load;
            row.at = now;
            row.reported = true;
            row.placed = Prompts::default();
        }
    }

    /// A request goes there.
    pub fn place(&mut self, spec: &Spec, tpot: u64, instance: InstanceId) {
        self.leave(spec.id);
        let Some(row) = self.rows.get_mut(&instance) else {
            return;
        };
        let tokens = spec.prompt.saturating_add(spec.generated);
        if row.role != Role::Decode {
            row.placed = row.placed.with(tokens.saturating_sub(spec.ready).max(1));
        }
        row.requests += 1;
        row.tokens += u64::from(tokens);
        *row.tpots.entry(tpot).or_default() += 1;
        let home = Home {
            instance,
            tokens,
            tpot,
        };
        self.homes.insert(spec.id, home);
    }

    /// A request is there no more; where it was.
    pub fn leave(&mut self, request: RequestId) -> Option<InstanceId> {
        let home = self.homes.remove(&request)?;
        if let Some(row) = self.rows.get_mut(&home.instance)
            && let Some(count) = row.tpots.get_mut(&home.tpot)
        {
            *count -= 1;
            if *count == 0 {
                row.tpots.remove(&home.tpot);
            }
            row.requests -= 1;
            row.tokens -= u64::from(home.tokens);
            // Nearly all that end decode; the next report says how it is.
            row.load.decoding = row.load.decoding.saturating_sub(1);
            row.load.running = row.load.running.saturating_sub(1);
            let tokens = u64::from(home.tokens);
            row.load.decode_context = row.load.decode_context.saturating_sub(tokens);
        }
        Some(home.instance)
    }

    /// An instance.
    #[must_use]
    pub fn row(&self, instance: InstanceId) -> Option<&Row> {
        self.rows.get(&instance)
    }

    /// What was to be computed at an instance is: by a prediction, where reports are rare.
    pub fn computed(&mut self, instance: InstanceId) {
        if let Some(row) = self.rows.get_mut(&instance) {
            let prompts = row.prompts();
            row.load.waiting = 0;
            row.load.prefill_tokens = 0;
            row.load.decoding += prompts.requests as u32;
            row.load.running = row.load.decoding;
            row.load.decode_context += prompts.tokens as u64;
            row.placed = Prompts::default();
        }
    }

    /// All, by number.
    pub fn rows(&self) -> impl Iterator<Item = (InstanceId, &Row)> {
        self.rows.iter().map(|(instance, row)| (*instance, row))
    }
}
