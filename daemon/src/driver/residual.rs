//! Applies each port's rate in force, which foreign traffic and congestion leave (architecture
//! §4.6).

use std::sync::Arc;

use super::Driver;
use crate::config::{Config, ResidualMode};
use crate::stats::PortResidual;

impl Driver {
    /// Records the residual capacity of each port, and applies the rates in force.
    pub(super) fn apply_residuals(&mut self, residuals: &[Option<PortResidual>]) {
        for (port, residual) in self.intake.ports.iter_mut().zip(residuals) {
            port.residual = *residual;
        }
        let config = Arc::clone(&self.config);
        self.follow(&config);
    }

    /// Sets the rate of each port: the residual rate with `mode = "follow"`, else the full rate.
    pub(super) fn follow(&mut self, config: &Config) {
        let now = self.intake.now;
        for port in &mut self.intake.ports {
            let follows = config.residual.mode == ResidualMode::Follow;
            let left = port.residual.filter(|_| follows).map(|it| it.capacity.rate);
            port.set_rate(now, left.unwrap_or(u64::MAX));
        }
    }
}
