//! Stage 2 over a real NCCL net plugin ([`Collectives::NcclPlugin`]): one communicator to and one from each peer of the unit,
//! all-to-alls as `isend`s and `irecv`s on them.
//!
//! A thread of its own owns the plugin, as NCCL's proxy thread does: the interface is polled and has no file descriptor, and the
//! worker's loop has stages 1 and 3 to look after. The two talk by queues; what comes back also rings an eventfd that the loop
//! watches. While no all-to-all is under way the thread sleeps; else it looks every [`POLL_EVERY`].
//!
//! As NCCL does, a rank posts its receives when it begins an exchange, not before: what a faster peer sends waits in the
//! connection until then. Both sides know the size, which depends on the batch only. A message carries the frames of
//! [`frame`](crate::frame), so that every byte is checked as on the replay's own connections.
//!
//! The flows are the plugin's: it submits them to the host's daemon under a name of its own, and marks what it sends. The worker
//! submits none of them.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use laxity_nccl_host::{
    Attempt, Connecting, Context, HANDLE_BYTES, Handle, HostError, Listener, Plugin, RecvComm,
    Region, Request, SendComm, Tested,
};
use nix::sys::eventfd::{EfdFlags, EventFd};
use serde::{Deserialize, Serialize};

#[cfg(doc)]
use crate::config::Collectives;
use crate::config::LabConfig;
use crate::fabric;
use crate::frame::{self, HEAD_BYTES, Head, PAYLOAD_BYTES_MAX};
use crate::ledger::{Arrival, Ledger, Reassembly, stage_name};
use crate::message::Traffic;
use crate::worker::daemon_socket;

/// How often transfers under way are looked at. A message of 64 KiB takes 2.6 ms on the lab's ports.
const POLL_EVERY: Duration = Duration::from_micros(150);

/// Payload of one message at most: a step of NCCL's buffers (4 MiB in 8 steps).
const MESSAGE_BYTES_MAX: u64 = 512 << 10;

/// A message with its frames' heads.
const WIRE_BYTES_MAX: usize = wire_bytes(MESSAGE_BYTES_MAX);

/// Messages under way on one communicator: NCCL's steps.
const UNDER_WAY_MAX: usize = 8;

/// How long a plugin waits for its daemon to take it. It marks its connections by what the daemon says when they are made.
const ATTACH_MS: u32 = 5_000;

/// The device: the plugin is shown one interface only.
const DEVICE: usize = 0;

/// Bytes of a message that has so much payload.
const fn wire_bytes(payload: u64) -> usize {
    payload as usize + payload.div_ceil(PAYLOAD_BYTES_MAX as u64) as usize * HEAD_BYTES
}

/// The payload of each message of a flow.
fn messages(total: u64) -> impl Iterator<Item = (u64, u64)> {
    let count = total.div_ceil(MESSAGE_BYTES_MAX);
    (0..count).map(move |index| {
        let offset = index * MESSAGE_BYTES_MAX;
        (offset, (total - offset).min(MESSAGE_BYTES_MAX))
    })
}

/// Fills `region` with the frames of a message and returns how long it is.
fn fill(region: &mut [u8], head: &Head, offset: u64, payload: u64) -> usize {
    let (mut at, mut offset, end) = (0, offset, offset + payload);
    while offset < end {
        let len = (end - offset).min(PAYLOAD_BYTES_MAX as u64);
        let cut = Head {
            offset,
            len: len as u32,
            ..*head
        };
        region[at..][..HEAD_BYTES].copy_from_slice(&cut.encode());
        at += HEAD_BYTES;
        let bytes = frame::payload(head.flow, offset, len as usize);
        region[at..][..bytes.len()].copy_from_slice(bytes);
        at += bytes.len();
        offset += len;
    }
    at
}

/// What a worker's plugin did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CarrierRecord {
    /// What the plugin calls itself.
    pub name: String,
    /// The device that it used.
    pub device: String,
    /// Messages that were sent.
    pub messages: u64,
    /// Times that it said "not now" to a message; the same one may be told so often.
    pub refusals: u64,
    /// Its sockets could not be given the buffers of the lab's own connections.
    pub buffers_unbounded: bool,
}

