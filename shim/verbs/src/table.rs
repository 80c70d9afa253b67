//! Queue pairs by their number. Each post and each completion looks them up without a lock.

use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};
use std::collections::HashMap;
use std::time::Instant;

use laxity_ibverbs::{ibv_wc, ibv_wc_status};

use laxity_job::fork::{Leaked, PerProcess};
use parking_lot::Mutex;

use crate::bundle::barrier_place;
use crate::queue_pair::{END_PATIENCE, QueuePair, WorkCounts};

/// Number of entries of a page, and of pages. Queue pair numbers have 24 bits.
const PAGE: usize = 1 << 12;

type TablePage = [AtomicPtr<QueuePair>; PAGE];

/// The queue pairs of a context. Pages are made when first needed and never freed. Queue pairs are
/// never freed either, but used again. A thread that found one may therefore lock it and check
/// whether it is still the same.
#[derive(Debug)]
pub(crate) struct QueuePairTable {
    pages: [Leaked<TablePage>; PAGE],
    /// Numbers of destroyed queue pairs that had siblings, and of these, each with the number that
    /// the program knows. Not every provider removes the completions of a destroyed queue pair.
    ended: PerProcess<Mutex<HashMap<u32, u32>>>,
}

/// Queue pairs that can be used again.
static FREE: PerProcess<Mutex<Vec<&'static QueuePair>>> = PerProcess::none();

/// Made with this process's first alias, before the sibling gets work requests. Completions of
/// siblings may be left over when none is known any more.
static HAS_ALIASES: PerProcess<()> = PerProcess::none();

/// Reports whether completions may have the numbers of siblings.
#[inline]
pub(crate) fn has_aliases() -> bool {
    HAS_ALIASES.get().is_some()
}

static ALL: PerProcess<Mutex<Vec<&'static QueuePair>>> = PerProcess::none();

/// Returns the sum of all queue pairs' counters.
pub(crate) fn counts() -> WorkCounts {
    let mut sum = WorkCounts::default();
    let Some(all) = all().try_lock_for(END_PATIENCE) else { return sum };
    for queue_pair in all.iter() {
        let counts = queue_pair.counts();
        sum.posted += counts.posted;
        sum.posted_bytes += counts.posted_bytes;
        sum.completions += counts.completions;
    }
    sum
}

/// Reports all work requests that went ahead to the daemon, at the process's end. A queue pair that
/// another thread holds is left out, and so are all others after [`END_PATIENCE`].
pub(crate) fn report_all_ahead() {
    let give_up = Instant::now() + END_PATIENCE;
    let Some(all) = all().try_lock_for(END_PATIENCE) else { return };
    for queue_pair in all.iter() {
        queue_pair.report_ahead(give_up.saturating_duration_since(Instant::now()));
    }
}

fn all() -> &'static Mutex<Vec<&'static QueuePair>> {
    ALL.get_or_make(Mutex::default)
}

pub(crate) fn free() -> &'static Mutex<Vec<&'static QueuePair>> {
    FREE.get_or_make(Mutex::default)
}

impl QueuePairTable {
    pub(crate) const fn new() -> Self {
        Self { pages: [const { Leaked::none() }; PAGE], ended: PerProcess::none() }
    }

    #[inline]
    fn entry(&self, number: u32) -> Option<&AtomicPtr<QueuePair>> {
        let (page, at) = (number as usize / PAGE % PAGE, number as usize % PAGE);
        Some(&self.pages[page].get()?[at])
    }

