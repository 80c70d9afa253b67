//! Which collective a send belongs to: NCCL's profiler interface, turned around.
//!
//! NCCL tells a profiler plugin of each collective, of the proxy operations that it becomes, and of
//! their steps, and gives every `isend` a handle of its step. A network plugin may report events of
//! its own for that handle, by a callback; NCCL then calls the profiler with the step as the
//! event's parent. This library is both: in `isend` it calls back with the address of a
//! [`Question`], its own `startEvent` is called on the same stack with that address and the step,
//! and writes the answer.
//!
//! Events are numbers, not addresses: NCCL treats them as opaque, a collective's is stopped long
//! before its sends begin, and that of another process (PXN: a proxy works for a neighbour's GPU)
//! means nothing here. Each names a place in a ring and how often that was used; what is too old is
//! not found, and such a send is classified by its communicator alone.

use core::ffi::c_void;

use parking_lot::Mutex;

/// Collectives and point-to-point operations remembered.
const TASKS: usize = 4096;
/// Proxy operations remembered: one per channel and peer of a collective.
const OPERATIONS: usize = 16384;

/// Event types that are asked for (`ncclProfileColl`, `P2p`, `ProxyOp`, `NetPlugin`). Steps come
/// with the last.
pub const EVENTS_WANTED: i32 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 7;
/// `ncclProfileColl`.
pub const EVENT_COLLECTIVE: u64 = 1 << 1;
/// `ncclProfileP2p`.
pub const EVENT_P2P: u64 = 1 << 2;
/// `ncclProfileProxyOp`.
pub const EVENT_OPERATION: u64 = 1 << 3;
/// `ncclProfileProxyStep`.
pub const EVENT_STEP: u64 = 1 << 4;
/// `ncclProfileNetPlugin`.
pub const EVENT_NET: u64 = 1 << 7;

/// Whose events are ours, among those of other network plugins: the type in the upper, a version in
/// the lower half.
pub const PLUGIN_ID: i64 = 0x4c58 << 16 | 1;

/// What a send belongs to: a collective or a point-to-point operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The communicator's hash, the same on all ranks.
    pub communicator: u64,
    /// Its function.
    pub function: Function,
}

/// What NCCL's users call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Function {
    /// Not known.
    #[default]
    Unknown,
    /// ncclAllReduce.
    AllReduce,
    /// ncclAllGather.
    AllGather,
    /// ncclReduceScatter.
    ReduceScatter,
    /// ncclBroadcast.
    Broadcast,
    /// ncclReduce.
    Reduce,
    /// ncclAlltoAll.
    AllToAll,
    /// ncclGather or ncclScatter.
    GatherScatter,
    /// ncclSend.
    Send,
    /// ncclRecv.
    Receive,
}

impl Function {
    /// By the name that NCCL's profiler interface uses.
    #[must_use]
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

    /// By its bit in `ncclNetAttr.op`, which has NCCL's own order of functions.
    #[must_use]
    pub fn from_attribute(op: u32) -> Self {
        // When a connection is made, all that may go over it is named.
        if !op.is_power_of_two() {
            return Self::Unknown;
        }
        match op.trailing_zeros() {
            0 => Self::Broadcast,
            1 => Self::Reduce,
            2 => Self::AllGather,
            3 => Self::ReduceScatter,
            4 => Self::AllReduce,
            5 | 6 => Self::Send,
            7 => Self::Receive,
            8 => Self::AllToAll,
            9 | 10 => Self::GatherScatter,
            11 => Self::AllGather,
            _ => Self::Unknown,
        }
    }

    /// For reports.
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

/// What `isend` asks; its address travels through NCCL.
#[derive(Debug)]
pub struct Question {
    /// [`QUESTION_MAGIC`]: that it is one.
    pub magic: u64,
    /// The answer.
    pub answer: Option<Origin>,
}

/// In each [`Question`].
pub const QUESTION_MAGIC: u64 = 0x004c_4158_5155_4552;

const KIND_TASK: u64 = 1;
const KIND_OPERATION: u64 = 2;
const KIND_STEP: u64 = 3;
const KIND_SHIFT: u32 = 60;
const KIND_MASK: u64 = u64::MAX << KIND_SHIFT;
const TURN_SHIFT: u32 = 20;
const TURN_MASK: u64 = (1 << (KIND_SHIFT - TURN_SHIFT)) - 1;
const PLACE_MASK: u64 = (1 << TURN_SHIFT) - 1;

/// The last `N` of something, by number.
#[derive(Debug)]
struct Ring<T, const N: usize> {
    entries: Vec<T>,
    next: u64,
}

impl<T: Copy + Default, const N: usize> Ring<T, N> {
    const fn new() -> Self {
        Self {
            entries: Vec::new(),
            next: 0,
        }
    }

