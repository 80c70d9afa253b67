//! What a forked child leaves behind: everything that its parent's libraries knew.
//!
//! A child may not use the parent's lanes or queue pairs, and the locks that other threads held at
//! the fork stay locked in it for ever. So each fork begins a new *epoch*, and what a process has
//! once ([`PerProcess`]) is made anew in the child, without a look at the parent's.

use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::Once;

/// Forks between this process and the one that loaded the library. Relaxed: changes only in a
/// process that has one thread at that moment.
static EPOCH: AtomicU32 = AtomicU32::new(0);
/// The first of all values that were ever made.
static LIST: AtomicPtr<PerProcess<()>> = AtomicPtr::new(ptr::null_mut());

/// The epoch of this process.
#[inline]
#[must_use]
pub fn epoch() -> u32 {
    EPOCH.load(Ordering::Relaxed)
}

/// Counts forks from here on, and empties [`PerProcess`] values in children.
pub fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler loads and stores atomics, nothing else, which is safe in any child.
        if unsafe { libc::pthread_atfork(None, None, Some(in_child)) } != 0 {
            eprintln!(
                "laxity: pthread_atfork is refused; a process that forks may hang in its child"
            );
        }
    });
}

extern "C" fn in_child() {
    EPOCH.fetch_add(1, Ordering::Relaxed);
    let mut at = LIST.load(Ordering::Acquire);
    // SAFETY: null or a static, listed by `make`.
    while let Some(listed) = unsafe { at.as_ref() } {
        listed.value.0.store(ptr::null_mut(), Ordering::Relaxed);
        at = listed.next.load(Ordering::Relaxed);
    }
}

/// A value that is made when it is first needed, and never freed. Nobody waits for whoever makes
/// it: of several that are made at a time, the first counts.
#[derive(Debug)]
#[repr(transparent)]
pub struct Leaked<T>(AtomicPtr<T>);

impl<T: Send + Sync> Leaked<T> {
    /// None so far.
    #[must_use]
    pub const fn none() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// The value, if it was made.
    #[inline(always)]
    pub fn get(&self) -> Option<&'static T> {
        // SAFETY: null, or from `Box::into_raw` in `make` and never freed. Acquire pairs with the
        // Release of the exchange there.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    /// The value, made if there is none.
    #[cold]
    #[inline(never)]
    pub fn make(&self, make: impl FnOnce() -> T) -> &'static T {
        let made = Box::into_raw(Box::new(make()));
        let none = ptr::null_mut();
        match self
            .0
            .compare_exchange(none, made, Ordering::AcqRel, Ordering::Acquire)
        {
            // SAFETY: as in `get`.
            Ok(_) => unsafe { &*made },
            Err(there) => {
                // SAFETY: just made, and shown to nobody. The other is as in `get`.
                unsafe {
                    drop(Box::from_raw(made));
                    &*there
                }
            }
        }
    }
}

/// A value that a process makes when it is first needed and never frees. A forked child makes its
/// own.
// `repr(C)`: the same layout for each `T`, as that of a pointer is.
#[derive(Debug)]
#[repr(C)]
pub struct PerProcess<T> {
    value: Leaked<T>,
    is_listed: AtomicBool,
    next: AtomicPtr<PerProcess<()>>,
}

impl<T: Send + Sync> PerProcess<T> {
    /// None so far.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            value: Leaked::none(),
            is_listed: AtomicBool::new(false),
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// The value, if it was made.
    #[inline(always)]
    pub fn get(&'static self) -> Option<&'static T> {
        self.value.get()
    }

    /// The value, made if there is none. If several threads make one, the first counts.
    #[inline(always)]
    pub fn get_or_make(&'static self, make: impl FnOnce() -> T) -> &'static T {
        match self.value.get() {
            Some(there) => there,
            None => {
                self.list();
                self.value.make(make)
            }
        }
    }

    /// Has children forget the value.
    #[cold]
    fn list(&'static self) {
        watch();
        if self.is_listed.swap(true, Ordering::Relaxed) {
            return;
        }
        let own = ptr::from_ref(self).cast_mut().cast();
        let mut first = LIST.load(Ordering::Relaxed);
        loop {
            self.next.store(first, Ordering::Relaxed);
            // Release: a child that finds this one finds the next one in it.
            match LIST.compare_exchange(first, own, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(other) => first = other,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static FIRST: PerProcess<u32> = PerProcess::none();
    static SECOND: PerProcess<String> = PerProcess::none();

    #[test]
    fn a_child_has_nothing_of_its_parents_and_its_parent_keeps_all() {
        assert_eq!(FIRST.get(), None);
        assert_eq!(FIRST.get_or_make(|| 1), &1);
        assert_eq!(FIRST.get_or_make(|| 2), &1);
        assert_eq!(SECOND.get_or_make(String::new), "");
        let before = epoch();
        // SAFETY: the child makes a number and leaves by _exit.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork");
        if pid == 0 {
            let empty = FIRST.get().is_none() && SECOND.get().is_none();
            let own = FIRST.get_or_make(|| 3) == &3 && epoch() == before + 1;
            // SAFETY: ends the child without the parent's exit handlers.
            unsafe { libc::_exit(i32::from(empty && own)) };
        }
        let mut status = 0;
        // SAFETY: waits for our own child.
        unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!(libc::WEXITSTATUS(status), 1);
        assert_eq!((FIRST.get(), epoch()), (Some(&1), before));
    }
}
