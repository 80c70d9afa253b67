//! Places for those who connect: so many in total, and so many for one holder.
//!
//! A newcomer gets a place even if all are taken, since whoever connects idly and early must not
//! shut others out. What makes room for it is the oldest place of
//! 1. the newcomer's own holder, if that holder has its share already;
//! 2. otherwise the holder that has the most, the privileged ones apart.
//!
//! Places of a privileged holder (root, say) make room only for the same holder's.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// See the module. Cheap to clone; clones share the places.
#[derive(Debug)]
pub struct Places<H> {
    held: Arc<Mutex<Held<H>>>,
    max: usize,
    per_holder_max: usize,
}

impl<H> Clone for Places<H> {
    fn clone(&self) -> Self {
        Self {
            held: Arc::clone(&self.held),
            ..*self
        }
    }
}

#[derive(Debug)]
struct Held<H> {
    next: u64,
    /// By number.
    places: BTreeMap<u64, Holding<H>>,
}

#[derive(Debug)]
struct Holding<H> {
    holder: H,
    is_privileged: bool,
    /// Grows with each place that is taken or renewed.
    age: u64,
    /// Resolves the place's [`Place::lost`] when dropped.
    _keep: oneshot::Sender<()>,
}

/// A place that is held until this is dropped, or lost to a newcomer.
#[derive(Debug)]
pub struct Place<H> {
    held: Arc<Mutex<Held<H>>>,
    number: u64,
    lost: oneshot::Receiver<()>,
}

fn lock<H>(held: &Mutex<Held<H>>) -> MutexGuard<'_, Held<H>> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<H: Clone + Ord> Places<H> {
    /// `max` places, of which a holder that is not privileged has at most `per_holder_max`.
    #[must_use]
    pub fn new(max: usize, per_holder_max: usize) -> Self {
        Self {
            held: Arc::new(Mutex::new(Held {
                next: 0,
                places: BTreeMap::new(),
            })),
            max,
            per_holder_max,
        }
    }

    /// A place for `holder`. Somebody may lose one for it; see the module. `None` if privileged
    /// holders have all places and `holder` is not one.
    #[must_use]
    pub fn take(&self, holder: H, is_privileged: bool) -> Option<Place<H>> {
        let mut held = lock(&self.held);
        let has = held.count(&holder);
        if !is_privileged && has >= self.per_holder_max {
            held.end_oldest(&holder);
        } else if held.places.len() >= self.max {
            match held.largest() {
                Some(largest) => held.end_oldest(&largest),
                None if is_privileged && has > 0 => held.end_oldest(&holder),
                None => return None,
            }
        }
        let (keep, lost) = oneshot::channel();
        let number = held.stamp();
        let holding = Holding {
            holder,
            is_privileged,
            age: number,
            _keep: keep,
        };
        held.places.insert(number, holding);
        Some(Place {
            held: Arc::clone(&self.held),
            number,
            lost,
        })
    }

    /// A place for `holder` that nobody loses one for; `None` if there is none.
    #[must_use]
    pub fn take_free(&self, holder: H) -> Option<Place<H>> {
        let held = lock(&self.held);
        let has_room = held.places.len() < self.max && held.count(&holder) < self.per_holder_max;
        drop(held);
        has_room.then(|| self.take(holder, false)).flatten()
    }

    /// Makes place `number` the newest, if it is still held.
    pub fn renew(&self, number: u64) {
        let mut held = lock(&self.held);
        let age = held.stamp();
        if let Some(holding) = held.places.get_mut(&number) {
            holding.age = age;
        }
    }

    /// Places that are held now.
    #[must_use]
    pub fn len(&self) -> usize {
        lock(&self.held).places.len()
    }

    /// Whether none is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<H: Clone + Ord> Held<H> {
    fn stamp(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn count(&self, holder: &H) -> usize {
        let of = |holding: &&Holding<H>| holding.holder == *holder;
        self.places.values().filter(of).count()
    }

    fn end_oldest(&mut self, holder: &H) {
        let oldest = self
            .places
            .iter()
            .filter(|(_, holding)| holding.holder == *holder)
            .min_by_key(|(_, holding)| holding.age)
            .map(|(number, _)| *number);
        if let Some(number) = oldest {
            self.places.remove(&number);
        }
    }

    /// The holder that has the most places, of those that are not privileged; of equals the one
    /// with the oldest place.
    fn largest(&self) -> Option<H> {
        let mut holders: BTreeMap<&H, (usize, u64)> = BTreeMap::new();
        for holding in self.places.values().filter(|h| !h.is_privileged) {
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

impl<H> Place<H> {
    /// Returns once the place is lost. The connection is then to be closed.
    pub async fn lost(&mut self) {
        // Nobody sends: the sender is dropped with the entry.
        let _ = (&mut self.lost).await;
    }

    /// Its number, for [`Places::renew`].
    #[must_use]
    pub const fn number(&self) -> u64 {
        self.number
    }
}

impl<H> Drop for Place<H> {
    fn drop(&mut self) {
        lock(&self.held).places.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether `place` was lost, now.
    fn is_lost(place: &mut Place<u32>) -> bool {
        place.lost.try_recv() == Err(oneshot::error::TryRecvError::Closed)
    }

    #[test]
    fn a_newcomer_takes_the_oldest_place_of_the_holder_with_the_most() {
        let places = Places::new(4, 4);
        let mut one = places.take(1, false).expect("a place");
        let mut two: Vec<_> = (0..3).filter_map(|_| places.take(2, false)).collect();
        let mut three = places.take(3, false).expect("a place");
        assert!(is_lost(&mut two[0]) && !is_lost(&mut two[1]) && !is_lost(&mut one));
        places.renew(two[1].number());
        let mut four = places.take(4, false).expect("a place");
        assert!(is_lost(&mut two[2]) && !is_lost(&mut two[1]));
        assert!(!is_lost(&mut three) && !is_lost(&mut four));
        assert_eq!(places.len(), 4);
        drop((one, two, three, four));
        assert!(places.is_empty());
    }

    #[test]
    fn a_holder_has_its_share_and_takes_from_itself_only() {
        let places = Places::new(100, 2);
        let mut other = places.take(7, false).expect("a place");
        let mut own: Vec<_> = (0..5).filter_map(|_| places.take(1, false)).collect();
        assert_eq!(places.len(), 3);
        assert!(own[..3].iter_mut().all(is_lost) && !own[3..].iter_mut().any(is_lost));
        assert!(!is_lost(&mut other));
    }

    #[test]
    fn a_free_place_costs_nobody_one() {
        let places = Places::new(3, 2);
        let mut own: Vec<_> = (0..3).filter_map(|_| places.take_free(1)).collect();
        let _other = places.take_free(2).expect("a place");
        assert!(places.take_free(3).is_none(), "all are taken");
        assert!(own.len() == 2 && !own.iter_mut().any(is_lost));
    }

    #[test]
    fn a_privileged_holder_always_has_a_place_and_loses_none_to_others() {
        let places = Places::new(3, 2);
        let others: Vec<_> = (10..13).filter_map(|uid| places.take(uid, false)).collect();
        let mut root: Vec<_> = (0..3).filter_map(|_| places.take(0, true)).collect();
        assert_eq!((others.len(), root.len(), places.len()), (3, 3, 3));
        assert!(places.take(10, false).is_none(), "root has them all");
        let last = places.take(0, true);
        assert!(last.is_some() && is_lost(&mut root[0]) && !is_lost(&mut root[1]));
    }
}
