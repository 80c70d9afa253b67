//! The placement of waiting stages by Algorithm 3, in the order of the queue.
//!
//! The paper leaves these points open:
//! * *Queues of nodes.* A node gets no more stages than it has slots. Others wait in the global
//!   queue, where their order can change. Node queues hold only stages that wait for weights.
//!   Otherwise the fit of eq. 5 queues stages at full nodes while others are free.
//! * *The first stage fits nowhere.* The next [`LOOKAHEAD`] stages are tried, because their models
//!   may be resident. A stage that was overtaken for [`PATIENCE`] gets a reserved node, so that it
//!   doesn't starve. That is the node that should be empty first, and it takes no other stage until
//!   then.
//! * *Actions at admission* (Algorithm 2's levels). A batch stage may only displace unused models.
//!   An interactive stage may also swap out batch stages. No stage is aborted for a stage that
//!   starts. Swapped-out stages come back before others start.

use super::fitness::Candidate;
use super::memory::Action;
use super::node::{Ask, Node};
use super::queue::Boundary;
use super::scheduler::{INTERRUPT, Scheduler, StageEntry, StagePosition};
use crate::workflow::{Class, StageId, WorkflowJob};
use crate::{Span, Time};

/// Number of queued stages that are tried in one pass.
const LOOKAHEAD: usize = 16;

/// Time for which a stage may be overtaken before a node is reserved for it.
const PATIENCE: Span = Span::from_millis(5_000);

impl Scheduler {
    fn ask(&self, entry: &StageEntry, class: Class) -> Ask {
        let most = self
            .model(&entry.stage)
            .map_or(0, |model| model.kv(entry.stage.prompt, f64::from(entry.stage.output_max)));
        Ask {
            stage: entry.stage.id,
            model: entry.stage.model,
            class,
            // A stage's limit never exceeds the most that it can use.
            kv: self.margin.need(entry.predicted).max(entry.least).min(most),
            execution: entry.execution,
            highest: match class {
                Class::Interactive => Action::SwapOut,
                Class::Batch => Action::Evict,
            },
            interrupt: INTERRUPT.0,
        }
    }

    /// Places a stage by Algorithm 3. Returns whether it has a place now.
    pub(super) fn try_place(&mut self, stage: StageId, only: Option<usize>, now: Time) -> bool {
        let Some(entry) = self.entries.get(&stage) else { return false };
        let Some(job) = self.jobs.get(&entry.stage.job).map(|entry| entry.job) else {
            return false;
        };
        let ask = self.ask(entry, job.class);
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.clear();
        for (index, node) in self.nodes.iter().enumerate() {
            let elsewhere = only.is_some_and(|only| only != index);
            let kept = self.kept.get(&index).is_some_and(|other| *other != stage);
            if elsewhere || kept || !self.is_open(index) {
                continue;
            }
            if let Some(estimate) = node.estimate(&ask, now) {
                candidates.push(Candidate {
                    node: index,
                    estimate,
                    rtt: self.rtt(&job, node),
                    load: node.load(),
                    warm: node.is_warm(ask.model),
                });
            }
        }
        let chosen = self.fitness.choose(&candidates, ask.kv, job.class);
        self.candidates = candidates;
        chosen.is_some_and(|node| self.place(&ask, node, now))
    }

    fn rtt(&self, job: &WorkflowJob, node: &Node) -> Span {
        self.options
            .rtt
            .get(usize::from(job.source.0))
            .and_then(|row| row.get(usize::from(node.spec.cluster.0)))
            .copied()
            .unwrap_or_default()
    }

    fn place(&mut self, ask: &Ask, node: usize, now: Time) -> bool {
        let Some(done) = self.nodes[node].place(ask, now) else { return false };
        self.queue.remove(ask.stage);
        self.turns.retain(|other| *other != ask.stage);
        self.kept.retain(|_, other| *other != ask.stage);
        if let Some(entry) = self.entries.get_mut(&ask.stage) {
            entry.place = StagePosition::On(node);
            entry.overtaken = None;
        }
        self.apply(node, done, now);
        self.start(node, now);
        true
    }

    pub(super) fn dispatch(&mut self, now: Time) {
        for node in 0..self.nodes.len() {
            self.start(node, now);
            self.resume(node, now);
        }
        for (node, stage) in self.kept.clone() {
            self.try_place(stage, Some(node), now);
        }
        while self.pass(now) {}
        self.give_up_turns(now);
    }

    /// Queues the stages of batch jobs that kept their turn and got no place. A turn is for
    /// continuing at once. A stage that waits for room with its turn would go before every shorter
    /// job that comes meanwhile.
    fn give_up_turns(&mut self, now: Time) {
        if !matches!(self.options.boundary, Boundary::Preempt { .. }) {
            return;
        }
        for stage in std::mem::take(&mut self.turns) {
            let job = self.entries.get(&stage).and_then(|entry| self.jobs.get(&entry.stage.job));
            if job.is_some_and(|job| job.job.class == Class::Batch) {
                self.enqueue(stage, now);
            } else {
                self.turns.push_back(stage);
            }
        }
    }

    /// Resumes swapped-out stages, the oldest first, without harm to other stages.
    fn resume(&mut self, node: usize, now: Time) {
        if self.kept.contains_key(&node) {
            return;
        }
        let slots = self.nodes[node].spec.slots as usize;
        while self.nodes[node].load() < slots {
            let Some(ask) = self.nodes[node].swapped().next() else { return };
            let ask = Ask { highest: Action::Evict, ..ask };
            if !self.place(&ask, node, now) {
                return;
            }
        }
    }

    /// Tries the first waiting stages. Returns whether any got a place.
    fn pass(&mut self, now: Time) -> bool {
        if !(0..self.nodes.len()).any(|node| self.is_open(node)) {
            return false;
        }
        let mut waiting = Vec::new();
        self.queue.first(LOOKAHEAD, now, &mut waiting);
        let turns: Vec<StageId> = self.turns.iter().copied().collect();
        let mut failed = Vec::new();
        let mut placed = false;
        for stage in turns.into_iter().chain(waiting) {
            if self.try_place(stage, None, now) {
                placed = true;
                self.overtaken(&failed, now);
            } else {
                failed.push(stage);
            }
        }
        placed
    }

    /// Records that a later stage got a place before these.
    fn overtaken(&mut self, failed: &[StageId], now: Time) {
        for stage in failed {
            let Some(entry) = self.entries.get_mut(stage) else { continue };
            let since = *entry.overtaken.get_or_insert(now);
            if now.since(since) > PATIENCE {
                self.keep(*stage, now);
            }
        }
    }

    /// Reserves for a stage the node that should be empty first.
    fn keep(&mut self, stage: StageId, now: Time) {
        if self.kept.values().any(|other| *other == stage) {
            return;
        }
        let Some(entry) = self.entries.get(&stage) else { return };
        let Some(model) = self.model(&entry.stage) else { return };
        let most = model.kv(entry.stage.prompt, f64::from(entry.stage.output_max));
        let first = (0..self.nodes.len())
            .filter(|node| !self.kept.contains_key(node))
            .filter(|node| self.nodes[*node].most(model) >= most)
            .min_by_key(|node| self.nodes[*node].empty_at(now));
        if let Some(node) = first {
            self.kept.insert(node, stage);
        }
    }
}
