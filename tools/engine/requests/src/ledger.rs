//! The state of instances as a dispatcher sees it: last reports, and placements after them.
//!
//! A report describes the end of an iteration. Placements and ends since then are added, so that
//! two decisions between two reports don't use the same room twice. HyperFlexis §5.1 step 5 calls
//! this the dispatcher's own shadow of each worker.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use crate::Time;
use crate::dispatch::Role;
use crate::iteration::Load;
use crate::request::{InstanceId, RequestId, Slo, Spec};

/// The two objectives of a request that HyperFlexis and similar schedulers use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Targets {
    /// Time to the first token, ns.
    pub ttft: u64,
    /// Time per token after it, ns.
    pub tpot: u64,
}

impl Targets {
    /// Returns the targets of a request. A batch request has only one objective. Half of its time
    /// is for the first token and half for the most tokens that it may generate. No paper defines
    /// this case.
    pub fn of(spec: &Spec) -> Self {
        match spec.slo {
            Slo::Interactive { ttft, tbt } => Self { ttft, tpot: tbt },
            Slo::Batch { ttlt } => {
                Self { ttft: ttlt / 2, tpot: ttlt / 2 / u64::from(spec.output_max.max(1)) }
            }
        }
    }
}

/// A set of prompts, as the sums that latency models use.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prompts {
    pub requests: f64,
    pub tokens: f64,
    /// Sum of the squared lengths.
    pub squares: f64,
}

impl Prompts {
    pub fn with(self, tokens: u32) -> Self {
        let tokens = f64::from(tokens);
        Self {
            requests: self.requests + 1.0,
            tokens: self.tokens + tokens,
            squares: self.squares + tokens * tokens,
        }
    }

