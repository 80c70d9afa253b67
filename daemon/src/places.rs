//! Places of attached clients, with the limits per user, for root, and by open files.
//!
//! No user, and so no process, can take all places. Otherwise other users would run unscheduled,
//! and so would the tools that root starts to find out why.

use std::collections::BTreeMap;

use thiserror::Error;

use crate::clients::ClientId;
use crate::config::SchedulerConfig;

/// Why there is no place, as text for the operator.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NoFreeSlot {
    #[error(
        "{attached} clients are attached, which is the maximum; raise `clients_max` of [scheduler] \
         in the configuration, then run `laxity reload`"
    )]
    Full { attached: usize },
    #[error(
        "{attached} clients are attached, and the limit of open files allows no more; raise \
         `LimitNOFILE` of the unit (`ulimit -n`), then restart laxityd"
    )]
    Descriptors { attached: usize },
    #[error(
        "user {uid} has {attached} clients attached, the maximum for one user; raise \
         `clients_per_uid_max` of [scheduler] in the configuration, then run `laxity reload`"
    )]
    Share { uid: u32, attached: usize },
    #[error(
        "{attached} clients are attached, and the last {reserve} places are reserved for root; \
         raise `clients_max` of [scheduler] in the configuration, then run `laxity reload`"
    )]
    Reserved { attached: usize, reserve: usize },
}

/// The taken places, each with its user, and the limit by open files.
#[derive(Debug)]
pub struct ClientSlots {
    next: u64,
    taken: BTreeMap<ClientId, u32>,
    /// Maximum number of clients that the limit of open files allows.
    room: usize,
}

impl ClientSlots {
    pub const fn new(room: usize) -> Self {
        Self { next: 1, taken: BTreeMap::new(), room }
    }

    pub fn taken(&self) -> usize {
        self.taken.len()
    }

    pub fn take(&mut self, uid: u32, limits: &SchedulerConfig) -> Result<ClientId, NoFreeSlot> {
        let attached = self.taken.len();
        if attached >= self.room {
            return Err(NoFreeSlot::Descriptors { attached });
        }
        if attached >= limits.clients_max {
            return Err(NoFreeSlot::Full { attached });
        }
        if uid != 0 {
            let own = self.taken.values().filter(|of| **of == uid).count();
            if own >= limits.clients_per_uid() {
                return Err(NoFreeSlot::Share { uid, attached: own });
            }
            let max = limits.clients_max.min(self.room);
            let reserve = SchedulerConfig::root_reserve(max);
            if attached >= max - reserve {
                return Err(NoFreeSlot::Reserved { attached, reserve });
            }
        }
        let id = ClientId(self.next);
        self.next += 1;
        self.taken.insert(id, uid);
        Ok(id)
    }

    pub fn free(&mut self, id: ClientId) {
        self.taken.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(clients_max: usize) -> SchedulerConfig {
        SchedulerConfig { clients_max, ..SchedulerConfig::default() }
    }

    fn fill(places: &mut ClientSlots, uid: u32, limits: &SchedulerConfig) -> (usize, NoFreeSlot) {
        for taken in 0.. {
            if let Err(why) = places.take(uid, limits) {
                return (taken, why);
            }
        }
        unreachable!("it never ends")
    }

    #[test]
    fn a_user_has_its_share_all_users_leave_root_its_reserve_and_root_has_the_rest() {
        let (mut places, limits) = (ClientSlots::new(10_000), limits(256));
        let (first, why) = fill(&mut places, 7, &limits);
        assert_eq!(first, 128);
        assert_eq!(why, NoFreeSlot::Share { uid: 7, attached: 128 });
        let (second, why) = fill(&mut places, 8, &limits);
        assert_eq!(second, 112);
        assert_eq!(why, NoFreeSlot::Reserved { attached: 240, reserve: 16 });
        let (root, why) = fill(&mut places, 0, &limits);
        assert_eq!((root, why), (16, NoFreeSlot::Full { attached: 256 }));
        places.free(ClientId(1));
        assert!(places.take(8, &limits).is_err(), "it is root's");
        assert!(places.take(0, &limits).is_ok());
    }

    #[test]
    fn the_limit_of_open_files_counts_and_leaves_root_its_reserve_too() {
        let (mut places, limits) = (ClientSlots::new(8), limits(256));
        assert_eq!(fill(&mut places, 7, &limits).0, 7);
        let (root, why) = fill(&mut places, 0, &limits);
        assert_eq!((root, why), (1, NoFreeSlot::Descriptors { attached: 8 }));
    }

    #[test]
    fn a_single_place_is_anybodys() {
        let (mut places, limits) = (ClientSlots::new(8), limits(1));
        assert!(places.take(7, &limits).is_ok());
    }
}
