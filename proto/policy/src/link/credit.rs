//! What a port can take ahead of permits, for credit (architecture §3).

use laxity_types::{FlowId, Level, Stage};

use super::Link;
use crate::event::FlowSpec;
use crate::time::Time;

impl Link {
    /// Returns the level of credit: that of a lone collective whose batch is unknown.
    pub fn credit_level(&self, now: Time) -> Level {
        let name = FlowId(u64::MAX);
        self.level_alone(now, &FlowSpec::anonymous(name, Stage::Collective, 1))
    }

    /// Returns how many bytes of collectives the port can take ahead of any permit. This is the
    /// rest of the window, or zero while a flow of their rank or better, or a starved flow, waits.
    pub fn credit_allowance(&self) -> u64 {
        if !self.starved.is_empty() {
            return 0;
        }
        match self.port.queues.first() {
            Some((rank, _)) if rank <= self.discipline.credit_bar() => 0,
            _ => {
                let level = self.collective_level.unwrap_or(Level::SCAVENGER);
                self.port.config.window_bytes.saturating_sub(self.port.in_flight.at_or_above(level))
            }
        }
    }

    /// Returns how many bytes of any stage the port can take ahead of any permit. This is the rest
    /// of the window while no flow waits. It is for flows whose traffic class is fixed, see
    /// [`FlowSpec::whole`]. Their level is [`Link::level_alone`].
    pub fn idle_allowance(&self) -> u64 {
        if self.waiting != 0 {
            return 0;
        }
        self.port.config.window_bytes.saturating_sub(self.port.in_flight.all)
    }
}
