//! Whether this coordinator leads the cluster, and until when.
//!
//! With an election (`election.rs`), leadership is a lease that ends at a known instant. Every
//! order is checked against that instant before it is sent. The clock is `CLOCK_BOOTTIME`: it is
//! monotonic, nobody can set it, and it runs while the machine is suspended. `election.rs` explains
//! why the instant is early enough.
//!
//! A process may be stopped between the check and the send. For this case the daemons have a rule:
//! they refuse an order of an older term than the largest that they saw.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use parking_lot::Mutex;
use tokio::sync::watch;

/// Returns the current time of a clock that runs while the machine is suspended.
pub(crate) fn boottime() -> Duration {
    // Every supported Linux has this clock. If it fails, leadership ends.
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::MAX, Duration::from)
}

#[derive(Clone, Debug)]
enum Leadership {
    Leads {
        /// The instant at which leadership ends. `None`: there is no election, so it never ends.
        until: Option<Duration>,
    },
    Follows {
        leader: String,
    },
}

#[derive(Debug)]
pub(crate) struct Lead {
    leadership: Mutex<Leadership>,
    /// Grows when leadership begins or ends, so that earlier streams end.
    era: watch::Sender<u64>,
}

impl Lead {
    /// Returns the state of a coordinator without an election, which always leads.
    pub(crate) fn alone() -> Self {
        Self::with(Leadership::Leads { until: None })
    }

    /// Returns the state of one of several coordinators, which does not lead yet.
    pub(crate) fn follower() -> Self {
        Self::with(Leadership::Follows { leader: String::new() })
    }

    fn with(leadership: Leadership) -> Self {
        Self { leadership: Mutex::new(leadership), era: watch::channel(0).0 }
    }

    pub(crate) fn holds(&self) -> bool {
        match *self.leadership.lock() {
            Leadership::Leads { until: None } => true,
            Leadership::Leads { until: Some(until) } => boottime() < until,
            Leadership::Follows { .. } => false,
        }
    }

    /// Returns the address of the leader. It is empty if it is unknown or if this coordinator
    /// leads.
    pub(crate) fn leader(&self) -> String {
        match &*self.leadership.lock() {
            Leadership::Leads { .. } => String::new(),
            Leadership::Follows { leader } => leader.clone(),
        }
    }

    /// Returns a receiver that is notified when leadership begins or ends.
    pub(crate) fn era(&self) -> watch::Receiver<u64> {
        self.era.subscribe()
    }

    pub(crate) fn begin(&self, until: Duration) {
        *self.leadership.lock() = Leadership::Leads { until: Some(until) };
        self.era.send_modify(|era| *era += 1);
    }

    pub(crate) fn extend(&self, later: Duration) {
        if let Leadership::Leads { until: Some(until) } = &mut *self.leadership.lock() {
            *until = later.max(*until);
        }
    }

    /// Ends leadership. `now_leads` is the new leader's address, or empty if it is unknown.
    pub(crate) fn follow(&self, now_leads: &str) {
        let mut leadership = self.leadership.lock();
        let led = matches!(*leadership, Leadership::Leads { .. });
        *leadership = Leadership::Follows { leader: now_leads.to_owned() };
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
