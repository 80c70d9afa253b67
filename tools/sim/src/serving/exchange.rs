//! What the ranks of a unit send each other in one collective.
//!
//! Expert parallelism: *dispatch* takes each token to the ranks that hold its experts, *combine*
//! brings the results back the same way. Sequence parallelism: each rank needs every other's KV
//! cache, passed around the ring or all to all. What stays inside a server goes over NVLink.

use super::layout::Layout;

/// Which pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pattern {
    Dispatch,
    Combine,
    Ring,
    AllGather,
}

/// What makes up the traffic of a collective: bytes from rank `r` to `q` of the unit are
/// `source[r] · sink[q]`, or the reverse for a combine. For sequence parallelism `source` is the
/// bytes of a rank's shard and `sink` is one.
#[derive(Debug, Default)]
pub(super) struct Exchange {
    source: Vec<f64>,
    sink: Vec<f64>,
    source_of_server: Vec<f64>,
    sink_of_server: Vec<f64>,
    sources: f64,
    sinks: f64,
    per_server: usize,
    pattern: Option<Pattern>,
    /// Bytes through a rank's NICs: egress of rank `r` at `2r`, ingress at `2r + 1`.
    pieces: Vec<u64>,
    most: u64,
    total: u64,
}

impl Exchange {
    /// Sets the pattern up; `source` and `sink` by rank of the unit.
    pub(super) fn set(
        &mut self,
        layout: &Layout,
        pattern: Pattern,
        source: impl Iterator<Item = f64>,
        sink: impl Iterator<Item = f64>,
    ) {
        self.pattern = Some(pattern);
        self.per_server = layout.ranks_per_server as usize;
        let fill =
            |to: &mut Vec<f64>, of_server: &mut Vec<f64>, from: &mut dyn Iterator<Item = f64>| {
                to.clear();
                to.extend(from);
                of_server.clear();
                of_server.extend(
                    to.chunks(layout.ranks_per_server as usize)
                        .map(|c| c.iter().sum::<f64>()),
                );
                of_server.iter().sum()
            };
        let (mut source, mut sink) = (source, sink);
        self.sources = fill(&mut self.source, &mut self.source_of_server, &mut source);
        self.sinks = fill(&mut self.sink, &mut self.sink_of_server, &mut sink);
        self.add_up(pattern);
    }

    fn add_up(&mut self, pattern: Pattern) {
        let ranks = self.ranks();
        self.pieces.clear();
        (self.most, self.total) = (0, 0);
        for rank in 0..ranks {
            let (out, back) = match pattern {
                Pattern::Dispatch | Pattern::AllGather => (self.forward(rank), self.backward(rank)),
                Pattern::Combine => (self.backward(rank), self.forward(rank)),
                Pattern::Ring => (self.ring(rank), self.ring((rank + ranks - 1) % ranks)),
            };
            let (out, back) = (out.max(0.0) as u64, back.max(0.0) as u64);
            self.pieces.extend([out, back]);
            self.most = self.most.max(out).max(back);
            self.total += out;
        }
    }

    fn forward(&self, rank: usize) -> f64 {
        self.source[rank] * (self.sinks - self.sink_of_server[rank / self.per_server])
    }

    fn backward(&self, rank: usize) -> f64 {
        self.sink[rank] * (self.sources - self.source_of_server[rank / self.per_server])
    }

    fn ranks(&self) -> usize {
        self.source.len()
    }

    /// Bytes of a ring that leave the rank for the next one, which is on another server.
    fn ring(&self, from: usize) -> f64 {
        let to = (from + 1) % self.ranks();
        if from / self.per_server == to / self.per_server {
            0.0
        } else {
            self.sources - self.source[to]
        }
    }

    /// Bytes through a rank's NICs: egress of rank `r` is piece `2r`, ingress `2r + 1`.
    pub(super) fn piece(&self, piece: usize) -> u64 {
        self.pieces[piece]
    }

    /// Most bytes that any rank's NICs carry in one direction.
    pub(super) const fn most(&self) -> u64 {
        self.most
    }

    /// Bytes that leave all the ranks' NICs.
    pub(super) const fn total(&self) -> u64 {
        self.total
    }

    /// Bytes from one rank to another over the network, zero inside a server.
    pub(super) fn pair(&self, from: usize, to: usize) -> u64 {
        if from / self.per_server == to / self.per_server {
            return 0;
        }
        let bytes = match self.pattern {
            Some(Pattern::Dispatch | Pattern::AllGather) => self.source[from] * self.sink[to],
            Some(Pattern::Combine) => self.sink[from] * self.source[to],
            Some(Pattern::Ring) if (from + 1) % self.ranks() == to => self.ring(from),
            _ => 0.0,
        };
        bytes as u64
    }

    /// Most bytes that any rank's NVLinks carry in one direction.
    pub(super) fn nvlink(&self) -> f64 {
        let inside = |rank: usize| {
            let server = rank / self.per_server;
            match self.pattern {
                Some(Pattern::Ring) => {
                    let to = (rank + 1) % self.ranks();
                    if server == to / self.per_server && self.ranks() > 1 {
                        self.sources - self.source[to]
                    } else {
                        0.0
                    }
                }
                _ => {
                    let out = self.source[rank] * (self.sink_of_server[server] - self.sink[rank]);
                    let back =
                        self.sink[rank] * (self.source_of_server[server] - self.source[rank]);
                    out.max(back)
                }
            }
        };
        (0..self.ranks()).map(inside).fold(0.0, f64::max)
    }

    /// How many ranks of other servers a rank exchanges with: the flows that its aggregate stands
    /// for.
    pub(super) fn peers(&self) -> f64 {
        match self.pattern {
            Some(Pattern::Ring) => 1.0,
            _ => (self.ranks() - self.per_server.min(self.ranks())).max(1) as f64,
        }
    }
}
