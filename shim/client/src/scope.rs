//! Scopes of threads, set by the inference engine, which are the first source of a flow's metadata
//! (architecture §4.1).
//!
//! A transfer library has bytes and addresses, and its caller has the request. The caller opens a
//! scope, calls the library, and closes the scope. Flows submitted meanwhile belong to it.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use laxity_shm::record::Stage;

use crate::memory;

/// Metadata of flows. A part is `None` or 0 if it is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// The flows' stage.
    pub stage: Option<Stage>,
    /// The layer that consumes or produced the bytes.
    pub layer: Option<u16>,
    /// The batch's id, 0 if unknown.
    pub batch: u64,
    /// The request's id, 0 if unknown or for the whole batch.
    pub request: u64,
    /// Deadline in CLOCK_MONOTONIC nanoseconds. 0 if unknown.
    pub deadline_ns: u64,
}

impl Scope {
    /// Returns this scope with unknown parts taken from `outer`. If the scopes have different
    /// requests, `outer`'s batch and deadline belong to its own request, and are not used.
    #[must_use]
    pub fn within(self, mut outer: Self) -> Self {
        let or = |own: u64, other: u64| if own == 0 { other } else { own };
        if self.request != 0 && outer.request != 0 && self.request != outer.request {
            (outer.batch, outer.deadline_ns) = (0, 0);
        }
        Self {
            stage: self.stage.or(outer.stage),
            layer: self.layer.or(outer.layer),
            batch: or(self.batch, outer.batch),
            request: or(self.request, outer.request),
            deadline_ns: or(self.deadline_ns, outer.deadline_ns),
        }
    }
}

/// Largest number of open scopes of a thread. Deeper ones are counted for closing, but have no
/// effect.
pub const DEPTH_MAX: usize = 8;

struct Stack {
    scopes: [Cell<Scope>; DEPTH_MAX],
    depth: Cell<usize>,
}

thread_local! {
    // The constant has no destructor, so it can be used at any time, also while a thread ends.
    static STACK: Stack = const {
        Stack {
            scopes: [const {
                Cell::new(Scope { stage: None, layer: None, batch: 0, request: 0, deadline_ns: 0 })
            }; DEPTH_MAX],
            depth: Cell::new(0),
        }
    };
}

/// Whether any thread ever opened a scope. Relaxed: a thread sees its own, and a process without
/// scopes saves the access to the stack.
static USED: AtomicBool = AtomicBool::new(false);

/// Opens a scope for the calling thread, inside its current one.
pub fn push(scope: Scope) {
    if !USED.load(Ordering::Relaxed) {
        USED.store(true, Ordering::Relaxed);
    }
    STACK.with(|stack| {
        let depth = stack.depth.get();
        if let Some(cell) = stack.scopes.get(depth) {
            let outer =
                depth.checked_sub(1).map_or_else(Scope::default, |at| stack.scopes[at].get());
            cell.set(scope.within(outer));
        }
        stack.depth.set(depth + 1);
    });
}

/// Closes the innermost scope of the calling thread. Returns false if there is none.
pub fn pop() -> bool {
    STACK.with(|stack| match stack.depth.get() {
        0 => false,
        depth => {
            stack.depth.set(depth - 1);
            true
        }
    })
}

/// Reports whether the calling thread has no open scope.
#[inline]
pub fn is_silent() -> bool {
    !USED.load(Ordering::Relaxed) || depth() == 0
}

/// Returns the number of open scopes. Not inlined, since the access to thread-local memory is a
/// call that the compiler would otherwise move before the check.
#[inline(never)]
fn depth() -> usize {
    STACK.with(|stack| stack.depth.get())
}

/// Returns the combined values of the calling thread's open scopes.
#[inline]
pub fn current() -> Option<Scope> {
    if !USED.load(Ordering::Relaxed) {
        return None;
    }
    STACK.with(|stack| match stack.depth.get().min(DEPTH_MAX) {
        0 => None,
        depth => Some(stack.scopes[depth - 1].get()),
    })
}

/// Returns the combined values of the calling thread's open scopes. Unknown parts come from the
/// facts about the memory at `address` (0 for none).
pub fn said_of(address: u64) -> Scope {
    let open = current().unwrap_or_default();
    match memory::at(address) {
        Some(near) if address != 0 => open.within(near),
        _ => open,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inner_scopes_inherit_and_end() {
        assert_eq!(current(), None);
        let outer =
            Scope { stage: Some(Stage::P2d), batch: 7, deadline_ns: 99, ..Scope::default() };
        push(outer);
        push(Scope { layer: Some(3), request: 5, ..Scope::default() });
        let both = current().expect("two are open");
        assert_eq!((both.stage, both.layer), (Some(Stage::P2d), Some(3)));
        assert_eq!((both.batch, both.request, both.deadline_ns), (7, 5, 99));
        assert!(pop());
        assert_eq!(current(), Some(outer));
        std::thread::spawn(|| assert_eq!(current(), None)).join().expect("another thread has none");
        assert!(pop());
        assert_eq!(current(), None);
        assert!(!pop());
    }

    #[test]
    fn what_is_said_of_one_request_is_not_said_of_another() {
        let outer = Scope {
            stage: Some(Stage::P2d),
            layer: Some(3),
            batch: 7,
            request: 5,
            deadline_ns: 99,
        };
        let of = |request| Scope { request, ..Scope::default() };
        assert_eq!(of(5).within(outer), outer);
        assert_eq!(of(0).within(outer), outer);
        let other = of(6).within(outer);
        assert_eq!((other.stage, other.layer), (Some(Stage::P2d), Some(3)));
        assert_eq!((other.request, other.batch, other.deadline_ns), (6, 0, 0));
        let outer = Scope { request: 0, ..outer };
        let member = of(6).within(outer);
        assert_eq!((member.batch, member.deadline_ns), (7, 99));
    }

    #[test]
    fn too_deep_is_counted_and_harmless() {
        for depth in 0..DEPTH_MAX as u64 + 3 {
            push(Scope { batch: depth + 1, ..Scope::default() });
        }
        assert_eq!(current().map(|s| s.batch), Some(DEPTH_MAX as u64));
        for _ in 0..DEPTH_MAX + 3 {
            assert!(pop());
        }
        assert_eq!(current(), None);
    }
}
