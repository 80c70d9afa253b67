//! A process's attachment: finding a daemon, losing it, and finding it again.
//!
//! # Why no thread
//! Attaching again is a non-blocking state machine: it connects and greets, and later looks for the
//! answer. Submits without a scheduler advance it, at most once per `reattach_every`, and look for
//! the answer once a millisecond. A background thread would attach sooner only in a process that
//! submits rarely, where that is no gain. It would also disturb the application: it does not
//! survive fork, inherits signal masks, and appears in thread counts. All calls are non-blocking,
//! so they cost a few microseconds in a submit that would be bypassed anyway.

use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use laxity_job::fork;
use laxity_shm::fork::ForkGuard;
use laxity_shm::layout::{Mode, attention};
use laxity_shm::marking::{Verdict, decide};
use laxity_shm::record::Stage;
use laxity_shm::registration::{self, Reason, RegistrationError};
use laxity_shm::sleep::Clock;

use crate::lane::Lane;
use crate::locks::{LOCK_PATIENCE, LOCK_PATIENCE_FORKED, shortly};
use crate::options::Options;
use crate::owners::PortOwners;
use crate::session::{Session, greet};
use crate::stats::{LaneCounters, Stats};
use AttachPhase::{Asked, Attached, Detached};
use RegistrationError::{NoAnswer, Rejected, Version};

/// Time between two checks for the daemon's answer.
const ANSWER_POLL_NS: u64 = 1_000_000;
/// Time after which an unanswered connection is closed. A stopped daemon still accepts connections
/// in its backlog, and answers when it continues.
const ANSWER_LIMIT_NS: u64 = 5_000_000_000;
/// Time before another attempt if the daemon's backlog is full. The daemon empties it in less time.
/// If it does not, each attempt waits twice as long as the one before.
const BACKLOG_RETRY_NS: u64 = 1_000_000;
/// Factor of `reattach_every` before another attempt if the daemon refuses.
const REFUSED_FACTOR: u64 = 40;
/// Time before another attempt if the daemon that was asked ends. The next one may be there.
const ENDED_RETRY_NS: u64 = 10_000_000;
/// Time between attempts to take a lock that was held. In a forked child, `reattach_every`.
const LOCK_RETRY_NS: u64 = 10_000_000;

#[derive(Debug)]
enum AttachPhase {
    Detached,
    /// A greeting was sent. `pid` is the process that sent it, which differs in a forked child.
    Asked {
        /// The guard, which must be dropped before the socket.
        guard: ForkGuard,
        socket: OwnedFd,
        since_ns: u64,
        pid: u32,
    },
    Attached(Arc<Session>),
}

#[derive(Debug)]
struct Attachment {
    phase: AttachPhase,
    /// The time since which there is no scheduler, or `None` while there is one.
    detached_ns: Option<u64>,
    /// Total length of earlier periods without a scheduler.
    unscheduled_ns: u64,
    attached: u64,
    /// The refusal of the daemon that was last asked.
    refusal: Option<String>,
    /// The last session, while its flows wait for the next daemon.
    before: Option<Arc<Session>>,
    /// How often in a row the daemon's backlog was full, see [`BACKLOG_RETRY_NS`].
    crowded: u32,
}

#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) options: Options,
    pub(crate) clock: Clock,
    /// The [`fork::epoch`] in which the process attached, which differs in a forked child.
    epoch: u32,
    /// Number of daemons found so far. Relaxed, as a hint.
    generation: AtomicU64,
    /// The attachment. Reads are frequent and writes are rare.
    attachment: RwLock<Attachment>,
    /// Time before which no attempt is made. Relaxed everywhere, because it is a hint.
    next_ns: AtomicU64,
    /// Whether there is a session [`Attachment::before`]. Relaxed, as a hint that saves a lock.
    awaits: AtomicBool,
    lanes: Mutex<Registry>,
    owners: PortOwners,
}

#[derive(Debug, Default)]
struct Registry {
    living: Vec<Arc<LaneCounters>>,
    gone: Stats,
}

/// A process's attachment to laxityd. Clones share the attachment and are cheap.
#[derive(Clone, Debug)]
pub struct Client {
    core: Arc<Core>,
}

impl Client {
    /// Attaches to a daemon. Never fails. Without a daemon that answers within `attach_timeout` and
    /// accepts this version, all flows are bypassed, and lanes look for a daemon from time to time.
    pub fn attach(options: Options) -> Self {
        Self::attach_by(Clock::SYSTEM, options)
    }

