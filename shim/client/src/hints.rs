//! Hints of the inference engine from any thread of the process: requests and their deadlines,
//! batches, layers, and what transfers and memory belong to.
//!
//! The functions here are those of `laxity.h` and of the Python package. They differ from a lane's
//! hints ([`Lane::hint`]):
//! * They need no lane. All hints use one lane, in the order of the calls.
//! * They remember hints, within limits. A request's deadline is found for its transfers, and a new
//!   daemon gets all remembered hints.
//! * They return an error if a hint is invalid ([`HintError`]), where the daemon could only ignore
//!   it.
//!
//! Nothing here waits for the daemon. A forked child begins without hints and attaches for itself.

mod bounded;
mod gate;
mod hint_table;
mod outside;
mod sights;

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use laxity_job::Job;
use laxity_job::fork::{PerProcess, epoch};
use laxity_shm::layout::Mode;
use laxity_shm::record::{Direction, Flow, Stage};
use laxity_shm::sleep::now_ns;

pub use gate::{Excess, Transfer, Transfers};
pub use hint_table::{
    BATCHES_MAX, Facts, HintCounts, HintError, HintTable, REQUESTS_MAX, TENANT_MAX,
};
pub use outside::is_there as is_preloaded;
pub use sights::FirstSights;

use crate::Hint;
use crate::client::Client;
use crate::lane::Lane;
use crate::memory::{self, MemoryError};
use crate::options::Options;
use crate::scope::{self, Scope};
use gate::Shard;

/// The hints of this process, and its connection to the daemon.
#[derive(Debug)]
struct HintHub {
    client: Client,
    /// The [`epoch`] in which the hub was made.
    epoch: u32,
    channel: Mutex<HintChannel>,
    shards: [Shard; gate::LANES],
    /// Number of transfers without a NIC by direction, for [`Client::nic_in_turn`].
    turns: [AtomicUsize; 2],
    /// Number of transfers that were dropped before they were sent or cancelled completely.
    dropped: AtomicU64,
}

#[derive(Debug)]
struct HintChannel {
    table: HintTable,
    lane: Option<Lane>,
    /// The [`Client::generation`] of the daemon that has the table.
    told: u64,
}

static HUB: PerProcess<HintHub> = PerProcess::none();

impl HintHub {
    fn nic_in_turn(&self, direction: Direction) -> u8 {
        // Relaxed, because only the value matters.
        let turn = self.turns[direction as usize].fetch_add(1, Ordering::Relaxed);
        self.client.nic_in_turn(&Job::of_this_process().nics, turn)
    }
}

fn hub() -> &'static HintHub {
    HUB.get_or_make(|| {
        let client = Client::attach(Options::from_env());
        let told = client.generation();
        HintHub {
            client,
            epoch: epoch(),
            channel: Mutex::new(HintChannel { table: HintTable::new(), lane: None, told }),
            shards: Default::default(),
            turns: Default::default(),
            dropped: AtomicU64::new(0),
        }
    })
}

fn channel(hub: &HintHub) -> MutexGuard<'_, HintChannel> {
    // A panic may only leave an entry too many or too few.
    hub.channel.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes a hint into the table, and then sends it to the daemon.
fn take(
    how: impl FnOnce(&mut HintTable, &mut dyn FnMut(Hint)) -> Result<(), HintError>,
) -> Result<(), HintError> {
    let hub = hub();
    let mut channel = channel(hub);
    let HintChannel { table, lane, told } = &mut *channel;
    let lane = lane.get_or_insert_with(|| hub.client.lane());
    lane.try_attach();
    // A new daemon gets the whole table, which contains this hint.
    let is_new = lane.is_attached() && *told != hub.client.generation();
    how(table, &mut |hint| {
        if !is_new {
            lane.hint(hint);
        }
    })?;
    if is_new {
        *told = hub.client.generation();
        table.retell(&mut |hint| lane.hint(hint));
    }
    Ok(())
}

/// Returns the number of a request or batch whose id is a text. It is the text's FNV-1a hash of 64
/// bits, the same on all hosts and in all versions. Never 0.
pub fn number(id: &str) -> u64 {
    number_of(id.as_bytes())
}

