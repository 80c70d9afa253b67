//! Which faults happen when: drawn from a seed, and kept in a file to be played again.
//!
//! A campaign is a row of rounds. Each round has a daemon and workers of its own, and draws which
//! kinds of faults it has before it draws the faults. So some rounds never kill the daemon, and
//! others do little else, and combinations that a mixture of all kinds hides are reached
//! ("swarm testing").

use rand::seq::{IndexedRandom as _, SliceRandom as _};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

pub(super) const ROUND_FAULTS: u64 = 50;
const KINDS_MAX: usize = 8;
const GAP_MS: f64 = 22.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// SIGKILL of the daemon. Another starts after `for_ms`.
    DaemonKilled,
    DaemonStopped,
    /// SIGTERM of the daemon. Another starts when it has gone.
    DaemonRestarted,
    /// SIGKILL of a worker. Another starts.
    ClientKilled,
    ClientStopped,
    /// A worker forks beside threads that submit. In C the child sends with its parent's client.
    ClientForked,
    ThreadLost,
    Reloaded,
    /// A reload of a file that is wrong, which the daemon has to refuse.
    ReloadedBroken,
    PolicyChanged,
    ModeChanged,
    Bypassed,
    /// A hostile client for `for_ms`: garbage in its region, permits that it keeps, or lies.
    Hostile,
    DescriptorsTaken,
    /// SIGTERM of the daemon. The log of the next one is on a full disk.
    LogFull,
    /// A port of the router loses some packets for `for_ms`.
    PacketsLost,
    LinkDown,
    /// A queue pair with work requests gets into the error state.
    QueuePairFailed,
    /// `CLOCK_REALTIME` has another time for `for_ms`.
    ClockSet,
    /// The daemon's control group has hardly any memory left. The kernel may kill it.
    MemoryGroupFull,
    /// The daemon or a worker runs for a small part of the time only.
    CpuStarved,
    /// The daemon gets no more memory. It may end, as if the kernel killed it.
    MemoryExhausted,
    /// SIGKILL of the coordinator. Another starts.
    CoordinatorKilled,
    CoordinatorStopped,
    /// A thread submits more at once than its lane has slots.
    LaneFilled,
    /// The port carries nothing for `for_ms`.
    PortStalled,
    /// The port and its configuration have another rate.
    RateChanged,
    /// Nothing runs for `for_ms`, as in a virtual machine that is paused.
    ClockStepped,
    CoordinatorLost,
    /// The next orders of the coordinator are lost on the way.
    OrdersLost,
    OrderRepeated,
    /// Another coordinator leads, of a later term, or of an earlier one for `for_ms`.
    LeaderChanged,
}

macro_rules! kinds {
    ($($kind:ident)*) => { [$(Self::$kind),*] };
}

impl FaultKind {
    /// The kinds of any campaign with processes.
    pub const ALL: [Self; 20] = kinds! {
        DaemonKilled DaemonStopped DaemonRestarted
        ClientKilled ClientStopped ClientForked ThreadLost
        Reloaded ReloadedBroken PolicyChanged ModeChanged Bypassed
        Hostile DescriptorsTaken LogFull CpuStarved MemoryExhausted RateChanged
        CoordinatorKilled CoordinatorStopped
    };

    /// The kinds of a campaign on verbs, beside those of any campaign with processes.
    pub const VERBS: [Self; 5] = kinds! {
        PacketsLost LinkDown QueuePairFailed ClockSet MemoryGroupFull
    };

    /// The kinds of a campaign in virtual time.
    pub const VIRTUAL: [Self; 19] = kinds! {
        DaemonKilled DaemonStopped DaemonRestarted
        ClientKilled ClientStopped ThreadLost
        Reloaded PolicyChanged ModeChanged Bypassed
        Hostile LaneFilled PortStalled RateChanged ClockStepped
        CoordinatorLost OrdersLost OrderRepeated LeaderChanged
    };

    pub(super) const fn needs_coordinator(self) -> bool {
        matches!(self, Self::CoordinatorKilled | Self::CoordinatorStopped)
    }

