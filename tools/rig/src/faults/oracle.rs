//! The oracle of a fault campaign. It sees only what came out of the workers' pipes.
//!
//! It holds a model of each queue: the transfers that are open, and how many bytes of each came.
//! Each transfer must complete once, with all of its bytes in their places. In a queue that is in
//! order, only the oldest open transfer may send or complete. A wait for a permit may not last
//! longer than its bound, apart from the time in which the worker or the daemon was stopped.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::frame::{Frame, is_content};

/// Longest wait for a permit: what `docs/faults.md` promises. A hung daemon is given up after the
/// stall timeout of 100 ms. The rest is for others that use the port, honest or not.
pub(super) const WAIT_MAX: Duration = Duration::from_millis(500);

/// Longest share of a stop of the daemon that a wait may contain: the stall timeout and one sleep.
const STOP_EXCUSES: u64 = 125_000_000;
/// Queues of threads and children that a fault ends have numbers from here on.
pub(super) const LOST_QUEUES: u32 = 1000;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct TransferCounts {
    pub transfers: u64,
    pub bytes: u64,
    pub scheduled_bytes: u64,
    /// Bytes that went out without a permit.
    pub bypassed_bytes: u64,
    /// Transfers that a fault ended with the error that it must give.
    pub ended_by_fault: u64,
    pub by_siblings: u64,
}

impl TransferCounts {
    pub(super) fn add(&mut self, other: &Self) {
        self.transfers += other.transfers;
        self.bytes += other.bytes;
        self.scheduled_bytes += other.scheduled_bytes;
        self.bypassed_bytes += other.bypassed_bytes;
        self.ended_by_fault += other.ended_by_fault;
        self.by_siblings += other.by_siblings;
    }
}

#[derive(Debug, Default)]
struct TransferQueue {
    in_order: bool,
    next: u64,
    open: BTreeMap<u64, (u64, u64)>,
    /// Bytes of all transfers that came.
    came: u64,
    ended: bool,
    abandoned: bool,
}

impl TransferQueue {
    /// Returns the open transfer `number` if it may make progress now.
    fn turn(&mut self, number: u64, what: &str) -> Result<&mut (u64, u64), String> {
        let first = self.open.keys().next().copied();
        if self.in_order
            && let Some(first) = first
            && first < number
            && self.open.contains_key(&number)
        {
            return Err(format!("transfer {number} {what} before transfer {first}"));
        }
        let next = self.next;
        self.open.get_mut(&number).ok_or_else(|| {
            if number < next {
                format!("transfer {number} {what} after it was complete")
            } else {
                format!("transfer {number} {what} and was never submitted")
            }
        })
    }

    /// Takes the next `length` bytes of a transfer.
    fn sends(&mut self, number: u64, offset: u64, length: u64) -> Result<(), String> {
        let (bytes, came) = self.turn(number, "sends")?;
        if offset != *came || *came + length > *bytes {
            let to = offset + length;
            return Err(format!(
                "transfer {number} sends bytes {offset} to {to} after {came} of {bytes}"
            ));
        }
        *came += length;
        self.came += length;
        Ok(())
    }

    fn take(&mut self, frame: &Frame) -> Result<u64, String> {
        if self.ended {
            return Err(format!("{frame:?} after the end of its queue")
                .chars()
                .take(120)
                .collect());
        }
        match frame {
            Frame::Submitted { number, bytes, in_order, .. } => {
                if *number != self.next {
                    return Err(format!("transfer {number} is submitted, not {}", self.next));
                }
                self.next += 1;
                self.in_order = *in_order;
                self.open.insert(*number, (*bytes, 0));
            }
            Frame::Bytes { queue, number, offset, payload } => {
                let length = payload.len() as u64;
                self.sends(*number, *offset, length)?;
                if !is_content(*queue, *number, *offset, payload) {
                    return Err(format!("transfer {number} has other bytes from {offset} on"));
                }
                return Ok(length);
            }
            Frame::Sent { number, offset, bytes, .. } => {
                self.sends(*number, *offset, *bytes)?;
                return Ok(*bytes);
            }
            Frame::Done { number, .. } => {
                let (bytes, came) = *self.turn(*number, "completes")?;
                self.open.remove(number);
                if came != bytes {
                    return Err(format!(
                        "transfer {number} completes after {came} of {bytes} bytes"
                    ));
                }
            }
            Frame::Ended { count, .. } => {
                self.ended = true;
                if *count != self.next || !self.open.is_empty() {
                    let open: Vec<_> = self.open.keys().take(4).collect();
                    return Err(format!(
                        "the queue ended after {count} of {} transfers, and {open:?} never \
                         completed",
                        self.next
                    ));
                }
            }
            Frame::Abandoned { .. } => {
                self.ended = true;
                self.abandoned = true;
                return Ok(std::mem::take(&mut self.open).len() as u64);
            }
            Frame::Waited { .. } | Frame::Counted { .. } | Frame::Wrong { .. } => {}
        }
        Ok(0)
    }
}

/// What a worker counted that ended in order, and the bytes that came from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WorkerCount {
    pub(super) path: &'static str,
    pub(super) came: u64,
    pub(super) scheduled: u64,
    pub(super) bypassed: u64,
}

