//! The daemon's end of the stream to the coordinator (docs/coordinator.md). Reports of this host go
//! to the coordinator, and cluster orders come back.
//!
//! ```text
//! scheduler thread       CoordinatorExchange     tokio task
//!   ReportState ──── one outgoing report ───▶ stream ──▶ coordinator
//!   merge  ◀─── the latest cluster order ── OrderAssembler ◀──
//! ```
//!
//! * *Neither thread waits.* The [`exchange`] between them holds one outgoing report and one
//!   cluster order. A thread that finds it locked or full tries again later. Until then, news is
//!   merged into the state of the reports or into a newer order. So a slow or noisy coordinator
//!   costs no extra memory.
//! * *Orders are whole.* [`assemble`] returns complete orders only, and refuses those of an
//!   outdated term.
//! * *Orders end.* The last cluster order holds until its age limit ([`order`] covers batches that
//!   it does not name). Then the daemon's own admission decides, which runs all the time.
//! * *Reads are reported.* They load the port that they leave
//!   ([`driver::fetches`](crate::driver::fetches)).

pub mod addresses;
pub mod assemble;
pub mod attendant;
pub mod channel;
pub mod credentials;
pub mod exchange;
mod fetch_reports;
pub mod order;
pub mod outgoing;
mod port_loads;
pub mod reports;
pub mod stream;
pub mod stream_end;
pub mod stream_state;