/// Returns the [`number`] of bytes that need not be UTF-8.
pub fn number_of(id: &[u8]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in id {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash.max(1)
}

/// Returns the time of the clock of deadlines, in nanoseconds.
pub fn now() -> u64 {
    now_ns()
}

/// Begins a request.
///
/// # Errors
/// [`HintError::DeadlinePassed`], [`HintError::NoId`].
pub fn request_begin(request: u64, facts: Facts) -> Result<(), HintError> {
    // The time is taken at the call, since the first hint of a process attaches, which may be slow.
    let now = now_ns();
    take(|table, say| table.request_begin(now, request, facts, say))
}

/// Returns the facts about a request that has not ended.
pub fn request(request: u64) -> Option<Facts> {
    channel(hub()).table.facts(request).cloned()
}

/// Sends a hint to the daemon. The facts about a request are added when it joins a batch.
///
/// # Errors
/// Every [`HintError`] but [`HintError::DeadlinePassed`].
pub fn tell(hint: Hint) -> Result<(), HintError> {
    take(|table, say| table.tell(hint, say))
}

/// Opens a scope for the calling thread, here and in the preloaded library. Values that the scope
/// lacks come from the facts about its request.
pub fn scope_push(mut scope: Scope) {
    fill(&mut scope);
    outside::scope_push(&scope);
    scope::push(scope);
}

/// Closes the innermost scope of the calling thread. Returns false if there is none.
pub fn scope_pop() -> bool {
    let was_open = scope::pop();
    if was_open {
        outside::scope_pop();
    }
    was_open
}

fn fill(scope: &mut Scope) {
    if scope.request != 0 && (scope.deadline_ns == 0 || scope.batch == 0) {
        let channel = channel(hub());
        let table = &channel.table;
        if scope.deadline_ns == 0 {
            scope.deadline_ns = table.facts(scope.request).map_or(0, |f| f.deadline_ns);
        }
        if scope.batch == 0 {
            scope.batch = table.batch_of(scope.request);
        }
    }
}

/// Records that the range holds the KV cache of a layer, here and in the preloaded library.
///
/// # Errors
/// [`MemoryError`], also if part of it is another layer's. Nothing changes then.
pub fn memory_layer(
    address: u64,
    bytes: u64,
    layer: u16,
    stage: Option<Stage>,
) -> Result<(), MemoryError> {
    memory::claim_layer(address, bytes, layer, stage)?;
    outside::memory_layer(address, bytes, layer, stage);
    Ok(())
}

/// Records that the range holds blocks of a request, here and in the preloaded library. Values that
/// the owner lacks come from the facts about its request.
///
/// # Errors
/// [`MemoryError`]. Nothing changes then.
pub fn memory_owner(address: u64, bytes: u64, mut owner: Scope) -> Result<(), MemoryError> {
    fill(&mut owner);
    let (batch, request, due) = (owner.batch, owner.request, owner.deadline_ns);
    memory::set_owner(address, bytes, batch, request, due)?;
    outside::memory_owner(address, bytes, batch, request, due);
    Ok(())
}

/// Removes all facts about the range.
pub fn memory_forget(address: u64, bytes: u64) -> Result<(), MemoryError> {
    memory::forget(address, bytes)?;
    outside::memory_forget(address, bytes);
    Ok(())
}

/// Returns the values for a transfer that the calling thread posts from `address`. They come from
/// the first copy of this library that the dynamic linker finds by name, or from this one. That is
/// the copy to which the program sends its hints.
pub fn said_of(address: u64) -> Scope {
    outside::scope_of(address).unwrap_or_else(|| scope::said_of(address))
}

/// A transfer that asks for permits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// Bytes to move.
    pub bytes: u64,
    /// The caller's own values.
    pub said: Scope,
    /// The stage if neither caller, scope nor memory has one.
    pub otherwise: Option<Stage>,
    /// Address of the bytes in this process, 0 if unknown. The facts about this memory are used
    /// where the caller and the thread's scope have no value.
    pub address: u64,
    /// The transfer's direction.
    pub direction: Direction,
    /// The daemon's number of the NIC. `None` means that the caller doesn't know it: such transfers
    /// take turns on the NICs of [`Job::nics`], or on all of the host.
    pub nic: Option<u8>,
    /// The number of the peer, see [`crate::peers`].
    pub peer: u8,
    /// Whether the transfer can't be split.
    pub whole: bool,
    /// Objective in nanoseconds for KV reuse and P2D without a deadline, counted from the first
    /// sight of their request. 0 uses the daemon's.
    pub objective_ns: u64,
}

