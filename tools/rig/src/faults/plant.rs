//! Deliberate bugs. A test checks that the oracle finds them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use super::frame::Frame;

/// A bug. The first three come once for each worker of the path, after the first fault that costs
/// workers their daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Plant {
    /// A transfer completes twice.
    Twice,
    /// A transfer is lost.
    Drop,
    /// Two transfers of an ordered queue change places.
    Swap,
    /// A client stays attached when the round is over, if a daemon was killed.
    Leak,
    /// Threads of the Rust worker end without giving their lanes back, always.
    LeakLane,
    LeakMemory,
    LeakDescriptor,
}

/// The reports of a worker to the oracle, changed by one planted bug in its first queue.
pub(super) struct Reported {
    plant: Option<Plant>,
    armed: Arc<AtomicBool>,
    /// The transfer that is kept or lost.
    number: Option<u64>,
    kept: Vec<Frame>,
}

impl Reported {
    pub(super) fn new(plant: Option<Plant>, armed: &Arc<AtomicBool>) -> Self {
        Self { plant, armed: Arc::clone(armed), number: None, kept: Vec::new() }
    }

    /// Returns what the oracle hears when the worker says `frame`.
    pub(super) fn pass(&mut self, frame: Frame) -> Vec<Frame> {
        let (number, begins, ends) = match frame {
            Frame::Bytes { queue: 0, number, offset, .. }
            | Frame::Sent { queue: 0, number, offset, .. } => (number, offset == 0, false),
            Frame::Done { queue: 0, number } => (number, false, true),
            Frame::Ended { queue: 0, .. } => {
                let mut all = std::mem::take(&mut self.kept);
                all.push(frame);
                return all;
            }
            _ => return vec![frame],
        };
        // Relaxed: one frame more or less makes no difference.
        let armed = self.armed.load(Ordering::Relaxed);
        match self.plant {
            Some(Plant::Twice) if armed && ends => {
                self.plant = None;
                vec![frame.clone(), frame]
            }
            Some(plant @ (Plant::Drop | Plant::Swap)) => {
                if armed && begins {
                    self.number.get_or_insert(number);
                }
                match self.number {
                    Some(kept) if number == kept => {
                        if plant == Plant::Swap {
                            self.kept.push(frame);
                        } else if ends {
                            self.plant = None;
                        }
                        Vec::new()
                    }
                    Some(_) if ends => {
                        self.plant = None;
                        let mut all = vec![frame];
                        all.append(&mut self.kept);
                        all
                    }
                    _ => vec![frame],
                }
            }
            _ => vec![frame],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transfer(number: u64) -> [Frame; 2] {
        let payload = vec![0; 8];
        [Frame::Bytes { queue: 0, number, offset: 0, payload }, Frame::Done { queue: 0, number }]
    }

    fn heard(plant: Plant, armed: bool) -> Vec<Frame> {
        let armed = Arc::new(AtomicBool::new(armed));
        let mut reported = Reported::new(Some(plant), &armed);
        (0..4).flat_map(transfer).flat_map(|frame| reported.pass(frame)).collect()
    }

    #[test]
    fn each_bug_happens_once_and_only_after_a_fault() {
        let honest: Vec<Frame> = (0..4).flat_map(transfer).collect();
        for plant in [Plant::Twice, Plant::Drop, Plant::Swap, Plant::Leak] {
            assert_eq!(heard(plant, false), honest);
        }
        let [bytes, done] = transfer(0);
        let rest = |from: u64| (from..4).flat_map(transfer).collect::<Vec<_>>();
        assert_eq!(heard(Plant::Twice, true), [vec![bytes, done.clone(), done], rest(1)].concat());
        assert_eq!(heard(Plant::Drop, true), rest(1));
        let swapped = [transfer(1), transfer(0)].concat();
        assert_eq!(heard(Plant::Swap, true), [swapped, rest(2)].concat());
    }
}
