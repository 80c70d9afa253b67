//! Objectives from priorities (§5.2, Algorithm 2): recent latencies, assigned by rank.
//!
//! The latencies of the last `W` requests are sorted. A request of priority `p` gets the latency at
//!
//! ```text
//! base + offset = Σ_{i<p} C_i + ⌊(p + 1) / (N + 1) · C_p⌋                       (6)
//! ```
//!
//! where `C_i` is the number of requests of priority `i` in the window. The highest priority gets
//! the lowest latencies.
//!
//! The paper leaves these points open. An index beyond the window (an empty lowest class) means the
//! last entry. An empty window gives the class's largest objective. Records are measured values
//! (Algorithm 2 says "recent request SLOs", the text "recent TTFT and TPOT values"). Algorithm 2
//! sets `last_queue_time[p]` to the reference's own queue time, so that the second of two requests
//! isn't corrected. Here it is the latest of the class, as in the text ("the most recent request of
//! the same priority"). The relaxed lower bound (step 5) is that of the highest priority.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::ledger::Targets;
use crate::window::Window;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bounds {
    /// Smallest and largest time to the first token, ns.
    pub ttft: (u64, u64),
    /// Smallest and largest time per token, ns.
    pub tpot: (u64, u64),
}

impl Bounds {
    /// Returns the range of `share` around the medians. §7.3 uses ±25 %.
    pub fn around(ttft: u64, tpot: u64, share: f64) -> Self {
        let range = |median: u64| {
            let median = median as f64;
            ((median * (1.0 - share)) as u64, (median * (1.0 + share)) as u64)
        };
        Self { ttft: range(ttft), tpot: range(tpot) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub priority: usize,
    /// Measured time to the first token, ns.
    pub ttft: u64,
    /// Measured time per token, ns.
    pub tpot: u64,
    /// Part of the time to the first token that the request waited for an instance, ns.
    pub queued: u64,
}

#[derive(Clone, Debug)]
pub struct Mapping {
    bounds: Vec<Bounds>,
    window: usize,
    /// Records of the window, in the order in which the requests ended.
    recent: VecDeque<Record>,
    /// Times to the first token with the waits in them, sorted.
    ttfts: Window<(u64, u64)>,
    /// Times per token, sorted.
    tpots: Window<u64>,
    counts: Vec<usize>,
    last_queued: Vec<u64>,
}

impl Mapping {
    /// Creates a mapping with a class for each of `bounds`, the highest priority first. `window` is
    /// the number of recent requests.
    ///
    /// # Panics
    /// Panics if there is no class or the window is 0.
    pub fn new(bounds: Vec<Bounds>, window: usize) -> Self {
        assert!(!bounds.is_empty() && window > 0, "a mapping has classes and a window");
        let classes = bounds.len();
        Self {
            bounds,
            window,
            recent: VecDeque::new(),
            ttfts: Window::default(),
            tpots: Window::default(),
            counts: vec![0; classes],
            last_queued: vec![0; classes],
        }
    }

    /// Returns the class of a priority. Priorities beyond the lowest class belong to it.
    fn class(&self, priority: usize) -> usize {
        priority.min(self.bounds.len() - 1)
    }

    pub fn record(&mut self, record: Record) {
        let class = self.class(record.priority);
        let record = Record { priority: class, ..record };
        if self.recent.len() == self.window
            && let Some(old) = self.recent.pop_front()
        {
            self.counts[old.priority] -= 1;
        }
        self.counts[class] += 1;
        self.last_queued[class] = record.queued;
        self.ttfts.push((record.ttft, record.queued), self.window);
        self.tpots.push(record.tpot, self.window);
        self.recent.push_back(record);
    }

    fn index(&self, class: usize) -> usize {
        let base: usize = self.counts[..class].iter().sum();
        let offset = (class + 1) * self.counts[class] / (self.bounds.len() + 1);
        (base + offset).min(self.recent.len().saturating_sub(1))
    }

    /// Returns the objectives of a request that arrives now. `contended` is whether requests of a
    /// higher priority wait.
    pub fn assign(&self, priority: usize, contended: bool) -> Targets {
        let class = self.class(priority);
        let bounds = self.bounds[class];
        let at = self.index(class);
        let (ttfts, tpots) = (self.ttfts.sorted(), self.tpots.sorted());
        let (Some((ttft, queued)), Some(tpot)) = (ttfts.get(at), tpots.get(at)) else {
            return Targets { ttft: bounds.ttft.1, tpot: bounds.tpot.1 };
        };
        // Replaces the reference's wait by the latest wait of the class: ttft − (queued − last).
        let ttft = ttft.saturating_add(self.last_queued[class]).saturating_sub(*queued);
        let least = if contended { bounds } else { self.bounds[0] };
        let clamp = |value: u64, least: u64, most: u64| value.clamp(least.min(most), most);
        Targets {
            ttft: clamp(ttft, least.ttft.0, bounds.ttft.1),
            tpot: clamp(*tpot, least.tpot.0, bounds.tpot.1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping() -> Mapping {
        let bounds = [(100, 10), (200, 20), (400, 40)].map(|(t, p)| Bounds::around(t, p, 0.25));
        Mapping::new(bounds.to_vec(), 9)
    }

    fn record(priority: usize, ttft: u64, queued: u64) -> Record {
        Record { priority, ttft, tpot: ttft / 10, queued }
    }

    #[test]
    fn an_empty_window_gives_the_largest_objective_of_the_class() {
        let targets = mapping().assign(1, false);
        assert_eq!(targets, Targets { ttft: 250, tpot: 25 });
    }

    #[test]
    fn higher_priorities_get_lower_latencies_of_the_window() {
        let mut mapping = mapping();
        // As in figure 2: three requests of each class.
        for ttft in [80, 90, 100] {
            mapping.record(record(0, ttft, 0));
        }
        for ttft in [150, 190, 230] {
            mapping.record(record(1, ttft, 0));
        }
        for ttft in [300, 350, 450] {
            mapping.record(record(2, ttft, 0));
        }
        // The indices are 0 + ⌊3/4⌋, 3 + ⌊6/4⌋ and 6 + ⌊9/4⌋.
        assert_eq!(mapping.assign(0, false).ttft, 80);
        assert_eq!(mapping.assign(1, false).ttft, 190);
        assert_eq!(mapping.assign(2, false).ttft, 450);
    }

    #[test]
    fn the_oldest_leaves_the_window_and_an_empty_class_takes_the_last() {
        let mut mapping = mapping();
        for ttft in 0..20 {
            mapping.record(record(0, 80 + ttft, 0));
        }
        assert_eq!(mapping.ttfts.sorted().len(), 9);
        assert_eq!(mapping.ttfts.sorted()[0].0, 91);
        assert_eq!(mapping.assign(2, false).ttft, 99);
    }

    #[test]
    fn what_the_reference_waited_longer_is_taken_off() {
        let mut mapping = mapping();
        mapping.record(record(1, 240, 90));
        mapping.record(record(1, 245, 30));
        // The index is ⌊2 · 2 / 4⌋ = 1. The reference 245 waited as long as the latest.
        assert_eq!(mapping.assign(1, false).ttft, 245);
        mapping.record(record(0, 250, 200));
        // The index is 1 + 1. The reference 250 waited 200, and the class waits 30.
        assert_eq!(mapping.assign(1, false).ttft, 80);
    }

    #[test]
    fn the_lower_bound_holds_while_higher_priorities_wait_and_is_relaxed_otherwise() {
        let mut mapping = mapping();
        mapping.record(record(2, 50, 0));
        assert_eq!(mapping.assign(2, true).ttft, 300);
        assert_eq!(mapping.assign(2, false).ttft, 75);
        mapping.record(record(2, 5_000, 0));
        mapping.record(record(2, 5_000, 0));
        assert_eq!(mapping.assign(2, true).ttft, 500);
    }
}
