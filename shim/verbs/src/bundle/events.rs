//! Asynchronous events of siblings, which the program gets as events of its own queue pair.
//!
//! A queue pair is destroyed only after its events were acknowledged, and they are counted per
//! queue pair. An acknowledgement of a translated event therefore goes to the sibling.

use laxity_ibverbs::{ibv_async_event, ibv_event_type as event, ibv_qp};
use laxity_job::fork::PerProcess;
use parking_lot::Mutex;

use crate::contexts;
use crate::queue_pair::QueuePair;

/// Siblings with their first queue pair, and events that the program has not acknowledged.
#[derive(Debug, Default)]
struct SiblingEvents {
    /// Addresses of a sibling and its first.
    siblings: Vec<(usize, usize)>,
    /// The same for each event that was translated, until it is acknowledged.
    unacknowledged: Vec<(usize, usize)>,
}

static EVENTS: PerProcess<Mutex<SiblingEvents>> = PerProcess::none();

/// Records siblings of a queue pair.
pub(crate) fn add(first: *mut ibv_qp, siblings: &[*mut ibv_qp]) {
    let mut events = EVENTS.get_or_make(Mutex::default).lock();
    events.siblings.extend(siblings.iter().map(|sibling| (*sibling as usize, first as usize)));
}

/// Forgets the siblings of a queue pair after they were destroyed. That waits for acknowledgements,
/// so no lock is held meanwhile.
pub(crate) fn remove(first: *mut ibv_qp) {
    if let Some(events) = EVENTS.get() {
        let mut events = events.lock();
        events.siblings.retain(|(_, of)| *of != first as usize);
        events.unacknowledged.retain(|(_, of)| *of != first as usize);
    }
}

const fn is_of_queue_pair(kind: event::Type) -> bool {
    matches!(kind, event::IBV_EVENT_QP_FATAL..=event::IBV_EVENT_PATH_MIG_ERR)
        || kind == event::IBV_EVENT_QP_LAST_WQE_REACHED
}

/// Translates an event that the program gets. After a failure, all of the bundle fails.
///
/// # Safety
/// `got` was just returned by `ibv_get_async_event`, and its queue pair is alive, because the event
/// is not acknowledged.
pub(crate) unsafe fn received(got: &mut ibv_async_event) {
    if !super::is_on() || !is_of_queue_pair(got.event_type) {
        return;
    }
    let sibling = got.element as usize;
    if let Some(events) = EVENTS.get() {
        let mut events = events.lock();
        let found = events.siblings.iter().find(|(own, _)| *own == sibling).copied();
        if let Some((own, first)) = found {
            events.unacknowledged.push((own, first));
            got.element = first as *mut _;
        }
    }
    if matches!(got.event_type, event::IBV_EVENT_QP_FATAL..=event::IBV_EVENT_QP_ACCESS_ERR) {
        // SAFETY: upheld by the caller. A first queue pair lives longer than its siblings.
        if let Some(first) = unsafe { queue_pair(got.element.cast()) } {
            first.fail_bundle();
        }
    }
}

/// # Safety
/// `ibv` is a live queue pair.
unsafe fn queue_pair(ibv: *mut ibv_qp) -> Option<&'static QueuePair> {
    // SAFETY: upheld by the caller.
    let (context, number) = unsafe { ((*ibv).context, (*ibv).qp_num) };
    contexts::find(context).filter(|context| context.is_ours())?.queue_pairs.find(number)
}

/// Acknowledges an event by `real`, for the sibling that it came from.
pub(crate) fn acknowledge(given: &ibv_async_event, real: impl FnOnce(*mut ibv_async_event)) {
    let mut own = *given;
    if is_of_queue_pair(given.event_type)
        && let Some(events) = EVENTS.get()
    {
        let mut events = events.lock();
        let first = given.element as usize;
        if let Some(at) = events.unacknowledged.iter().position(|(_, of)| *of == first) {
            own.element = events.unacknowledged.swap_remove(at).0 as *mut _;
        }
    }
    real(&raw mut own);
}
