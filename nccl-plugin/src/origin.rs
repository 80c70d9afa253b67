//! The collective that a send belongs to, found through NCCL's profiler interface.
//!
//! NCCL reports each collective, its proxy operations and their steps to a profiler plugin, and
//! gives every `isend` a handle of its step. A network plugin may report its own events for that
//! handle by a callback. NCCL then calls the profiler with the step as the event's parent. This
//! library is both plugins. `isend` calls back with the address of a [`Question`]. On the same
//! stack, NCCL calls this library's `startEvent`, which writes the answer.
//!
//! Events are numbers, not addresses, and NCCL treats them as opaque. NCCL stops a collective long
//! before its sends begin. With PXN, a proxy works for another process's GPU, whose events have no
//! meaning here. An event names an entry of a ring and the number of the entry's use. A send whose
//! event is too old to be found is classified by its communicator alone.

use core::ffi::c_void;

use parking_lot::Mutex;

/// Number of collectives and point-to-point operations that are remembered.
const TASKS: usize = 4096;
/// Number of proxy operations that are remembered. A collective has one per channel and peer.
const OPERATIONS: usize = 16384;

/// Event types that the profiler asks for (`ncclProfileColl`, `P2p`, `ProxyOp`, `NetPlugin`). NCCL
/// adds steps to the last.
pub const EVENTS_WANTED: i32 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 7;
/// A collective, `ncclProfileColl`.
pub const EVENT_COLLECTIVE: u64 = 1 << 1;
/// A point-to-point operation, `ncclProfileP2p`.
pub const EVENT_P2P: u64 = 1 << 2;
/// A proxy operation, `ncclProfileProxyOp`.
pub const EVENT_OPERATION: u64 = 1 << 3;
/// A step of a proxy operation, `ncclProfileProxyStep`.
pub const EVENT_STEP: u64 = 1 << 4;
/// A network plugin's event, `ncclProfileNetPlugin`.
pub const EVENT_NET: u64 = 1 << 7;

/// The id of this plugin's events: the plugin's type in the upper half, the version in the lower
/// half.
pub const PLUGIN_ID: i64 = 0x4c58 << 16 | 1;

/// The collective or point-to-point operation that a send belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Operation {
    /// The communicator's hash, the same on all ranks.
    pub communicator: u64,
    /// The NCCL function that the application called.
    pub function: Function,
}

/// A function of NCCL's interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Function {
    #[default]
    Unknown,
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    Reduce,
    AllToAll,
    /// `ncclGather` and `ncclScatter`.
    GatherScatter,
    Send,
    Receive,
}

impl Function {
    /// Returns the function with this name in NCCL's profiler interface.
    pub fn from_name(name: &[u8]) -> Self {
        match name {
            b"AllReduce" => Self::AllReduce,
            b"AllGather" => Self::AllGather,
            b"ReduceScatter" => Self::ReduceScatter,
            b"Broadcast" => Self::Broadcast,
            b"Reduce" => Self::Reduce,
            b"AlltoAll" | b"AllToAll" => Self::AllToAll,
            b"Gather" | b"Scatter" => Self::GatherScatter,
            b"Send" | b"SendRecv" => Self::Send,
            b"Recv" => Self::Receive,
            _ => Self::Unknown,
        }
    }

    /// Returns the function with this bit in `ncclNetAttr.op`.
    pub fn from_attribute(op: u32) -> Self {
        // When NCCL makes a connection, it sets the bits of all operations that may use it.
        if !op.is_power_of_two() {
            return Self::Unknown;
        }
        use Function::{AllGather, AllReduce, AllToAll, Broadcast, GatherScatter};
        use Function::{Receive, Reduce, ReduceScatter, Send};
        const BY_BIT: [Function; 12] = [
            Broadcast, Reduce, AllGather, ReduceScatter, AllReduce, Send, Send, Receive, AllToAll,
            GatherScatter, GatherScatter, AllGather,
        ];
        BY_BIT.get(op.trailing_zeros() as usize).copied().unwrap_or_default()
    }

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::AllToAll => "all_to_all",
            Self::GatherScatter => "gather_scatter",
            Self::Send => "send",
            Self::Receive => "recv",
        }
    }
}

/// A question to the profiler of this plugin. `isend` passes its address to NCCL's callback, which
/// calls that profiler's `startEvent` before it returns.
#[derive(Debug)]
pub struct Question {
    /// [`QUESTION_MAGIC`], which marks the memory as a question.
    pub magic: u64,
    /// The collective or operation that the send belongs to, if it is known.
    pub answer: Option<Operation>,
}

/// The first word of each [`Question`].
pub const QUESTION_MAGIC: u64 = 0x004c_4158_5155_4552;

const KIND_TASK: u64 = 1;
const KIND_OPERATION: u64 = 2;
const KIND_STEP: u64 = 3;
const KIND_SHIFT: u32 = 60;
const KIND_MASK: u64 = u64::MAX << KIND_SHIFT;
const TURN_SHIFT: u32 = 20;
const TURN_MASK: u64 = (1 << (KIND_SHIFT - TURN_SHIFT)) - 1;
const PLACE_MASK: u64 = (1 << TURN_SHIFT) - 1;

/// The last `N` entries, by number.
#[derive(Debug)]
struct Ring<T, const N: usize> {
    entries: Vec<T>,
    next: u64,
}

