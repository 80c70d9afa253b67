//! Slots for connections, with a maximum in total and for each holder.
//!
//! A new connection gets a slot even if all are taken, so that idle connections do not shut it out.
//! The oldest slot is taken from
//! 1. the new connection's own holder, if that holder has its share already;
//! 2. otherwise the holder that has the most slots and is not privileged.
//!
//! A privileged holder, such as root, loses slots only to itself.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// The slots of one listener. Clones share them.
#[derive(Debug)]
pub struct ConnectionSlots<H> {
    held: Arc<Mutex<HeldSlots<H>>>,
    max: usize,
    per_holder_max: usize,
}

impl<H> Clone for ConnectionSlots<H> {
    fn clone(&self) -> Self {
        Self { held: Arc::clone(&self.held), ..*self }
    }
}

#[derive(Debug)]
struct HeldSlots<H> {
    next: u64,
    /// The held slots by number.
    slots: BTreeMap<u64, HeldSlot<H>>,
}

#[derive(Debug)]
struct HeldSlot<H> {
    holder: H,
    is_privileged: bool,
    /// A number that grows with each slot that is taken or renewed.
    age: u64,
    /// The sender whose drop resolves [`ConnectionSlot::lost`].
    _keep: oneshot::Sender<()>,
}

/// A slot that is held until this is dropped, or until a new connection takes the slot.
#[derive(Debug)]
pub struct ConnectionSlot<H> {
    held: Arc<Mutex<HeldSlots<H>>>,
    number: u64,
    lost: oneshot::Receiver<()>,
}

fn lock<H>(held: &Mutex<HeldSlots<H>>) -> MutexGuard<'_, HeldSlots<H>> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<H: Clone + Ord> ConnectionSlots<H> {
    /// Makes `max` slots. A holder that is not privileged has at most `per_holder_max`.
    pub fn new(max: usize, per_holder_max: usize) -> Self {
        Self {
            held: Arc::new(Mutex::new(HeldSlots { next: 0, slots: BTreeMap::new() })),
            max,
            per_holder_max,
        }
    }

    /// Takes a slot for `holder`, perhaps from another holder as the module says. Returns `None` if
    /// other holders, all of them privileged, have all slots.
    pub fn take(&self, holder: H, is_privileged: bool) -> Option<ConnectionSlot<H>> {
        let mut held = lock(&self.held);
        let has = held.count(&holder);
        if !is_privileged && has >= self.per_holder_max {
            held.end_oldest(&holder);
        } else if held.slots.len() >= self.max {
            match held.largest() {
                Some(largest) => held.end_oldest(&largest),
                None if is_privileged && has > 0 => held.end_oldest(&holder),
                None => return None,
            }
        }
        let (keep, lost) = oneshot::channel();
        let number = held.stamp();
        let holding = HeldSlot { holder, is_privileged, age: number, _keep: keep };
        held.slots.insert(number, holding);
        Some(ConnectionSlot { held: Arc::clone(&self.held), number, lost })
    }

    /// Takes a slot for `holder` only if one is free. Otherwise returns `None`.
    pub fn take_free(&self, holder: H) -> Option<ConnectionSlot<H>> {
        let held = lock(&self.held);
        let has_room = held.slots.len() < self.max && held.count(&holder) < self.per_holder_max;
        drop(held);
        has_room.then(|| self.take(holder, false)).flatten()
    }

    /// Makes slot `number` the newest, if it is still held.
    pub fn renew(&self, number: u64) {
        let mut held = lock(&self.held);
        let age = held.stamp();
        if let Some(holding) = held.slots.get_mut(&number) {
            holding.age = age;
        }
    }

    /// Returns the number of slots that are held.
    pub fn len(&self) -> usize {
        lock(&self.held).slots.len()
    }

    /// Reports whether no slot is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<H: Clone + Ord> HeldSlots<H> {
    fn stamp(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn count(&self, holder: &H) -> usize {
        let of = |holding: &&HeldSlot<H>| holding.holder == *holder;
        self.slots.values().filter(of).count()
    }

    fn end_oldest(&mut self, holder: &H) {
        let oldest = self
            .slots
            .iter()
            .filter(|(_, holding)| holding.holder == *holder)
            .min_by_key(|(_, holding)| holding.age)
            .map(|(number, _)| *number);
        if let Some(number) = oldest {
            self.slots.remove(&number);
        }
    }

    /// Returns the holder with the most slots among those that are not privileged. Among equals, it
    /// is the one with the oldest slot.
    fn largest(&self) -> Option<H> {
        let mut holders: BTreeMap<&H, (usize, u64)> = BTreeMap::new();
        for holding in self.slots.values().filter(|h| !h.is_privileged) {
            let (count, oldest) = holders.entry(&holding.holder).or_insert((0, u64::MAX));
            *count += 1;
            *oldest = (*oldest).min(holding.age);
        }
        holders
            .into_iter()
            .max_by_key(|(_, (count, oldest))| (*count, Reverse(*oldest)))
            .map(|(holder, _)| holder.clone())
    }
}