    /// Does the same as [`Client::attach`] with another clock, for tests in virtual time.
    pub fn attach_by(clock: Clock, options: Options) -> Self {
        fork::watch();
        let now = clock.now_ns();
        let limit = options.attach_timeout;
        let off = options.mode == Mode::Off;
        let core = Arc::new(Core {
            options,
            clock,
            epoch: fork::epoch(),
            generation: AtomicU64::new(0),
            attachment: RwLock::new(Attachment {
                phase: Detached,
                detached_ns: Some(now),
                unscheduled_ns: 0,
                attached: 0,
                refusal: None,
                before: None,
                crowded: 0,
            }),
            next_ns: AtomicU64::new(if off { u64::MAX } else { 0 }),
            awaits: AtomicBool::new(false),
            lanes: Mutex::default(),
            owners: PortOwners::default(),
        });
        if !off {
            core.attach_within(limit);
        }
        Self { core }
    }

    /// Reports whether a daemon schedules this process now: it enforces, and is not bypassed.
    pub fn is_scheduled(&self) -> bool {
        let enforced =
            |session: Arc<Session>| session.header().attention() & attention::NOT_ENFORCED == 0;
        self.is_attached() && self.core.live_session().is_some_and(enforced)
    }

    /// Reports whether this process is attached to a daemon, whatever its mode.
    pub fn is_attached(&self) -> bool {
        self.core.live_session().is_some_and(|session| session.check_hangup().is_none())
    }

    /// Returns the reason why the last daemon refuses this process, such as another version. The
    /// client asks again from time to time.
    pub fn refusal(&self) -> Option<String> {
        self.core.attachment()?.refusal.clone()
    }

    /// Returns a lane for one thread. Without a daemon or a free lane, its flows are bypassed until
    /// a later submit finds one.
    pub fn lane(&self) -> Lane {
        let counters = Arc::new(LaneCounters::default());
        if let Some(mut registry) = self.core.registry() {
            registry.living.push(Arc::clone(&counters));
        }
        Lane::new(Arc::clone(&self.core), counters)
    }

    /// Returns the sum of all lanes' counters. In a forked child, counters stay 0 if another thread
    /// of the parent had locked them at the fork.
    pub fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        if let Some(registry) = self.core.registry() {
            stats = registry.gone;
            for lane in &registry.living {
                lane.add_to(&mut stats);
            }
        }
        let now = self.core.clock.now_ns();
        let Some(attachment) = self.core.attachment() else { return stats };
        stats.reattaches = attachment.attached.saturating_sub(1);
        let detached_ns = match &attachment.phase {
            // A process whose flows never wait may not have noticed the loss yet.
            Attached(session) => session.check_hangup(),
            _ => attachment.detached_ns,
        };
        stats.unscheduled_ns =
            attachment.unscheduled_ns + detached_ns.map_or(0, |since| now.saturating_sub(since));
        stats
    }

    /// Returns the daemon's number of the NIC of this name, else of its owner, else of `default`.
    /// Without any, returns `u8::MAX`: such flows go out unscheduled, and are counted.
    pub fn nic(&self, name: &str) -> u8 {
        let Some(session) = self.core.latest() else { return u8::MAX };
        session.header().nic(name, || self.core.owners.owner(name)).unwrap_or(u8::MAX)
    }

    /// Returns the daemon's number of a NIC for a transfer whose own NIC is unknown. Successive
    /// turns have the NICs in `names` that the daemon has, or else all of the daemon's. Returns 0
    /// without a daemon.
    pub(crate) fn nic_in_turn(&self, names: &[String], turn: usize) -> u8 {
        let Some(session) = self.core.latest() else { return 0 };
        let header = session.header();
        let number = |name: &String| header.nic_named(name, || self.core.owners.owner(name));
        let mut known = names.iter().filter_map(number);
        let count = known.clone().count();
        let chosen = turn.checked_rem(count).and_then(|at| known.nth(at));
        chosen.unwrap_or_else(|| header.nic_in_turn(turn))
    }

    /// Returns the number of daemons found so far. Values from a daemon, such as [`Client::nic`],
    /// have to be asked for again when it changes.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.core.generation.load(Ordering::Relaxed)
    }

    /// Returns the daemon's DSCP for a stage, for transfers whose class can't be chosen
    /// individually. Returns 0 (unmarked) without a daemon, with one that has none, and while it
    /// schedules nothing: in mode `observe`, or bypassed.
    pub fn dscp_of(&self, stage: Stage) -> u8 {
        self.core.enforcing().and_then(|it| it.header().dscp_of_stage(stage)).unwrap_or(0)
    }

    /// Returns the service level for queue pairs of a stage on InfiniBand, or `None` if none is to
    /// be set: without a daemon that enforces, and where its configuration names none.
    pub fn sl_of(&self, stage: Stage) -> Option<u8> {
        self.core.enforcing()?.header().sl_of_stage(stage)
    }

    /// Decides about the class of a queue pair or connection for transfers of a stage. `class` is
    /// what the program gave it, and `is_chosen` says that its operator or the program set it.
    /// Returns `None` where [`Client::dscp_of`] returns 0: nothing changes then.
    #[must_use]
    pub fn class_of(&self, stage: Stage, class: u8, is_chosen: bool) -> Option<Verdict> {
        let dscp = Some(self.dscp_of(stage)).filter(|dscp| *dscp != 0)?;
        self.verdict(dscp, class, is_chosen)
    }

    /// Decides as [`Client::class_of`] about a change to `dscp`. Returns `None` without a daemon.
    pub fn verdict(&self, dscp: u8, class: u8, is_chosen: bool) -> Option<Verdict> {
        let session = self.core.latest()?;
        let header = session.header();
        Some(decide(header.marking(), &header.treatments(), class, is_chosen, dscp))
    }

    /// Returns the DSCP of a level, or 0 (unmarked) without a daemon.
    pub fn dscp(&self, level: u8) -> u8 {
        self.core.latest().map_or(0, |session| session.header().dscp(level))
    }
}