    pub fn without(self, tokens: u32) -> Self {
        let tokens = f64::from(tokens);
        Self {
            requests: (self.requests - 1.0).max(0.0),
            tokens: (self.tokens - tokens).max(0.0),
            squares: (self.squares - tokens * tokens).max(0.0),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Home {
    instance: InstanceId,
    tokens: u32,
    tpot: u64,
    /// Prompt tokens to compute.
    left: u32,
    /// Number of reports of the instance before the placement.
    reports: u64,
}

#[derive(Clone, Debug, Default)]
pub struct Row {
    pub role: Role,
    pub load: Load,
    pub at: Time,
    pub reported: bool,
    pub placed: Prompts,
    tpots: BTreeMap<u64, u32>,
    /// Requests that are placed here and not ended.
    pub requests: u32,
    tokens: u64,
    reports: u64,
    /// Requests in the last report beyond those that this table placed there.
    foreign: u32,
}

impl Row {
    /// Returns the prompts that wait for computation. Reports contain the sum of tokens but no
    /// lengths, so all prompts are assumed to be equally long.
    pub fn prompts(&self) -> Prompts {
        let load = &self.load;
        let tokens = load.prefill_tokens as f64;
        let requests = f64::from(load.waiting + load.running.saturating_sub(load.decoding));
        let squares = if requests > 0.0 { tokens * tokens / requests } else { 0.0 };
        Prompts {
            requests: requests + self.placed.requests,
            tokens: tokens + self.placed.tokens,
            squares: squares + self.placed.squares,
        }
    }

    /// Returns the number of requests that decode and the number of tokens that they attend to.
    pub fn decodes(&self) -> (f64, f64) {
        if self.role == Role::Decode {
            // Reports don't include KV that is still on its way, so placed requests count, too.
            let requests = self.requests.max(self.load.decoding);
            let context = self.tokens.max(self.load.decode_context);
            return (f64::from(requests), context as f64);
        }
        (f64::from(self.load.decoding), self.load.decode_context as f64)
    }

    /// Returns the number of tokens for which there is room, with blocks of `block_tokens`. Without
    /// a report the room is infinite, because an instance without room refuses the request.
    pub fn room(&self, block_tokens: u32, headroom: f64) -> f64 {
        if !self.reported {
            return f64::INFINITY;
        }
        let load = &self.load;
        let block = f64::from(block_tokens);
        let held = f64::from(load.blocks.saturating_sub(load.blocks_free)) * block;
        // Waiting prompts hold no blocks yet, but they will need them.
        let coming = load.prefill_tokens as f64 + self.placed.tokens;
        let used = (held + coming).max(self.tokens as f64);
        f64::from(load.blocks) * block * (1.0 - headroom) - used
    }

    /// Returns the share of blocks that are held, 0 to 1.
    pub fn occupancy(&self) -> f64 {
        let load = &self.load;
        if load.blocks == 0 {
            return 0.0;
        }
        f64::from(load.blocks - load.blocks_free.min(load.blocks)) / f64::from(load.blocks)
    }

    /// Returns the shortest time per token, in ns, of the requests that are placed here and not
    /// ended.
    pub fn tpot_min(&self) -> Option<u64> {
        self.tpots.keys().next().copied()
    }

    /// Reports whether the instance has nothing to do. An instance that computes prompts of other
    /// dispatchers is not idle. Neither is a decode instance whose KV is on its way, because its
    /// reports don't include that.
    pub fn is_idle(&self) -> bool {
        let load = &self.load;
        let empty = self.placed.requests == 0.0 && load.waiting + load.running == 0;
        self.requests == 0 && self.foreign == 0
            || self.role != Role::Decode && self.reported && empty
    }
}

#[derive(Clone, Debug, Default)]
pub struct InstanceTable {
    rows: BTreeMap<InstanceId, Row>,
    homes: FxHashMap<RequestId, Home>,
    /// Number of [`Self::up`] calls times 2³², so that counts of reports differ after each.
    ups: u64,
}

impl InstanceTable {
    pub fn up(&mut self, now: Time, instance: InstanceId, role: Role) {
        // An instance that changes its role may still have requests of its former role.
        let mut row = Row { role, at: now, reports: self.ups, ..Row::default() };
        self.ups += 1 << 32;
        for home in self.homes.values().filter(|home| home.instance == instance) {
            *row.tpots.entry(home.tpot).or_default() += 1;
            row.requests += 1;
            row.tokens += u64::from(home.tokens);
        }
        self.rows.insert(instance, row);
    }

    pub fn down(&mut self, instance: InstanceId, lost: &[Spec]) {
        self.rows.remove(&instance);
        for spec in lost {
            self.homes.remove(&spec.id);
        }
    }

    /// Records a reported load and clears the placements before it.
    pub fn report(&mut self, now: Time, instance: InstanceId, load: Load) {
        if let Some(row) = self.rows.get_mut(&instance) {
            row.load = load;
            row.at = now;
            row.reported = true;
            row.reports += 1;
            row.foreign = (load.waiting + load.running).saturating_sub(row.requests);
            row.placed = Prompts::default();
        }
    }

    pub fn place(&mut self, spec: &Spec, tpot: u64, instance: InstanceId) {
        self.leave(spec.id);
        let Some(row) = self.rows.get_mut(&instance) else { return };
        let tokens = spec.prompt.saturating_add(spec.generated);
        let left = tokens.saturating_sub(spec.ready).max(1);
        if row.role != Role::Decode {
            row.placed = row.placed.with(left);
        }
        row.requests += 1;
        row.tokens += u64::from(tokens);
        *row.tpots.entry(tpot).or_default() += 1;
        let home = Home { instance, tokens, tpot, left, reports: row.reports };
        self.homes.insert(spec.id, home);
    }

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
            if home.reports == row.reports && row.placed.requests > 0.0 {
                // No report has the request yet. An idle instance sends none that would clear it.
                row.placed = row.placed.without(home.left);
                return Some(home.instance);
            }
            // Nearly all requests that end were decoding. The next report corrects the numbers.
            row.load.decoding = row.load.decoding.saturating_sub(1);
            row.load.running = row.load.running.saturating_sub(1);
            let tokens = u64::from(home.tokens);
            row.load.decode_context = row.load.decode_context.saturating_sub(tokens);
        }
        Some(home.instance)
    }

    pub fn row(&self, instance: InstanceId) -> Option<&Row> {
        self.rows.get(&instance)
    }

    /// Marks all prompts of an instance as computed. Used with predictions, where reports are rare.
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

    pub fn rows(&self) -> impl Iterator<Item = (InstanceId, &Row)> {
        self.rows.iter().map(|(instance, row)| (*instance, row))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: InstanceId = InstanceId(0);

    fn spec(number: u64) -> Spec {
        Spec {
            id: RequestId(number),
            prompt: 1_000,
            output_max: 10,
            slo: Slo::Interactive { ttft: 1_000, tbt: 10 },
            ..Spec::default()
        }
    }

    fn table(role: Role) -> InstanceTable {
        let mut table = InstanceTable::default();
        table.up(Time::ZERO, AT, role);
        table
    }

    fn is_idle(table: &InstanceTable) -> bool {
        table.row(AT).is_some_and(Row::is_idle)
    }

    #[test]
    fn a_decode_instance_is_not_idle_while_kv_is_on_its_way() {
        let mut table = table(Role::Decode);
        table.place(&spec(1), 10, AT);
        table.report(Time(1), AT, Load::default());
        assert!(!is_idle(&table));
        table.leave(RequestId(1));
        assert!(is_idle(&table));
    }

    #[test]
    fn an_instance_that_works_for_other_dispatchers_is_not_idle() {
        let mut table = table(Role::Prefill);
        table.report(Time(1), AT, Load { waiting: 3, prefill_tokens: 9_000, ..Load::default() });
        assert!(!is_idle(&table));
        table.report(Time(2), AT, Load::default());
        assert!(is_idle(&table));
    }

    #[test]
    fn a_prompt_that_leaves_before_a_report_takes_its_tokens_along() {
        let mut table = table(Role::Whole);
        table.place(&spec(1), 10, AT);
        table.place(&spec(2), 10, AT);
        table.leave(RequestId(1));
        let left = table.row(AT).map(Row::prompts);
        assert_eq!(left, Some(Prompts::default().with(1_000)));
    }
}