/// The environment of a worker whose plugin is to use the host's port and daemon and nothing else.
#[must_use]
pub fn environment(
    config: &LabConfig,
    folder: &Path,
    host: usize,
    scheduled: bool,
) -> Vec<(&'static str, OsString)> {
    let mut environment: Vec<(&'static str, OsString)> = vec![
        // The whole name, not the beginning of one.
        (
            "NCCL_SOCKET_IFNAME",
            format!("={}", fabric::HOST_PORT).into(),
        ),
        ("NCCL_SOCKET_FAMILY", "AF_INET".into()),
        ("LAXITY_NET", "tcp".into()),
        // As for the sockets' buffers: a wait that the machine's other work makes long must not leave a plugin unscheduled.
        ("LAXITY_ATTACH_MS", ATTACH_MS.to_string().into()),
        // One connection per class, as the lab's own.
        ("LAXITY_NSOCKS", "1".into()),
        ("LAXITY_NAME", config.host_name(host).into()),
        ("LAXITY_REPORT", report_path(folder, host).into()),
        (
            "LAXITY_STALL_MS",
            crate::gate::STALL_TIMEOUT.as_millis().to_string().into(),
        ),
    ];
    environment.push(if scheduled {
        ("LAXITY_SOCKET", daemon_socket(folder, host).into())
    } else {
        ("LAXITY_MODE", "off".into())
    });
    environment
}

/// What the plugin of a host calls itself at the daemon.
#[must_use]
pub fn client_name(config: &LabConfig, host: usize) -> String {
    // The plugin adds its own part to the name that it is given.
    format!("{}/nccl", config.host_name(host))
}

/// Where the plugin writes what it sent, when its process ends.
#[must_use]
pub fn report_path(folder: &Path, host: usize) -> PathBuf {
    folder.join(format!("plugin{host}.json"))
}

/// Gives every socket of this host that asks for nothing else a buffer of `bytes` each way, as the lab's own have: without, TCP's
/// auto-tuning would put megabytes of the plugin's into the fabric's queues. True if the kernel agreed.
#[must_use]
pub fn bound_buffers(bytes: u32) -> bool {
    let value = format!("4096 {bytes} {bytes}");
    ["tcp_wmem", "tcp_rmem"]
        .iter()
        .all(|name| std::fs::write(Path::new("/proc/sys/net/ipv4").join(name), &value).is_ok())
}

enum Order {
    /// Connect to a peer's listener.
    Connect(usize, Box<Handle>),
    /// Send a flow to a peer and receive one of the same size from it.
    Exchange(usize, Head),
}

/// What the plugin's thread tells the worker.
#[derive(Debug)]
pub enum Report {
    /// It listens, with a handle for each peer.
    Listening(Vec<(usize, Handle)>),
    /// Connected to and from every peer.
    Connected,
    /// Bytes arrived.
    Arrived(Arrival),
    /// The plugin failed; nothing more comes.
    Failed(anyhow::Error),
}

/// The worker's end of the plugin's thread.
pub struct Carrier {
    orders: Sender<Order>,
    reports: Receiver<Report>,
    wake: Arc<EventFd>,
    thread: JoinHandle<(CarrierRecord, Traffic)>,
}

impl Carrier {
    /// Starts the thread, which loads the plugin and listens once for each peer. What comes of it is the first report.
    ///
    /// # Errors
    /// No thread or descriptor is left.
    pub fn start(plugin: PathBuf, peers: Vec<usize>) -> io::Result<Self> {
        let wake = Arc::new(EventFd::from_flags(
            EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK,
        )?);
        let (orders, incoming) = channel();
        let (outgoing, reports) = channel();
        let bell = Bell {
            reports: outgoing,
            wake: Arc::clone(&wake),
        };
        let thread = std::thread::Builder::new()
            .name("collectives".to_owned())
            .spawn(move || {
                let mut progress = Progress::default();
                if let Err(error) = serve(&plugin, &peers, &incoming, &bell, &mut progress) {
                    bell.ring(Report::Failed(error));
                }
                let traffic = Traffic {
                    carried: progress.carried,
                    ..progress.ledger.traffic().clone()
                };
                (progress.record, traffic)
            })?;
        Ok(Self {
            orders,
            reports,
            wake,
            thread,
        })
    }

    /// To be polled: readable when there are reports.
    #[must_use]
    pub fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Connects to a peer; nobody to connect to is left when the thread has failed, which it reports.
    pub fn connect(&self, peer: usize, handle: Handle) {
        let _ = self.orders.send(Order::Connect(peer, Box::new(handle)));
    }

