//! Follows the NICs and the rates that the configuration leaves to the kernel.

use std::path::Path;
use std::sync::Arc;

use tracing::{info, warn};

use super::Service;
use crate::config::{Config, NicConfig};

impl Service {
    /// Reads the NICs and rates that the configuration leaves to the kernel below `root`, and
    /// applies what changed.
    pub(crate) fn follow_nics(&self, root: &Path) {
        let before = self.config();
        let mut read = Config::clone(&before);
        // A driver may take long to answer, so the lock is not held.
        read.find_nics(root);
        read.read_rates(root);
        let state = self.state.lock();
        // If the configuration was reloaded meanwhile, the next look applies the changes.
        if read == *before || !Arc::ptr_eq(&before, &self.config()) {
            return;
        }
        if read.nic == before.nic {
            self.config.store(Arc::new(read));
            return;
        }
        self.put_in_force(Arc::new(read.clone()));
        drop(state);
        let mut known = before.nic.iter();
        for nic in &read.nic {
            log_change(known.next(), nic);
        }
    }
}

fn log_change(before: Option<&NicConfig>, now: &NicConfig) {
    let (nic, bytes_per_s) = (&now.name, now.rate.bytes_per_s);
    match before {
        None if !now.rate.is_known() => {
            warn!(nic, bytes_per_s, "a NIC was added; the kernel does not know its rate yet");
        }
        None => info!(nic, bytes_per_s, "a NIC was added"),
        Some(before) if before.name != *nic => {
            info!(nic, before = before.name, bytes_per_s, "a NIC has its own name now");
        }
        Some(before) if now.absent && !before.absent => {
            warn!(nic, "a NIC is gone; its flows go out unscheduled until it returns");
        }
        Some(before) if before.absent && !now.absent => info!(nic, bytes_per_s, "a NIC is back"),
        Some(before) if before.rate != now.rate => {
            info!(nic, bytes_per_s, "the rate of a NIC changed");
        }
        Some(_) => {}
    }
}
