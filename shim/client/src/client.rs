//! The process's end: finding a daemon, losing it, finding it again.
//!
//! # Why no thread
//! Attaching anew is a non-blocking state machine (connect and greet; later, is the answer
//! there?) that submits without a scheduler advance, at most once per `reattach_every`, a poll
//! for the answer once a millisecond. A background thread would do it sooner in a process that
//! submits rarely, which gains nothing from it, and would be a stranger in the application: it
//! does not survive fork, inherits signal masks, appears in its thread counts. All calls are
//! non-blocking, so the price is a few microseconds in a submit that would go out unscheduled.

use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, TryLockError};
use std::time::{Duration, Instant};

use laxity_shm::fork::ForkGuard;
use laxity_shm::layout::{Mode, attention};
use laxity_shm::record::Stage;
use laxity_shm::registration::{self, Hello, RegistrationError};
use laxity_shm::sleep::{self, lately_ns, now_ns};

use crate::lane::Lane;
use crate::options::Options;
use crate::session::Session;
use crate::stats::{LaneCounters, Stats};

/// Between two looks whether the daemon has answered.
const ANSWER_POLL_NS: u64 = 1_000_000;
/// A connection that is not answered for this long is given up. A daemon that is stopped keeps
/// accepting connections, in its backlog; it answers when it goes on.
const ANSWER_LIMIT_NS: u64 = 5_000_000_000;
/// A daemon whose backlog is full is asked again after this: it works the backlog off, and room in
/// it comes and goes within less.
const BACKLOG_RETRY_NS: u64 = 1_000_000;
/// A daemon that refuses is asked again after this many times `reattach_every`.
const REFUSED_FACTOR: u64 = 10;
/// What a submit waits for a thread that was interrupted while it held a lock. Whoever holds one
/// does not block, so it is gone as soon as it runs again: within a few time slices of a busy
/// processor.
pub(crate) const LOCK_PATIENCE: Duration = Duration::from_millis(50);
/// The same in a forked child, where the holder may not exist.
const LOCK_PATIENCE_FORKED: Duration = Duration::from_millis(1);
/// Lanes that waited that long in vain do so again after this time; in a forked child after
/// `reattach_every`.
const LOCK_RETRY_NS: u64 = 10_000_000;

#[derive(Debug)]
enum Link {
    Detached,
    /// Greeted; `pid` is that of the process that did, which a forked child is not.
    Asked {
        /// First, because it must go before the socket.
        guard: ForkGuard,
        socket: OwnedFd,
        since_ns: u64,
        pid: u32,
    },
    Attached(Arc<Session>),
}

#[derive(Debug)]
struct Attachment {
    link: Link,
    /// Since when there is no scheduler, `None` while there is one.
    detached_ns: Option<u64>,
    /// Closed periods without one.
    unscheduled_ns: u64,
    attached: u64,
    /// What the daemon that was asked last said instead of welcome.
    refusal: Option<String>,
    /// The daemon's backlog was full just now, see [`BACKLOG_RETRY_NS`].
    is_crowded: bool,
}

#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) options: Options,
    /// Of the process that attached, which a forked child is not.
    pid: u32,
    /// Daemons found. Relaxed: a hint, too.
    generation: AtomicU64,
    /// Read to learn how things are, which everybody does all the time; written to change it.
    attachment: RwLock<Attachment>,
    /// Nothing is to be tried before this time. Relaxed everywhere: a hint.
    next_ns: AtomicU64,
    lanes: Mutex<Registry>,
}

#[derive(Debug, Default)]
struct Registry {
    living: Vec<Arc<LaneCounters>>,
    gone: Stats,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these locks protect is valid after every statement.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// A lock for submits, which must not block: waits for another thread's instant with it, since
/// otherwise a flow would go out unscheduled though there is a daemon, but no longer than
/// `patience`. The other may be attaching, or, in a forked child, not exist.
pub(crate) fn shortly<G>(
    patience: impl Fn() -> Duration,
    mut try_lock: impl FnMut() -> Result<G, TryLockError<G>>,
) -> Option<G> {
    let mut give_up = None;
    loop {
        match try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
        let now = Instant::now();
        if now > *give_up.get_or_insert_with(|| now + patience()) {
            return None;
        }
        std::thread::yield_now();
    }
}

/// A process's attachment to laxityd. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub struct Client {
    core: Arc<Core>,
}

impl Client {
    /// Attaches. Never fails: without a daemon (or with one that does not answer within
    /// `attach_timeout`, refuses, or is of another version) all flows are bypassed, and lanes
    /// look for a daemon now and then.
    #[must_use]
    pub fn attach(options: Options) -> Self {
        let now = now_ns();
        let limit = options.attach_timeout;
        let off = options.mode == Mode::Off;
        let core = Arc::new(Core {
            options,
            pid: std::process::id(),
            generation: AtomicU64::new(0),
            attachment: RwLock::new(Attachment {
                link: Link::Detached,
                detached_ns: Some(now),
                unscheduled_ns: 0,
                attached: 0,
                refusal: None,
                is_crowded: false,
            }),
            next_ns: AtomicU64::new(if off { u64::MAX } else { 0 }),
            lanes: Mutex::default(),
        });
        if !off {
            core.attach_within(limit);
        }
        Self { core }
    }