    #[inline]
    pub(crate) fn find(&self, number: u32) -> Option<&'static QueuePair> {
        // SAFETY: the pointer is null or leads to a queue pair, which is never freed.
        unsafe { self.entry(number)?.load(Ordering::Acquire).as_ref() }
    }

    /// Returns the queue pair with this number, and creates it if there is none.
    pub(crate) fn make(&'static self, number: u32) -> &'static QueuePair {
        let page = &self.pages[number as usize / PAGE % PAGE];
        let empty = || [const { AtomicPtr::new(ptr::null_mut()) }; PAGE];
        let page = page.get().unwrap_or_else(|| page.make(empty));
        let entry = &page[number as usize % PAGE];
        // SAFETY: the pointer is null or leads to a queue pair, which is never freed.
        if let Some(there) = unsafe { entry.load(Ordering::Acquire).as_ref() } {
            return there;
        }
        self.begin(number);
        let fresh = free().lock().pop();
        let fresh = fresh.unwrap_or_else(|| {
            let made: &'static QueuePair = Box::leak(Box::new(QueuePair::new()));
            all().lock().push(made);
            made
        });
        entry.store(ptr::from_ref(fresh).cast_mut(), Ordering::Release);
        fresh
    }

    /// Makes a queue pair known by the number of a sibling, too.
    pub(crate) fn alias(&'static self, number: u32, queue_pair: &'static QueuePair) {
        self.begin(number);
        HAS_ALIASES.get_or_make(|| ());
        let page = &self.pages[number as usize / PAGE % PAGE];
        let empty = || [const { AtomicPtr::new(ptr::null_mut()) }; PAGE];
        let page = page.get().unwrap_or_else(|| page.make(empty));
        let entry = ptr::from_ref(queue_pair).cast_mut();
        page[number as usize % PAGE].store(entry, Ordering::Release);
    }

    /// Removes the number of a sibling, if the queue pair is still known by it.
    pub(crate) fn unalias(&self, number: u32, queue_pair: &'static QueuePair) {
        let Some(entry) = self.entry(number) else { return };
        let known = ptr::from_ref(queue_pair).cast_mut();
        let none = ptr::null_mut();
        // Otherwise another queue pair has the number.
        let _ = entry.compare_exchange(known, none, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Records that a queue pair and its siblings are destroyed.
    pub(crate) fn end(&'static self, first: u32, siblings: &[u32]) {
        let mut ended = self.ended.get_or_make(Mutex::default).lock();
        ended.extend(siblings.iter().chain([&first]).map(|number| (*number, first)));
    }

    /// Records that a new queue pair has this number.
    fn begin(&'static self, number: u32) {
        if let Some(ended) = self.ended.get() {
            ended.lock().remove(&number);
        }
    }

    /// Gives a completion of a destroyed sibling the number that the program knows. Returns false
    /// if it is a barrier's, which the program must not see.
    pub(crate) fn pass_ended(&'static self, wc: &mut ibv_wc) -> bool {
        let Some(ended) = self.ended.get() else { return true };
        let Some(first) = ended.lock().get(&wc.qp_num).copied() else { return true };
        wc.qp_num = first;
        wc.status == ibv_wc_status::IBV_WC_SUCCESS || barrier_place(wc.wr_id).is_none()
    }

    /// Removes the closed queue pair with this number.
    pub(crate) fn remove(&self, number: u32) {
        let Some(entry) = self.entry(number) else { return };
        let gone = entry.swap(ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: the pointer is null or leads to a queue pair, which is never freed.
        if let Some(gone) = unsafe { gone.as_ref() } {
            gone.recycle();
        }
    }

    /// Closes and removes all remaining queue pairs.
    pub(crate) fn close_all(&'static self) {
        if let Some(ended) = self.ended.get() {
            ended.lock().clear();
        }
        let mut closed: Vec<*const QueuePair> = Vec::new();
        for entry in self.pages.iter().filter_map(Leaked::get).flatten() {
            let left = entry.swap(ptr::null_mut(), Ordering::AcqRel);
            // SAFETY: the pointer is null or leads to a queue pair, which is never freed.
            let Some(left) = (unsafe { left.as_ref() }) else { continue };
            // A queue pair with siblings has several numbers.
            if closed.contains(&ptr::from_ref(left)) {
                continue;
            }
            if left.close() {
                closed.push(left);
            }
            left.recycle();
        }
    }

    /// Empties the table without accessing its queue pairs.
    pub(crate) fn forget_all(&self) {
        for entry in self.pages.iter().filter_map(Leaked::get).flatten() {
            entry.store(ptr::null_mut(), Ordering::Release);
        }
    }
}
