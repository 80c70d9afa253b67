//! The thread that agrees with peers and looks after failures, one for all queue pairs.
//!
//! A RoCE v2 GID is an IP address. Each end binds the UDP port that follows from its queue pair's
//! number at its own GID's address, and connects to the peer's. At most [`SOCKETS_MAX`] agreements
//! have a socket at a time, and the others wait for their turn. An agreement that takes longer than
//! [`PATIENCE`] leaves its queue pair without a bundle.

use core::ffi::c_int;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use laxity_job::fork::PerProcess;
use laxity_job::monitor::Monitor;
use laxity_job::{BundleSecret, Job};
use parking_lot::Mutex;

use super::handshake::{Handshake, HandshakeTask};
use super::message::{BYTES_MAX, BundleEnd, BundleMessage, BundleNonce};
use crate::queue_pair::QueuePair;

/// Largest number of sockets.
const SOCKETS_MAX: usize = 32;
/// Largest number of queue pairs with siblings in a process.
pub(crate) const BUNDLES_MAX: usize = 1024;
/// Largest number of agreements, with and without a socket.
const AGREEMENTS_MAX: usize = 4 * BUNDLES_MAX;
/// How long an end looks for its peer, from its turn on.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long an end that is done answers a peer that isn't.
const LINGER: Duration = Duration::from_millis(500);
/// How long a queue pair that is ready to receive may take to become ready to send. That begins
/// another agreement, and this one finds that there are siblings already.
const EARLY: Duration = Duration::from_millis(300);
/// Shortest and longest time between two messages of an end.
const RESEND_MIN: Duration = Duration::from_millis(5);
const RESEND_MAX: Duration = Duration::from_millis(200);
/// Time between two looks for failed siblings.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Largest number of datagrams of one agreement that are read at a time.
const DATAGRAMS_MAX: usize = 16;
/// Longest wait for datagrams.
const WAIT_MS: c_int = 5;
/// The ports are below those of Linux's automatic range.
const FIRST_PORT: u16 = 12_288;
const PORTS: u32 = 16_384;

/// A queue pair that became ready to receive, or to send.
#[derive(Debug)]
pub(crate) struct BundleRequest {
    pub(crate) queue_pair: &'static QueuePair,
    pub(crate) life: u32,
    pub(crate) own: BundleEnd,
    pub(crate) peer: BundleEnd,
    /// Whether the queue pair may still become ready to send. Some responders never do.
    pub(crate) is_early: bool,
}

#[derive(Debug, Default)]
struct BundleAgent {
    requests: Monitor<Vec<BundleRequest>>,
    /// Queue pairs with siblings. No lock of a queue pair is taken with this one.
    watched: Mutex<Vec<&'static QueuePair>>,
    made: AtomicUsize,
    has_thread: AtomicBool,
}

static AGENT: PerProcess<BundleAgent> = PerProcess::none();

fn agent() -> &'static BundleAgent {
    AGENT.get_or_make(BundleAgent::default)
}

/// Fills `bytes` with random ones. Returns false if the kernel has none.
pub(super) fn random(bytes: &mut [u8]) -> bool {
    // SAFETY: the memory is `bytes`.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    usize::try_from(got) == Ok(bytes.len())
}

/// Starts an agreement about a queue pair.
pub(crate) fn request(request: BundleRequest) {
    let agent = agent();
    {
        let mut requests = agent.requests.lock();
        if requests.len() >= AGREEMENTS_MAX {
            return;
        }
        requests.push(request);
        agent.requests.notify();
    }
    if !agent.has_thread.swap(true, Ordering::Relaxed) {
        let builder = thread::Builder::new().name(String::from("laxity-bundles"));
        // Without the thread there are no bundles, and nothing else is missing. The next request
        // tries again.
        if laxity_job::thread::spawn(builder.stack_size(256 << 10), move || run(agent)).is_err() {
            agent.has_thread.store(false, Ordering::Relaxed);
        }
    }
}

