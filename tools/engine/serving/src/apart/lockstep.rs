//! Ranks that compute each layer together, like data-parallel attention with expert parallelism.
//! All ranks take part in every iteration, even without tokens of their own.
//!
//! In each layer, a rank sends every other rank rows for its experts, or an empty message, and
//! waits for theirs. It then computes its rows, sends back the outputs of the others' rows, and
//! waits for its own. So a layer is as slow as its slowest rank, and both exchanges delay all
//! ranks.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::Net;
use super::experts::{by_rank, decode, encode, rows_head};
use super::inbox::Key;
use crate::carry::Kind;
use crate::model::{ExpertPeers, ExpertRows, Experts, Result};

#[derive(Clone, Debug)]
pub struct Iteration {
    /// Number of the iteration, the same at all ranks.
    pub step: u64,
    /// Number of the batch, the same at all ranks.
    pub batch: u64,
    /// Earliest known deadline of the requests of all ranks, in ns. 0 if there is none.
    pub deadline_ns: Arc<AtomicU64>,
}

/// Returns the number of an exchange, which is the same at all ranks.
const fn place(step: u64, layer: usize) -> u64 {
    step << 16 | layer as u64
}

/// The other ranks, in lockstep with this one.
pub struct InStep<'a> {
    pub net: &'a Net,
    /// The experts that this rank holds.
    pub experts: Arc<dyn Experts>,
    pub hidden: usize,
    pub iteration: Iteration,
    /// Rows of other ranks whose outputs were not sent yet.
    pub came: Vec<(SocketAddr, Vec<ExpertRows>)>,
}

impl InStep<'_> {
    fn send(&self, kind: Kind, layer: usize, to: SocketAddr, rows: &[ExpertRows]) {
        let Iteration { step, batch, deadline_ns } = &self.iteration;
        let (at, payload) = (place(*step, layer), encode(rows, self.hidden));
        if let Some(plugin) = &self.net.plugin {
            let key = match kind {
                Kind::Dispatch => Key::Dispatch(at, to),
                _ => Key::Combine(at, to),
            };
            return plugin.exchange(to, key, payload);
        }
        let head = rows_head(kind, layer, *batch, at);
        self.net.carrier.send(to, head, deadline_ns.load(Ordering::Relaxed), payload);
    }

    /// Waits for the rows of one kind from all other ranks.
    fn gather(
        &self,
        key: impl Fn(SocketAddr) -> Key,
    ) -> Result<Vec<(SocketAddr, Vec<ExpertRows>)>> {
        let began = Instant::now();
        let others = self.net.peers.ranks.others();
        let all = others.map(|from| {
            let payload = self.net.inbox.wait(key(from), from, self.net.patience)?;
            Ok((from, decode(&payload, self.hidden)?))
        });
        let all = all.collect::<Result<Vec<_>>>();
        self.net.waited_for_experts(began);
        all
    }
}

impl ExpertPeers for InStep<'_> {
    fn dispatch(&mut self, layer: usize, rows: Vec<ExpertRows>) -> Result<()> {
        let at = place(self.iteration.step, layer);
        let mut by_rank = by_rank(&self.net.peers.ranks, layer, rows)?;
        for to in self.net.peers.ranks.others() {
            for key in [Key::Dispatch(at, to), Key::Combine(at, to)] {
                self.net.inbox.expect(key, to);
            }
            let rows = by_rank.remove(&to).unwrap_or_default();
            self.send(Kind::Dispatch, layer, to, &rows);
        }
        self.came = self.gather(|from| Key::Dispatch(at, from))?;
        Ok(())
    }

    fn collect(&mut self, layer: usize) -> Result<Vec<ExpertRows>> {
        let at = place(self.iteration.step, layer);
        let (from, rows): (Vec<_>, Vec<_>) = std::mem::take(&mut self.came).into_iter().unzip();
        let counts: Vec<usize> = rows.iter().map(Vec::len).collect();
        // All rows are computed at once, so that an expert's fixed time is counted once.
        let made = self.experts.run(layer, rows.concat())?;
        let mut made = made.into_iter();
        for (to, count) in from.into_iter().zip(counts) {
            let rows: Vec<ExpertRows> = made.by_ref().take(count).collect();
            self.send(Kind::Combine, layer, to, &rows);
        }
        let answers = self.gather(|from| Key::Combine(at, from))?;
        Ok(answers.into_iter().flat_map(|(_, rows)| rows).collect())
    }
}
