//! Queue pairs by their number. Each post and each completion looks them up without a lock.

use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::time::Instant;

use laxity_job::fork::{Leaked, PerProcess};
use parking_lot::Mutex;

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
}

/// Queue pairs that can be used again.
static FREE: PerProcess<Mutex<Vec<&'static QueuePair>>> = PerProcess::none();

/// Number of siblings that are known by their number. Relaxed: a program can't see a completion of
/// a sibling before the count has changed.
static ALIASES: AtomicUsize = AtomicUsize::new(0);

/// Reports whether completions may have the numbers of siblings.
#[inline]
pub(crate) fn has_aliases() -> bool {
    ALIASES.load(Ordering::Relaxed) > 0
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
        Self { pages: [const { Leaked::none() }; PAGE] }
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
    pub(crate) fn make(&self, number: u32) -> &'static QueuePair {
        let page = &self.pages[number as usize / PAGE % PAGE];
        let empty = || [const { AtomicPtr::new(ptr::null_mut()) }; PAGE];
        let page = page.get().unwrap_or_else(|| page.make(empty));
        let entry = &page[number as usize % PAGE];
        // SAFETY: the pointer is null or leads to a queue pair, which is never freed.
        if let Some(there) = unsafe { entry.load(Ordering::Acquire).as_ref() } {
            return there;
        }
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
    pub(crate) fn alias(&self, number: u32, queue_pair: &'static QueuePair) {
        let page = &self.pages[number as usize / PAGE % PAGE];
        let empty = || [const { AtomicPtr::new(ptr::null_mut()) }; PAGE];
        let page = page.get().unwrap_or_else(|| page.make(empty));
        let entry = ptr::from_ref(queue_pair).cast_mut();
        page[number as usize % PAGE].store(entry, Ordering::Release);
        ALIASES.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes the number of a sibling, if it is known by it.
    pub(crate) fn unalias(&self, number: u32, queue_pair: &'static QueuePair) {
        let Some(entry) = self.entry(number) else { return };
        let known = ptr::from_ref(queue_pair).cast_mut();
        let none = ptr::null_mut();
        if entry.compare_exchange(known, none, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            ALIASES.fetch_sub(1, Ordering::Relaxed);
        }
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
    pub(crate) fn close_all(&self) {
        let mut closed: Vec<*const QueuePair> = Vec::new();
        for entry in self.pages.iter().filter_map(Leaked::get).flatten() {
            let left = entry.swap(ptr::null_mut(), Ordering::AcqRel);
            // SAFETY: the pointer is null or leads to a queue pair, which is never freed.
            let Some(left) = (unsafe { left.as_ref() }) else { continue };
            // A queue pair with siblings has several numbers.
            if closed.contains(&ptr::from_ref(left)) {
                ALIASES.fetch_sub(1, Ordering::Relaxed);
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