/// Adds a queue pair with siblings. Returns false if there are too many.
pub(crate) fn watch(queue_pair: &'static QueuePair) -> bool {
    let agent = agent();
    let mut watched = agent.watched.lock();
    let fits = watched.len() < BUNDLES_MAX;
    if fits {
        watched.push(queue_pair);
        agent.made.fetch_add(1, Ordering::Relaxed);
    }
    fits
}

/// Removes a queue pair without siblings.
pub(crate) fn unwatch(queue_pair: &'static QueuePair) {
    if let Some(agent) = AGENT.get() {
        agent.watched.lock().retain(|other| !core::ptr::eq(*other, queue_pair));
    }
}

pub(crate) fn watched() -> Vec<&'static QueuePair> {
    AGENT.get().map_or_else(Vec::new, |agent| agent.watched.lock().clone())
}

/// Returns the number of queue pairs that ever had siblings.
pub(crate) fn made() -> usize {
    AGENT.get().map_or(0, |agent| agent.made.load(Ordering::Relaxed))
}

fn run(agent: &'static BundleAgent) {
    let Some(secret) = &Job::of_this_process().bundle_secret else { return };
    let mut agreements: Vec<Agreement> = Vec::new();
    let mut looked = Instant::now();
    loop {
        {
            let mut requests = agent.requests.lock();
            if agreements.is_empty() && requests.is_empty() {
                if agent.watched.lock().is_empty() {
                    requests = agent.requests.wait(requests);
                } else {
                    agent.requests.wait_for(requests, LOOK_EVERY);
                    requests = agent.requests.lock();
                }
            }
            agreements.extend(requests.drain(..).filter_map(Agreement::new));
            agreements.truncate(AGREEMENTS_MAX);
        }
        let mut open = 0;
        for agreement in &mut agreements {
            open += usize::from(open < SOCKETS_MAX && agreement.opens());
        }
        wait(&agreements);
        agreements.retain_mut(|agreement| agreement.advance(secret));
        if looked.elapsed() >= LOOK_EVERY {
            looked = Instant::now();
            for queue_pair in watched() {
                queue_pair.look_for_failures();
            }
        }
    }
}

/// Waits for datagrams, for a short time.
fn wait(agreements: &[Agreement]) {
    let mut sockets: Vec<libc::pollfd> = agreements
        .iter()
        .filter_map(|agreement| agreement.socket.as_ref())
        .map(|socket| libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 })
        .collect();
    if !agreements.is_empty() {
        // SAFETY: the list has as many entries as the call is told.
        unsafe { libc::poll(sockets.as_mut_ptr(), sockets.len() as libc::nfds_t, WAIT_MS) };
    }
}

fn address(end: &BundleEnd) -> SocketAddr {
    let port = FIRST_PORT + (end.number % PORTS) as u16;
    let address = Ipv6Addr::from(end.gid);
    let address = address.to_ipv4_mapped().map_or(IpAddr::V6(address), IpAddr::V4);
    SocketAddr::new(address, port)
}

/// An agreement about one queue pair.
#[derive(Debug)]
struct Agreement {
    request: BundleRequest,
    handshake: Handshake,
    socket: Option<UdpSocket>,
    /// Whether the socket could not be opened, or an attempt failed.
    is_over: bool,
    begins: Instant,
    ends: Option<Instant>,
    sends: Instant,
    pause: Duration,
    /// What a message asked for and is not done yet, while the program's own call delays it.
    pending: HandshakeTask,
}

impl Agreement {
    fn new(request: BundleRequest) -> Option<Self> {
        let mut nonce = BundleNonce::default();
        random(&mut nonce).then(|| Self {
            handshake: Handshake::new(request.own, request.peer, nonce),
            begins: Instant::now() + if request.is_early { EARLY } else { Duration::ZERO },
            request,
            socket: None,
            is_over: false,
            ends: None,
            sends: Instant::now(),
            pause: RESEND_MIN,
            pending: HandshakeTask::Nothing,
        })
    }

