//! State that a forked child doesn't take over from its parent.
//!
//! A child must not use the parent's lanes or queue pairs. Locks that other threads held at the
//! fork stay locked in it for ever. Each fork therefore begins a new *epoch*. The child makes its
//! own value of each [`PerProcess`], and doesn't access the parent's.

use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

/// Number of forks between this process and the one that loaded the library. Relaxed, because it
/// changes only while the process has one thread.
static EPOCH: AtomicU32 = AtomicU32::new(0);
/// The head of the list of all values that were ever made.
static LIST: AtomicPtr<PerProcess<()>> = AtomicPtr::new(ptr::null_mut());

/// Returns the epoch of this process.
#[inline]
pub fn epoch() -> u32 {
    EPOCH.load(Ordering::Relaxed)
}

/// Counts forks from now on, and empties [`PerProcess`] values in children.
pub fn watch() {
    // Not `Once`: another thread may fork while this one is in `pthread_atfork`, and the child
    // would wait for ever. If two threads install the handler, a child begins two epochs at once.
    static IS_INSTALLED: AtomicBool = AtomicBool::new(false);
    if IS_INSTALLED.load(Ordering::Relaxed) {
        return;
    }
    // SAFETY: the handler only loads and stores atomics, which is safe in any child.
    if unsafe { libc::pthread_atfork(None, None, Some(in_child)) } != 0 {
        eprintln!("laxity: pthread_atfork is refused; a process that forks may hang in its child");
    }
    IS_INSTALLED.store(true, Ordering::Relaxed);
}

extern "C" fn in_child() {
    EPOCH.fetch_add(1, Ordering::Relaxed);
    let mut at = LIST.load(Ordering::Acquire);
    // SAFETY: the pointer is null or leads to a static that `list` added.
    while let Some(listed) = unsafe { at.as_ref() } {
        listed.value.0.store(ptr::null_mut(), Ordering::Relaxed);
        at = listed.next.load(Ordering::Relaxed);
    }
}

/// A value that is made when it is first needed, and never freed. If several threads make one at
/// once, the first is used, and no thread waits.
#[derive(Debug)]
#[repr(transparent)]
pub struct Leaked<T>(AtomicPtr<T>);

impl<T: Send + Sync> Leaked<T> {
    /// Returns an empty cell.
    pub const fn none() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Returns the value, if it was made.
    #[inline(always)]
    pub fn get(&self) -> Option<&'static T> {
        // SAFETY: the pointer is null, or comes from `Box::into_raw` in `make` and is never freed.
        // Acquire pairs with the Release of the exchange there.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    /// Returns the value, and makes it if there is none.
    #[inline(always)]
    pub fn get_or_make(&self, make: impl FnOnce() -> T) -> &'static T {
        match self.get() {
            Some(there) => there,
            None => self.make(make),
        }
    }

    /// Makes the value if there is none, and returns it.
    #[cold]
    #[inline(never)]
    pub fn make(&self, make: impl FnOnce() -> T) -> &'static T {
        let made = Box::into_raw(Box::new(make()));
        let none = ptr::null_mut();
        match self.0.compare_exchange(none, made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: the pointer comes from `Box::into_raw` and is never freed.
            Ok(_) => unsafe { &*made },
            Err(there) => {
                // SAFETY: `made` was not shared with any thread. `there` comes from `make` and is
                // never freed.
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
// `repr(C)` gives each `T` the same layout, since that of the pointer is the same.
#[derive(Debug)]
#[repr(C)]
pub struct PerProcess<T> {
    value: Leaked<T>,
    is_listed: AtomicBool,
    next: AtomicPtr<PerProcess<()>>,
}

impl<T: Send + Sync> PerProcess<T> {
    /// Returns an empty cell.
    pub const fn none() -> Self {
        Self {
            value: Leaked::none(),
            is_listed: AtomicBool::new(false),
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Returns the value, if it was made.
    #[inline(always)]
    pub fn get(&'static self) -> Option<&'static T> {
        self.value.get()
    }

    /// Returns the value, and makes it if there is none. Of several made at once, the first is
    /// used.
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

    /// Adds the value to the list that a forked child empties.
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
            // Release, so that a child that finds this entry finds the next one in it.
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
        // SAFETY: the child only makes a number and ends by _exit.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork");
        if pid == 0 {
            let empty = FIRST.get().is_none() && SECOND.get().is_none();
            let own = FIRST.get_or_make(|| 3) == &3 && epoch() == before + 1;
            // SAFETY: the call ends the child without the parent's exit handlers.
            unsafe { libc::_exit(i32::from(empty && own)) };
        }
        let mut status = 0;
        // SAFETY: the call waits for this process's own child.
        unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!(libc::WEXITSTATUS(status), 1);
        assert_eq!((FIRST.get(), epoch()), (Some(&1), before));
    }
}
