//! What the thread that submits is doing, as said by the inference engine: the first of the sources
//! that a flow's metadata come from (architecture §4.1).
//!
//! A transfer library knows bytes and addresses; its caller knows the request. The caller opens a
//! scope, calls the library, and closes it: whatever the thread submits meanwhile belongs to it.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use laxity_shm::record::Stage;

use crate::memory;

/// Metadata of flows, each part `None` or 0 if nothing is said about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// What they are for.
    pub stage: Option<Stage>,
    /// The layer that consumes or produced the bytes.
    pub layer: Option<u16>,
    /// The batch, 0 if unknown.
    pub batch: u64,
    /// The request, 0 if unknown or all of the batch.
    pub request: u64,
    /// Deadline, absolute CLOCK_MONOTONIC nanoseconds; 0 if unknown.
    pub deadline_ns: u64,
}

impl Scope {
    /// This, and what `outer` says where this says nothing. If they are about different requests,
    /// `outer`'s batch and deadline are those of the other one, and not taken over.
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

/// Scopes that a thread may have open at once. Deeper ones are counted, so that closing them works,
/// and change nothing.
pub const DEPTH_MAX: usize = 8;

struct Stack {
    scopes: [Cell<Scope>; DEPTH_MAX],
    depth: Cell<usize>,
}

thread_local! {
    // Constant and without a destructor: usable at any time in a thread's life, also while it ends.
    static STACK: Stack = const {
        Stack {
            scopes: [const {
                Cell::new(Scope { stage: None, layer: None, batch: 0, request: 0, deadline_ns: 0 })
            }; DEPTH_MAX],
            depth: Cell::new(0),
        }
    };
}

/// Whether any thread ever opened one. Relaxed: a thread sees its own; a process without any saves
/// the way to its stack.
static USED: AtomicBool = AtomicBool::new(false);

/// Opens a scope for the calling thread, inside the one that is open.
pub fn push(scope: Scope) {
    if !USED.load(Ordering::Relaxed) {
        USED.store(true, Ordering::Relaxed);
    }
    STACK.with(|stack| {
        let depth = stack.depth.get();
        if let Some(cell) = stack.scopes.get(depth) {
            let outer = depth
                .checked_sub(1)
                .map_or_else(Scope::default, |at| stack.scopes[at].get());
            cell.set(scope.within(outer));
        }
        stack.depth.set(depth + 1);
    });
}

/// Closes the innermost scope of the calling thread; false if there is none.
pub fn pop() -> bool {
    STACK.with(|stack| match stack.depth.get() {
        0 => false,
        depth => {
            stack.depth.set(depth - 1);
            true
        }
    })
}

/// Whether the calling thread has none open.
#[inline]
#[must_use]
pub fn is_silent() -> bool {
    !USED.load(Ordering::Relaxed) || depth() == 0
}

/// Not inlined: the way to a thread's own memory is a call that is otherwise made ahead of the
/// question.
#[inline(never)]
fn depth() -> usize {
    STACK.with(|stack| stack.depth.get())
}

/// What the open scopes of the calling thread say together.
#[inline]
#[must_use]
pub fn current() -> Option<Scope> {
    if !USED.load(Ordering::Relaxed) {
        return None;
    }
    STACK.with(|stack| match stack.depth.get().min(DEPTH_MAX) {
        0 => None,
        depth => Some(stack.scopes[depth - 1].get()),
    })
}

/// What the open scopes of the calling thread say together, and where they say nothing, what is
/// known of the memory at `address` (0 for none).
#[must_use]
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
        let outer = Scope {
            stage: Some(Stage::P2d),
            batch: 7,
            deadline_ns: 99,
            ..Scope::default()
        };
        push(outer);
        push(Scope {
            layer: Some(3),
            request: 5,
            ..Scope::default()
        });
        let both = current().expect("two are open");
        assert_eq!((both.stage, both.layer), (Some(Stage::P2d), Some(3)));
        assert_eq!((both.batch, both.request, both.deadline_ns), (7, 5, 99));
        assert!(pop());
        assert_eq!(current(), Some(outer));
        std::thread::spawn(|| assert_eq!(current(), None))
            .join()
            .expect("another thread has none");
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
        let of = |request| Scope {
            request,
            ..Scope::default()
        };
        assert_eq!(of(5).within(outer), outer);
        assert_eq!(of(0).within(outer), outer);
        let other = of(6).within(outer);
        assert_eq!((other.stage, other.layer), (Some(Stage::P2d), Some(3)));
        assert_eq!((other.request, other.batch, other.deadline_ns), (6, 0, 0));
        let outer = Scope {
            request: 0,
            ..outer
        };
        let member = of(6).within(outer);
        assert_eq!((member.batch, member.deadline_ns), (7, 99));
    }

    #[test]
    fn too_deep_is_counted_and_harmless() {
        for depth in 0..DEPTH_MAX as u64 + 3 {
            push(Scope {
                batch: depth + 1,
                ..Scope::default()
            });
        }
        assert_eq!(current().map(|s| s.batch), Some(DEPTH_MAX as u64));
        for _ in 0..DEPTH_MAX + 3 {
            assert!(pop());
        }
        assert_eq!(current(), None);
    }
}
