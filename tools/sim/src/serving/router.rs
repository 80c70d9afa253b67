//! Routing of requests: the unit and rank that compute, the ranks that reused blocks come from, and
//! the decode rank.

use super::cache::Caches;
use super::layout::{Layout, mix};
use crate::scenario::{Placement, Routing, Serving};
use crate::workload::Requests;

/// A rank that holds reusable tokens, and their number.
pub(super) type PrefixSource = (u32, u32);

#[derive(Clone, Debug, Default)]
pub(super) struct Route {
    pub(super) rank: u32,
    /// Reusable tokens by the rank that holds them, including the request's own rank.
    pub(super) sources: Vec<PrefixSource>,
    pub(super) reused: u32,
    /// Reused blocks from first to last, each with the rank whose copy is used.
    pub(super) blocks: Vec<(u32, u32)>,
}

#[derive(Debug)]
pub(super) struct Router {
    routing: Routing,
    weight: f64,
    placement: Placement,
    turn: u32,
    rank_turn: u32,
    decode_turn: u32,
    /// Tokens that wait or compute, by rank.
    pub(super) queued: Vec<u64>,
    /// Maximum number of tokens of a rank in a step. `None` if a unit computes one request after
    /// the other, or prompts are not cut.
    step_tokens: Option<u64>,
    pub(super) decode_load: Vec<u64>,
    overlap: Vec<u64>,
    touched: Vec<u32>,
    seed: u64,
}

impl Router {
    pub(super) fn new(serving: &Serving, layout: &Layout, striped: bool, seed: u64) -> Self {
        Self {
            step_tokens: (serving.chunked && !striped).then_some(u64::from(serving.token_budget)),
            routing: serving.routing,
            weight: serving.overlap_weight,
            placement: serving.placement,
            turn: 0,
            rank_turn: 0,
            decode_turn: 0,
            queued: vec![0; layout.ranks as usize],
            decode_load: vec![0; layout.decodes as usize],
            overlap: vec![0; layout.units as usize],
            touched: Vec::new(),
            seed,
        }
    }

    /// Routes a request of `tokens` whose prefix is `blocks` of `block_tokens` each.
    pub(super) fn route(
        &mut self,
        layout: &Layout,
        caches: &Caches,
        requests: &Requests,
        number: usize,
    ) -> Route {
        let request = &requests.list[number];
        let tokens = request.prompt_tokens;
        let mut held = Vec::new();
        let mut reusable = 0;
        for &block in requests.blocks_of(request) {
            // The last token is always computed, because its output is the first token.
            let more = requests.block_tokens.min((tokens - 1).saturating_sub(reusable));
            if more == 0 || caches.holders(block).next().is_none() {
                break;
            }
            reusable += more;
            held.push((block, more));
        }
        for &(block, more) in &held {
            for rank in caches.holders(block) {
                let unit = layout.unit_of(rank);
                if self.overlap[unit as usize] == 0 {
                    self.touched.push(unit);
                }
                self.overlap[unit as usize] += u64::from(more);
            }
        }
        let unit = self.unit(layout, reusable, tokens - reusable);
        if self.turn == 0 {
            self.rank_turn = (self.rank_turn + 1) % layout.ranks_per_unit;
        }
        let rank = self.rank(layout, caches, &held, unit);
        for unit in self.touched.drain(..) {
            self.overlap[unit as usize] = 0;
        }
        let mut sources: Vec<PrefixSource> = Vec::new();
        let mut blocks = Vec::with_capacity(held.len());
        for &(block, more) in &held {
            let from = nearest(layout, caches, block, rank, number as u64);
            blocks.push((block, from));
            match sources.iter_mut().find(|source| source.0 == from) {
                Some(source) => source.1 += more,
                None => sources.push((from, more)),
            }
        }
        Route { rank, sources, reused: reusable, blocks }
    }

    /// Returns the tokens that a unit computes until `new` tokens are done on its rank with the
    /// fewest. Ranks run in step, so tokens of all ranks count, up to the last step of the new
    /// ones. A longer queue behind that step holds up nobody else.
    fn queued_before(&self, layout: &Layout, unit: u32, new: u64) -> u64 {
        let queued = || layout.ranks_of(unit).map(|rank| self.queued[rank as usize]);
        let Some(step) = self.step_tokens else { return queued().sum() };
        let own = queued().min().unwrap_or(0) + new;
        // One more step is already computing.
        let last = (own.div_ceil(step) + 1) * step;
        queued().map(|queued| queued.min(last)).sum()
    }

