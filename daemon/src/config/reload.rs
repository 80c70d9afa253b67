//! The keys that a reload changes, and those that need a restart: what is bound, mapped or counted
//! by name at the start.

use arc_swap::ArcSwap;

use super::{AccessConfig, Config, ConfigInForce, CoordinatorConfig, NicConfig, SchedulerConfig};

impl Config {
    /// Puts this configuration in force, for those that follow it.
    pub fn into_force(self) -> ConfigInForce {
        ConfigInForce::new(ArcSwap::from_pointee(self))
    }

    /// Returns the keys that differ from `running` and need a restart.
    pub fn needs_restart(&self, running: &Self) -> Vec<&'static str> {
        let reloaded = self.reloaded_over(running);
        let (access, kept_access) = (&self.access, &reloaded.access);
        let keeps_nics = self.is_discovered_like(running) || self.has_nics_of(running);
        let keys = [
            ("socket", self.socket != reloaded.socket),
            ("control", self.control != reloaded.control),
            ("metrics", self.metrics != reloaded.metrics),
            ("web", self.web != reloaded.web),
            ("log_format", self.log_format != reloaded.log_format),
            ("scheduler.cpu", self.scheduler.cpu != reloaded.scheduler.cpu),
            ("access.socket_mode", access.socket_mode != kept_access.socket_mode),
            ("access.control_mode", access.control_mode != kept_access.control_mode),
            ("coordinator (all but order_age_limit)", self.coordinator != reloaded.coordinator),
            ("nic (names, addresses and their number)", !keeps_nics),
        ];
        keys.into_iter().filter_map(|(key, differs)| differs.then_some(key)).collect()
    }

    fn has_nics_of(&self, other: &Self) -> bool {
        let what = |nic: &NicConfig| (nic.name.clone(), nic.addresses.clone());
        self.nic.iter().map(what).eq(other.nic.iter().map(what))
    }

    const fn is_discovered_like(&self, running: &Self) -> bool {
        self.discovered.is_some() && running.discovered.is_some()
    }

    /// Returns the configuration after a reload: this one, with `running`'s values of keys that
    /// need a restart.
    pub fn reloaded_over(&self, running: &Self) -> Self {
        // NICs that were discovered keep their order, which may differ from that of a new start.
        let is_own = self.has_nics_of(running) && !self.is_discovered_like(running);
        let nics = if is_own { self } else { running };
        Self {
            socket: running.socket.clone(),
            control: running.control.clone(),
            metrics: running.metrics.clone(),
            web: running.web.clone(),
            log_format: running.log_format,
            scheduler: SchedulerConfig { cpu: running.scheduler.cpu, ..self.scheduler.clone() },
            access: AccessConfig {
                socket_mode: running.access.socket_mode,
                control_mode: running.access.control_mode,
                ..self.access.clone()
            },
            coordinator: CoordinatorConfig {
                order_age_limit: self.coordinator.order_age_limit,
                ..running.coordinator.clone()
            },
            nic: nics.nic.clone(),
            discovered: nics.discovered.clone(),
            ..self.clone()
        }
    }
}
