//! Whether the daemon's counters agree with each other and with what the workers say.

use laxity_wire::{PortStatus, Status};

use crate::faults::oracle::WorkerCount;

/// Paths whose workers count exactly the bytes that they send. On others, the worker's peer sends
/// some of them, or the counted bytes are not those on the wire.
const BALANCED: [&str; 2] = ["client", "c"];

/// Whether [`of_worker`] judges a worker.
pub(super) fn is_balanced(count: &WorkerCount) -> bool {
    BALANCED.contains(&count.path)
}

/// Returns what is wrong with the daemon's counters. `before` is an earlier status of the same
/// daemon.
pub(super) fn of_daemon(before: &Status, now: &Status) -> Vec<String> {
    let totals = &now.totals;
    let of_ports = |of: fn(&PortStatus) -> u64| now.ports.iter().map(of).sum::<u64>();
    let waiting = of_ports(|port| port.waiting_bytes) + of_ports(|port| port.held_bytes);
    let known = totals.permitted_bytes
        + totals.observed_bytes
        + totals.bypassed_bytes
        + totals.withdrawn_bytes
        + waiting;
    let mut wrong = Vec::new();
    if known != totals.submitted_bytes {
        wrong.push(format!(
            "laxityd counts {} submitted bytes, but {known} permitted ({}), observed ({}), \
             bypassed ({}), withdrawn ({}) or waiting ({waiting})",
            totals.submitted_bytes,
            totals.permitted_bytes,
            totals.observed_bytes,
            totals.bypassed_bytes,
            totals.withdrawn_bytes
        ));
    }
    if totals.completed_bytes > totals.permitted_bytes + totals.observed_bytes {
        wrong.push(format!(
            "laxityd counts {} completed bytes of {} that went out",
            totals.completed_bytes,
            totals.permitted_bytes + totals.observed_bytes
        ));
    }
    if before.pid != now.pid {
        wrong.push(format!("laxityd was process {} and is {}", before.pid, now.pid));
    }
    let sums = |status: &Status| {
        let t = status.totals;
        [t.attachments, t.flows, t.submitted_bytes, t.permitted_bytes, t.completed_bytes]
    };
    if sums(before).iter().zip(sums(now)).any(|(before, now)| now < *before) {
        wrong.push(format!("a counter of laxityd fell: {:?}, {:?}", sums(before), sums(now)));
    }
    wrong
}

/// Returns what is wrong with the counters of a worker that ended in order: each byte that came
/// from it was permitted or bypassed.
pub(super) fn of_worker(count: &WorkerCount) -> Option<String> {
    (is_balanced(count) && count.came != count.scheduled + count.bypassed).then(|| {
        format!(
            "{}: {} bytes came from a worker that counts {} as permitted and {} as bypassed",
            count.path, count.came, count.scheduled, count.bypassed
        )
    })
}

/// Returns what is wrong if workers were permitted more bytes than the daemon knows.
pub(super) fn of_all(scheduled: u64, end: &Status) -> Option<String> {
    let known = end.totals.permitted_bytes + end.totals.bypassed_bytes;
    (scheduled > known)
        .then(|| format!("workers had permits for {scheduled} bytes, but laxityd gave {known}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(change: impl FnOnce(&mut Status)) -> Status {
        let mut status = Status { pid: 7, ..Status::default() };
        status.totals.submitted_bytes = 100;
        status.totals.permitted_bytes = 60;
        status.totals.bypassed_bytes = 5;
        status.totals.withdrawn_bytes = 15;
        status.totals.completed_bytes = 50;
        status.ports =
            vec![PortStatus { waiting_bytes: 18, held_bytes: 2, ..PortStatus::default() }];
        change(&mut status);
        status
    }

    #[test]
    fn counters_that_agree_are_fine_and_each_that_does_not_is_found() {
        let before = status(|_| {});
        let wrong = |change: fn(&mut Status)| of_daemon(&before, &status(change)).len();
        assert_eq!(wrong(|_| {}), 0);
        assert_eq!(wrong(|s| s.totals.submitted_bytes += 8), 1, "lost");
        assert_eq!(wrong(|s| s.totals.withdrawn_bytes += 8), 1, "counted twice");
        assert_eq!(wrong(|s| s.totals.completed_bytes = 61), 1);
        assert_eq!(wrong(|s| s.totals.completed_bytes = 49), 1, "it fell");
        assert_eq!(wrong(|s| s.pid = 8), 1, "another daemon");
        let end = status(|_| {});
        assert_eq!((of_all(65, &end), of_all(66, &end).is_some()), (None, true));
        let count = |came| WorkerCount { path: "c", came, scheduled: 8, bypassed: 16 };
        assert_eq!((of_worker(&count(24)), of_worker(&count(16)).is_some()), (None, true));
    }
}