#[derive(Debug)]
struct Wait {
    worker: usize,
    begin_ns: u64,
    end_ns: u64,
    starved_ns: u64,
}

#[derive(Debug, Default)]
pub(super) struct Oracle {
    queues: HashMap<(usize, u32), TransferQueue>,
    paths: Vec<&'static str>,
    waits: Vec<Wait>,
    /// For each worker whose peer was killed and that has not ended: the time of the kill.
    peer_killed_ns: BTreeMap<usize, u64>,
    pub(super) worker_counts: Vec<WorkerCount>,
    pub(super) violations: Vec<String>,
    pub(super) counts: BTreeMap<String, TransferCounts>,
}

impl Oracle {
    pub(super) fn add(&mut self, path: &'static str) -> usize {
        self.paths.push(path);
        self.paths.len() - 1
    }

    pub(super) fn blame(&mut self, text: impl Into<String>) {
        self.violations.push(text.into());
    }

    pub(super) fn take(&mut self, worker: usize, frame: &Frame) {
        let path = self.paths[worker];
        let counts = self.counts.entry(path.to_owned()).or_default();
        let queue = match *frame {
            Frame::Waited { begin_ns, end_ns, starved_ms, .. } => {
                let last = self.peer_killed_ns.get(&worker).map_or(end_ns, |at| end_ns.min(*at));
                // The worker may have been without a processor at any time of the wait. So the part
                // of the wait that is cut off reduces the excused time.
                let starved_ns = u64::from(starved_ms) * 1_000_000;
                let starved_ns = starved_ns.saturating_sub(end_ns - last);
                return self.waits.push(Wait { worker, begin_ns, end_ns: last, starved_ns });
            }
            Frame::Counted { scheduled, bypassed } => {
                counts.scheduled_bytes += scheduled;
                counts.bypassed_bytes += bypassed;
                let own = self.queues.iter().filter(|((of, _), _)| *of == worker);
                let came = own.map(|(_, queue)| queue.came).sum();
                return self.worker_counts.push(WorkerCount { path, came, scheduled, bypassed });
            }
            Frame::Wrong { ref why } => return self.violations.push(format!("{path}: {why}")),
            Frame::Submitted { queue, .. }
            | Frame::Bytes { queue, .. }
            | Frame::Sent { queue, .. }
            | Frame::Done { queue, .. }
            | Frame::Ended { queue, .. }
            | Frame::Abandoned { queue } => queue,
        };
        match self.queues.entry((worker, queue)).or_default().take(frame) {
            Ok(number) => match frame {
                Frame::Bytes { .. } | Frame::Sent { .. } => counts.bytes += number,
                Frame::Done { .. } => counts.transfers += 1,
                Frame::Abandoned { .. } => counts.ended_by_fault += number,
                _ => {}
            },
            Err(why) => self.violations.push(format!("{path}, queue {queue}: {why}")),
        }
    }

    pub(super) fn has_begun(&self, worker: usize) -> bool {
        self.queues.keys().any(|(of, _)| *of == worker)
    }

    /// Adds what workers without frames of their own counted.
    pub(super) fn counted(&mut self, path: &str, counted: &TransferCounts) {
        self.counts.entry(path.to_owned()).or_default().add(counted);
    }

    /// Excuses the waits of a worker from now on, because its peer was killed. What was permitted
    /// before can't complete, and a client that owes bytes gets no permits on that port.
    pub(super) fn peer_killed(&mut self, worker: usize, now_ns: u64) {
        self.peer_killed_ns.insert(worker, now_ns);
    }

    /// Forgets workers that are gone, so that a long soak does not fill the memory.
    pub(super) fn keep_only(&mut self, workers: &[usize]) {
        self.queues.retain(|(worker, _), _| workers.contains(worker));
    }

    pub(super) fn killed(&mut self, worker: usize) {
        self.peer_killed_ns.remove(&worker);
        let counts = self.counts.entry(self.paths[worker].to_owned()).or_default();
        for (_, queue) in self.queues.iter_mut().filter(|((of, _), _)| *of == worker) {
            counts.ended_by_fault += queue.open.len() as u64;
            queue.open.clear();
            queue.ended = true;
        }
    }

    /// Blames a worker that was not killed, and ended before its own queues did. The queues of its
    /// threads and children that a fault ends have numbers from [`LOST_QUEUES`] on.
    pub(super) fn ended(&mut self, worker: usize) {
        let early = self.queues.iter().any(|((of, number), queue)| {
            let is_own = *number < LOST_QUEUES;
            *of == worker && (!queue.ended || (queue.abandoned && is_own))
        });
        if early {
            let path = self.paths[worker];
            self.blame(format!("{path}: worker {worker} ended before its queues did"));
        }
    }

