//! The batch that each process computes now, for collectives that name no batch.
//!
//! NCCL has no batches, so its plugin can't name one. But the engine and the collectives of its
//! batch are in one process, which attaches once for hints and once for the plugin, with one pid.
//! So a collective without a batch belongs to the batch whose layer began last in its process.
//!
//! Processes without hints, and collectives that name a batch, are not affected. A hostile client
//! gains no more than by naming a batch itself ([`super::hints`]).

use laxity_policy::{BatchId, Layer};

/// Maximum number of computing processes. Beyond it, the one with the oldest hint is removed.
const PROCESSES_MAX: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RunningProcess {
    pid: u32,
    batch: BatchId,
    layer: Layer,
}

/// All processes that compute, the one with the latest hint first. They are few, so a search from
/// the front is fast for busy ones.
#[derive(Debug, Default)]
pub struct Running {
    processes: Vec<RunningProcess>,
}

impl Running {
    pub fn layer_began(&mut self, pid: u32, batch: BatchId, layer: Layer) {
        self.processes.retain(|process| process.pid != pid);
        self.processes.truncate(PROCESSES_MAX - 1);
        self.processes.insert(0, RunningProcess { pid, batch, layer });
    }

    pub fn ended(&mut self, batch: BatchId) {
        self.processes.retain(|process| process.batch != batch);
    }

    #[inline]
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
