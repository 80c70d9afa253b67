//! The daemon's end of the stream to the coordinator (docs/coordinator.md): what this host knows
//! goes there, an order between hosts comes back.
//!
//! ```text
//! scheduler thread          desk             tokio task
//!   ReportState ──── one dispatch ───▶ Report ──▶ coordinator
//!   merge  ◀─── the latest decree ── OrderAssembler ◀──
//! ```
//!
//! * *Nobody waits.* Between the two threads is a [`desk`] with room for one dispatch and one
//!   decree. Whoever finds it locked or full comes back later; what happens meanwhile is merged:
//!   into the ledger's notes on one side, into a newer decree on the other. So a coordinator that
//!   does not read, or says too much, costs the same memory as none.
//! * *Nothing half.* [`gather`] hands over whole orders only, and refuses those of a term that was
//!   overtaken.
//! * *Nothing for ever.* The last decree holds until its age limit ([`decree`] says what holds for
//!   batches that it does not name); then the order of the daemon's own admission does, which never
//!   stopped running.
//!
//! * *Nobody asks for leave.* What this host reads from another goes ahead until the coordinator
//!   says that it is to wait, and not for ever ([`driver::fetches`](crate::driver::fetches)).

pub mod addresses;
pub mod assemble;
pub mod backoff;
pub mod channel;
pub mod credentials;
pub mod exchange;
pub mod order;
pub mod reports;
pub mod stream;