    /// Whether a daemon schedules this process now: attached, neither bypassed nor off.
    #[must_use]
    pub fn is_scheduled(&self) -> bool {
        self.core.standing().is_some_and(|session| {
            session.header().attention() & attention::NOT_ENFORCED == 0 && session.look().is_none()
        })
    }

    /// Whether there is a daemon that this process is attached to, whatever its mode.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.core
            .standing()
            .is_some_and(|session| session.look().is_none())
    }

    /// Why the daemon that was found last refuses this process, if it does: it is of another
    /// version, for one. It is asked again now and then.
    #[must_use]
    pub fn refusal(&self) -> Option<String> {
        read(&self.core.attachment).refusal.clone()
    }

    /// A lane for one thread. Without a daemon, or if all lanes are taken, it works too: its
    /// flows are bypassed until a later submit finds one.
    #[must_use]
    pub fn lane(&self) -> Lane {
        let counters = Arc::new(LaneCounters::default());
        lock(&self.core.lanes).living.push(Arc::clone(&counters));
        Lane::new(Arc::clone(&self.core), counters)
    }

    /// Counters of all lanes.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let registry = lock(&self.core.lanes);
        let mut stats = registry.gone;
        for lane in &registry.living {
            lane.add_to(&mut stats);
        }
        drop(registry);
        let now = now_ns();
        let attachment = read(&self.core.attachment);
        stats.reattaches = attachment.attached.saturating_sub(1);
        let detached_ns = match &attachment.link {
            // A process that submits nothing, or nothing that waits, may not have noticed yet.
            Link::Attached(session) => session.look(),
            _ => attachment.detached_ns,
        };
        stats.unscheduled_ns =
            attachment.unscheduled_ns + detached_ns.map_or(0, |since| now.saturating_sub(since));
        stats
    }

    /// The number by which flows name a NIC, looked up in the daemon's configuration: that of the
    /// NIC of this name, else of the one that is named `default`. Without either, or without a
    /// daemon, one that no daemon knows: such flows go out unscheduled and are counted there.
    #[must_use]
    pub fn nic(&self, name: &str) -> u8 {
        self.core
            .standing()
            .and_then(|session| session.header().nic(name))
            .unwrap_or(u8::MAX)
    }

    /// How many daemons were found so far. What was asked of one, such as [`Client::nic`], has to
    /// be asked again of the next.
    #[inline]
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.core.generation.load(Ordering::Relaxed)
    }

    /// The DSCP that the daemon says for transfers of a stage whose class can't be chosen one by
    /// one. 0 (unmarked) without a daemon, with one that says none, and while it schedules nothing:
    /// in mode `observe`, or bypassed.
    #[must_use]
    pub fn dscp_of(&self, stage: Stage) -> u8 {
        let said = self.core.standing().and_then(|session| {
            let header = session.header();
            let enforced = header.attention() & attention::NOT_ENFORCED == 0;
            enforced.then(|| header.dscp_of_stage(stage)).flatten()
        });
        said.unwrap_or(0)
    }

    /// The DSCP that the daemon gives a level; 0 (unmarked) without a daemon.
    #[must_use]
    pub fn dscp(&self, level: u8) -> u8 {
        self.core
            .standing()
            .map_or(0, |session| session.header().dscp(level))
    }
}

impl Core {
    /// The session, if there is one and it was not lost.
    fn standing(&self) -> Option<Arc<Session>> {
        read(&self.attachment).standing()
    }

    /// For a lane without a seat: the session to sit in, or one step towards having one. Never
    /// blocks; a lock that another thread holds for longer than [`LOCK_PATIENCE`] counts as "not
    /// now".
    pub(crate) fn session(&self) -> Option<Arc<Session>> {
        let next = self.next_ns.load(Ordering::Relaxed);
        if next == u64::MAX {
            return None;
        }
        // A process without a daemon comes here with each of its flows.
        if lately_ns() < next {
            return None;
        }
        let patience = || {
            if self.is_forked() {
                LOCK_PATIENCE_FORKED
            } else {
                LOCK_PATIENCE
            }
        };
        let standing = shortly(patience, || self.attachment.try_read()).map(|is| is.standing());
        let Some(standing) = standing else {
            self.put_off(next);
            return None;
        };
        if standing.is_some() {
            return standing;
        }
        let Some(mut attachment) = shortly(patience, || self.attachment.try_write()) else {
            self.put_off(next);
            return None;
        };
        let now = now_ns();
        let (session, next) = attachment.advance(&self.options, now);
        self.generation
            .store(attachment.attached, Ordering::Relaxed);
        self.next_ns.store(next, Ordering::Relaxed);
        session
    }