    /// Keeps an entry; the lower bits of its event.
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
        // The turn in which this place was used last.
        let turn = if place <= last % N as u64 {
            last / N as u64
        } else {
            (last / N as u64).checked_sub(1)?
        };
        let fits = turn & TURN_MASK == event >> TURN_SHIFT & TURN_MASK;
        fits.then(|| self.entries.get(place as usize).copied())
            .flatten()
    }
}

/// The events of this process.
#[derive(Debug)]
pub struct Events {
    tasks: Mutex<Ring<Origin, TASKS>>,
    /// Those whose task is not known are here, too.
    operations: Mutex<Ring<Option<Origin>, OPERATIONS>>,
}

impl Default for Events {
    fn default() -> Self {
        Self::new()
    }
}

impl Events {
    /// None yet.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            tasks: Mutex::new(Ring::new()),
            operations: Mutex::new(Ring::new()),
        }
    }

    /// A collective or point-to-point operation begins.
    pub fn task(&self, task: Origin) -> u64 {
        KIND_TASK << KIND_SHIFT | self.tasks.lock().put(task)
    }

    /// A proxy operation of this process begins, for the task `parent`; `here` is false if that
    /// event is another process's.
    pub fn operation(&self, parent: u64, here: bool) -> u64 {
        let known = here && parent >> KIND_SHIFT == KIND_TASK;
        let task = known.then(|| self.tasks.lock().get(parent)).flatten();
        KIND_OPERATION << KIND_SHIFT | self.operations.lock().put(task)
    }

    /// A step of a proxy operation begins. Nothing is kept of it: it names its operation.
    #[must_use]
    pub fn step(&self, parent: u64) -> u64 {
        if parent >> KIND_SHIFT != KIND_OPERATION {
            return 0;
        }
        KIND_STEP << KIND_SHIFT | parent & !KIND_MASK
    }

    /// What a step belongs to.
    #[must_use]
    pub fn origin(&self, step: u64) -> Option<Origin> {
        if step >> KIND_SHIFT != KIND_STEP {
            return None;
        }
        self.operations.lock().get(step)?
    }
}

/// `ncclProfilerCallback_t`.
pub type Callback =
    unsafe extern "C" fn(*mut *mut c_void, i32, *mut c_void, i64, *mut c_void) -> i32;

/// `ncclProfilerNetEventStart`.
const EVENT_START: i32 = 0;
/// `ncclProfilerNetEventStop`.
const EVENT_STOP: i32 = 1;

/// Asks which collective the step behind `handle` belongs to.
///
/// # Safety
/// `callback` is NCCL's, and `handle` the one that it gave this very call.
#[must_use]
pub unsafe fn ask(callback: Callback, handle: *mut c_void) -> Option<Origin> {
    if handle.is_null() {
        return None;
    }
    let mut question = Question {
        magic: QUESTION_MAGIC,
        answer: None,
    };
    let mut event = core::ptr::null_mut();
    // SAFETY: upheld by the caller; the question outlives the call, and nobody keeps its address.
    unsafe {
        callback(
            &raw mut event,
            EVENT_START,
            handle,
            PLUGIN_ID,
            (&raw mut question).cast(),
        );
        if !event.is_null() {
            // Another profiler may have been called, and keep books.
            callback(
                &raw mut event,
                EVENT_STOP,
                handle,
                PLUGIN_ID,
                core::ptr::null_mut(),
            );
        }
    }
    question.answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_leads_back_to_its_collective() {
        let events = Events::new();
        let gather = Origin {
            communicator: 7,
            function: Function::AllGather,
        };
        let operation = events.operation(events.task(gather), true);
        assert_eq!(events.origin(events.step(operation)), Some(gather));
    }

    #[test]
    fn what_is_old_or_of_another_process_or_nonsense_is_not_found() {
        let events = Events::new();
        let task = events.task(Origin::default());
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