impl Core {
    /// Locks the attachment. Returns `None` in a forked child if another thread held the lock.
    fn attachment(&self) -> Option<RwLockReadGuard<'_, Attachment>> {
        if self.is_forked() {
            return shortly(|| LOCK_PATIENCE_FORKED, || self.attachment.try_read());
        }
        // The data is valid after every statement, so a panic leaves it usable.
        Some(self.attachment.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Locks the list of lanes in the same way as [`Core::attachment`].
    fn registry(&self) -> Option<MutexGuard<'_, Registry>> {
        if self.is_forked() {
            return shortly(|| LOCK_PATIENCE_FORKED, || self.lanes.try_lock());
        }
        Some(self.lanes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the session, if there is one and it was not lost.
    fn live_session(&self) -> Option<Arc<Session>> {
        self.attachment()?.live_session()
    }

    /// Returns the session, or the last one while its flows wait for the next daemon.
    fn latest(&self) -> Option<Arc<Session>> {
        let attachment = self.attachment()?;
        attachment.live_session().or_else(|| attachment.inherited())
    }

    /// Returns [`Core::latest`] if its daemon enforces.
    fn enforcing(&self) -> Option<Arc<Session>> {
        let enforces = |it: &Arc<Session>| it.header().attention() & attention::UNENFORCED == 0;
        self.latest().filter(enforces)
    }

    /// Returns the last session while flows wait for the next daemon. Never blocks.
    pub(crate) fn inherited(&self) -> Option<Arc<Session>> {
        let awaits = self.awaits.load(Ordering::Relaxed);
        awaits.then(|| self.attachment.try_read().ok()?.inherited())?
    }

    /// Returns a session for a lane without a seat, or does one step towards having one. Never
    /// blocks. Returns `None` if another thread holds a lock for longer than [`LOCK_PATIENCE`].
    pub(crate) fn session(&self) -> Option<Arc<Session>> {
        let next = self.next_ns.load(Ordering::Relaxed);
        if next == u64::MAX {
            return None;
        }
        // A process without a daemon gets here with each of its flows.
        if self.clock.lately_ns() < next {
            return None;
        }
        let patience = || {
            if self.is_forked() { LOCK_PATIENCE_FORKED } else { LOCK_PATIENCE }
        };
        let session = shortly(patience, || self.attachment.try_read()).map(|is| is.live_session());
        let Some(session) = session else {
            self.put_off(next);
            return None;
        };
        if session.is_some() {
            return session;
        }
        let Some(mut attachment) = shortly(patience, || self.attachment.try_write()) else {
            self.put_off(next);
            return None;
        };
        self.step(&mut attachment)
    }

    fn step(&self, attachment: &mut Attachment) -> Option<Arc<Session>> {
        let (session, next) = attachment.advance(&self.options, self.clock);
        self.generation.store(attachment.attached, Ordering::Relaxed);
        self.next_ns.store(next, Ordering::Relaxed);
        self.awaits.store(attachment.before.is_some(), Ordering::Relaxed);
        session
    }

    /// Reports whether this is a forked child, in which the holder of a lock may not exist.
    fn is_forked(&self) -> bool {
        fork::epoch() != self.epoch
    }

    /// Sets the time of the next attempt after a lock could not be taken, unless it is no longer
    /// `seen`.
    #[cold]
    fn put_off(&self, seen: u64) {
        let after_ns = if self.is_forked() {
            self.options.reattach_every.as_nanos() as u64
        } else {
            LOCK_RETRY_NS
        };
        let later = self.clock.now_ns().saturating_add(after_ns);
        let _ = self.next_ns.compare_exchange(seen, later, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Sets the time of the next attempt, for a lane whose session is lost or full.
    pub(crate) fn look_again(&self, at_ns: u64) {
        if self.next_ns.load(Ordering::Relaxed) != u64::MAX {
            self.next_ns.store(at_ns, Ordering::Relaxed);
        }
    }

    fn attach_within(&self, limit: Duration) {
        let end = self.clock.now_ns().saturating_add(limit.as_nanos() as u64);
        let attachment = self.attachment.write();
        let mut attachment = attachment.unwrap_or_else(PoisonError::into_inner);
        loop {
            let session = self.step(&mut attachment);
            let now = self.clock.now_ns();
            let left = end.saturating_sub(now);
            let Asked { ref socket, .. } = attachment.phase else {
                if attachment.crowded == 0 || left == 0 {
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
        let Some(mut registry) = self.registry() else { return };
        registry.living.retain(|lane| !Arc::ptr_eq(lane, counters));
        counters.add_to(&mut registry.gone);
    }
}

impl Attachment {
    /// Returns the session, if there is one and it was not lost.
    fn live_session(&self) -> Option<Arc<Session>> {
        match &self.phase {
            Attached(session) if session.lost_at().is_none() => Some(Arc::clone(session)),
            _ => None,
        }
    }

    /// Returns the last session while its flows wait for the next daemon.
    fn inherited(&self) -> Option<Arc<Session>> {
        let last = match &self.phase {
            Attached(session) => Some(session),
            _ => self.before.as_ref(),
        };
        last.filter(|session| session.has_successor()).cloned()
    }

    /// Ends the wait for the next daemon.
    fn give_up_successor(&mut self) {
        if let Some(before) = self.before.take() {
            before.give_up_successor();
        }
    }

    /// Does one step. Returns the session, if there is one, and the earliest time of the next step.
    fn advance(&mut self, options: &Options, clock: Clock) -> (Option<Arc<Session>>, u64) {
        let now = clock.now_ns();
        let retry = now.saturating_add(options.reattach_every.as_nanos() as u64);
        let crowded = std::mem::take(&mut self.crowded);
        if let Attached(session) = &self.phase {
            match session.lost_at() {
                None => return (Some(Arc::clone(session)), 0),
                Some(since) => {
                    self.detached_ns = Some(since);
                    self.before = session.has_successor().then(|| Arc::clone(session));
                    self.phase = Detached;
                }
            }
        }
        if self.before.as_ref().is_some_and(|before| !before.has_successor()) {
            self.before = None;
        }
        let retry = if self.before.is_some() { now + ENDED_RETRY_NS } else { retry };
        if let Asked { since_ns, pid, .. } = self.phase
            && (pid != std::process::id() || now.saturating_sub(since_ns) > ANSWER_LIMIT_NS)
        {
            self.phase = Detached;
        }
        match std::mem::replace(&mut self.phase, Detached) {
            // The guard is bound last, so it is dropped first.
            Asked { socket, since_ns, pid, guard } => {
                match registration::receive_reply(socket.as_fd()) {
                    Ok(None) => {
                        self.phase = Asked { guard, socket, since_ns, pid };
                        (None, now + ANSWER_POLL_NS)
                    }
                    Ok(Some(welcome)) => match Session::new(clock, socket, welcome, guard) {
                        Some(session) => {
                            let session = Arc::new(session);
                            self.phase = Attached(Arc::clone(&session));
                            self.attached += 1;
                            self.refusal = None;
                            self.before = None;
                            if let Some(since) = self.detached_ns.take() {
                                self.unscheduled_ns += now.saturating_sub(since);
                            }
                            (Some(session), 0)
                        }
                        None => (None, retry),
                    },
                    Err(NoAnswer | Rejected { reason: Reason::Stopping, .. }) => {
                        (None, now + ENDED_RETRY_NS)
                    }
                    Err(refusal @ (Rejected { .. } | Version(_))) => {
                        self.refusal = Some(refusal.to_string());
                        self.give_up_successor();
                        let every = options.reattach_every.as_nanos() as u64;
                        (None, now.saturating_add(every.saturating_mul(REFUSED_FACTOR)))
                    }
                    Err(_) => (None, retry),
                }
            }
            _ => match greet(options) {
                Ok((socket, guard)) => {
                    self.phase = Asked { guard, socket, since_ns: now, pid: std::process::id() };
                    (None, now + ANSWER_POLL_NS)
                }
                Err(error) if is_backlog_full(&error) => {
                    self.crowded = crowded.saturating_add(1);
                    let pause = BACKLOG_RETRY_NS << crowded.min(20);
                    (None, retry.min(now + pause))
                }
                Err(_) => {
                    self.give_up_successor();
                    (None, retry)
                }
            },
        }
    }
}

/// Reports whether a daemon listens whose backlog is full.
fn is_backlog_full(error: &RegistrationError) -> bool {
    matches!(
        error,
        RegistrationError::System { source, .. } if source.kind() == ErrorKind::WouldBlock
    )
}
