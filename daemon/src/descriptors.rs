//! The budget of file descriptors.
//!
//! An operator's connection must always find a descriptor, and so must the files that its command
//! opens (a configuration, a marker). So everything that takes descriptors is bounded, and the sum
//! of the bounds is below the limit of open files.

use laxity_listen::{http::HttpLimits, page};

use crate::{control, registration};

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
fn reserve(has_page: bool) -> usize {
    let page = if has_page { page::LIMITS.connections_max } else { 0 };
    OWN + control::CONNECTIONS_MAX
        + HttpLimits::METRICS.connections_max
        + page
        + registration::PENDING_MAX
}

/// Returns the number of clients that a limit of open files allows beside the web page, if there is
/// one.
pub fn room_within(limit: usize, has_page: bool) -> Result<usize, TooFew> {
    let reserve = reserve(has_page);
    match limit.saturating_sub(reserve) / PER_CLIENT {
        0 => Err(TooFew { limit, needed: reserve + PER_CLIENT }),
        room => Ok(room),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_number_of_clients_fits_the_limit_that_linux_has_for_services() {
        // The kernel's soft default is 1024, and its hard one 4096. systemd's hard one is far
        // higher.
        assert!(room_within(4096, true).is_ok_and(|room| room > 1000));
        assert!(room_within(1024, false).is_ok_and(|room| room >= 256));
        for has_page in [false, true] {
            let too_few = room_within(64, has_page).expect_err("not even for itself");
            assert!(room_within(too_few.needed, has_page).is_ok_and(|room| room == 1));
            assert!(room_within(too_few.needed - 1, has_page).is_err());
        }
    }
}
