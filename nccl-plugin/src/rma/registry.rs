//! The objects that NCCL holds, by number. A number that was removed, or that belongs to another
//! kind of object, is not found, and nothing is dereferenced.

use core::ffi::c_void;
use core::sync::atomic::{AtomicUsize, Ordering};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;

use crate::fault::{Fault, Result};

/// The next number. All registries share it, so a number names one object of one kind.
static NEXT: AtomicUsize = AtomicUsize::new(0x4c58_0000_0001);

#[derive(Debug)]
pub(crate) struct NumberedObjects<T> {
    entries: OnceLock<RwLock<HashMap<usize, Arc<T>>>>,
    /// The kind of objects, for messages.
    what: &'static str,
}

impl<T> NumberedObjects<T> {
    pub(crate) const fn new(what: &'static str) -> Self {
        Self { entries: OnceLock::new(), what }
    }

    fn entries(&self) -> &RwLock<HashMap<usize, Arc<T>>> {
        self.entries.get_or_init(RwLock::default)
    }

    /// Adds an object. Returns its number as NCCL holds it.
    pub(crate) fn add(&self, object: Arc<T>) -> *mut c_void {
        // Relaxed, because the number only has to be unique.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        self.entries().write().insert(number, object);
        number as *mut c_void
    }

    pub(crate) fn get(&self, number: *mut c_void) -> Result<Arc<T>> {
        let found = self.entries().read().get(&(number as usize)).map(Arc::clone);
        found.ok_or_else(|| self.unknown(number))
    }

    pub(crate) fn remove(&self, number: *mut c_void) -> Result<Arc<T>> {
        let found = self.entries().write().remove(&(number as usize));
        found.ok_or_else(|| self.unknown(number))
    }

    /// Removes the objects for which `belongs` holds.
    pub(crate) fn remove_all(&self, belongs: impl Fn(&T) -> bool) {
        self.entries().write().retain(|_, object| !belongs(object));
    }

    fn unknown(&self, number: *mut c_void) -> Fault {
        Fault::Argument(format!("{number:?} is no {} of this plugin's, or was closed", self.what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_found_until_it_is_removed_and_by_its_own_registry_only() {
        let (ones, others) = (NumberedObjects::new("one"), NumberedObjects::<u8>::new("other"));
        let number = ones.add(Arc::new(1_u8));
        assert_eq!(*ones.get(number).expect("added"), 1);
        assert!(others.get(number).unwrap_err().to_string().contains("no other of"));
        assert!(ones.get(core::ptr::null_mut()).is_err());
        assert_eq!(*ones.remove(number).expect("still there"), 1);
        assert!(ones.get(number).is_err() && ones.remove(number).is_err());
    }
}
