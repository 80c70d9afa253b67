//! The traffic between the ranks of a unit in one collective.
//!
//! In expert parallelism, *dispatch* sends each token to the ranks that hold its experts, and
//! *combine* returns the results. In sequence parallelism, each rank needs the KV cache of all
//! others, by a ring. Traffic inside a server uses NVLink.

use super::layout::Layout;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pattern {
    Dispatch,
    Combine,
    Ring,
}

/// The traffic of a collective. Rank `r` sends `source[r] · sink[q]` bytes to rank `q` of the unit.
/// A combine sends the reverse. In sequence parallelism `source` is the bytes of a rank's shard and
/// `sink` is one.
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
    pub(super) most: u64,
    pub(super) total: u64,
}

impl Exchange {
    /// Sets the pattern, with `source` and `sink` by rank of the unit.
    pub(super) fn set(
        &mut self,
        layout: &Layout,
        pattern: Pattern,
        source: impl Iterator<Item = f64>,
        sink: impl Iterator<Item = f64>,
    ) {
        self.pattern = Some(pattern);
        self.per_server = layout.ranks_per_server as usize;
        self.source.clear();
        self.source.extend(source);
        self.sink.clear();
        self.sink.extend(sink);
        for (list, of_server) in [
            (&mut self.source, &mut self.source_of_server),
            (&mut self.sink, &mut self.sink_of_server),
        ] {
            of_server.clear();
            of_server.extend(list.chunks(self.per_server).map(|ranks| ranks.iter().sum::<f64>()));
        }
        self.sources = self.source_of_server.iter().sum();
        self.sinks = self.sink_of_server.iter().sum();
        self.add_up(pattern);
    }

    fn add_up(&mut self, pattern: Pattern) {
        let ranks = self.ranks();
        self.pieces.clear();
        (self.most, self.total) = (0, 0);
        for rank in 0..ranks {
            let (out, back) = match pattern {
                Pattern::Dispatch => (self.forward(rank), self.backward(rank)),
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

    /// Returns the bytes of a ring from a rank to the next one, if that is on another server.
    fn ring(&self, from: usize) -> f64 {
        let to = (from + 1) % self.ranks();
        if from / self.per_server == to / self.per_server {
            0.0
        } else {
            self.sources - self.source[to]
        }
    }

    /// Returns the bytes through a rank's NICs: egress of rank `r` is piece `2r`, ingress `2r + 1`.
    pub(super) fn piece(&self, piece: usize) -> u64 {
        self.pieces[piece]
    }

    /// Returns the bytes from one rank to another over the network, or zero inside a server.
    pub(super) fn pair(&self, from: usize, to: usize) -> u64 {
        if from / self.per_server == to / self.per_server {
            return 0;
        }
        let bytes = match self.pattern {
            Some(Pattern::Dispatch) => self.source[from] * self.sink[to],
            Some(Pattern::Combine) => self.sink[from] * self.source[to],
            Some(Pattern::Ring) if (from + 1) % self.ranks() == to => self.ring(from),
            _ => 0.0,
        };
        bytes as u64
    }

    pub(super) fn nvlink(&self) -> f64 {
        let inside = |rank: usize| {
            let (server, to) = (rank / self.per_server, (rank + 1) % self.ranks());
            match self.pattern {
                Some(Pattern::Ring) if server != to / self.per_server || to == rank => 0.0,
                Some(Pattern::Ring) => self.sources - self.source[to],
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

    /// Returns the number of ranks on other servers that a rank exchanges with. Its aggregate
    /// stands for that number of flows.
    pub(super) fn peers(&self) -> f64 {
        match self.pattern {
            Some(Pattern::Ring) => 1.0,
            _ => (self.ranks() - self.per_server.min(self.ranks())).max(1) as f64,
        }
    }
}
