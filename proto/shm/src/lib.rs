//! The shared memory and the registration between a client process and laxityd: architecture §3.
//!
//! Each client process has one sealed memfd ([`region`]) with lanes ([`lane`]), one per submitting
//! thread, of 64-byte slots ([`layout`]). The client writes a record into a slot ([`record`]), and
//! the daemon writes the permit into the same cache line ([`permit`]). A client gets its region by
//! [`registration`]. Both sides sleep by the protocol of [`sleep`]. Everything that the daemon
//! reads from a region is untrusted input.
//!
//! The daemon's side:
//!
//! ```no_run
//! use laxity_shm::{consumer::Wake, layout::Geometry, record::Record};
//! use laxity_shm::{registration, served::RegionConsumer};
//! use std::os::fd::AsFd;
//!
//! let listener = registration::listen("/run/laxity/laxityd.sock".as_ref())?;
//! let socket = registration::accept(listener.as_fd())?.expect("a client waits");
//! let hello = registration::receive_hello(socket.as_fd())?.expect("it has spoken");
//! let fenced = hello.flags & registration::HELLO_FENCED != 0;
//! let mut client = RegionConsumer::new(Geometry { colour: 5, ..Geometry::default() }, fenced)?;
//! client.header().set_credit_class(1 << 2, 2); // Stage 2 on credit, at level 2
//! client.header().raise(hello.mode().unwrap_or_default().attention());
//! client.header().beat(laxity_shm::sleep::now_ns());
//! client.welcome(socket.as_fd())?;
//! loop {
//!     client.refresh(); // every few dozen scans
//!     client.scan(32, |_lane, consumer, incoming| match incoming {
//!         Ok(incoming) => if let Record::Submit(flow) = incoming.record {
//!             // permit first, account after
//!             if consumer.permit(incoming.at, flow.bytes, 2, true) == Ok(Wake::Needed) {
//!                 consumer.wake();
//!             }
//!         },
//!         Err(garbage) => eprintln!("detach this client: {garbage}"),
//!     });
//!     client.header().beat(laxity_shm::sleep::now_ns()); // every ≤ 20 ms while flows wait
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The client's side is `laxity_client`.

#[cfg(all(not(loom), not(target_os = "linux")))]
compile_error!("laxity-shm needs Linux: memfd seals, futex, membarrier");

pub mod consumer;
mod header;
mod hint;
pub mod lane;
pub mod layout;
pub mod permit;
pub mod producer;
pub mod record;
pub mod sleep;
pub mod sync;

pub use laxity_types::marking;

#[cfg(not(loom))]
pub mod fork;
#[cfg(not(loom))]
pub mod region;
#[cfg(not(loom))]
pub mod registration;
#[cfg(not(loom))]
pub mod served;
