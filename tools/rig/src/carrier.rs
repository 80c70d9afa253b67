//! Stage 2 over a real NCCL net plugin ([`Collectives::NcclPlugin`]): one communicator to and one
//! from each peer of the unit, all-to-alls as `isend`s and `irecv`s on them.
//!
//! A thread of its own owns the plugin, as NCCL's proxy thread does: the interface is polled and
//! has no file descriptor, and the worker's loop has stages 1 and 3 to look after. The two talk by
//! queues; what comes back also rings an eventfd that the loop watches. While no all-to-all is
//! under way the thread sleeps; else it looks every [`POLL_EVERY`].
//!
//! As NCCL does, a rank posts its receives when it begins an exchange, not before: what a faster
//! peer sends waits in the connection until then. Both sides know the size, which depends on the
//! batch only. A message carries the frames of [`frame`](crate::frame), so that every byte is
//! checked as on the replay's own connections.
//!
//! The flows are the plugin's: it submits them to the host's daemon under a name of its own, and
//! marks what it sends. The worker submits none of them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use laxity_nccl_host::{Context, HANDLE_BYTES, Handle, Plugin};
use nix::sys::eventfd::{EfdFlags, EventFd};
use serde::{Deserialize, Serialize};

mod peer;

#[cfg(doc)]
use crate::config::Collectives;
use crate::config::LabConfig;
use crate::fabric;
use crate::frame::Head;
use crate::ledger::{Arrival, DeliveryCheck};
use crate::message::Traffic;
use crate::worker::daemon_socket;
use peer::Peer;

/// How often transfers under way are looked at. A message of 64 KiB takes 2.6 ms on the lab's
/// ports.
const POLL_EVERY: Duration = Duration::from_micros(150);

/// How long a plugin waits for its daemon to take it. It marks its connections by what the daemon
/// says when they are made.
const ATTACH_MS: u32 = 5_000;

/// The device: the plugin is shown one interface only.
const DEVICE: usize = 0;

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
        // As for the sockets' buffers: a wait that the machine's other work makes long must not
        // leave a plugin unscheduled.
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

/// Gives every socket of this host that asks for nothing else a buffer of `bytes` each way, as the
/// lab's own have: without, TCP's auto-tuning would put megabytes of the plugin's into the fabric's
/// queues. True if the kernel agreed.
#[must_use]
pub fn bound_buffers(bytes: u32) -> bool {
    let value = format!("4096 {bytes} {bytes}");
    ["tcp_wmem", "tcp_rmem"]
        .iter()
        .all(|name| std::fs::write(Path::new("/proc/sys/net/ipv4").join(name), &value).is_ok())
}

enum CarrierCommand {
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
    orders: Sender<CarrierCommand>,
    reports: Receiver<Report>,
    wake: Arc<EventFd>,
    thread: JoinHandle<(CarrierRecord, Traffic)>,
}

impl Carrier {
    /// Starts the thread, which loads the plugin and listens once for each peer. What comes of it
    /// is the first report.
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

    /// Connects to a peer; nobody to connect to is left when the thread has failed, which it
    /// reports.
    pub fn connect(&self, peer: usize, handle: Handle) {
        let _ = self
            .orders
            .send(CarrierCommand::Connect(peer, Box::new(handle)));
    }

    /// Sends a flow to a peer and receives the peer's of the same size.
    pub fn exchange(&self, peer: usize, head: Head) {
        let _ = self.orders.send(CarrierCommand::Exchange(peer, head));
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
    ledger: DeliveryCheck,
    carried: BTreeMap<String, u64>,
}

/// The body of the thread: until the worker hangs up.
fn serve(
    plugin: &Path,
    peers: &[usize],
    orders: &Receiver<CarrierCommand>,
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
            take_command(order, &context, &mut all)?;
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

fn take_command(
    order: CarrierCommand,
    context: &Context,
    peers: &mut [Peer],
) -> anyhow::Result<()> {
    let (CarrierCommand::Connect(host, _) | CarrierCommand::Exchange(host, _)) = order;
    let peer = peers
        .iter_mut()
        .find(|peer| peer.host == host)
        .ok_or_else(|| anyhow!("host {host} is no peer of this unit"))?;
    match order {
        CarrierCommand::Connect(_, handle) => peer.connect(context, *handle),
        CarrierCommand::Exchange(_, head) => peer.exchange(head),
    }
    Ok(())
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