impl<T: Copy + Default, const N: usize> Ring<T, N> {
    const fn new() -> Self {
        Self { entries: Vec::new(), next: 0 }
    }

    /// Stores an entry and returns the lower bits of its event.
    fn put(&mut self, entry: T) -> u64 {
        if self.entries.is_empty() {
            self.entries = vec![T::default(); N];
        }
        let (place, turn) = (self.next % N as u64, self.next / N as u64);
        self.entries[place as usize] = entry;
        self.next += 1;
        (turn & TURN_MASK) << TURN_SHIFT | place
    }

    fn get(&self, event: u64) -> Option<T> {
        let place = event & PLACE_MASK;
        let last = self.next.checked_sub(1)?;
        // The number of the last use of this entry.
        let turn = if place <= last % N as u64 {
            last / N as u64
        } else {
            (last / N as u64).checked_sub(1)?
        };
        let fits = turn & TURN_MASK == event >> TURN_SHIFT & TURN_MASK;
        fits.then(|| self.entries.get(place as usize).copied()).flatten()
    }
}

#[derive(Debug)]
pub struct ProfilerEvents {
    tasks: Mutex<Ring<Operation, TASKS>>,
    /// The tasks of proxy operations. An operation with an unknown task has an entry, too.
    operations: Mutex<Ring<Option<Operation>, OPERATIONS>>,
}

impl Default for ProfilerEvents {
    fn default() -> Self {
        Self::new()
    }
}

impl ProfilerEvents {
    /// Returns an empty set of events.
    pub const fn new() -> Self {
        Self { tasks: Mutex::new(Ring::new()), operations: Mutex::new(Ring::new()) }
    }

    /// Records a collective or point-to-point operation and returns its event.
    pub fn task(&self, task: Operation) -> u64 {
        KIND_TASK << KIND_SHIFT | self.tasks.lock().put(task)
    }

    /// Records a proxy operation of the task `parent` and returns its event. `here` is false if
    /// that event belongs to another process.
    pub fn operation(&self, parent: u64, here: bool) -> u64 {
        let known = here && parent >> KIND_SHIFT == KIND_TASK;
        let task = known.then(|| self.tasks.lock().get(parent)).flatten();
        KIND_OPERATION << KIND_SHIFT | self.operations.lock().put(task)
    }

    /// Returns the event of a step. The event contains its operation, so nothing is stored.
    pub fn step(&self, parent: u64) -> u64 {
        if parent >> KIND_SHIFT != KIND_OPERATION {
            return 0;
        }
        KIND_STEP << KIND_SHIFT | parent & !KIND_MASK
    }

    /// Returns the collective or operation that a step belongs to.
    pub fn origin(&self, step: u64) -> Option<Operation> {
        if step >> KIND_SHIFT != KIND_STEP {
            return None;
        }
        self.operations.lock().get(step)?
    }
}

/// NCCL's callback for network events, `ncclProfilerCallback_t`.
pub type Callback =
    unsafe extern "C" fn(*mut *mut c_void, i32, *mut c_void, i64, *mut c_void) -> i32;

/// The start of an event, `ncclProfilerNetEventStart`.
const EVENT_START: i32 = 0;
/// The end of an event, `ncclProfilerNetEventStop`.
const EVENT_STOP: i32 = 1;

/// Asks which collective the step behind `handle` belongs to.
///
/// # Safety
/// `callback` is NCCL's, and `handle` is the one that NCCL passed to the current `isend`.
pub unsafe fn ask(callback: Callback, handle: *mut c_void) -> Option<Operation> {
    if handle.is_null() {
        return None;
    }
    let mut question = Question { magic: QUESTION_MAGIC, answer: None };
    let mut event = core::ptr::null_mut();
    // SAFETY: upheld by the caller. The question outlives the call, and nothing stores its address.
    unsafe {
        callback(&raw mut event, EVENT_START, handle, PLUGIN_ID, (&raw mut question).cast());
        if !event.is_null() {
            // NCCL may have called another profiler, which needs the end of each event.
            callback(&raw mut event, EVENT_STOP, handle, PLUGIN_ID, core::ptr::null_mut());
        }
    }
    question.answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_leads_back_to_its_collective() {
        let events = ProfilerEvents::new();
        let gather = Operation { communicator: 7, function: Function::AllGather };
        let operation = events.operation(events.task(gather), true);
        assert_eq!(events.origin(events.step(operation)), Some(gather));
    }

    #[test]
    fn what_is_old_or_of_another_process_or_nonsense_is_not_found() {
        let events = ProfilerEvents::new();
        let task = events.task(Operation::default());
        let old = events.operation(task, true);
        assert!(events.origin(events.step(old)).is_some());
        for _ in 0..OPERATIONS {
            events.operation(task, true);
        }
        assert_eq!(events.origin(events.step(old)), None);
        let foreign = events.operation(task, false);
        assert_eq!(events.origin(events.step(foreign)), None);
        for nonsense in [0, 1, u64::MAX, task, 3 << KIND_SHIFT | PLACE_MASK] {
            assert_eq!(events.origin(nonsense), None);
            let operation = events.operation(nonsense & !(1 << KIND_SHIFT), true);
            assert_eq!(events.origin(events.step(operation)), None);
        }
    }
}
