//! What the inference engine knows, said from any thread of the process: requests and their
//! deadlines, batches, layers, and what transfers and memory belong to.
//!
//! The functions here are those of `laxity.h` and of the Python package. They go beyond a lane's
//! hints ([`Lane::hint`]) in that they
//! * need no lane: all hints go through one, in the order in which they were said;
//! * remember, within limits, what was said: a request's deadline is found for its transfers, a
//!   daemon that is started anew is told all of it again, and
//! * say so if a hint makes no sense ([`HintError`]), where the daemon could only ignore it.
//!
//! Nothing here waits for the daemon. A forked child begins with nothing: it knows none of the
//! requests and attaches for itself.

mod bounded;
mod gate;
mod hint_table;
mod outside;
mod sights;

use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use laxity_job::fork::{PerProcess, epoch};
use laxity_shm::record::{Direction, Flow, Stage};
use laxity_shm::sleep::now_ns;

pub use gate::{Excess, Transfer, Transfers};
pub use hint_table::{BATCHES_MAX, Counts, Facts, HintError, REQUESTS_MAX, TENANT_MAX};
pub use outside::is_there as is_preloaded;
pub use sights::FirstSights;

use crate::client::Client;
use crate::hint::Hint;
use crate::lane::Lane;
use crate::memory::{self, MemoryError};
use crate::options::Options;
use crate::scope::{self, Scope};
use gate::Shard;
use hint_table::HintTable;

/// What this process said, and its way to the daemon.
#[derive(Debug)]
struct Hub {
    client: Client,
    /// [`epoch`] when it was made.
    epoch: u32,
    channel: Mutex<HintChannel>,
    shards: [Shard; gate::LANES],
    /// Transfers that were dropped before all of them was sent or given up.
    dropped: AtomicU64,
}

#[derive(Debug)]
struct HintChannel {
    table: HintTable,
    lane: Option<Lane>,
    /// [`Client::generation`] of the daemon that knows the table.
    told: u64,
}

static HUB: PerProcess<Hub> = PerProcess::none();

fn hub() -> &'static Hub {
    HUB.get_or_make(|| {
        let client = Client::attach(Options::from_env());
        let told = client.generation();
        Hub {
            client,
            epoch: epoch(),
            channel: Mutex::new(HintChannel {
                table: HintTable::new(),
                lane: None,
                told,
            }),
            shards: Default::default(),
            dropped: AtomicU64::new(0),
        }
    })
}

fn channel(hub: &Hub) -> MutexGuard<'_, HintChannel> {
    // What a panic may leave behind is an entry more or less.
    hub.channel.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes a hint: first the table, then the daemon.
