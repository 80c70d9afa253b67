//! What carries messages: the seam between what NCCL sees, and decides with the scheduler, and a
//! network.
//!
//! Above it (`comm.rs`, `gate.rs`) a message is classified and waits for its permit; below it
//! (`tcp/`, `verbs/`) its bytes go out in the class that the permit names. The rules on both sides:
//!
//! * Messages of a connection are numbered in the order in which they are begun, and match the
//!   buffers that are posted, in order; a tag only selects among the buffers of one grouped
//!   receive.
//! * A message that is handed over before its receiver has posted is kept above the seam.
//! * A message is begun only when [`Sender::clear`] says so: its receiver has posted for it, or it
//!   is so small that the network holds it in any case. What is begun therefore leaves the wire
//!   without any other message's help, in whatever order permits come (docs/nccl.md has the
//!   argument that nothing can deadlock).
//! * A message has one class for its life. Its bytes are pushed in order, as they are permitted.
//! * Nothing here blocks; nothing here starts a thread.
//! * Errors of a connection in use are returned by `progress`, and stay.

use std::any::Any;
use std::ffi::CString;
use std::net::IpAddr;

use smallvec::SmallVec;

use crate::fault::Result;
use crate::handle::Handle;

/// `NCCL_PTR_HOST`, `NCCL_PTR_CUDA`, `NCCL_PTR_DMABUF`.
pub const POINTER_HOST: i32 = 1;
/// Memory of a GPU, known by its address.
pub const POINTER_CUDA: i32 = 2;
/// Memory of a GPU, known by a file descriptor.
pub const POINTER_DMABUF: i32 = 4;

/// Buffers of one grouped receive. NCCL has 8 at most; one is advertised, since gating one tag
/// would hold up its group.
pub const GROUP_MAX: usize = 8;

/// One NIC, as `getProperties` describes it.
#[derive(Clone, Debug)]
pub struct Device {
    /// For logs, and to find the NIC in the daemon's configuration.
    pub name: CString,
    /// Its folder under /sys, none for virtual ones.
    pub pci_path: Option<CString>,
    /// One per physical NIC.
    pub guid: u64,
    /// `POINTER_*`.
    pub pointers: i32,
    /// Mbit/s.
    pub speed_mbit: i32,
    /// Port of the NIC.
    pub port: i32,
    /// Microseconds; 0 leaves it to NCCL.
    pub latency_us: f32,
    /// Connections at most.
    pub comms_max: i32,
    /// A registration serves all connections of the device.
    pub registers_globally: bool,
    /// Whether data may become visible to a GPU after their completion, so that NCCL has to flush.
    pub force_flush: bool,
    /// Bytes of a message at most.
    pub message_max: usize,
    /// Its address, for peers' numbers.
    pub address: IpAddr,
}

/// The traffic classes of a connection: DSCP by index, the connection's own (for what nobody
/// permits) first.
pub type Classes = SmallVec<[u8; 8]>;

/// Memory as NCCL registers it.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// Where.
    pub address: usize,
    /// Bytes.
    pub bytes: usize,
    /// `POINTER_*`.
    pub kind: i32,
    /// File descriptor and offset, for `POINTER_DMABUF`.
    pub dma_buf: Option<(i32, u64)>,
}

/// A registration: whatever the backend keeps of it. Given back to `deregister` of the same
/// connection or, where the device registers globally, of any.
pub type Region = Box<dyn Any + Send + Sync>;

/// A message to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// Where its bytes are; they stay until `Sent::done` says so.
    pub address: usize,
    /// How many.
    pub bytes: usize,
    /// Selects the buffer of a grouped receive.
    pub tag: i32,
    /// Registration of the memory; none if NCCL gave none (only messages of no bytes).
    pub region: Option<&'a Region>,
    /// Index into the connection's classes.
    pub class: usize,
    /// Whether it matters when exactly bytes leave the wire (`Sent::left`). Otherwise they have
    /// when the network took them.
    pub accounted: bool,
}

/// A buffer that a message is to be received in.
#[derive(Clone, Copy, Debug)]
pub struct Buffer<'a> {
    /// Where.
    pub address: usize,
    /// Room.
    pub bytes: usize,
    /// See [`Message::tag`].
    pub tag: i32,
    /// See [`Message::region`].
    pub region: Option<&'a Region>,
}

/// What became of a message that was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    /// Its number.
    pub message: u64,
    /// Bytes of it that have left the wire since the last time.
    pub left: usize,
    /// The memory may be used again; said once.
    pub done: bool,
}

