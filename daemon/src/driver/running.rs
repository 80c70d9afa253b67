//! Which batch each process computes now, as its engine says: for collectives that name none.
//!
//! NCCL knows no batches, so its plugin can't name one. But the engine that computes a batch and
//! the collectives that it waits for are one process, attached once by the engine's hints and once
//! by the plugin; the kernel says that they have the same pid. A collective without a batch
//! therefore belongs to the batch whose layer began last in its process.
//!
//! A process that says nothing of batches, or whose collectives name their own, is left alone. What
//! a hostile client gains is what it gains by naming a batch itself ([`super::hints`]).

use laxity_policy::{BatchId, Layer};

/// Processes that compute at once; the one that was heard of least lately is forgotten.
const PROCESSES_MAX: usize = 64;

/// One process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
    pid: u32,
    batch: BatchId,
    layer: Layer,
}

/// All of them, the one heard of last in front: they are few, and a search from the front finds the
/// busy ones.
#[derive(Debug, Default)]
pub struct Running {
    processes: Vec<Process>,
}

impl Running {
    /// A process began a layer of a batch.
    pub fn layer_began(&mut self, pid: u32, batch: BatchId, layer: Layer) {
        self.processes.retain(|process| process.pid != pid);
        self.processes.truncate(PROCESSES_MAX - 1);
        self.processes.insert(0, Process { pid, batch, layer });
    }

    /// Nobody computes a batch any more.
    pub fn ended(&mut self, batch: BatchId) {
        self.processes.retain(|process| process.batch != batch);
    }

    /// The batch that a process computes, and the layer.
    #[inline]
    #[must_use]
    pub fn of(&self, pid: u32) -> Option<(BatchId, Layer)> {
        let found = self.processes.iter().find(|process| process.pid == pid);
        found.map(|process| (process.batch, process.layer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_computes_what_it_began_last_until_that_ends() {
        let mut running = Running::default();
        assert_eq!(running.of(7), None);
        running.layer_began(7, BatchId(1), Layer(0));
        running.layer_began(8, BatchId(2), Layer(5));
        running.layer_began(7, BatchId(1), Layer(1));
        assert_eq!(running.of(7), Some((BatchId(1), Layer(1))));
        assert_eq!(running.of(8), Some((BatchId(2), Layer(5))));
        running.ended(BatchId(1));
        assert_eq!((running.of(7), running.of(9)), (None, None));
        assert!(running.of(8).is_some());
    }

    #[test]
    fn the_process_that_was_silent_longest_is_forgotten_first() {
        let mut running = Running::default();
        for pid in 0..=PROCESSES_MAX as u32 {
            running.layer_began(pid, BatchId(1), Layer(0));
        }
        assert_eq!(running.of(0), None);
        assert!((1..=PROCESSES_MAX as u32).all(|pid| running.of(pid).is_some()));
        assert_eq!(running.processes.len(), PROCESSES_MAX);
    }
}
