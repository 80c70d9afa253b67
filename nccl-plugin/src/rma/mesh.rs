//! The control connections of a group, all to all, and the thread that serves them.
//!
//! A thread of its own serves the connections, because the target of an operation need not call
//! anything. It sleeps while nothing moves.

use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::collections::VecDeque;
use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::{Condvar, Mutex, RwLock};

use super::gate::{RmaOperation, Wire};
use super::link::{Outgoing, RankLink};
use super::region::RmaRegion;
use super::request::RequestPart;
use crate::fault::{Fault, Result};

/// Longest wait of a close for operations in flight.
const CLOSE_WAIT: Duration = Duration::from_secs(2);

/// A peer, as other threads see it.
#[derive(Default)]
struct MeshPeer {
    /// Messages and operations that the service thread has not taken yet. `None` once the
    /// connection is over.
    inbox: Mutex<Option<Vec<Outgoing>>>,
    /// The reason why the connection is over.
    fault: OnceLock<Fault>,
}

/// Exchanges, in which every rank contributes data and gets those of all others.
#[derive(Default)]
struct Exchanges {
    /// Number of exchanges to which this rank has contributed.
    begun: u64,
    /// By rank: the number of contributions that came, and those that were not collected.
    came: Vec<(u64, VecDeque<Vec<u8>>)>,
    /// Whether the service thread has ended.
    has_ended: bool,
}

pub(crate) struct Mesh {
    pub(crate) rank: usize,
    peers: Vec<MeshPeer>,
    /// All regions by number. `None` stands for one that was deregistered.
    pub(super) regions: RwLock<Vec<Option<Arc<RmaRegion>>>>,
    exchanges: Mutex<Exchanges>,
    changed: Condvar,
    waker: EventFd,
    /// Whether the service thread sleeps, or is about to.
    sleeping: AtomicBool,
    closing: AtomicBool,
    failed: AtomicBool,
    /// Grows whenever a rank is lost or has left.
    lost: AtomicUsize,
}

impl Mesh {
    /// Starts the service of a group's connections. There is one for each rank but this one.
    pub(super) fn start(rank: usize, streams: Vec<Option<TcpStream>>) -> Result<Arc<Self>> {
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        let waker = EventFd::from_value_and_flags(0, flags);
        let peer = |stream: &Option<TcpStream>| MeshPeer {
            inbox: Mutex::new(stream.is_some().then(Vec::new)),
            fault: OnceLock::new(),
        };
        let exchanges =
            Exchanges { came: vec![Default::default(); streams.len()], ..Exchanges::default() };
        let mesh = Arc::new(Self {
            rank,
            peers: streams.iter().map(peer).collect(),
            regions: RwLock::default(),
            exchanges: Mutex::new(exchanges),
            changed: Condvar::new(),
            waker: waker.map_err(|error| Fault::system("no eventfd can be made", error))?,
            sleeping: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            lost: AtomicUsize::new(0),
        });
        let link = |(rank, stream): (usize, Option<TcpStream>)| Some(RankLink::new(stream?, rank));
        let links: Vec<RankLink> = streams.into_iter().enumerate().filter_map(link).collect();
        let served = Arc::clone(&mesh);
        let builder = thread::Builder::new().name(String::from("laxity-rma"));
        laxity_job::thread::spawn(builder, move || served.run(links))
            .map_err(|error| Fault::system("no thread can be started", error))?;
        Ok(mesh)
    }

    pub(crate) fn ranks(&self) -> usize {
        self.peers.len()
    }

    /// Returns the reason why a rank is lost.
    pub(crate) fn fault(&self, rank: usize) -> Option<Fault> {
        self.peers.get(rank)?.fault.get().cloned()
    }

    /// Returns a number that grows whenever a rank is lost or has left.
    pub(crate) fn lost(&self) -> usize {
        // Acquire pairs with the release in `end`: the faults of these ranks are set.
        self.lost.load(Ordering::Acquire)
    }

    /// Records that a rank is lost, unless that is known.
    pub(crate) fn lose(&self, rank: usize, fault: Fault) {
        if self.peers[rank].fault.get().is_none() {
            self.failed.store(true, Ordering::Release);
            self.end(rank, fault);
        }
    }

    fn end(&self, rank: usize, fault: Fault) {
        let _ = self.peers[rank].fault.set(fault);
        self.lost.fetch_add(1, Ordering::Release);
        *self.peers[rank].inbox.lock() = None;
        drop(self.exchanges.lock());
        self.changed.notify_all();
        self.wake();
    }