    /// Sends a flow to a peer and receives the peer's of the same size.
    pub fn exchange(&self, peer: usize, head: Head) {
        let _ = self.orders.send(Order::Exchange(peer, head));
    }

    /// What the thread has to say.
    pub fn take(&self) -> Vec<Report> {
        // First the bell, then the queue: what comes in between rings it again.
        let _ = self.wake.read();
        self.reports.try_iter().collect()
    }

    /// Ends the thread and closes the plugin; what was under way is given up.
    #[must_use]
    pub fn finish(self) -> (CarrierRecord, Traffic) {
        drop(self.orders);
        self.thread.join().unwrap_or_default()
    }
}

/// The thread's end of the reports.
struct Bell {
    reports: Sender<Report>,
    wake: Arc<EventFd>,
}

impl Bell {
    fn ring(&self, report: Report) {
        // A worker that has gone hears nothing, and needs to hear nothing.
        let _ = self.reports.send(report);
        let _ = self.wake.write(1);
    }
}

/// What is left when the thread ends, however it does.
#[derive(Default)]
struct Progress {
    record: CarrierRecord,
    ledger: Ledger,
    carried: BTreeMap<String, u64>,
}

/// A message that is to be sent.
struct Outbound {
    head: Head,
    offset: u64,
    payload: u64,
    /// Its memory, once the plugin has said "not now" to it.
    filled: Option<Region>,
}

/// A message that is to come.
struct Inbound {
    wire_bytes: usize,
    /// Its memory, once the plugin has said "not now" to it.
    ready: Option<Region>,
}

/// One peer of the unit.
struct Peer {
    host: usize,
    listener: Option<Listener>,
    connecting: Option<Connecting>,
    send: Option<SendComm>,
    receive: Option<RecvComm>,
    outbound: VecDeque<Outbound>,
    sending: VecDeque<Request>,
    inbound: VecDeque<Inbound>,
    receiving: VecDeque<(Request, usize)>,
    spare_out: Vec<Region>,
    spare_in: Vec<Region>,
    so_far: Reassembly,
}

