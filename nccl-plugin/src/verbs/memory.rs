//! Registrations of a device, each of which the hardware has once, however many users it has.
//!
//! NCCL registers the same buffers for many connections, and registers pieces of a buffer. A
//! registration costs a system call and pins pages. Ranges are therefore widened to whole pages. A
//! registration that covers a new range is used again, and it ends with its last user. Registered
//! memory must not be returned to the system while it is in use. NCCL does not do that.

use crate::backend::{Memory, POINTER_DMABUF};
use crate::fault::{Fault, Result};

/// A range of whole pages, as it is registered with the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageRange {
    /// Address of the first byte.
    pub(super) start: usize,
    pub(super) bytes: usize,
    /// File descriptor and offset of `start`, for a DMA-BUF.
    pub(super) dma_buf: Option<(i32, u64)>,
}

impl PageRange {
    /// Returns the pages that contain the memory.
    pub(super) fn of(memory: Memory, page: usize) -> Result<Self> {
        let wrong = |what: &str| {
            Err(Fault::Argument(format!(
                "registration of {} bytes at {:#x}: {what}",
                memory.bytes, memory.address
            )))
        };
        if memory.bytes == 0 {
            return wrong("there is nothing to register");
        }
        if (memory.kind & POINTER_DMABUF != 0) != memory.dma_buf.is_some() {
            return wrong("a DMA-BUF is known by a file descriptor, other memory by its address");
        }
        let before = memory.address % page;
        let Some(end) = memory
            .address
            .checked_add(memory.bytes)
            .and_then(|end| end.checked_next_multiple_of(page))
        else {
            return wrong("it would end beyond the address space");
        };
        // A DMA-BUF begins where its offset says, and can't be widened to before that.
        let (start, dma_buf) = match memory.dma_buf {
            None => (memory.address - before, None),
            Some((fd, offset)) => match offset.checked_sub(before as u64) {
                Some(offset) => (memory.address - before, Some((fd, offset))),
                None => (memory.address, Some((fd, offset))),
            },
        };
        Ok(Self { start, bytes: end - start, dma_buf })
    }

    /// Reports whether this span contains the other. Descriptors are not compared, since they
    /// differ from call to call for the same memory.
    fn covers(&self, other: &Self) -> bool {
        self.dma_buf.is_some() == other.dma_buf.is_some()
            && self.start <= other.start
            && other.start + other.bytes <= self.start + self.bytes
    }
}

#[derive(Debug)]
struct RegistrationCacheEntry<H> {
    id: u64,
    span: PageRange,
    users: usize,
    handle: H,
}

/// The registrations of a device. `H` is the device's handle of a registration.
#[derive(Debug)]
pub(super) struct Cache<H> {
    entries: Vec<RegistrationCacheEntry<H>>,
    next: u64,
}

impl<H: Copy> Cache<H> {
    pub(super) const fn new() -> Self {
        Self { entries: Vec::new(), next: 0 }
    }

    /// Returns the handle and the number of a registration that covers a span. Calls `register` if
    /// there is none yet.
    pub(super) fn take(
        &mut self,
        span: PageRange,
        register: impl FnOnce(&PageRange) -> Result<H>,
    ) -> Result<(u64, H)> {
        if let Some(entry) = self.entries.iter_mut().find(|entry| entry.span.covers(&span)) {
            entry.users += 1;
            return Ok((entry.id, entry.handle));
        }
        let handle = register(&span)?;
        let id = self.next;
        self.next += 1;
        self.entries.push(RegistrationCacheEntry { id, span, users: 1, handle });
        Ok((id, handle))
    }

    /// Removes one user of a registration.
    ///
    /// # Errors
    /// Returns the errors of `deregister`, or [`Fault::Argument`] if nothing is registered there.
    pub(super) fn give_back(
        &mut self,
        id: u64,
        deregister: impl FnOnce(H) -> Result<()>,
    ) -> Result<()> {
        let Some(at) = self.entries.iter().position(|entry| entry.id == id) else {
            return Err(Fault::Argument(
                "a memory registration is given back that there isn't; it was given back before"
                    .into(),
            ));
        };
        self.entries[at].users -= 1;
        if self.entries[at].users > 0 {
            return Ok(());
        }
        deregister(self.entries.swap_remove(at).handle)
    }

