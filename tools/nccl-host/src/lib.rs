//! NCCL's side of its net plugin interface, without NCCL. It loads a plugin as NCCL does and calls
//! it with host memory.
//!
//! ```no_run
//! use laxity_nccl_host::{Attempt, Plugin, Tested};
//!
//! # fn main() -> Result<(), laxity_nccl_host::HostError> {
//! let plugin = Plugin::load("libnccl-net-laxity.so".as_ref())?;
//! let context = plugin.init(1)?;
//! let (mut listener, handle) = context.listen(0)?;
//! let mut connecting = context.connect(0, handle);
//! let (mut to, mut from) = (None, None);
//! while to.is_none() || from.is_none() {
//!     to = to.or(connecting.poll()?); // never blocks
//!     from = from.or(listener.accept()?);
//! }
//! # let (Some(to), Some(from)) = (to, from) else { return Ok(()) };
//! let mut ready = to.register(b"hello".to_vec())?;
//! let mut sending = loop {
//!     match to.send(ready, 5, 0)? {
//!         Attempt::Started(request) => break request,
//!         Attempt::NotNow(region) => ready = region, // as NCCL does: the same again, later
//!     }
//! };
//! // … `from.receive(…)`, then test both …
//! while let Tested::Pending(request) = sending.test()? {
//!     sending = request;
//! }
//! # Ok(()) }
//! ```
//!
//! The table is `ncclNet_v12_t`, of NCCL 2.30 and later. The types ensure what the interface
//! requires of a host:
//!
//! * Memory belongs to its request until the plugin reports the request done. Memory of an
//!   abandoned request belongs to its communicator, and is freed after the plugin has closed that.
//! * A handle doesn't move while a connection is made, since plugins keep their state in it.
//! * Requests and memory are dropped before their communicator, communicators before their context,
//!   and all before the library.
//! * Everything of a context stays in the thread that made it: no type is `Send`. NCCL itself uses
//!   some functions from two threads, which is a matter for a conformance test.
//!
//! Grouped receives, device memory and offload are not supported.
//!
//! A plugin is native code in this process, and no check can make a wrong one harmless. Load only
//! plugins that you would give NCCL.
#![allow(missing_docs, reason = "what a name of the laboratory says is not said twice")]

mod abi;
mod comm;
mod error;
mod log;
mod memory;
mod plugin;
mod queue;
mod request;

pub use abi::HANDLE_BYTES;
pub use comm::{Connecting, Handle, Listener, RecvComm, SendComm};
pub use error::HostError;
pub use memory::Region;
pub use plugin::{Context, Plugin};
pub use queue::{ReceiveQueue, STEP_BYTES, STEPS, SendCounts, SendQueue};
pub use request::{Attempt, Request, Tested};