    fn unit(&mut self, layout: &Layout, reusable: u32, new: u32) -> u32 {
        let weight = match self.routing {
            Routing::RoundRobin => {
                self.turn = (self.turn + 1) % layout.units;
                return self.turn;
            }
            Routing::KvAware => self.weight,
            Routing::LeastLoaded | Routing::StaticHomes => 0.0,
        };
        let mut best = (f64::INFINITY, 0);
        // Equal units are chosen in turn, or the first would get all requests when all are idle.
        let first = self.turn;
        self.turn = (self.turn + 1) % layout.units;
        for n in 0..layout.units {
            let unit = (first + n) % layout.units;
            let missing = u64::from(reusable).saturating_sub(self.overlap[unit as usize]);
            let cost =
                self.queued_before(layout, unit, u64::from(new)) as f64 + weight * missing as f64;
            if cost < best.0 {
                best = (cost, unit);
            }
        }
        best.1
    }

    /// Returns the unit's rank with the least work, where a fetch from another server counts as
    /// work.
    fn rank(&self, layout: &Layout, caches: &Caches, held: &[(u32, u32)], unit: u32) -> u32 {
        let ranks = layout.ranks_of(unit);
        let mut near = vec![0_u64; ranks.len()];
        let mut total = 0;
        for &(block, more) in held {
            total += u64::from(more);
            let Some(holder) = caches.holders(block).find(|&rank| layout.unit_of(rank) == unit)
            else {
                continue;
            };
            let server = layout.server_of(holder);
            for (rank, near) in ranks.clone().zip(&mut near) {
                *near += u64::from(more) * u64::from(layout.server_of(rank) == server);
            }
        }
        let cost = |rank: u32| {
            let missing = total - near[(rank - ranks.start) as usize];
            self.queued[rank as usize] as f64 + self.weight * missing as f64
        };
        // Equal ranks are chosen in turn, too.
        let count = ranks.len() as u32;
        let mut best = (f64::INFINITY, ranks.start);
        for n in 0..count {
            let rank = ranks.start + (self.rank_turn + n) % count;
            if cost(rank) < best.0 {
                best = (cost(rank), rank);
            }
        }
        best.1
    }

    /// Returns the decode rank with the least cost, for `bytes` of a request. Among equals the next
    /// in turn is chosen.
    pub(super) fn place_cheapest(&mut self, bytes: u64, costs: &[f64]) -> u32 {
        let cost = |decode: &u32| costs[*decode as usize];
        let best = self.decodes_in_turn().min_by(|a, b| cost(a).total_cmp(&cost(b))).unwrap_or(0);
        self.decode_load[best as usize] += bytes;
        best
    }

    fn decodes_in_turn(&mut self) -> impl Iterator<Item = u32> + use<> {
        let (count, first) = (self.decode_load.len() as u32, self.decode_turn);
        self.decode_turn = (first + 1) % count;
        (0..count).map(move |n| (first + n) % count)
    }

    pub(super) fn place(&mut self, number: usize, bytes: u64) -> u32 {
        let count = self.decode_load.len() as u32;
        let decode = match self.placement {
            Placement::Random => (mix(self.seed ^ mix(number as u64)) % u64::from(count)) as u32,
            Placement::RoundRobin => {
                self.decode_turn = (self.decode_turn + 1) % count;
                self.decode_turn
            }
            // `cheapest_decode` chooses by the network's state, which the router does not know.
            Placement::LeastLoaded | Placement::NetworkCost => {
                let in_turn = self.decodes_in_turn();
                in_turn.min_by_key(|&decode| self.decode_load[decode as usize]).unwrap_or(0)
            }
        };
        self.decode_load[decode as usize] += bytes;
        decode
    }
}

/// Returns the holder of a block that is nearest to `rank`. Among equally near ones the request's
/// number decides, so that copies share the load.
fn nearest(layout: &Layout, caches: &Caches, block: u32, rank: u32, number: u64) -> u32 {
    let distance = |holder: u32| {
        if holder == rank {
            0
        } else if layout.server_of(holder) == layout.server_of(rank) {
            1
        } else {
            2
        }
    };
    caches
        .holders(block)
        .min_by_key(|&holder| (distance(holder), mix(number << 20 ^ u64::from(holder)), holder))
        .unwrap_or(rank)
}