    /// Removes and returns all registrations, even those in use.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = H> {
        self.entries.drain(..).map(|entry| entry.handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{POINTER_CUDA, POINTER_HOST};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const PAGE: usize = 4096;

    fn host(address: usize, bytes: usize) -> Memory {
        Memory { address, bytes, kind: POINTER_HOST, dma_buf: None }
    }

    fn span(address: usize, bytes: usize) -> PageRange {
        PageRange::of(host(address, bytes), PAGE).expect("a span")
    }

    /// A device that records what is registered.
    #[derive(Default)]
    struct Fake {
        live: BTreeMap<u32, PageRange>,
        next: u32,
    }

    impl Fake {
        fn register(&mut self, span: &PageRange) -> Result<u32> {
            self.next += 1;
            self.live.insert(self.next, *span);
            Ok(self.next)
        }

        fn deregister(&mut self, key: u32) -> Result<()> {
            self.live.remove(&key).expect("registered, and once");
            Ok(())
        }
    }

    #[test]
    fn spans_are_whole_pages() {
        assert_eq!((span(0x1001, 1).start, span(0x1001, 1).bytes), (0x1000, PAGE));
        assert_eq!((span(0x1fff, 2).start, span(0x1fff, 2).bytes), (0x1000, 2 * PAGE));
        let gpu = |address, offset| {
            let memory =
                Memory { kind: POINTER_DMABUF, dma_buf: Some((3, offset)), ..host(address, 100) };
            let span = PageRange::of(memory, PAGE).expect("a span");
            (span.start, span.bytes, span.dma_buf)
        };
        assert_eq!(gpu(0x1010, 0x10), (0x1000, PAGE, Some((3, 0))));
        assert_eq!(gpu(0x1010, 0), (0x1010, 0xff0, Some((3, 0))));
    }

    #[test]
    fn memory_that_cannot_be_is_refused_with_what_is_wrong() {
        let refused = |memory| PageRange::of(memory, PAGE).unwrap_err().to_string();
        assert!(refused(host(0x1000, 0)).contains("nothing to register"));
        assert!(refused(host(usize::MAX - 5, 100)).contains("beyond the address space"));
        let fd = Memory { kind: POINTER_CUDA, dma_buf: Some((3, 0)), ..host(0x1000, 1) };
        assert!(refused(fd).contains("DMA-BUF"));
    }

    #[test]
    fn a_registration_is_shared_and_goes_with_its_last_user() {
        let mut cache = Cache::new();
        let mut fake = Fake::default();
        let (whole, key) = cache.take(span(0x10000, 8 * PAGE), |s| fake.register(s)).unwrap();
        let (part, same) = cache.take(span(0x11004, 100), |s| fake.register(s)).unwrap();
        assert_eq!((whole, key), (part, same));
        let (other, _) = cache.take(span(0x17000, 2 * PAGE), |s| fake.register(s)).unwrap();
        assert_ne!(whole, other);
        cache.give_back(whole, |key| fake.deregister(key)).unwrap();
        assert_eq!(fake.live.len(), 2);
        cache.give_back(part, |key| fake.deregister(key)).unwrap();
        assert_eq!(fake.live.len(), 1);
        assert!(cache.give_back(part, |key| fake.deregister(key)).is_err());
        assert_eq!(cache.drain().count(), 1);
    }

    #[test]
    fn a_refused_registration_leaves_nothing_behind() {
        let mut cache: Cache<u32> = Cache::new();
        let refused = cache.take(span(0x1000, 1), |_| Err(Fault::System("no".into())));
        assert!(refused.is_err() && cache.entries.is_empty());
    }

    proptest! {
        #[test]
        fn whoever_has_a_registration_is_covered_until_it_is_given_back(
            steps in prop::collection::vec((any::<bool>(), 0..64_usize, 1..20_000_usize), 1..60),
        ) {
            let mut cache = Cache::new();
            let mut fake = Fake::default();
            let mut held: Vec<(u64, u32, PageRange)> = Vec::new();
            for (takes, place, bytes) in steps {
                if takes || held.is_empty() {
                    let wanted = span(0x10_0000 + place * 1000, bytes);
                    let (id, key) = cache.take(wanted, |s| fake.register(s)).unwrap();
                    held.push((id, key, wanted));
                } else {
                    let (id, ..) = held.swap_remove(place % held.len());
                    cache.give_back(id, |key| fake.deregister(key)).unwrap();
                }
                for (_, key, wanted) in &held {
                    prop_assert!(fake.live[key].covers(wanted));
                }
            }
            for (id, ..) in held.drain(..) {
                cache.give_back(id, |key| fake.deregister(key)).unwrap();
            }
            prop_assert!(fake.live.is_empty());
        }
    }
}
