//! The budget of file descriptors.
//!
//! An operator's connection must always find a descriptor, and so must the files that its command
//! opens (a configuration, a marker). So everything that takes descriptors is bounded, and the sum
//! of the bounds is below the limit of open files.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tracing::warn;

use crate::{control, registration};
use laxity_listen::http::HttpLimits;

/// Descriptors of one client: its socket, its memory and its eventfd.
const PER_CLIENT: usize = 3;
/// Descriptors of the daemon itself: listeners, locks, epoll, the coordinator and files.
const OWN: usize = 48;

/// The limit of open files is too low for the daemon alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooFew {
    pub limit: usize,
    /// The descriptors that the daemon and one client need.
    pub needed: usize,
}

/// Returns the number of descriptors that are not for attached clients.
fn reserve() -> usize {
    OWN + control::CONNECTIONS_MAX + HttpLimits::METRICS.connections_max + registration::PENDING_MAX
}

/// Raises the limit of open files as far as possible and returns the number of clients it allows.
///
/// # Errors
/// The limit leaves no room for one client.
pub fn room_for_clients() -> Result<usize, TooFew> {
    let limit = match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((soft, hard)) if soft < hard => {
            let raised = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
            raised.map_or(soft, |()| hard)
        }
        Ok((soft, _)) => soft,
        // The unit's filter of system calls may forbid `getrlimit`. `/proc` has the same answer.
        Err(error) => std::fs::read_to_string("/proc/self/limits")
            .ok()
            .and_then(|limits| soft_limit(&limits))
            .unwrap_or_else(|| {
                warn!(%error, "cannot read the limit of open files; 1024 is assumed");
                1024
            }),
    };
    room_within(usize::try_from(limit).unwrap_or(usize::MAX))
}

/// Returns the soft limit of open files from the text of `/proc/PID/limits`.
fn soft_limit(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

fn room_within(limit: usize) -> Result<usize, TooFew> {
    match limit.saturating_sub(reserve()) / PER_CLIENT {
        0 => Err(TooFew { limit, needed: reserve() + PER_CLIENT }),
        room => Ok(room),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_has_the_limit_that_the_system_call_gives() {
        let limits = std::fs::read_to_string("/proc/self/limits").expect("Linux has it");
        let (soft, _) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
        assert_eq!(soft_limit(&limits), Some(soft));
    }

    #[test]
    fn the_default_number_of_clients_fits_the_limit_that_linux_has_for_services() {
        // The kernel's soft default is 1024, and its hard one 4096. systemd's hard one is far
        // higher.
        assert!(room_within(4096).is_ok_and(|room| room > 1000));
        assert!(room_within(1024).is_ok_and(|room| room >= 256));
        let too_few = room_within(64).expect_err("not even for itself");
        assert!(room_within(too_few.needed).is_ok_and(|room| room == 1));
        assert!(room_within(too_few.needed - 1).is_err());
    }
}
