//! Measures foreign traffic on the host's NICs, so that scheduled traffic gets the rest
//! (architecture §4.6).
//!
//! A counter may take a system call or a firmware command, so a thread of its own reads, at most 50
//! times a second. The thread asks the scheduler by one command for the bytes that it permitted.
//! [`laxity_policy::residual`] compares the two. While hardly anything passes the NICs, the thread
//! does not ask.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use laxity_nic::{NicCounters, NicCounts, NicDriver, counters_of};
use laxity_policy::Time;
use laxity_policy::residual::{self as policy, Capacity, PortRate, Reading, Residual};
use laxity_shm::sleep::now_ns;
use tracing::{info, warn};

use crate::config::{ConfigInForce, NicConfig, ResidualConfig, ResidualMode};
use crate::mailbox::{ANSWER_MAX, Mailbox, SchedulerCommand};
use crate::stats::{PortResidual, PortUse};

/// The time between two readings while traffic passes.
const READ_EVERY: Duration = Duration::from_nanos(policy::READ_EVERY.0);
/// The time between two readings while no traffic passes.
const IDLE_EVERY: Duration = Duration::from_nanos(policy::IDLE_EVERY.0);
/// The time between two searches for the counters of a NIC that has none, and between two checks of
/// the configuration in mode `off`.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Starts a watch, which ends when the returned end of a channel is dropped.
pub(crate) fn watch(config: ConfigInForce, mailbox: Mailbox) -> io::Result<mpsc::Sender<()>> {
    let (alive, ended) = mpsc::channel();
    let mut watch = Watch::new("/".into(), config.load().residual, mailbox);
    std::thread::Builder::new().name("counters".into()).spawn(move || {
        let mut pause = Duration::ZERO;
        while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
            let config = config.load();
            watch.follow(&config.nic, config.dscp_of_port());
            match watch.look(Time(now_ns())) {
                Some(next) => pause = next,
                None => return,
            }
        }
    })?;
    Ok(alive)
}

/// A NIC, its counters and the state of its ports: egress, ingress.
struct WatchedNic {
    name: String,
    source: Option<NicCounters>,
    looked: Option<Time>,
    states: [Residual; 2],
    /// What the scheduler was told last.
    told: [Option<PortResidual>; 2],
    /// The bytes that had passed at the last question to the scheduler.
    asked: [u64; 2],
}

impl WatchedNic {
    fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            source: None,
            looked: None,
            states: Default::default(),
            told: [None; 2],
            asked: [0; 2],
        }
    }

    /// Reads the counters. Every [`LOOK_EVERY`], it searches for counters if there are none, and
    /// for functions that share this port and are not in `nics`.
    fn read(&mut self, root: &Path, nics: &[String], ours: &[u8], now: Time) -> Option<NicCounts> {
        let is_due =
            self.looked.is_none_or(|at| u128::from(now.since(at).0) >= LOOK_EVERY.as_nanos());
        let first = self.looked.is_none();
        if is_due {
            self.looked = Some(now);
        }
        if let Some(source) = &mut self.source {
            if is_due {
                source.look(nics);
            }
            if let Some(counts) = source.read(ours) {
                return Some(counts);
            }
            warn!(nic = self.name, "the counters can't be read; traffic of others is not measured");
            (self.source, self.told, self.states) = (None, [None; 2], Default::default());
        }
        if is_due {
            self.source = counters_of(root, &self.name, NicDriver::KERNEL);
            match &mut self.source {
                Some(source) => {
                    source.look(nics);
                    info!(nic = self.name, source = source.name(), "reads counters");
                }
                None if first => {
                    info!(nic = self.name, "no counters found; traffic of others is not measured");
                }
                None => {}
            }
        }
        self.source.as_mut().and_then(|source| source.read(ours))
    }

    /// Reports whether the full rate of both ports is in force, and too little passed since the
    /// scheduler was asked to ask again.
    fn is_quiet(&self, counts: &NicCounts, uses: &[PortUse]) -> bool {
        let bytes = [counts.egress.bytes, counts.ingress.bytes];
        (0..2).all(|side| {
            let rate = uses.get(side).map_or(0, |port| port.rate);
            let passed = bytes[side].wrapping_sub(self.asked[side]);
            self.told[side].is_some_and(|told| told.capacity.is_quiet(rate, passed))
        })
    }
}

struct Watch {
    root: PathBuf,
    mailbox: Mailbox,
    config: ResidualConfig,
    nics: Vec<WatchedNic>,
    /// The DSCPs of scheduled traffic.
    ours: Vec<u8>,
    /// By port, the scheduler's last answer.
    uses: Vec<PortUse>,
    /// By port, the rate that the scheduler was told last.
    sent: Vec<Option<u64>>,
}

impl Watch {
    fn new(root: PathBuf, config: ResidualConfig, mailbox: Mailbox) -> Self {
        Self {
            root,
            mailbox,
            config,
            nics: Vec::new(),
            ours: Vec::new(),
            uses: Vec::new(),
            sent: Vec::new(),
        }
    }