    /// Whoever held a lock when this process was forked does not exist in it.
    fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }

    /// After a lock could not be had: when to look again, unless somebody has said so since `seen`
    /// was read.
    #[cold]
    fn put_off(&self, seen: u64) {
        let after_ns = if self.is_forked() {
            self.options.reattach_every.as_nanos() as u64
        } else {
            LOCK_RETRY_NS
        };
        let later = now_ns().saturating_add(after_ns);
        let _ = self
            .next_ns
            .compare_exchange(seen, later, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// For a lane that found its session lost or full: when to look again.
    pub(crate) fn look_again(&self, at_ns: u64) {
        if self.next_ns.load(Ordering::Relaxed) != u64::MAX {
            self.next_ns.store(at_ns, Ordering::Relaxed);
        }
    }

    fn attach_within(&self, limit: Duration) {
        let end = now_ns().saturating_add(limit.as_nanos() as u64);
        let attachment = self.attachment.write();
        let mut attachment = attachment.unwrap_or_else(PoisonError::into_inner);
        loop {
            let (session, next) = attachment.advance(&self.options, now_ns());
            self.generation
                .store(attachment.attached, Ordering::Relaxed);
            self.next_ns.store(next, Ordering::Relaxed);
            let now = now_ns();
            let left = end.saturating_sub(now);
            let Link::Asked { ref socket, .. } = attachment.link else {
                if !attachment.is_crowded || left == 0 {
                    return;
                }
                std::thread::sleep(Duration::from_nanos(BACKLOG_RETRY_NS.min(left)));
                continue;
            };
            if session.is_some() || left == 0 {
                return;
            }
            let _ = registration::wait_readable(socket.as_fd(), Duration::from_nanos(left));
        }
    }

    pub(crate) fn retire(&self, counters: &Arc<LaneCounters>) {
        let mut registry = lock(&self.lanes);
        registry.living.retain(|lane| !Arc::ptr_eq(lane, counters));
        counters.add_to(&mut registry.gone);
    }
}

impl Attachment {
    /// The session, if there is one and it was not lost.
    fn standing(&self) -> Option<Arc<Session>> {
        match &self.link {
            Link::Attached(session) if session.lost_at().is_none() => Some(Arc::clone(session)),
            _ => None,
        }
    }

    /// One step, and the time before which the next makes no sense.
    fn advance(&mut self, options: &Options, now: u64) -> (Option<Arc<Session>>, u64) {
        let retry = now.saturating_add(options.reattach_every.as_nanos() as u64);
        self.is_crowded = false;
        if let Link::Attached(session) = &self.link {
            match session.lost_at() {
                None => return (Some(Arc::clone(session)), 0),
                Some(since) => {
                    self.detached_ns = Some(since);
                    self.link = Link::Detached;
                }
            }
        }
        if let Link::Asked { since_ns, pid, .. } = self.link
            && (pid != std::process::id() || now.saturating_sub(since_ns) > ANSWER_LIMIT_NS)
        {
            self.link = Link::Detached;
        }
        match std::mem::replace(&mut self.link, Link::Detached) {
            // The guard is bound last, so it is dropped first.
            Link::Asked {
                socket,
                since_ns,
                pid,
                guard,
            } => match registration::receive_reply(socket.as_fd()) {
                Ok(None) => {
                    self.link = Link::Asked {
                        guard,
                        socket,
                        since_ns,
                        pid,
                    };
                    (None, now + ANSWER_POLL_NS)
                }
                Ok(Some(welcome)) => match Session::new(socket, welcome, guard) {
                    Some(session) => {
                        let session = Arc::new(session);
                        self.link = Link::Attached(Arc::clone(&session));
                        self.attached += 1;
                        self.refusal = None;
                        if let Some(since) = self.detached_ns.take() {
                            self.unscheduled_ns += now.saturating_sub(since);
                        }
                        (Some(session), 0)
                    }
                    None => (None, retry),
                },
                Err(
                    refusal @ (RegistrationError::Rejected { .. } | RegistrationError::Version(_)),
                ) => {
                    self.refusal = Some(refusal.to_string());
                    let every = options.reattach_every.as_nanos() as u64;
                    (
                        None,
                        now.saturating_add(every.saturating_mul(REFUSED_FACTOR)),
                    )
                }
                Err(_) => (None, retry),
            },
            _ => match greet(options) {
                Ok((socket, guard)) => {
                    self.link = Link::Asked {
                        guard,
                        socket,
                        since_ns: now,
                        pid: std::process::id(),
                    };
                    (None, now + ANSWER_POLL_NS)
                }
                Err(error) if is_backlog_full(&error) => {
                    self.is_crowded = true;
                    (None, now + BACKLOG_RETRY_NS)
                }
                Err(_) => (None, retry),
            },
        }
    }
}

/// Whether somebody listens who has too many connections to accept just now.
fn is_backlog_full(error: &RegistrationError) -> bool {
    matches!(error, RegistrationError::System { source, .. } if source.kind() == ErrorKind::WouldBlock)
}

fn greet(options: &Options) -> Result<(OwnedFd, ForkGuard), RegistrationError> {
    let socket = registration::connect(&options.socket)?;
    let guard = ForkGuard::socket(socket.as_fd()).map_err(|_| RegistrationError::NoAnswer)?;
    let hello = Hello::new(&options.name, options.mode, !sleep::register());
    registration::send_hello(socket.as_fd(), &hello)?;
    Ok((socket, guard))
}
