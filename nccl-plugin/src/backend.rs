//! The interface between NCCL's view of connections and the network that carries messages.
//!
//! Above this interface (`comm/`), a message is classified and waits for its permit. Below it
//! (`tcp/`, `verbs/`), its bytes go out in the permit's class. The rules are:
//!
//! * Messages of a connection are numbered in the order in which they begin. They match posted
//!   buffers in order. NCCL's tags and grouped receives of several buffers aren't used, because the
//!   plugin advertises one buffer: a message that waits for its permit would delay its group.
//! * A message whose receiver has not posted is kept above this interface.
//! * A message begins only when [`Sender::clear`] allows it. Either its receiver has posted for it,
//!   or it is so small that the network buffers it. A message that began is therefore delivered
//!   whatever other messages do, in whatever order permits arrive. docs/nccl.md shows that nothing
//!   can deadlock.
//! * A message has one class for its life. Its bytes are pushed in order, as they are permitted.
//! * No function blocks or starts a thread.
//! * `progress` returns the error of a connection in use, and returns it again in later calls.

use std::any::Any;
use std::ffi::CString;
use std::net::{IpAddr, SocketAddr};

use smallvec::SmallVec;

use crate::fault::Result;
use crate::handle::Handle;
use crate::verbs::OneSidedPort;

/// Memory of the host, `NCCL_PTR_HOST`.
pub const POINTER_HOST: i32 = 1;
/// Memory of a GPU, identified by its address (`NCCL_PTR_CUDA`).
pub const POINTER_CUDA: i32 = 2;
/// Memory of a GPU, identified by a file descriptor (`NCCL_PTR_DMABUF`).
pub const POINTER_DMABUF: i32 = 4;

/// A NIC, as `getProperties` describes it.
#[derive(Clone, Debug)]
pub struct Device {
    /// The NIC's name in logs and in the daemon's configuration.
    pub name: CString,
    /// The NIC's folder under /sys. A virtual NIC has none.
    pub pci_path: Option<CString>,
    /// A number that is unique for each physical NIC.
    pub guid: u64,
    /// The supported kinds of memory, a set of `POINTER_*`.
    pub pointers: i32,
    pub speed_mbit: i32,
    pub port: i32,
    /// The NIC's latency in microseconds. With 0, NCCL uses its own value.
    pub latency_us: f32,
    pub comms_max: i32,
    /// Whether a registration serves all connections of the device.
    pub registers_globally: bool,
    /// Whether NCCL has to flush, because data may become visible to a GPU after their completion.
    pub force_flush: bool,
    pub message_max: usize,
    /// The NIC's address, from which the numbers of peers are computed.
    pub address: IpAddr,
}

/// A connection's traffic classes, as DSCP values. The first is the connection's own, which
/// messages without a permit use.
pub type TrafficClasses = SmallVec<[u8; 8]>;

#[derive(Clone, Copy, Debug)]
pub struct Memory {
    pub address: usize,
    pub bytes: usize,
    /// The memory's kind, one of `POINTER_*`.
    pub kind: i32,
    /// The file descriptor and the offset of `POINTER_DMABUF` memory.
    pub dma_buf: Option<(i32, u64)>,
}

/// The backend's data of a registration. `deregister` takes it on the same connection, or on any
/// connection if the device registers globally.
pub type MemoryRegistration = Box<dyn Any + Send + Sync>;

#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// The message's bytes, which stay valid until `Sent::done`.
    pub buffer: Buffer<'a>,
    /// Index into the connection's classes.
    pub class: usize,
    /// Whether `Sent::left` has to be exact. Otherwise bytes count as delivered once the network
    /// took them.
    pub accounted: bool,
}

/// Memory of a message, at either end.
#[derive(Clone, Copy, Debug)]
pub struct Buffer<'a> {
    pub address: usize,
    pub bytes: usize,
    /// Registration of the memory. Only buffers of no bytes have none.
    pub region: Option<&'a MemoryRegistration>,
}