/// A grouped receive is complete (or a flush is).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// The number that `post` or `flush` gave.
    pub post: u64,
    /// Bytes that came, by buffer.
    pub sizes: SmallVec<[usize; GROUP_MAX]>,
}

/// Whether a message may be begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clear {
    /// Now.
    Yes,
    /// Its receiver has not posted yet: ask again.
    NotYet,
    /// The grouped receive that is next has no buffer of this tag (left): messages of other tags go
    /// before it.
    OthersFirst,
}

/// A network.
pub trait Backend: Send + Sync {
    /// `tcp`, `verbs`.
    fn name(&self) -> &'static str;

    /// The NICs that can be used, in the order of their numbers; at least one.
    fn devices(&self) -> &[Device];

    /// Listens for one or more connections, and the handle by which they find this.
    ///
    /// # Errors
    /// The system refused.
    fn listen(&self, device: usize) -> Result<(Box<dyn Listener>, Handle)>;

    /// Begins to connect. `handle` was checked to be one of this backend.
    ///
    /// # Errors
    /// The system refused.
    fn connect(
        &self,
        device: usize,
        handle: &Handle,
        classes: &Classes,
    ) -> Result<Box<dyn Connecting>>;
}

/// Where connections arrive.
pub trait Listener: Send {
    /// The next connection that is complete, if there is one.
    ///
    /// # Errors
    /// The system refused. A stranger's or a broken connection is no error: it is dropped,
    /// with a word in the log.
    fn accept(&mut self) -> Result<Option<Box<dyn Receiver>>>;
}

/// A connection that is being made.
pub trait Connecting: Send {
    /// The connection, once it is complete.
    ///
    /// # Errors
    /// It can't be made.
    fn poll(&mut self) -> Result<Option<Box<dyn Sender>>>;
}

/// The sending end of a connection.
pub trait Sender: Send {
    /// Registers memory for sending.
    ///
    /// # Errors
    /// The device can't, or not that kind.
    fn register(&mut self, memory: Memory) -> Result<Region>;

    /// Lets go of a registration.
    ///
    /// # Errors
    /// The device refused.
    fn deregister(&mut self, region: Region) -> Result<()>;

    /// Whether the next message, of `bytes` with `tag`, may be begun.
    ///
    /// # Errors
    /// It fits in no buffer that was posted.
    fn clear(&mut self, bytes: usize, tag: i32) -> Result<Clear>;

    /// Begins the message that [`Sender::clear`] was asked about, and returns its number: one more
    /// than that of the message before.
    fn begin(&mut self, message: Message<'_>) -> u64;

    /// The next `bytes` of the newest message may go. Those of a message without any go with
    /// `push(0)`.
    fn push(&mut self, bytes: usize);

    /// Moves what can be moved, and adds what became of messages.
    ///
    /// # Errors
    /// The connection is broken.
    fn progress(&mut self, sent: &mut Vec<Sent>) -> Result<()>;

    /// Adds what has left the wire of messages that are done. Reads no memory of messages. Where a
    /// message is done when it has left there is nothing to look for.
    fn look(&mut self, _sent: &mut Vec<Sent>) {}

    /// Ends the connection. If `kept`, what is done was done for good: the receiver gets it, though
    /// it may ask for it only later; waits for that a moment at most. Otherwise whatever is in
    /// flight is dropped.
    fn close(self: Box<Self>, kept: bool);
}

/// The receiving end of a connection.
pub trait Receiver: Send {
    /// Registers memory for receiving.
    ///
    /// # Errors
    /// The device can't, or not that kind.
    fn register(&mut self, memory: Memory) -> Result<Region>;

    /// Lets go of a registration.
    ///
    /// # Errors
    /// The device refused.
    fn deregister(&mut self, region: Region) -> Result<()>;

    /// Posts the buffers of one grouped receive, at most [`GROUP_MAX`]; a number for it, or `None`
    /// if it can't be taken now.
    fn post(&mut self, buffers: &[Buffer<'_>]) -> Option<u64>;

    /// Begins to make data visible to a GPU that were received in these buffers; `None` if nothing
    /// has to be done.
    fn flush(&mut self, buffers: &[Buffer<'_>]) -> Option<u64>;

    /// Moves what can be moved, and adds what is complete.
    ///
    /// # Errors
    /// The connection is broken.
    fn progress(&mut self, received: &mut Vec<Received>) -> Result<()>;

    /// Ends the connection.
    fn close(self: Box<Self>);
}