    /// Checks all waits, and returns the longest that is nobody's fault but the daemon's. `stops`
    /// are the periods in which the daemon was stopped, as pairs of beginning and end.
    pub(super) fn judge_waits(&mut self, stops: &[(u64, u64)], wait_max: Duration) -> Duration {
        let mut longest = 0;
        for wait in std::mem::take(&mut self.waits) {
            let whole = wait.end_ns.saturating_sub(wait.begin_ns);
            let stopped = stops.iter().map(|(begin, end)| {
                let (begin, end) = (wait.begin_ns.max(*begin), wait.end_ns.min(*end));
                end.saturating_sub(begin).min(STOP_EXCUSES)
            });
            let excused = stopped.sum::<u64>() + wait.starved_ns;
            longest = longest.max(whole.saturating_sub(wait.starved_ns));
            if whole.saturating_sub(excused) > wait_max.as_nanos() as u64 {
                let path = self.paths[wait.worker];
                self.violations.push(format!(
                    "{path}: worker {} waited {} ms for a permit, {} ms of them excused",
                    wait.worker,
                    whole / 1_000_000,
                    excused / 1_000_000
                ));
            }
        }
        Duration::from_nanos(longest)
    }
}

#[cfg(test)]
mod tests {
    use super::super::frame::content;
    use super::*;

    fn transfer(number: u64) -> Vec<Frame> {
        vec![
            Frame::Submitted { queue: 0, number, bytes: 16, in_order: true },
            Frame::Bytes { queue: 0, number, offset: 0, payload: content(0, number, 0, 16) },
            Frame::Done { queue: 0, number },
        ]
    }

    fn judged(frames: &[Frame]) -> Vec<String> {
        let mut oracle = Oracle::default();
        let worker = oracle.add("client");
        frames.iter().for_each(|frame| oracle.take(worker, frame));
        oracle.violations
    }

    #[test]
    fn transfers_that_complete_once_and_in_order_are_fine() {
        let mut frames = [transfer(0), transfer(1)].concat();
        frames.push(Frame::Ended { queue: 0, count: 2 });
        assert_eq!(judged(&frames), Vec::<String>::new());
    }

    #[test]
    fn a_transfer_twice_lost_swapped_short_or_wrong_is_found() {
        let (first, second) = (transfer(0), transfer(1));
        let end = |count| vec![Frame::Ended { queue: 0, count }];
        let wrong = Frame::Bytes { queue: 0, number: 0, offset: 0, payload: content(1, 0, 0, 16) };
        let cases = [
            ("after it was complete", [&first[..], &first[2..]].concat()),
            ("never completed", [&first[..2], &end(1)].concat()),
            ("before transfer 0", [&first[..1], &second[..]].concat()),
            ("after 0 of 16", vec![first[0].clone(), first[2].clone()]),
            ("after 16 of 16", [&first[..2], &first[1..2]].concat()),
            ("other bytes", vec![first[0].clone(), wrong]),
            ("is submitted, not 0", second),
        ];
        for (why, frames) in cases {
            let found = judged(&frames);
            assert!(found.iter().any(|text| text.contains(why)), "{why}: {found:?}");
        }
    }

    #[test]
    fn a_wait_is_excused_only_for_what_was_stopped() {
        let ms = |ms: u64| ms * 1_000_000;
        let judged = |begin, end, starved_ms, peer_killed| {
            let mut oracle = Oracle::default();
            let worker = oracle.add("client");
            oracle.peer_killed(worker, peer_killed);
            let (begin_ns, end_ns) = (ms(begin), ms(end));
            oracle.take(worker, &Frame::Waited { queue: 0, begin_ns, end_ns, starved_ms });
            let longest = oracle.judge_waits(&[(ms(1000), ms(9000))], WAIT_MAX);
            (longest.as_millis(), oracle.violations.len())
        };
        let waited = |begin, end, starved_ms| judged(begin, end, starved_ms, u64::MAX);
        assert_eq!(waited(0, 490, 0), (490, 0));
        assert_eq!(waited(0, 510, 0), (510, 1));
        assert_eq!(waited(0, 610, 150), (460, 0));
        assert_eq!(waited(900, 1500, 0), (600, 0), "the stop excuses 125 ms");
        assert_eq!(waited(900, 2500, 0), (1600, 1), "a stopped daemon has to be given up");
        assert_eq!(judged(0, 800, 0, ms(490)), (490, 0), "without a peer nothing completes");
        assert_eq!(judged(0, 800, 0, ms(510)), (510, 1));
        assert_eq!(judged(0, 800, 290, ms(510)), (510, 1), "it may not have run after that");
    }

    #[test]
    fn whoever_is_killed_owes_nothing_and_whoever_ends_by_itself_does() {
        let mut oracle = Oracle::default();
        let (killed, ended) = (oracle.add("client"), oracle.add("client"));
        for worker in [killed, ended] {
            oracle.take(worker, &transfer(0)[0]);
        }
        oracle.killed(killed);
        oracle.ended(killed);
        assert!(oracle.violations.is_empty());
        oracle.ended(ended);
        assert_eq!(oracle.violations.len(), 1);
        for (queue, wrong) in [(1001, 1), (0, 2)] {
            let worker = oracle.add("nccl");
            oracle.take(worker, &Frame::Abandoned { queue });
            oracle.ended(worker);
            assert_eq!(oracle.violations.len(), wrong, "queue {queue}");
        }
    }
}
