//! Descriptors: so many for clients that enough are left for everything else.
//!
//! Whatever clients, scrapers and strangers do, an operator's connection must find a descriptor,
//! and so must what it asks for (a configuration to read, a marker to write). So all who can take
//! descriptors are bounded, and the sum of the bounds is below the limit of open files.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tracing::warn;

use crate::{control, registration};
use laxity_listen::http::Limits;

/// Of one client: its socket, its memory, its eventfd.
const PER_CLIENT: usize = 3;
/// Of the daemon itself: listeners, locks, epoll, the coordinator, files that it reads.
const OWN: usize = 48;

/// The limit of open files is too low for the daemon alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooFew {
    /// The limit.
    pub limit: usize,
    /// What is needed for the daemon and one client.
    pub needed: usize,
}

/// Descriptors that are not for attached clients.
fn reserve() -> usize {
    OWN + control::CONNECTIONS_MAX + Limits::METRICS.connections_max + registration::PENDING_MAX
}

/// Raises the limit of open files as far as this process may, and gives the number of clients that
/// it leaves room for.
///
/// # Errors
/// There is no room for one.
pub fn room_for_clients() -> Result<usize, TooFew> {
    let limit = match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((soft, hard)) if soft < hard => {
            let raised = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
            raised.map_or(soft, |()| hard)
        }
        Ok((soft, _)) => soft,
        // The unit's filter of system calls may forbid the question, which /proc answers, too.
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

/// The soft limit of open files in the text of `/proc/PID/limits`.
fn soft_limit(limits: &str) -> Option<u64> {
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

fn room_within(limit: usize) -> Result<usize, TooFew> {
    match limit.saturating_sub(reserve()) / PER_CLIENT {
        0 => Err(TooFew {
            limit,
            needed: reserve() + PER_CLIENT,
        }),
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
        // The kernel's own: 1024, and 4096 as the hard one. systemd's hard one is far above.
        assert!(room_within(4096).is_ok_and(|room| room > 1000));
        assert!(room_within(1024).is_ok_and(|room| room >= 256));
        let too_few = room_within(64).expect_err("not even for itself");
        assert!(room_within(too_few.needed).is_ok_and(|room| room == 1));
        assert!(room_within(too_few.needed - 1).is_err());
    }
}