impl<H> ConnectionSlot<H> {
    /// Returns once the slot is lost. The caller then closes the connection.
    pub async fn lost(&mut self) {
        // The only event is that the sender is dropped with the entry.
        let _ = (&mut self.lost).await;
    }

    /// Returns the number of the slot, for [`ConnectionSlots::renew`].
    pub const fn number(&self) -> u64 {
        self.number
    }
}

impl<H> Drop for ConnectionSlot<H> {
    fn drop(&mut self) {
        lock(&self.held).slots.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reports whether `slot` is lost now.
    fn is_lost(slot: &mut ConnectionSlot<u32>) -> bool {
        slot.lost.try_recv() == Err(oneshot::error::TryRecvError::Closed)
    }

    #[test]
    fn a_newcomer_takes_the_oldest_place_of_the_holder_with_the_most() {
        let slots = ConnectionSlots::new(4, 4);
        let mut one = slots.take(1, false).expect("a slot");
        let mut two: Vec<_> = (0..3).filter_map(|_| slots.take(2, false)).collect();
        let mut three = slots.take(3, false).expect("a slot");
        assert!(is_lost(&mut two[0]) && !is_lost(&mut two[1]) && !is_lost(&mut one));
        slots.renew(two[1].number());
        let mut four = slots.take(4, false).expect("a slot");
        assert!(is_lost(&mut two[2]) && !is_lost(&mut two[1]));
        assert!(!is_lost(&mut three) && !is_lost(&mut four));
        assert_eq!(slots.len(), 4);
        drop((one, two, three, four));
        assert!(slots.is_empty());
    }

    #[test]
    fn a_holder_has_its_share_and_takes_from_itself_only() {
        let slots = ConnectionSlots::new(100, 2);
        let mut other = slots.take(7, false).expect("a slot");
        let mut own: Vec<_> = (0..5).filter_map(|_| slots.take(1, false)).collect();
        assert_eq!(slots.len(), 3);
        assert!(own[..3].iter_mut().all(is_lost) && !own[3..].iter_mut().any(is_lost));
        assert!(!is_lost(&mut other));
    }

    #[test]
    fn a_free_place_costs_nobody_one() {
        let slots = ConnectionSlots::new(3, 2);
        let mut own: Vec<_> = (0..3).filter_map(|_| slots.take_free(1)).collect();
        let _other = slots.take_free(2).expect("a slot");
        assert!(slots.take_free(3).is_none(), "all are taken");
        assert!(own.len() == 2 && !own.iter_mut().any(is_lost));
    }

    #[test]
    fn a_privileged_holder_always_has_a_place_and_loses_none_to_others() {
        let slots = ConnectionSlots::new(3, 2);
        let others: Vec<_> = (10..13).filter_map(|uid| slots.take(uid, false)).collect();
        let mut root: Vec<_> = (0..3).filter_map(|_| slots.take(0, true)).collect();
        assert_eq!((others.len(), root.len(), slots.len()), (3, 3, 3));
        assert!(slots.take(10, false).is_none(), "root has them all");
        let last = slots.take(0, true);
        assert!(last.is_some() && is_lost(&mut root[0]) && !is_lost(&mut root[1]));
    }
}
