//! A group of ranks with regions of memory: connecting all to all, and registering.

use core::sync::atomic::{AtomicBool, Ordering};
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::frame::{HELLO_BYTES, RmaHello};
use super::gate::{Around, Wire};
use super::mesh::Mesh;
use super::region::{RemotePart, RmaRegion};
use crate::backend::{Memory, POINTER_HOST};
use crate::fault::{Fault, Result};
use crate::handle::{Carrier, HANDLE_BYTES, Handle, word};
use crate::log;
use crate::socket::{Stranger, accept, is_connected, listen, peer, random};
use crate::tcp::socket;
use crate::verbs::{OneSidedPort, RegionKeys};

/// Longest wait of a connect for all ranks.
const CONNECT_WITHIN: Duration = Duration::from_secs(120);
/// Longest wait for the hello of a connection.
const HELLO_WITHIN: Duration = Duration::from_secs(10);
/// Largest number of connections without a complete hello.
const STRANGERS_MAX: usize = 4096;
/// Pause between two looks at connections that are being made.
const PAUSE: Duration = Duration::from_millis(1);
const REGISTRATION_BYTES: usize = 28;

/// A listener, as NCCL holds it.
#[derive(Debug)]
pub struct RmaListener {
    socket: TcpListener,
    handle: Handle,
    pub device: usize,
    /// The address of the NIC, from which connections go out.
    address: SocketAddr,
    /// The class of the group's connections, as a DSCP.
    dscp: u8,
    /// The device port, if operations use RDMA.
    rdma: Option<OneSidedPort>,
    is_closed: AtomicBool,
}

/// A group of ranks, as NCCL holds it.
pub struct RmaGroup {
    mesh: Arc<Mesh>,
    /// Held during a collective call, since all ranks have to make them in one order.
    collective: Mutex<()>,
    pub device: usize,
    rdma: Option<OneSidedPort>,
}

impl RmaListener {
    /// Listens at an address of this host, for operations over TCP.
    pub fn new(device: usize, address: SocketAddr, dscp: u8) -> Result<Self> {
        Self::over(device, (address, None), dscp)
    }

    /// Listens at an address of this host, for operations by a device port or over TCP.
    pub fn over(
        device: usize,
        (address, rdma): (SocketAddr, Option<OneSidedPort>),
        dscp: u8,
    ) -> Result<Self> {
        let socket = listen(address)?;
        let at =
            socket.local_addr().map_err(|error| Fault::system("the listener's address", error))?;
        let carrier = if rdma.is_some() { Carrier::Verbs } else { Carrier::Tcp };
        let handle = Handle { carrier, address: at, nonce: random() };
        let is_closed = AtomicBool::new(false);
        Ok(Self { socket, handle, device, address, dscp, rdma, is_closed })
    }

    /// Returns the bytes by which other ranks find this one.
    pub fn handle(&self) -> [u8; HANDLE_BYTES] {
        self.handle.encode()
    }

    /// Ends a connect that another thread waits for.
    pub fn close(&self) {
        // Relaxed, because nothing else depends on it.
        self.is_closed.store(true, Ordering::Relaxed);
    }

