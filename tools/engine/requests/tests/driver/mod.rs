//! Drives a replica in a test. The driver has its own account of all tokens. It checks that no
//! request is computed twice at once or beyond its blocks, that memory is never exceeded, and that
//! refused requests exist.

use std::collections::{HashMap, HashSet};

use laxity_requests::discipline::Discipline;
use laxity_requests::iteration::{Event, Plan};
use laxity_requests::kv::Pool;
use laxity_requests::replica::Replica;
use laxity_requests::request::{RequestId, Spec};
use laxity_requests::{Span, Time};

pub(crate) struct Driver {
    pub(crate) replica: Replica,
    pub(crate) now: Time,
    pub(crate) live: HashSet<RequestId>,
    pub(crate) drops: usize,
    tick: Span,
    blocks: u32,
    block_tokens: u32,
    outputs: HashMap<RequestId, u32>,
    given: HashMap<RequestId, u32>,
    next: u64,
}

impl Driver {
    pub(crate) fn new(
        discipline: Box<dyn Discipline + Send>,
        pool: (u32, u32),
        tick: Span,
    ) -> Self {
        let (blocks, block_tokens) = pool;
        Self {
            replica: Replica::new(Pool::new(blocks, block_tokens), 1, discipline),
            now: Time::ZERO,
            live: HashSet::new(),
            drops: 0,
            tick,
            blocks,
            block_tokens,
            outputs: HashMap::new(),
            given: HashMap::new(),
            next: 0,
        }
    }

    /// Adds a request that generates `output` tokens. `of` creates it with its id.
    pub(crate) fn arrive(
        &mut self,
        output: u32,
        of: impl FnOnce(RequestId, Time) -> Spec,
    ) -> RequestId {
        let id = RequestId(self.next);
        self.next += 1;
        let spec = of(id, self.now);
        self.outputs.insert(id, output);
        self.live.insert(id);
        self.replica.handle(self.now, &Event::Arrived(spec));
        self.refusals();
        id
    }

    /// Cancels one of the live requests.
    pub(crate) fn cancel(&mut self, at: usize) {
        let mut live: Vec<_> = self.live.iter().copied().collect();
        live.sort();
        if !live.is_empty() {
            let request = live[at % live.len()];
            self.live.remove(&request);
            self.replica.handle(self.now, &Event::Cancelled(request));
        }
    }

    fn refusals(&mut self) {
        while let Some(refusal) = self.replica.poll_refusal() {
            assert!(self.live.remove(&refusal.request), "{refusal:?} of nobody");
        }
    }

    /// Runs an iteration. Returns the requests that got a token, or `None` if there was no plan.
    pub(crate) fn compute(&mut self) -> Option<Vec<RequestId>> {
        let plan = self.replica.plan(self.now)?;
        self.drops += plan.drops.len();
        self.refusals();
        self.check_plan(&plan);
        self.now = self.now + self.tick;
        let chunks = plan.chunks.iter().filter(|c| c.last).map(|c| c.request);
        let tokens: Vec<_> = chunks.chain(plan.steps.iter().map(|s| s.request)).collect();
        let mut finished = Vec::new();
        for request in &tokens {
            let given = self.given.entry(*request).or_default();
            *given += 1;
            if *given >= self.outputs[request] {
                finished.push(*request);
                self.live.remove(request);
            }
        }
        let took = self.tick;
        self.replica.handle(self.now, &Event::Done { took, finished });
        Some(tokens)
    }

    fn check_plan(&self, plan: &Plan) {
        let pool = self.replica.pool();
        assert!(pool.used() <= self.blocks);
        let mut seen = HashSet::new();
        let chunks = plan.chunks.iter().map(|c| (c.request, c.prefix + c.tokens));
        let steps = plan.steps.iter().map(|s| (s.request, s.context + 1));
        for (request, tokens) in chunks.chain(steps) {
            assert!(seen.insert(request), "{request:?} is computed twice at once");
            let held = pool.held(request) * self.block_tokens;
            assert!(held >= tokens, "{request:?} computes {tokens} and holds {held}");
        }
        assert!(plan.chunks.iter().all(|chunk| chunk.tokens > 0));
    }

    /// Checks that the replica has every live request and that its sums agree.
    pub(crate) fn check(&self) {
        assert!(self.replica.pool().is_balanced() && self.replica.is_balanced());
        for request in &self.live {
            assert!(self.replica.job(*request).is_some(), "{request:?} was lost");
        }
    }

    /// Runs iterations until there is no plan. All requests have ended and all blocks are free
    /// then.
    pub(crate) fn finish(&mut self) {
        let mut rounds = 0;
        while self.compute().is_some() {
            self.check();
            rounds += 1;
            assert!(rounds < 40_000, "no end in sight: {:?}", self.replica);
        }
        assert!(self.live.is_empty(), "never ended: {:?}", self.live);
        assert_eq!(self.replica.pool().used(), 0);
    }
}