/// The progress of a message that was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    pub message: u64,
    /// Bytes of the message that were delivered since the last report.
    pub left: usize,
    /// Whether the memory may be used again. Reported once.
    pub done: bool,
}

/// A receive or a flush that is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// The number that `post` or `flush` returned.
    pub post: u64,
    /// Bytes that arrived. `None` for a flush.
    pub bytes: Option<usize>,
}

/// A network that carries messages, such as TCP.
pub trait Backend: Send + Sync {
    /// Returns the network's name, `tcp` or `verbs`.
    fn name(&self) -> &'static str;

    /// Returns the usable NICs in the order of their numbers. There is at least one.
    fn devices(&self) -> &[Device];

    /// Returns the address at which groups of ranks meet for one-sided operations of a NIC, and the
    /// device port if they use RDMA. Returns `None` if the NIC has no such operations.
    fn one_sided_at(&self, _device: usize) -> Option<(SocketAddr, Option<OneSidedPort>)> {
        None
    }

    /// Listens for connections. Returns the listener and the handle by which senders find it.
    fn listen(&self, device: usize) -> Result<(Box<dyn Listener>, Handle)>;

    /// Begins to connect. The caller has checked that `handle` belongs to this backend.
    /// `service_level` is for InfiniBand.
    fn connect(
        &self,
        device: usize,
        handle: &Handle,
        classes: &TrafficClasses,
        service_level: u8,
    ) -> Result<Box<dyn Connecting>>;
}

pub trait Listener: Send {
    /// Returns the next complete connection, if there is one.
    ///
    /// # Errors
    /// The operating system refused. A stranger's or a broken connection is dropped and logged.
    fn accept(&mut self) -> Result<Option<Box<dyn Receiver>>>;
}

pub trait Connecting: Send {
    /// Returns the connection once it is complete.
    fn poll(&mut self) -> Result<Option<Box<dyn Sender>>>;
}

pub trait Sender: Send {
    fn register(&mut self, memory: Memory) -> Result<MemoryRegistration>;

    fn deregister(&mut self, region: MemoryRegistration) -> Result<()>;

    /// Reports whether the next message, of `bytes`, may begin. If its receiver has not posted yet,
    /// the caller asks again.
    ///
    /// # Errors
    /// The message doesn't fit in the posted buffer.
    fn clear(&mut self, bytes: usize) -> Result<bool>;

    /// Begins the message for which [`Sender::clear`] was called, and returns its consecutive
    /// number.
    fn begin(&mut self, message: Message<'_>) -> u64;

    /// Permits the next `bytes` of the newest message. An empty message goes out with `push(0)`.
    fn push(&mut self, bytes: usize);

    /// Moves bytes as far as possible without blocking, and appends the progress of messages to
    /// `sent`.
    fn progress(&mut self, sent: &mut Vec<Sent>) -> Result<()>;

    /// Appends the bytes of done messages that were delivered, without reading those messages'
    /// memory. A network whose messages are done only when they were delivered needs no
    /// implementation.
    fn look(&mut self, _sent: &mut Vec<Sent>) {}

    /// Ends the connection. With `kept`, the receiver still gets all messages that are done, even
    /// if it posts later, and the call waits briefly for that. Otherwise bytes in flight are
    /// dropped.
    fn close(self: Box<Self>, kept: bool);
}

/// The receiving end of a connection.
pub trait Receiver: Send {
    fn register(&mut self, memory: Memory) -> Result<MemoryRegistration>;

    fn deregister(&mut self, region: MemoryRegistration) -> Result<()>;

    /// Posts a buffer. Returns its number, or `None` if the connection can't take it now.
    fn post(&mut self, buffer: Buffer<'_>) -> Option<u64>;

    /// Begins to make received data in this buffer visible to a GPU. Returns `None` if not needed.
    fn flush(&mut self, buffer: Buffer<'_>) -> Option<u64>;

    /// Moves bytes as far as possible without blocking, and appends complete receives and flushes
    /// to `received`.
    fn progress(&mut self, received: &mut Vec<Received>) -> Result<()>;

    fn close(self: Box<Self>);
}