fn take(
    how: impl FnOnce(&mut HintTable, &mut dyn FnMut(Hint)) -> Result<(), HintError>,
) -> Result<(), HintError> {
    let hub = hub();
    let mut channel = channel(hub);
    let HintChannel { table, lane, told } = &mut *channel;
    let lane = lane.get_or_insert_with(|| hub.client.lane());
    lane.seek();
    // A daemon that is new to this process gets all of the table, with the change in it.
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

/// The number of a request or batch that the application knows by a text: its FNV-1a hash of 64
/// bits, the same on all hosts and in all versions. Never 0.
#[must_use]
pub fn number(id: &str) -> u64 {
    number_of(id.as_bytes())
}

/// [`number`] of bytes that need not be UTF-8.
#[must_use]
pub fn number_of(id: &[u8]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in id {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash.max(1)
}

/// The clock of deadlines.
#[must_use]
pub fn now() -> u64 {
    now_ns()
}

/// A request came in.
///
/// # Errors
/// [`HintError::DeadlinePassed`], [`HintError::NoId`].
pub fn request_begin(request: u64, facts: Facts) -> Result<(), HintError> {
    // As the caller has it: the first hint of a process attaches, which may take its time.
    let now = now_ns();
    take(|table, say| table.request_begin(now, request, facts, say))
}

/// What was said of a request that has not ended.
#[must_use]
pub fn request(request: u64) -> Option<Facts> {
    channel(hub()).table.facts(request).cloned()
}

/// Tells the daemon a hint. To a request that joins a batch, what was said when it began is added.
///
/// # Errors
/// Any other [`HintError`].
pub fn tell(hint: Hint) -> Result<(), HintError> {
    take(|table, say| table.tell(hint, say))
}

/// Opens a scope for the calling thread, here and in the library that was preloaded. What is not
/// said of a request comes from what was said when it began.
pub fn scope_push(mut scope: Scope) {
    fill(&mut scope);
    outside::scope_push(&scope);
    scope::push(scope);
}

/// Closes the innermost scope of the calling thread; false if there is none.
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

/// The range holds the KV cache of a layer, here and in the library that was preloaded.
///
/// # Errors
/// [`MemoryError`], also if part of it is another layer's; nothing changes then.
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

/// The range holds blocks of a request, here and in the library that was preloaded. What is not
/// said of the request comes from what was said when it began.
///
/// # Errors
/// [`MemoryError`]; nothing changes then.
pub fn memory_owner(address: u64, bytes: u64, mut owner: Scope) -> Result<(), MemoryError> {
    fill(&mut owner);
    let (batch, request, due) = (owner.batch, owner.request, owner.deadline_ns);
    memory::set_owner(address, bytes, batch, request, due)?;
    outside::memory_owner(address, bytes, batch, request, due);
    Ok(())
}

/// Nothing is known of the range any more.
///
/// # Errors
/// [`MemoryError::NoRange`].
pub fn memory_forget(address: u64, bytes: u64) -> Result<(), MemoryError> {
    memory::forget(address, bytes)?;
    outside::memory_forget(address, bytes);
    Ok(())
}

/// What is said of a transfer that the calling thread posts from `address`, wherever the program
/// says its hints: in the first copy of this library that the dynamic linker finds by name, else in
/// this one.
#[must_use]
pub fn said_of(address: u64) -> Scope {
    outside::scope_of(address).unwrap_or_else(|| scope::said_of(address))
}

/// A transfer, as far as its caller knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// Bytes to move.
    pub bytes: u64,
    /// What the caller says of it.
    pub said: Scope,
    /// Its stage if nobody says one.
    pub otherwise: Option<Stage>,
    /// Where its bytes are in this process, 0 if unknown: what is known of that memory holds where
    /// the caller and the thread's scope say nothing.
    pub address: u64,
    /// Which way it goes.
    pub direction: Direction,
    /// The NIC, by its number at the daemon.
    pub nic: u8,
    /// The other end, see [`crate::peers`].
    pub peer: u8,
    /// It cannot be sent in pieces.
    pub whole: bool,
    /// KV reuse and P2D of which nobody says a deadline are due this long after the first sight of
    /// their request; 0 leaves that to the daemon.
    pub objective_ns: u64,
}

/// Asks for leave to send; never blocks. A deadline that was said for it and has passed, and a
/// layer that its batch doesn't have, are counted and left out: a transfer is not refused.
#[must_use]
pub fn submit(asked: &Asked) -> Transfer {
    // As the caller has it: see `request_begin`.
    let now = now_ns();
    let hub = hub();
    let flow = flow(hub, now, asked);
    Transfer::submit(hub, &flow)
}

/// A lane for transfers of which one thread will wait for any.
#[must_use]
pub fn transfers() -> Transfers {
    Transfers::open(hub())
}

/// The flow that a transfer is, with what is known of it.
fn flow(hub: &Hub, now: u64, asked: &Asked) -> Flow {
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
        nic: asked.nic,
        receiver_bound: false,
        layer: said.layer.unwrap_or(0),
        whole: asked.whole,
        peer: asked.peer,
        bytes: asked.bytes,
        batch: said.batch,
        request: said.request,
        deadline_ns: said.deadline_ns,
    }
}

/// The client that hints and transfers of this process go through.
#[must_use]
pub fn client() -> &'static Client {
    &hub().client
}

/// What is known and what was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HintStats {
    /// Requests that are remembered, with those that have ended.
    pub requests: usize,
    /// Batches that are remembered.
    pub batches: usize,
    /// What was counted.
    pub counts: Counts,
    /// Transfers that were dropped before all of them was sent or given up.
    pub tickets_dropped: u64,
}

/// What is known and what was counted of hints.
#[must_use]
pub fn stats() -> HintStats {
    let hub = hub();
    let channel = channel(hub);
    let (requests, batches) = channel.table.sizes();
    HintStats {
        requests,
        batches,
        counts: channel.table.counts,
        tickets_dropped: hub.dropped.load(Ordering::Relaxed),
    }
}
