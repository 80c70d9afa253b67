//! The faults of a virtual world, and their ends.

use std::sync::atomic::Ordering;

use laxity_client::{Flow, Stage};
use laxity_daemon::config::Mode;
use laxity_policy::Time;

use super::process::QUEUES;
use super::settings;
use super::world::{VirtualWorld, WorldEvent};
use crate::error::LabError;
use crate::faults::frame::Frame;
use crate::faults::oracle::LOST_QUEUES;
use crate::faults::plant::Plant;
use crate::faults::schedule::{Fault, FaultKind};

/// Threads that end at one fault, one after the other.
const LOST_AT_ONCE: u64 = 3;
const LOST_TRANSFERS: u64 = 6;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum FaultEnd {
    Launch,
    ContinueDaemon,
    ContinueProcess(usize),
    EndHostile(usize),
    EndBypass,
    Enforce,
    FindCoordinator,
    ChangeLeader,
}

impl VirtualWorld<'_> {
    fn later(&mut self, fault: &Fault, end: FaultEnd) {
        self.planned += 1;
        self.plan(fault.for_ms * 1_000_000, WorldEvent::Undo(end));
    }

    pub(super) fn apply(&mut self, fault: &Fault) -> Result<(), LabError> {
        let (choice, for_ns) = (fault.choice, fault.for_ms * 1_000_000);
        match fault.kind {
            FaultKind::DaemonKilled => {
                self.arm();
                self.continue_daemon();
                self.coordinator.daemon_ended(Time(self.now_ns));
                self.host.kill();
                // A daemon may die after a permit and before the wake-up.
                self.forget_sleeps();
                self.later(fault, FaultEnd::Launch);
            }
            FaultKind::DaemonStopped => {
                self.stopped_ns.get_or_insert(self.now_ns);
                self.later(fault, FaultEnd::ContinueDaemon);
            }
            FaultKind::DaemonRestarted => {
                self.arm();
                self.continue_daemon();
                self.coordinator.daemon_ended(Time(self.now_ns));
                self.host.stop(choice.is_multiple_of(2))?;
                self.later(fault, FaultEnd::Launch);
            }
            FaultKind::ClientKilled => {
                if let Some(process) = self.application(choice) {
                    self.kill_process(process);
                    self.start_application();
                }
            }
            FaultKind::ClientStopped => {
                if let Some(process) = self.application(choice)
                    && !self.processes[process].stopped
                {
                    self.processes[process].stopped = true;
                    self.processes[process].starved_ns += for_ns;
                    self.later(fault, FaultEnd::ContinueProcess(process));
                }
            }
            FaultKind::ThreadLost => {
                if let Some(process) = self.application(choice) {
                    self.lose_threads(process, 1 + choice % 1_000_000);
                }
            }
            FaultKind::LaneFilled => {
                if let Some(process) = self.application(choice) {
                    let transfers = u32::from(settings::SLOTS) + (choice % 32) as u32;
                    self.processes[process].queues[QUEUES - 1].burst = transfers;
                    self.wake_up(process);
                }
            }
            FaultKind::Hostile => {
                let process = self.start_hostile(choice);
                self.later(fault, FaultEnd::EndHostile(process));
            }
            FaultKind::PortStalled => {
                // A longer stall would hide all other faults.
                self.stops.extend(self.port.stall(self.now_ns, for_ns / 4));
            }
            FaultKind::ClockStepped => self.pause(for_ns),
            FaultKind::CoordinatorLost
            | FaultKind::OrdersLost
            | FaultKind::OrderRepeated
            | FaultKind::LeaderChanged => self.harm_coordinator(fault)?,
            _ => self.reconfigure(fault),
        }
        Ok(())
    }

    fn harm_coordinator(&mut self, fault: &Fault) -> Result<(), LabError> {
        let (now, choice) = (Time(self.now_ns), fault.choice);
        match fault.kind {
            FaultKind::CoordinatorLost => {
                self.coordinator.is_lost = true;
                self.later(fault, FaultEnd::FindCoordinator);
            }
            FaultKind::OrdersLost => self.coordinator.orders_to_lose += 1 + choice % 4,
            FaultKind::OrderRepeated => {
                if let Some(daemon) = self.host.stream().filter(|_| self.stopped_ns.is_none()) {
                    self.coordinator.repeat_order(now, daemon);
                }
            }
            _ => {
                let is_outdated = choice.is_multiple_of(2);
                self.coordinator.change_leader(now, is_outdated)?;
                if is_outdated {
                    self.later(fault, FaultEnd::ChangeLeader);
                }
            }
        }
        Ok(())
    }

    fn reconfigure(&mut self, fault: &Fault) {
        let choice = fault.choice;
        match fault.kind {
            FaultKind::PolicyChanged => {
                settings::change_policy(&mut self.host.config, &mut self.rng);
            }
            FaultKind::RateChanged => {
                self.port.bytes_per_s = settings::change_rate(&mut self.host.config, choice);
            }
            FaultKind::ModeChanged => {
                self.host.config.mode = [Mode::Off, Mode::Observe][(choice % 2) as usize];
                self.later(fault, FaultEnd::Enforce);
            }
            FaultKind::Bypassed => {
                self.later(fault, FaultEnd::EndBypass);
                return self.host.set_bypass(true);
            }
            _ => settings::change(&mut self.host.config, choice),
        }
        self.host.configure();
    }

    pub(super) fn end_of(&mut self, end: FaultEnd) -> Result<(), LabError> {
        match end {
            FaultEnd::Launch => self.launch()?,
            FaultEnd::ContinueDaemon => self.continue_daemon(),
            FaultEnd::ContinueProcess(process) => {
                self.processes[process].stopped = false;
                self.wake_up(process);
            }
            FaultEnd::EndHostile(process) => self.kill_process(process),
            FaultEnd::FindCoordinator => self.coordinator.is_lost = false,
            FaultEnd::ChangeLeader => self.coordinator.change_leader(Time(self.now_ns), false)?,
            FaultEnd::EndBypass => self.host.set_bypass(false),
            FaultEnd::Enforce => {
                self.host.config.mode = Mode::Enforce;
                self.host.configure();
            }
        }
        Ok(())
    }

    /// Ends what the faults left, so that everything runs.
    pub(super) fn recover(&mut self) -> Result<(), LabError> {
        self.continue_daemon();
        self.launch()
    }

    /// Expects no wake-ups of threads that sleep now.
    fn forget_sleeps(&mut self) {
        for queue in self.processes.iter_mut().flat_map(|process| &mut process.queues) {
            queue.sleep = None;
        }
    }

    pub(super) fn launch(&mut self) -> Result<(), LabError> {
        if !self.host.is_up() {
            self.host.launch()?;
            self.step_in(0);
        }
        Ok(())
    }

    fn continue_daemon(&mut self) {
        if let Some(since) = self.stopped_ns.take() {
            self.stops.push((since, self.now_ns));
            self.step_in(0);
        }
    }

    /// Lets the planted bug happen, after a fault that costs processes their daemon.
    fn arm(&self) {
        self.armed.store(true, Ordering::Relaxed);
    }

    fn kill_process(&mut self, process: usize) {
        self.host.cut_off(self.processes[process].number);
        if self.processes[process].is_application() {
            self.count(process);
            self.oracle.killed(self.processes[process].worker);
        }
        self.processes[process].die();
    }

    /// Simulates threads that end one after the other with flows in their lanes. Each lane
    /// withdraws its flows. `turn` makes their queue numbers unique.
    pub(super) fn lose_threads(&mut self, index: usize, turn: u64) {
        for thread in 0..LOST_AT_ONCE {
            let Some(client) = self.processes[index].client.clone() else { return };
            let queue = LOST_QUEUES + (turn * LOST_AT_ONCE + thread) as u32;
            let mut lane = client.lane();
            for number in 0..LOST_TRANSFERS {
                let bytes = 8 << (number % 12);
                let in_order = false;
                self.tell(index, Frame::Submitted { queue, number, bytes, in_order });
                let ticket = lane.submit(&Flow { stage: Stage::P2d, bytes, ..Flow::default() });
                drop(ticket);
            }
            self.tell(index, Frame::Abandoned { queue });
            if self.plant == Some(Plant::LeakLane) {
                self.leaked_lanes.push(lane);
            }
        }
    }
}
