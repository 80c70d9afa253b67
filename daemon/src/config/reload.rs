//! What a reload takes, and what it leaves for a restart: whatever is bound, mapped or counted by
//! name from the start on.

use super::{AccessConfig, Config, CoordinatorConfig, SchedulerConfig};

impl Config {
    /// What differs from `running` and only takes effect after a restart, by key.
    #[must_use]
    pub fn needs_restart(&self, running: &Self) -> Vec<&'static str> {
        let mut keys = Vec::new();
        let mut differs = |key, differs| {
            if differs {
                keys.push(key);
            }
        };
        differs("socket", self.socket != running.socket);
        differs("control", self.control != running.control);
        differs("metrics", self.metrics != running.metrics);
        differs("log_format", self.log_format != running.log_format);
        differs("scheduler.cpu", self.scheduler.cpu != running.scheduler.cpu);
        differs(
            "access.socket_mode",
            self.access.socket_mode != running.access.socket_mode,
        );
        differs(
            "access.control_mode",
            self.access.control_mode != running.access.control_mode,
        );
        let dialled = |config: &Self| CoordinatorConfig {
            order_age_limit: self.coordinator.order_age_limit,
            ..config.coordinator.clone()
        };
        differs(
            "coordinator (all but order_age_limit)",
            dialled(self) != dialled(running),
        );
        differs(
            "nic (names and their number)",
            !self
                .nic
                .iter()
                .map(|n| &n.name)
                .eq(running.nic.iter().map(|n| &n.name)),
        );
        keys
    }

    /// This configuration with what needs a restart taken from `running`: what holds after a
    /// reload.
    #[must_use]
    pub fn reloaded_over(&self, running: &Self) -> Self {
        let same_nics = self
            .nic
            .iter()
            .map(|n| &n.name)
            .eq(running.nic.iter().map(|n| &n.name));
        Self {
            socket: running.socket.clone(),
            control: running.control.clone(),
            metrics: running.metrics.clone(),
            log_format: running.log_format,
            scheduler: SchedulerConfig {
                cpu: running.scheduler.cpu,
                ..self.scheduler.clone()
            },
            access: AccessConfig {
                socket_mode: running.access.socket_mode,
                control_mode: running.access.control_mode,
                ..self.access.clone()
            },
            coordinator: CoordinatorConfig {
                order_age_limit: self.coordinator.order_age_limit,
                ..running.coordinator.clone()
            },
            nic: if same_nics {
                self.nic.clone()
            } else {
                running.nic.clone()
            },
            ..self.clone()
        }
    }
}