    /// Returns the region of a number, or `None` if it was deregistered.
    pub(super) fn region(
        &self,
        id: u32,
    ) -> core::result::Result<Option<Arc<RmaRegion>>, &'static str> {
        let regions = self.regions.read();
        regions.get(id as usize).cloned().ok_or("the number of no region")
    }

    /// Queues something for a peer. It is dropped if the peer is lost.
    fn push(&self, rank: usize, outgoing: Outgoing) {
        let mut inbox = self.peers[rank].inbox.lock();
        if let Some(inbox) = &mut *inbox {
            inbox.push(outgoing);
        }
        drop(inbox);
        self.wake();
    }

    fn wake(&self) {
        // SeqCst, as in `serve`: either the thread's last look sees the inbox, or this swap sees
        // that the thread sleeps.
        if self.sleeping.swap(false, Ordering::SeqCst) {
            let _ = self.waker.write(1);
        }
    }

    /// Contributes `data`, and waits for the contributions of all ranks. Only one thread may call
    /// this at a time.
    ///
    /// # Errors
    /// A rank is lost, or has left.
    pub(crate) fn exchange(&self, data: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut exchanges = self.exchanges.lock();
        let number = exchanges.begun;
        exchanges.begun += 1;
        let others = || (0..self.ranks()).filter(|rank| *rank != self.rank);
        for rank in others() {
            self.push(rank, Outgoing::Exchange(number, data.to_vec()));
        }
        while let Some(rank) = others().find(|rank| exchanges.came[*rank].1.is_empty()) {
            if let Some(fault) = self.fault(rank) {
                return Err(fault);
            }
            if exchanges.has_ended {
                return Err(Fault::Argument("the group was closed".into()));
            }
            self.changed.wait(&mut exchanges);
        }
        let mut all = |rank: usize| {
            let contributed = exchanges.came[rank].1.pop_front();
            contributed.unwrap_or_else(|| data.to_vec())
        };
        Ok((0..self.ranks()).map(&mut all).collect())
    }

    /// Adds a peer's contribution. The peer can be one exchange ahead, and no further.
    pub(super) fn contributed(
        &self,
        rank: usize,
        number: u64,
        data: Vec<u8>,
    ) -> core::result::Result<(), &'static str> {
        let mut exchanges = self.exchanges.lock();
        let begun = exchanges.begun;
        let (came, waiting) = &mut exchanges.came[rank];
        if number != *came || number > begun {
            return Err("an exchange out of its order");
        }
        *came += 1;
        waiting.push_back(data);
        self.changed.notify_all();
        Ok(())
    }

    /// Ends the connections after everything that was posted. Waits briefly for the peers.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
        self.wake();
        let give_up = Instant::now() + CLOSE_WAIT;
        let mut exchanges = self.exchanges.lock();
        while !exchanges.has_ended && !self.changed.wait_until(&mut exchanges, give_up).timed_out()
        {
        }
    }

    /// The service thread.
    fn run(&self, links: Vec<RankLink>) {
        let served = catch_unwind(AssertUnwindSafe(|| self.serve(links)));
        for peer in &self.peers {
            if served.is_err() {
                let bug = "a bug in Laxity's plugin; standard error says where";
                let _ = peer.fault.set(Fault::Internal(bug.to_owned()));
                self.failed.store(true, Ordering::Release);
            }
            *peer.inbox.lock() = None;
        }
        self.exchanges.lock().has_ended = true;
        self.changed.notify_all();
    }

    fn serve(&self, mut links: Vec<RankLink>) {
        let mut give_up = None;
        loop {
            // Read before the inboxes, so that operations that were posted before the close go out.
            let is_closing = self.closing.load(Ordering::SeqCst);
            self.move_out(&mut links);
            if is_closing {
                let now = Instant::now();
                let Some(give_up) = give_up else {
                    give_up = Some(now + CLOSE_WAIT);
                    for link in &mut links {
                        *self.peers[link.rank].inbox.lock() = None;
                        link.push(Outgoing::Bye);
                    }
                    continue;
                };
                for link in links.iter().filter(|link| !link.has_output()) {
                    link.end_output();
                }
                if links.is_empty() || now > give_up {
                    return;
                }
            }
            self.sleeping.store(true, Ordering::SeqCst);
            let has_mail = |link: &RankLink| {
                let inbox = self.peers[link.rank].inbox.lock();
                inbox.as_ref().is_some_and(|inbox| !inbox.is_empty())
            };
            // `close` wakes the thread if it sets the flag after this look.
            let is_closing = give_up.is_none() && self.closing.load(Ordering::SeqCst);
            let busy = is_closing || links.iter().any(has_mail);
            let readable = self.sleep(&links, busy, give_up.is_some());
            self.sleeping.store(false, Ordering::SeqCst);
            self.serve_each(&mut links, |link| {
                if readable.contains(&link.rank) { link.read(self) } else { Ok(true) }
            });
        }
    }

    /// Takes and sends the queued frames.
    fn move_out(&self, links: &mut Vec<RankLink>) {
        self.serve_each(links, |link| {
            // A device has lost the rank. The end of the connection tells the rank.
            if let Some(fault) = self.fault(link.rank) {
                return Err(fault);
            }
            let mail = self.peers[link.rank].inbox.lock().as_mut().map(core::mem::take);
            for outgoing in mail.into_iter().flatten() {
                link.push(outgoing);
            }
            link.write().map(|()| true)
        });
    }

    /// Serves all connections. Ends those that are over or broken.
    fn serve_each(
        &self,
        links: &mut Vec<RankLink>,
        mut serve: impl FnMut(&mut RankLink) -> Result<bool>,
    ) {
        links.retain_mut(|link| {
            let fault = match serve(link) {
                Ok(true) => return true,
                Ok(false) if link.has_left() => {
                    Fault::Remote(format!("rank {} has closed its group", link.rank))
                }
                Ok(false) => Fault::Remote(format!(
                    "rank {} closed its connection: its process is gone, or aborted",
                    link.rank
                )),
                Err(fault) => fault,
            };
            if !link.has_left() {
                self.failed.store(true, Ordering::Release);
            }
            // The fault is set before the requests fail, which is when the link is dropped.
            self.end(link.rank, fault);
            false
        });
    }

    /// Waits until something can be moved. Returns the ranks from which something has arrived.
    fn sleep(&self, links: &[RankLink], busy: bool, closing: bool) -> Vec<usize> {
        let interest = |link: &RankLink| {
            let output = if link.has_output() { PollFlags::POLLOUT } else { PollFlags::empty() };
            PollFlags::POLLIN | output
        };
        let mut fds = vec![PollFd::new(self.waker.as_fd(), PollFlags::POLLIN)];
        fds.extend(links.iter().map(|link| PollFd::new(link.stream.as_fd(), interest(link))));
        let timeout = match (busy, closing) {
            (true, _) => PollTimeout::ZERO,
            (_, true) => PollTimeout::from(20_u8),
            _ => PollTimeout::NONE,
        };
        if poll(&mut fds, timeout).is_err() {
            return Vec::new();
        }
        let came = |fd: &PollFd<'_>| {
            fd.revents().is_some_and(|events| !(events & !PollFlags::POLLOUT).is_empty())
        };
        if came(&fds[0]) {
            let _ = self.waker.read();
        }
        let readable = fds[1..].iter().zip(links).filter(|(fd, _)| came(fd));
        readable.map(|(_, link)| link.rank).collect()
    }
}

impl Wire for Mesh {
    fn post(&self, _context: usize, rank: usize, operation: RmaOperation, part: RequestPart) {
        if rank != self.rank {
            return self.push(rank, Outgoing::RmaOperation(operation, part));
        }
        let done = match operation {
            RmaOperation::Put(put) => {
                let to = put.far.region.place(put.far.offset, put.bytes);
                to.is_ok_and(|to| put.near.copy_to(&to, put.bytes))
            }
            RmaOperation::Get(get) => {
                let from = get.far.region.place(get.far.offset, get.bytes);
                from.is_ok_and(|from| from.copy_to(&get.near, get.bytes))
            }
            RmaOperation::Signal(far, value) => {
                far.region.place(far.offset, 8).and_then(|word| word.add(value)).is_ok()
            }
            RmaOperation::Flush(_) => true,
        };
        if done {
            part.succeed();
        }
    }

    fn has_failed(&self) -> bool {
        // Acquire pairs with the release at the failure. The fault may be set a moment later.
        self.failed.load(Ordering::Acquire)
    }

    fn is_over(&self, rank: usize) -> bool {
        self.fault(rank).is_some()
    }
}