    /// Waits a little for a rank.
    fn pause(&self, give_up: Instant, rank: usize) -> Result<()> {
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(Fault::Argument("the listener was closed".into()));
        }
        if Instant::now() > give_up {
            let wait = CONNECT_WITHIN.as_secs();
            return Err(Fault::Remote(format!("rank {rank} did not connect within {wait} s")));
        }
        thread::sleep(PAUSE);
        Ok(())
    }

    /// Connects to the ranks before this one, and accepts those behind it.
    fn connect(&self, handles: &[Handle], rank: usize) -> Result<Vec<Option<TcpStream>>> {
        let give_up = Instant::now() + CONNECT_WITHIN;
        let ranks = handles.len();
        let mut streams: Vec<Option<TcpStream>> = (0..ranks).map(|_| None).collect();
        for (to, handle) in handles[..rank].iter().enumerate() {
            let mut stream = socket::connect(self.address, handle.address, self.dscp)?;
            while !is_connected(&stream, handle.address)? {
                self.pause(give_up, to)?;
            }
            let hello = RmaHello { nonce: handle.nonce, rank: rank as u32, ranks: ranks as u32 };
            // An empty socket buffer holds a hello.
            stream
                .write_all(&hello.encode())
                .map_err(|error| Fault::Remote(format!("rank {to} hung up: {error}")))?;
            streams[to] = Some(stream);
        }
        let mut strangers: Vec<Stranger<HELLO_BYTES>> = Vec::new();
        while let Some(missing) = (rank + 1..ranks).find(|behind| streams[*behind].is_none()) {
            while strangers.len() < STRANGERS_MAX
                && let Some(stream) = accept(&self.socket)?
            {
                strangers.push(Stranger::new(stream));
            }
            strangers.retain_mut(|stranger| {
                let heard = stranger.hear(HELLO_WITHIN);
                let hello = match heard
                    .and_then(|hello| hello.map(|bytes| RmaHello::decode(&bytes)).transpose())
                {
                    Ok(None) => return true,
                    Ok(Some(hello)) => hello,
                    Err(problem) => {
                        refuse(&stranger.stream, &problem);
                        return false;
                    }
                };
                let behind = hello.rank as usize;
                let is_right = hello.nonce == self.handle.nonce
                    && hello.ranks as usize == ranks
                    && (rank + 1..ranks).contains(&behind)
                    && streams[behind].is_none();
                match stranger.stream.try_clone() {
                    Ok(stream) if is_right => {
                        socket::notice_silence(&stream);
                        socket::mark(&stream, self.address.is_ipv4(), self.dscp);
                        streams[behind] = Some(stream);
                    }
                    _ => refuse(&stranger.stream, "is of another group"),
                }
                false
            });
            self.pause(give_up, missing)?;
        }
        Ok(streams)
    }
}

fn refuse(stream: &TcpStream, problem: &str) {
    log::info(&format!("a connection from {} was dropped: it {problem}", peer(stream)));
}

/// A rank's contribution to a registration: the region's number, whether the rank can register its
/// part, and the part.
struct Registration {
    id: u32,
    refused: bool,
    part: RemotePart,
}

impl Registration {
    fn encode(&self) -> Vec<u8> {
        let mut data = Vec::with_capacity(REGISTRATION_BYTES);
        data.extend(self.id.to_le_bytes());
        data.extend(u32::from(self.refused).to_le_bytes());
        data.extend(self.part.bytes.to_le_bytes());
        data.extend(self.part.address.to_le_bytes());
        data.extend(self.part.key.to_le_bytes());
        data
    }

    fn decode(data: &[u8]) -> Option<Self> {
        let part = RemotePart {
            bytes: u64::from_le_bytes(word(data, 8)),
            address: u64::from_le_bytes(word(data, 16)),
            key: u32::from_le_bytes(word(data, 24)),
        };
        let refused = word::<4>(data, 4) != [0; 4];
        let id = u32::from_le_bytes(word(data, 0));
        (data.len() == REGISTRATION_BYTES).then_some(Self { id, refused, part })
    }
}

impl RmaGroup {
    /// Connects all ranks. Blocks until all have called it.
    pub fn connect(
        listener: &RmaListener,
        handles: &[[u8; HANDLE_BYTES]],
        rank: usize,
    ) -> Result<Arc<Self>> {
        let handles: Vec<Handle> = handles.iter().map(Handle::decode).collect::<Result<_>>()?;
        let carrier = listener.handle.carrier;
        if let Some(other) = handles.iter().position(|handle| handle.carrier != carrier) {
            return Err(Fault::Usage(format!(
                "rank {other} uses {:?}, this one {carrier:?}: set LAXITY_NET to the same on all \
                 nodes",
                handles[other].carrier
            )));
        }
        if handles.get(rank) != Some(&listener.handle) {
            return Err(Fault::Argument(format!("rank {rank}'s handle is not its listener's")));
        }
        let streams = listener.connect(&handles, rank)?;
        let mesh = Mesh::start(rank, streams)?;
        let (device, rdma) = (listener.device, listener.rdma.clone());
        Ok(Arc::new(Self { mesh, collective: Mutex::new(()), device, rdma }))
    }

