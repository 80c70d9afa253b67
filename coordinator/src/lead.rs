//! Whether this coordinator speaks for the cluster, and until when.
//!
//! With an election (`election.rs`) leadership is a lease: it holds up to an instant that this
//! process can tell by itself, and whoever sends an order asks here first. The clock is
//! `CLOCK_BOOTTIME`: it is monotonic, nobody can set it, and it goes on while the machine sleeps.
//! Why the instant is early enough is argued in `election.rs`.
//!
//! What no clock can help against, a process that is stopped between asking and sending, the
//! daemons' rule does: an order of an older term than the largest seen is refused.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use tokio::sync::watch;

/// Now, on a clock that goes on while the machine sleeps.
pub(crate) fn boottime() -> Duration {
    // The clock exists on every Linux that this builds for; a zero would only end leadership.
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::MAX, Duration::from)
}

#[derive(Clone, Debug)]
enum Leadership {
    Leads {
        /// `None`: nobody else could.
        until: Option<Duration>,
    },
    Follows {
        leader: String,
    },
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Lead {
    leadership: Mutex<Leadership>,
    /// Grows when leadership comes or goes: streams of before end.
    era: watch::Sender<u64>,
}

impl Lead {
    /// The only coordinator there is.
    pub(crate) fn alone() -> Self {
        Self::with(Leadership::Leads { until: None })
    }

    /// One of several, and not the leader yet.
    pub(crate) fn follower() -> Self {
        Self::with(Leadership::Follows {
            leader: String::new(),
        })
    }

    fn with(leadership: Leadership) -> Self {
        Self {
            leadership: Mutex::new(leadership),
            era: watch::channel(0).0,
        }
    }

    fn leadership(&self) -> MutexGuard<'_, Leadership> {
        self.leadership
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// May anything be said for the cluster at this instant?
    pub(crate) fn holds(&self) -> bool {
        match *self.leadership() {
            Leadership::Leads { until: None } => true,
            Leadership::Leads { until: Some(until) } => boottime() < until,
            Leadership::Follows { .. } => false,
        }
    }

    /// Where the leader is, if it is known and elsewhere.
    pub(crate) fn leader(&self) -> String {
        match &*self.leadership() {
            Leadership::Leads { .. } => String::new(),
            Leadership::Follows { leader } => leader.clone(),
        }
    }

    /// Told when leadership comes or goes.
    pub(crate) fn era(&self) -> watch::Receiver<u64> {
        self.era.subscribe()
    }

    /// Leadership has come, and holds until then.
    pub(crate) fn begin(&self, until: Duration) {
        *self.leadership() = Leadership::Leads { until: Some(until) };
        self.era.send_modify(|era| *era += 1);
    }

    /// It holds longer.
    pub(crate) fn extend(&self, later: Duration) {
        if let Leadership::Leads { until: Some(until) } = &mut *self.leadership() {
            *until = later.max(*until);
        }
    }

    /// It is over, or another has it.
    pub(crate) fn follow(&self, now_leads: &str) {
        let mut leadership = self.leadership();
        let led = matches!(*leadership, Leadership::Leads { .. });
        *leadership = Leadership::Follows {
            leader: now_leads.to_owned(),
        };
        drop(leadership);
        if led {
            self.era.send_modify(|era| *era += 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leadership_ends_by_itself_at_its_instant() {
        let lead = Lead::follower();
        assert!(!lead.holds());
        lead.begin(boottime() + Duration::from_secs(3600));
        assert!(lead.holds());
        lead.follow("other:7471");
        assert!(!lead.holds());
        assert_eq!(lead.leader(), "other:7471");
        lead.begin(boottime().saturating_sub(Duration::from_nanos(1)));
        assert!(!lead.holds(), "an instant that has passed");
        let _ = lead.era();
        assert!(Lead::alone().holds());
    }
}