    pub fn name(self) -> String {
        // A unit variant is written as a string in quotes.
        serde_json::to_string(&self).unwrap_or_default().trim_matches('"').to_owned()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The time since the beginning of the round.
    pub at_ms: u64,
    pub kind: FaultKind,
    pub for_ms: u64,
    pub choice: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    pub seed: u64,
    pub faults: Vec<Fault>,
}

impl Schedule {
    /// Draws `count` faults of some of these kinds.
    pub fn draw_of(all: &[FaultKind], seed: u64, round: u64, count: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(round);
        let mut kinds = all.to_vec();
        kinds.shuffle(&mut rng);
        let kinds = &kinds[..rng.random_range(1..=KINDS_MAX.min(kinds.len()))];
        let mut at_ms = 0.0;
        let faults = (0..count).map(|_| {
            // Exponential gaps: some faults come together, and some find everything at rest.
            at_ms += -GAP_MS * (1.0 - rng.random::<f64>()).ln();
            let kind = *kinds.choose(&mut rng).unwrap_or(&FaultKind::DaemonKilled);
            // Half of all faults are short, and some outlast the stall timeout of 100 ms.
            let for_ms =
                if rng.random() { rng.random_range(0..25) } else { rng.random_range(25..250) };
            Fault { at_ms: at_ms as u64, kind, for_ms, choice: rng.random() }
        });
        let faults = faults.collect();
        Self { seed: rng.random(), faults }
    }

    /// Returns the same faults on a machine that takes `slowness` times as long.
    pub fn slowed(&self, slowness: u32) -> Self {
        let slow = |fault: &Fault| Fault {
            at_ms: fault.at_ms * u64::from(slowness),
            for_ms: fault.for_ms * u64::from(slowness),
            ..fault.clone()
        };
        Self { seed: self.seed, faults: self.faults.iter().map(slow).collect() }
    }

    pub fn without(&self, from: usize, to: usize) -> Self {
        let kept = self.faults.iter().enumerate().filter(|(at, _)| !(from..to).contains(at));
        Self { seed: self.seed, faults: kept.map(|(_, fault)| fault.clone()).collect() }
    }
}

/// Drops faults as long as `fails` says that the rest still fails, larger parts first, and returns
/// the smallest schedule that failed. `budget` bounds how many schedules are played.
pub(super) fn shrink(
    schedule: &Schedule,
    mut budget: u32,
    mut fails: impl FnMut(&Schedule) -> bool,
) -> Schedule {
    let mut smallest = schedule.clone();
    let mut part = smallest.faults.len().div_ceil(2);
    while part > 0 {
        let mut at = 0;
        while at < smallest.faults.len() && budget > 0 {
            let fewer = smallest.without(at, at + part);
            budget -= 1;
            if fails(&fewer) {
                smallest = fewer;
            } else {
                at += part;
            }
        }
        part = if part > 1 { part.div_ceil(2) } else { 0 };
    }
    smallest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(seed: u64, round: u64) -> Schedule {
        Schedule::draw_of(&FaultKind::ALL, seed, round, 50)
    }

    #[test]
    fn a_seed_and_a_round_name_the_same_faults_each_time() {
        let one = draw(7, 3);
        assert_eq!(one, draw(7, 3));
        assert_ne!(one.faults, draw(7, 4).faults);
        assert_ne!(one.faults, draw(8, 3).faults);
        assert!(one.faults.is_sorted_by_key(|fault| fault.at_ms));
        let text = serde_json::to_string(&one).unwrap();
        assert_eq!(serde_json::from_str::<Schedule>(&text).unwrap(), one);
    }

    #[test]
    fn every_kind_is_drawn_within_a_few_rounds() {
        for kind in FaultKind::ALL {
            let drawn = |round| draw(1, round).faults.iter().any(|f| f.kind == kind);
            assert!((0..30).any(drawn), "{kind:?}");
        }
    }

    #[test]
    fn a_schedule_shrinks_to_the_faults_that_matter() {
        let whole = draw(1, 1);
        let culprits = [whole.faults[11].clone(), whole.faults[38].clone()];
        let fails = |tried: &Schedule| culprits.iter().all(|c| tried.faults.contains(c));
        assert_eq!(shrink(&whole, 1000, fails).faults, culprits);
        let mut played = 0;
        let _ = shrink(&whole, 5, |_| {
            played += 1;
            false
        });
        assert_eq!(played, 5, "the budget holds");
    }
}