    /// Opens the socket if there is none. Reports whether the agreement has one.
    fn opens(&mut self) -> bool {
        if Instant::now() < self.begins {
            return false;
        }
        if self.socket.is_none() && !self.is_over {
            let BundleRequest { queue_pair, life, .. } = self.request;
            self.socket = queue_pair.may_agree(life).then(|| self.connected()).flatten();
            self.is_over = self.socket.is_none();
            self.ends = Some(Instant::now() + PATIENCE);
        }
        self.socket.is_some()
    }

    /// Returns a socket that receives only what the peer's address sends.
    fn connected(&self) -> Option<UdpSocket> {
        let socket = UdpSocket::bind(address(&self.request.own)).ok()?;
        socket.set_nonblocking(true).ok()?;
        socket.connect(address(&self.request.peer)).ok()?;
        Some(socket)
    }

    /// Receives, acts and sends. Reports whether the agreement goes on.
    fn advance(&mut self, secret: &BundleSecret) -> bool {
        if self.is_over || !self.request.queue_pair.lives(self.request.life) {
            return false;
        }
        let (Some(socket), Some(ends)) = (&self.socket, self.ends) else { return true };
        let mut datagram = [0; BYTES_MAX + 1];
        // An error says that there is no datagram, or that nothing listens at the peer yet.
        for _ in 0..DATAGRAMS_MAX {
            let Ok(length) = socket.recv(&mut datagram) else { break };
            let Some(message) = BundleMessage::decode(secret, &datagram[..length]) else {
                continue;
            };
            if self.pending == HandshakeTask::Nothing {
                self.pending = self.handshake.receive(&message);
            }
            // An end that is behind is answered at once.
            if message.step < self.handshake.message().step {
                self.pause = RESEND_MIN;
                self.sends = self.sends.min(Instant::now() + RESEND_MIN);
            }
        }
        self.act();
        let now = Instant::now();
        if now >= self.sends {
            // A datagram that is lost is sent again.
            let _ = self.socket.as_ref().map(|s| s.send(&self.handshake.message().encode(secret)));
            self.sends = now + self.pause;
            self.pause = (2 * self.pause).min(RESEND_MAX);
        }
        now < ends && !self.is_over
    }

    /// Does what the last message asks for. A queue pair that the program is changing is left for
    /// the next turn.
    fn act(&mut self) {
        let (queue_pair, life) = (self.request.queue_pair, self.request.life);
        let done = match self.pending {
            HandshakeTask::Nothing => return,
            HandshakeTask::Make => queue_pair.make_siblings(life).map(|offer| {
                offer.is_some_and(|offer| {
                    self.handshake.offer(offer);
                    true
                })
            }),
            HandshakeTask::Connect => {
                let peers = &self.handshake.peers_offer;
                let connected = queue_pair.connect_siblings(life, peers);
                if connected == Some(true) {
                    self.handshake.connected();
                }
                connected
            }
            HandshakeTask::Use => {
                let used = queue_pair.use_bundle(life);
                if used == Some(true) {
                    self.ends = Some(Instant::now() + LINGER);
                }
                used
            }
        };
        if let Some(done) = done {
            self.is_over |= !done;
            self.pending = HandshakeTask::Nothing;
            self.pause = RESEND_MIN;
            self.sends = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gid_and_a_number_are_an_address_and_a_port() {
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, 1]);
        let end = BundleEnd { gid, number: 0x00ff_ffff };
        assert_eq!(address(&end).to_string(), "10.0.0.1:28671");
        gid[0] = 0xfd;
        assert_eq!(address(&BundleEnd { gid, number: 5 }).port(), 12_293);
        assert!(address(&BundleEnd { gid, number: 5 }).is_ipv6());
    }
}
