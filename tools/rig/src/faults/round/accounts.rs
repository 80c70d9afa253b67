//! The checks of a round's daemon at its end: lanes, NICs, and remains of clients that are gone.

use std::time::{Duration, Instant};

use laxity_wire::PortStatus;

use super::{CLOSED_WITHIN, FORGET_MAX, Scene, note};
use crate::child::poll;
use crate::faults::client;
use crate::faults::task::LOSE_THREAD;

/// Time until a worker has found the daemon.
const ATTACHED_WITHIN: Duration = Duration::from_secs(1);
/// Time until some threads of the workers have ended. If they need more, a leak is found in another
/// round.
const THREADS_END: Duration = Duration::from_millis(60);
/// Growth of the daemon's memory over a round that is no leak: buffers of its log and runtime.
const GROWTH_KIB: u64 = 4096;
/// Flows of a worker whose NIC the daemon may not know. The first flows of a client name none if
/// its daemon has just started.
const UNKNOWN_NIC_MAX: u64 = 32;

impl Scene<'_> {
    /// Ends threads of the workers, and returns how many lanes a Rust worker has then at most.
    pub(super) fn most_lanes(&mut self) -> Option<u32> {
        self.wait_ready();
        if self.setting.uses("client") {
            let within = self.setting.pace.slow(ATTACHED_WITHIN);
            poll(within, CLOSED_WITHIN, || (self.lanes() >= Some(client::QUEUES)).then_some(()));
        }
        self.workers.tell_all(LOSE_THREAD);
        std::thread::sleep(THREADS_END);
        self.lanes()
    }

    /// Returns how many lanes a Rust worker has at most, or `None` if none is attached.
    fn lanes(&mut self) -> Option<u32> {
        match self.daemon.status() {
            Ok(status) => {
                let workers = status.clients.iter().filter(|client| client.name == client::NAME);
                workers.map(|worker| worker.lanes).max()
            }
            Err(wrong) => {
                self.blame(wrong);
                None
            }
        }
    }

    /// Checks that the daemon knows the NIC of each worker's flows. It permits others at once.
    pub(super) fn check_nics(&mut self) {
        let status = match self.daemon.status() {
            Ok(status) => status,
            Err(wrong) => return self.blame(wrong),
        };
        for client in status.clients.iter().filter(|c| c.unknown_nic_flows > UNKNOWN_NIC_MAX) {
            if let Some(path) = self.workers.path_of_process(client.pid) {
                self.blame(format!(
                    "{path}: {} flows of a worker have a NIC that the daemon does not know",
                    client.unknown_nic_flows
                ));
            }
        }
    }

    /// Checks that the daemon has forgotten all clients, and returned what it had for them.
    pub(super) fn check_accounts(&mut self, before: (usize, u64)) {
        let start = Instant::now();
        let mut left = String::new();
        while start.elapsed() < self.setting.pace.slow(FORGET_MAX) {
            match self.daemon.status() {
                Ok(status) => {
                    let clients = status.clients.len();
                    let sum = |of: fn(&PortStatus) -> u64| status.ports.iter().map(of).sum::<u64>();
                    let (flows, bytes) = (sum(|p| p.waiting_flows), sum(|p| p.in_flight_bytes));
                    std::thread::sleep(CLOSED_WITHIN);
                    let (descriptors, memory) = self.daemon.size().unwrap_or_default();
                    left = format!(
                        "{clients} clients, {flows} waiting flows, {bytes} bytes in flight, \
                         {descriptors} descriptors instead of {}, {memory} KiB of memory instead \
                         of {}",
                        before.0, before.1
                    );
                    let small = descriptors <= before.0 && memory <= before.1 + GROWTH_KIB;
                    if clients == 0 && flows == 0 && bytes == 0 && small {
                        return note(&self.oracle, self.daemon.panicked());
                    }
                }
                Err(wrong) => return self.blame(wrong),
            }
        }
        self.blame(format!("{:?} after the end the daemon has {left}", start.elapsed()));
        note(&self.oracle, self.daemon.panicked());
    }
}