/// Submits a transfer. Never blocks. A deadline that has passed is left out. A layer that the batch
/// doesn't have is replaced by the layer that the batch computes. Both are counted. The transfer is
/// never refused.
pub fn submit(asked: &Asked) -> Transfer {
    // The time is taken at the call, since the first use of a process attaches.
    let now = now_ns();
    let hub = hub();
    let flow = flow(hub, now, asked);
    Transfer::submit(hub, &flow)
}

/// Returns a lane for transfers, so that one thread can wait for any of them.
pub fn transfers() -> Transfers {
    Transfers::open(hub())
}

/// Returns the flow of a transfer, with all values from hints.
fn flow(hub: &HintHub, now: u64, asked: &Asked) -> Flow {
    let mut said = asked.said;
    let passed = said.deadline_ns != 0 && said.deadline_ns <= now;
    if passed {
        said.deadline_ns = 0;
    }
    if let Some(open) = scope::current() {
        said = said.within(open);
    }
    if asked.address != 0
        && let Some(near) = memory::at(asked.address)
    {
        said = said.within(near);
    }
    fill(&mut said);
    let stage = said.stage.or(asked.otherwise).unwrap_or_default();
    let is_due = asked.objective_ns != 0
        && said.deadline_ns == 0
        && matches!(stage, Stage::KvReuse | Stage::P2d);
    if passed || is_due || said.layer.is_some() && said.batch != 0 {
        let mut channel = channel(hub);
        let table = &mut channel.table;
        table.counts.deadlines_passed += u64::from(passed);
        if is_due {
            said.deadline_ns = table.sights.due(now, said.request, asked.objective_ns);
        }
        if let Some((layers, current)) = table.layers(said.batch)
            && said.layer.is_some_and(|layer| layer >= layers)
        {
            table.counts.layers_unknown += 1;
            said.layer = current;
        }
    }
    Flow {
        stage,
        direction: asked.direction,
        nic: asked.nic.unwrap_or_else(|| hub.nic_in_turn(asked.direction)),
        layer: said.layer.unwrap_or(0),
        whole: asked.whole,
        peer: asked.peer,
        bytes: asked.bytes,
        batch: said.batch,
        request: said.request,
        deadline_ns: said.deadline_ns,
        ..Flow::default()
    }
}

/// Returns the client for hints and transfers of this process.
pub fn client() -> &'static Client {
    &hub().client
}

/// Prints that `what` go out unscheduled, and why, if no daemon is there or the daemon refuses this
/// process. Prints nothing in mode `off`.
pub fn warn_if_alone(what: &str) {
    let client = client();
    if Job::of_this_process().mode == Mode::Off || client.is_attached() {
        return;
    }
    let why = client.refusal().unwrap_or_else(|| {
        let socket = Options::from_env().socket;
        format!("nobody answers at {}", socket.display())
    });
    eprintln!(
        "laxity: {why}; {what} go out unscheduled until a daemon is there (`laxity doctor` says \
         more)"
    );
}

/// Sizes of the tables and counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HintStats {
    /// Number of remembered requests, with those that have ended.
    pub requests: usize,
    /// Number of remembered batches.
    pub batches: usize,
    /// Number of hints that were taken.
    pub hints: u64,
    /// Counters of hints.
    pub counts: HintCounts,
    /// Number of transfers that were dropped before they were sent or cancelled completely.
    pub tickets_dropped: u64,
}

/// Returns the sizes of the tables and the counters.
pub fn stats() -> HintStats {
    let hub = hub();
    let channel = channel(hub);
    let (requests, batches) = channel.table.sizes();
    HintStats {
        requests,
        batches,
        hints: channel.table.taken,
        counts: channel.table.counts,
        tickets_dropped: hub.dropped.load(Ordering::Relaxed),
    }
}