/// The body of the thread: until the worker hangs up.
fn serve(
    plugin: &Path,
    peers: &[usize],
    orders: &Receiver<Order>,
    bell: &Bell,
    progress: &mut Progress,
) -> anyhow::Result<()> {
    let plugin = Plugin::load(plugin)?;
    progress.record.name = plugin.name().to_owned();
    // All ranks of a unit have its lowest host in common; 0 is no number of a communicator.
    let context = plugin.init(1 + peers.iter().min().copied().unwrap_or(0) as u64)?;
    let devices = context.devices()?;
    if devices == 0 {
        bail!("the plugin has no device for {}", fabric::HOST_PORT);
    }
    progress.record.device = context.properties(DEVICE)?.name;
    let (mut all, mut handles) = (Vec::new(), Vec::new());
    for &host in peers {
        let (peer, handle) = Peer::listen(&context, host)?;
        all.push(peer);
        handles.push((host, handle));
    }
    bell.ring(Report::Listening(handles));
    let mut connected = false;
    loop {
        let busy = all.iter().any(Peer::is_busy);
        let order = if busy {
            match orders.recv_timeout(POLL_EVERY) {
                Ok(order) => Some(order),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        } else {
            match orders.recv() {
                Ok(order) => Some(order),
                Err(_) => return Ok(()),
            }
        };
        let mut next = order;
        while let Some(order) = next {
            take_order(order, &context, &mut all)?;
            next = match orders.try_recv() {
                Ok(order) => Some(order),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => return Ok(()),
            };
        }
        for peer in &mut all {
            peer.turn(progress, bell)
                .with_context(|| format!("collectives with host {}", peer.host))?;
        }
        if !connected && all.iter().all(Peer::is_connected) {
            connected = true;
            bell.ring(Report::Connected);
        }
    }
}

fn take_order(order: Order, context: &Context, peers: &mut [Peer]) -> anyhow::Result<()> {
    let (Order::Connect(host, _) | Order::Exchange(host, _)) = order;
    let peer = peers
        .iter_mut()
        .find(|peer| peer.host == host)
        .ok_or_else(|| anyhow!("host {host} is no peer of this unit"))?;
    match order {
        Order::Connect(_, handle) => peer.connecting = Some(context.connect(DEVICE, *handle)),
        Order::Exchange(_, head) => peer.exchange(head),
    }
    Ok(())
}

impl Peer {
    fn listen(context: &Context, host: usize) -> Result<(Self, Handle), HostError> {
        let (listener, handle) = context.listen(DEVICE)?;
        let peer = Self {
            host,
            listener: Some(listener),
            connecting: None,
            send: None,
            receive: None,
            outbound: VecDeque::new(),
            sending: VecDeque::new(),
            inbound: VecDeque::new(),
            receiving: VecDeque::new(),
            spare_out: Vec::new(),
            spare_in: Vec::new(),
            so_far: Reassembly::default(),
        };
        Ok((peer, handle))
    }

    fn is_connected(&self) -> bool {
        self.send.is_some() && self.receive.is_some()
    }

    /// Whether the plugin has to be asked again without an order.
    fn is_busy(&self) -> bool {
        self.connecting.is_some()
            || self.listener.is_some()
            || !(self.outbound.is_empty()
                && self.sending.is_empty()
                && self.inbound.is_empty()
                && self.receiving.is_empty())
    }

    fn exchange(&mut self, head: Head) {
        for (offset, payload) in messages(head.total) {
            self.outbound.push_back(Outbound {
                head,
                offset,
                payload,
                filled: None,
            });
            self.inbound.push_back(Inbound {
                wire_bytes: wire_bytes(payload),
                ready: None,
            });
        }
    }

    /// Goes on with whatever is under way.
    fn turn(&mut self, progress: &mut Progress, bell: &Bell) -> anyhow::Result<()> {
        if let Some(connecting) = &mut self.connecting
            && let Some(send) = connecting.poll()?
        {
            self.send = Some(send);
            self.connecting = None;
        }
        if let Some(listener) = &mut self.listener
            && let Some(receive) = listener.accept()?
        {
            self.receive = Some(receive);
            self.listener = None;
        }
        // Receives first: a peer may wait for them.
        self.receive(progress, bell)?;
        self.send(progress)
    }

    fn send(&mut self, progress: &mut Progress) -> anyhow::Result<()> {
        let Some(comm) = &self.send else {
            return Ok(());
        };
        while self.sending.len() < UNDER_WAY_MAX
            && let Some(mut message) = self.outbound.pop_front()
        {
            let wire = wire_bytes(message.payload);
            let region = match message.filled.take() {
                Some(filled) => filled,
                None => {
                    let mut region = spare(&mut self.spare_out, |bytes| comm.register(bytes))?;
                    fill(&mut region, &message.head, message.offset, message.payload);
                    region
                }
            };
            match comm.send(region, wire, 0)? {
                Attempt::Started(request) => {
                    self.sending.push_back(request);
                    progress.record.messages += 1;
                    let stage = stage_name(message.head.kind).to_owned();
                    *progress.carried.entry(stage).or_default() += message.payload;
                }
                Attempt::NotNow(region) => {
                    progress.record.refusals += 1;
                    message.filled = Some(region);
                    self.outbound.push_front(message);
                    break;
                }
            }
        }
        while let Some(request) = self.sending.pop_front() {
            match request.test()? {
                Tested::Done(region, _) => self.spare_out.push(region),
                Tested::Pending(request) => {
                    self.sending.push_front(request);
                    break;
                }
            }
        }
        Ok(())
    }

    fn receive(&mut self, progress: &mut Progress, bell: &Bell) -> anyhow::Result<()> {
        let Some(comm) = &self.receive else {
            return Ok(());
        };
        while self.receiving.len() < UNDER_WAY_MAX
            && let Some(mut message) = self.inbound.pop_front()
        {
            let region = match message.ready.take() {
                Some(region) => region,
                None => spare(&mut self.spare_in, |bytes| comm.register(bytes))?,
            };
            match comm.receive(region, message.wire_bytes, 0)? {
                Attempt::Started(request) => {
                    self.receiving.push_back((request, message.wire_bytes));
                }
                Attempt::NotNow(region) => {
                    message.ready = Some(region);
                    self.inbound.push_front(message);
                    break;
                }
            }
        }
        let mut arrivals = Vec::new();
        while let Some((request, expected)) = self.receiving.pop_front() {
            match request.test()? {
                Tested::Done(region, bytes) if bytes == expected => {
                    let (so_far, ledger) = (&mut self.so_far, &mut progress.ledger);
                    so_far.take(&region[..bytes], ledger, &mut arrivals)?;
                    self.spare_in.push(region);
                }
                Tested::Done(_, bytes) => {
                    bail!("a message had {bytes} bytes where {expected} were expected")
                }
                Tested::Pending(request) => {
                    self.receiving.push_front((request, expected));
                    break;
                }
            }
        }
        for arrival in arrivals {
            bell.ring(Report::Arrived(arrival));
        }
        Ok(())
    }
}

/// Registered memory for one message: some that is spare, else new.
fn spare(
    spare: &mut Vec<Region>,
    register: impl FnOnce(Vec<u8>) -> Result<Region, HostError>,
) -> Result<Region, HostError> {
    match spare.pop() {
        Some(region) => Ok(region),
        None => register(vec![0; WIRE_BYTES_MAX]),
    }
}

/// A handle as it came in a message.
///
/// # Errors
/// It has another length: the peer is of another version.
pub fn handle_from(bytes: &[u8]) -> anyhow::Result<Handle> {
    Handle::try_from(bytes)
        .map_err(|_| anyhow!("a handle has {} bytes, not {HANDLE_BYTES}", bytes.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::Kind;
    use proptest::prelude::*;

    fn head(total: u64) -> Head {
        Head {
            flow: Head::name(3, 9),
            offset: 0,
            total,
            len: 0,
            kind: Kind::Dispatch,
            layer: 2,
            batch: 1_000_001,
            request: 0,
            from: 3,
        }
    }

    proptest! {
        #[test]
        fn a_flow_cut_into_messages_arrives_whole_and_in_order(total in 1..3_000_000_u64) {
            let (mut so_far, mut ledger) = (Reassembly::default(), Ledger::default());
            let mut arrivals = Vec::new();
            let mut region = vec![0; WIRE_BYTES_MAX];
            for (offset, payload) in messages(total) {
                let filled = fill(&mut region, &head(total), offset, payload);
                prop_assert_eq!(filled, wire_bytes(payload));
                so_far.take(&region[..filled], &mut ledger, &mut arrivals).unwrap();
            }
            prop_assert!(arrivals.last().unwrap().complete);
            prop_assert_eq!(arrivals.iter().filter(|arrival| arrival.complete).count(), 1);
            let traffic = ledger.traffic();
            prop_assert_eq!(traffic.received["collective"], total);
            prop_assert_eq!((traffic.corrupted, traffic.missing, traffic.duplicated), (0, 0, 0));
        }
    }

    #[test]
    fn a_plugin_that_is_not_there_is_the_first_report() {
        let carrier = Carrier::start("/nowhere/plugin.so".into(), vec![1]).unwrap();
        let reports = loop {
            let reports = carrier.take();
            if !reports.is_empty() {
                break reports;
            }
            std::thread::sleep(POLL_EVERY);
        };
        let [Report::Failed(error)] = &reports[..] else {
            panic!("{reports:?}");
        };
        assert!(error.to_string().contains("/nowhere/plugin.so"), "{error}");
        let (record, traffic) = carrier.finish();
        assert_eq!((record.messages, traffic.received.len()), (0, 0));
    }

    #[test]
    fn the_environment_leads_to_the_hosts_own_daemon_or_to_none() {
        let value = |environment: &[(&str, OsString)], wanted: &str| {
            let found = environment.iter().find(|(name, _)| *name == wanted);
            found.map(|(_, value)| value.to_string_lossy().into_owned())
        };
        let config = LabConfig::default();
        let folder = Path::new("/run/lab/0");
        let scheduled = environment(&config, folder, 1, true);
        assert_eq!(
            value(&scheduled, "LAXITY_SOCKET").as_deref(),
            Some("/run/lab/0/laxityd1.sock")
        );
        assert_eq!(value(&scheduled, "LAXITY_NAME").as_deref(), Some("unit0.1"));
        assert_eq!(client_name(&config, 1), "unit0.1/nccl");
        assert_eq!(value(&scheduled, "LAXITY_MODE"), None);
        let alone = environment(&config, folder, 1, false);
        assert_eq!(value(&alone, "LAXITY_MODE").as_deref(), Some("off"));
        assert_eq!(value(&alone, "LAXITY_SOCKET"), None);
    }
}