    pub fn rank(&self) -> usize {
        self.mesh.rank
    }

    pub fn ranks(&self) -> usize {
        self.mesh.ranks()
    }

    /// Returns the network of a new context. With RDMA, all ranks have to call this.
    pub(super) fn open(&self, domains: usize, around: &Around) -> Result<Arc<dyn Wire>> {
        let Some(port) = &self.rdma else { return Ok(Arc::clone(&self.mesh) as Arc<dyn Wire>) };
        let _collective = self.collective.lock();
        let wire = port.open(&self.mesh, domains, around.dscp, around.service_level)?;
        Ok(Arc::new(wire))
    }

    /// Returns the reason why a rank is lost.
    pub fn fault(&self, rank: usize) -> Option<Fault> {
        self.mesh.fault(rank)
    }

    /// Registers this rank's part of a region. Blocks until all ranks have called it.
    pub fn register(&self, memory: Memory) -> Result<Arc<RmaRegion>> {
        let _collective = self.collective.lock();
        let mut problem = None;
        let keys = match &self.rdma {
            Some(port) => port.register(memory).map_err(|fault| problem = Some(fault)).ok(),
            None => {
                if memory.kind != POINTER_HOST {
                    let text = "over TCP, only the host's memory can be used";
                    problem = Some(Fault::Usage(text.to_owned()));
                }
                None
            }
        };
        let key = keys.as_ref().map_or(0, RegionKeys::remote);
        let part = RemotePart { bytes: memory.bytes as u64, address: memory.address as u64, key };
        let mut regions = self.mesh.regions.write();
        let id = regions.len() as u32;
        let region = Arc::new(RmaRegion::new(id, memory, keys));
        // Another rank may use the region before this one knows that all have registered it. With
        // RDMA, the control connections carry no operations.
        let is_served = problem.is_none() && self.rdma.is_none();
        regions.push(is_served.then(|| Arc::clone(&region)));
        drop(regions);
        let own = Registration { id, refused: problem.is_some(), part };
        match self.mesh.exchange(&own.encode()).and_then(|all| agreed(id, &all)) {
            Ok(parts) => {
                let _ = region.parts.set(parts);
                Ok(region)
            }
            Err(fault) => {
                self.deregister(&region);
                Err(problem.unwrap_or(fault))
            }
        }
    }

    /// Ends a registration. The memory is not touched afterwards.
    pub fn deregister(&self, region: &RmaRegion) {
        if let Some(entry) = self.mesh.regions.write().get_mut(region.id as usize) {
            *entry = None;
        }
        region.end();
    }

    /// Ends the group. Waits briefly until the other ranks have the bytes of completed operations.
    pub fn close(&self) {
        self.mesh.close();
    }
}

impl Drop for RmaGroup {
    fn drop(&mut self) {
        self.mesh.close();
    }
}

/// Returns the parts of all ranks.
fn agreed(id: u32, all: &[Vec<u8>]) -> Result<Vec<RemotePart>> {
    let part = |(rank, data): (usize, &Vec<u8>)| match Registration::decode(data) {
        Some(theirs) if theirs.refused => Err(Fault::Remote(format!(
            "rank {rank} can't register its part of a region; the log there says why"
        ))),
        Some(theirs) if theirs.id == id => Ok(theirs.part),
        _ => Err(Fault::Argument(format!("rank {rank} registers regions in another order"))),
    };
    all.iter().enumerate().map(part).collect()
}
