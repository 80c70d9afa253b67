//! The daemon's end of the stream to the coordinator (docs/coordinator.md): what this host knows
//! goes there, an order between hosts comes back.
//!
//! ```text
//! scheduler thread       CoordinatorExchange     tokio task
//!   ReportState ──── one outgoing report ───▶ stream ──▶ coordinator
//!   merge  ◀─── the latest cluster order ── OrderAssembler ◀──
//! ```
//!
//! * *Neither thread waits.* The [`exchange`] between them has room for one outgoing report and one
//!   cluster order. A thread that finds it locked or full comes back later. What happens meanwhile
//!   is merged, into the state of the reports or into a newer order. So a coordinator that does not
//!   read, or sends too much, costs no more memory than none.
//! * *Orders are whole.* [`assemble`] hands over complete orders only, and refuses those of a term
//!   that a later one replaced.
//! * *Orders end.* The last cluster order holds until its age limit ([`order`] says what holds for
//!   batches that it does not name). After that the daemon's own admission decides, which never
//!   stopped running.
//! * *Reads start without permission.* What this host reads from another host proceeds until the
//!   coordinator tells it to wait, for a bounded time ([`driver::fetches`](crate::driver::fetches)).

pub mod addresses;
pub mod assemble;
pub mod backoff;
pub mod channel;
pub mod credentials;
pub mod exchange;
mod fetch_reports;
pub mod order;
pub mod outgoing;
mod port_loads;
pub mod reports;
pub mod stream;
mod stream_state;