    /// Begins to watch NICs that were added. A NIC that got another name begins anew.
    fn follow(&mut self, nics: &[NicConfig], ours: Vec<u8>) {
        self.ours = ours;
        for (index, nic) in nics.iter().enumerate() {
            match self.nics.get_mut(index) {
                Some(watched) if watched.name == nic.name => {}
                Some(watched) => *watched = WatchedNic::new(&nic.name),
                None => self.nics.push(WatchedNic::new(&nic.name)),
            }
        }
    }

    /// Reads all counters and tells the scheduler. Returns when to look again, or `None` if the
    /// scheduler has ended.
    fn look(&mut self, now: Time) -> Option<Duration> {
        let is_off = self.config.mode == ResidualMode::Off;
        let counts: Vec<Option<NicCounts>> = match is_off {
            true => {
                self.nics.iter_mut().for_each(|nic| *nic = WatchedNic::new(&nic.name));
                vec![None; self.nics.len()]
            }
            false => {
                let names: Vec<_> = self.nics.iter().map(|nic| nic.name.clone()).collect();
                let (root, ours) = (&self.root, &self.ours);
                self.nics.iter_mut().map(|nic| nic.read(root, &names, ours, now)).collect()
            }
        };
        let read = || self.nics.iter().zip(&counts).zip(self.uses.chunks(2));
        let has_any = counts.iter().any(Option::is_some);
        let told = self.nics.iter().flat_map(|nic| nic.told);
        let rates: Vec<_> = told.map(|told| told.map(|it| it.capacity.rate)).collect();
        if has_any
            && rates == self.sent
            && !self.uses.is_empty()
            && read().all(|((nic, counts), uses)| {
                counts.is_none_or(|counts| nic.is_quiet(&counts, uses))
            })
        {
            return Some(IDLE_EVERY);
        }
        if !has_any && !is_off && self.sent.iter().all(Option::is_none) {
            return Some(LOOK_EVERY);
        }
        let (usage, answer) = mpsc::channel();
        let residuals: Vec<_> = self.nics.iter().flat_map(|nic| nic.told).collect();
        self.sent = rates;
        if !self.mailbox.send(SchedulerCommand::Residual { residuals, usage }) {
            return None;
        }
        match answer.recv_timeout(ANSWER_MAX) {
            Ok((config, uses)) => (self.config, self.uses) = (config, uses),
            // The scheduler is busy. The next reading has the bytes of this one.
            Err(mpsc::RecvTimeoutError::Timeout) => return Some(READ_EVERY),
            Err(mpsc::RecvTimeoutError::Disconnected) => return None,
        }
        for ((nic, counts), uses) in self.nics.iter_mut().zip(counts).zip(self.uses.chunks(2)) {
            if let Some(counts) = counts {
                nic.take(now, self.config, counts, uses);
            }
        }
        Some(if has_any { READ_EVERY } else { LOOK_EVERY })
    }
}

impl WatchedNic {
    /// Updates the capacities by a reading of the counters and what permits used until then.
    fn take(&mut self, at: Time, config: ResidualConfig, counts: NicCounts, uses: &[PortUse]) {
        let Some(source) = &self.source else { return };
        let source = source.name();
        let passed = [counts.egress, counts.ingress];
        // What the switch does with bytes that arrive is unknown.
        let yielding = [counts.yielding_bytes, 0];
        self.asked = passed.map(|passed| passed.bytes);
        for (side, (used, passed)) in uses.iter().zip(passed).enumerate() {
            let reading = Reading {
                at,
                port_bytes: passed.bytes,
                permitted_bytes: used.permitted_bytes,
                in_flight_bytes: used.in_flight_bytes,
                signals: passed.signals,
                yielding_bytes: yielding[side],
            };
            let assured_permille = config.assured_permille;
            let configured = PortRate { rate: used.rate, assured_permille };
            let capacity = self.states[side].read(configured, reading);
            let direction = ["egress", "ingress"][side];
            let before = self.told[side].replace(PortResidual { source, capacity });
            self.log(direction, before.map(|it| it.capacity), capacity, used.rate, config.mode);
        }
    }

    /// Logs when the rate falls below the configured one, when it is back, and when counters stop.
    fn log(
        &self,
        direction: &str,
        before: Option<Capacity>,
        now: Capacity,
        rate: u64,
        mode: ResidualMode,
    ) {
        let Some(before) = before else { return };
        let (nic, left) = (&self.name, now.rate);
        if now.stale && !before.stale {
            warn!(
                nic,
                direction,
                "the counters stand still although scheduled bytes pass; check the name of the NIC"
            );
        }
        let begins = before.rate >= rate && now.rate < rate;
        let followed = mode == ResidualMode::Follow;
        if begins && now.lost_rate > now.foreign_rate {
            info!(
                nic,
                direction,
                left,
                followed,
                signals = now.signals,
                "the network signals congestion (CNP or PFC pause)"
            );
        } else if begins {
            info!(
                nic,
                direction,
                left,
                followed,
                taken = now.foreign_rate,
                "foreign traffic lowers the rate in force"
            );
        } else if before.rate < rate && now.rate >= rate {
            info!(
                nic,
                direction,
                foreign_bytes = now.foreign_bytes,
                "the full rate is in force again"
            );
        }
    }
}

#[cfg(test)]
mod tests;
