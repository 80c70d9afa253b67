//! One port, divided between trust domains.
//!
//! Programs of one domain (the clients of one user, unless configured otherwise) may mislead each
//! other's order by wrong deadlines and hints. Programs of different domains may not. So each
//! domain has a [`Link`] of its own on each port: its own flows, batches, requests, pruned set and
//! bounds on them. An id of one domain means nothing in another. What is left to share is the port:
//!
//! 1. *Window.* A domain is active while its flows wait or are in flight, and for [`ACTIVE_FOR`]
//!    after it submitted one. Each of `n` active domains has `W / n` of the port's window `W`, but
//!    at least two chunks, so that one can be sent while the other completes. A domain alone has
//!    all of it, and may go beyond it to peers that are not busy (`link/peers.rs`). A domain that
//!    completes nothing thus holds its own part only.
//! 2. *Turns.* Of the domains whose parts have room, the one that has been permitted the fewest
//!    bytes goes first (start-time fair queueing). Idle time earns nothing: a domain that begins to
//!    wait starts where the domain that was served last started. A domain that waits for room in
//!    its own part gets behind by at most a window.
//! 3. *Pieces.* A piece that can't be cut counts as one chunk in the window, whatever its size. So
//!    after a piece of more than a chunk, its domain rests while others wait or have bytes in
//!    flight. It rests for the time of the piece at its part of the port's rate.
//! 4. *Scavenger.* While any domain has work in the levels, a domain that has none gets
//!    `scavenger_permille` of the port, as in a [`Link`] (`scavenger.rs`). Such a domain is not
//!    active, so background work of one user takes no part of another's window.
//!
//! Bytes in flight exceed the window for a moment after a domain became active: the others complete
//! what they hold. Ranks and levels of different domains are not compared in the host, but the
//! levels on the wire are the same for all.

use laxity_types::{FlowId, Level, PeerId, Stage};

use crate::config::{InvalidConfig, LinkConfig};
use crate::event::{Action, Event, FlowSpec};
use crate::link::explain::{Obstacle, WaitingFlow};
use crate::link::{Link, LinkSnapshot, Permit};
use crate::time::{Span, Time};

/// Maximum number of domains on a port. The driver numbers them from zero.
pub const DOMAINS_MAX: usize = 64;
/// How long a domain keeps its part of the window after its last flow. Pauses between the flows of
/// a program that computes are shorter.
pub const ACTIVE_FOR: Span = Span::from_millis(100);
/// Maximum number of bytes that one piece costs its domain: the largest message of RDMA. So a claim
/// of more costs a few seconds at most.
const PIECE_MAX: u64 = 1 << 31;
/// The counts of [`Share::served`] are lowered once one of them is this large.
const SERVED_MAX: u64 = u64::MAX / 2;

/// The number of a trust domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainId(pub u8);

#[derive(Debug)]
struct Share {
    link: Link,
    /// When a flow that is not background work arrived last.
    used: Time,
    is_active: bool,
    /// The bytes that the domain was permitted, raised to [`SharedLink::clock`] while it is idle.
    served: u64,
    /// Until when the domain rests after a piece of more than a chunk, if others are busy.
    throttled_until: Time,
    /// When scavenged work may be permitted beside others' work in the levels.
    scavenges_at: Time,
}

impl Share {
    fn is_busy(&self) -> bool {
        self.link.waiting_flows() > 0 || self.link.in_flight_bytes() > 0
    }

    /// Reports whether nothing but scavenged work waits while others may have work in the levels.
    fn scavenges(&self, levels_wait: bool) -> bool {
        levels_wait && !self.link.waits_in_levels()
    }
}

/// The arbitration of one port for all its domains.
#[derive(Debug)]
pub struct SharedLink {
    /// The configuration of the whole port.
    config: LinkConfig,
    shares: Vec<Share>,
    /// The share that is polled first among equals.
    turn: usize,
    /// The largest count of bytes with which a domain was served by turns.
    clock: u64,
    /// When the port was polled last.
    polled: Time,
}

impl SharedLink {
    /// Creates a port without flows.
    ///
    /// # Errors
    /// Returns the first field of `config` that is out of range.
    pub fn new(config: LinkConfig) -> Result<Self, InvalidConfig> {
        let mut shared = Self { config, shares: Vec::new(), turn: 0, clock: 0, polled: Time::ZERO };
        shared.shares.push(shared.share()?);
        Ok(shared)
    }

    fn share(&self) -> Result<Share, InvalidConfig> {
        let link = Link::new(self.config.clone())?;
        Ok(Share {
            link,
            used: Time::ZERO,
            is_active: false,
            served: self.clock,
            throttled_until: Time::ZERO,
            scavenges_at: Time::ZERO,
        })
    }

    /// Returns the configuration of the whole port.
    pub const fn config(&self) -> &LinkConfig {
        &self.config
    }

    /// Changes the configuration of all domains, see [`Link::set_config`].
    ///
    /// # Errors
    /// Returns the first field that is out of range. The old configuration then stays.
    pub fn set_config(&mut self, now: Time, config: LinkConfig) -> Result<(), InvalidConfig> {
        config.validate()?;
        for share in &mut self.shares {
            share.link.set_config(now, config.clone())?;
            // The pause after the last piece may be that of a very small `scavenger_permille`.
            share.scavenges_at = Time::ZERO;
        }
        self.config = config;
        self.divide();
        Ok(())
    }

    /// Changes the rate and the window in force, see [`Link::set_capacity`].
    pub fn set_capacity(&mut self, rate: u64, window_bytes: u64) {
        self.config.rate = rate.max(1);
        self.config.window_bytes = window_bytes.max(self.config.chunk_bytes);
        for share in &mut self.shares {
            share.link.set_capacity(rate, window_bytes);
        }
        self.divide();
    }

    fn at(&self, domain: DomainId) -> usize {
        usize::from(domain.0).min(self.shares.len() - 1)
    }

    /// Returns the link of a domain. A domain without flows and hints may have another's.
    pub fn link(&self, domain: DomainId) -> &Link {
        &self.shares[self.at(domain)].link
    }

    /// Returns the share of a domain, and creates it if it is missing.
    #[inline]
    fn enter(&mut self, domain: DomainId) -> &mut Share {
        if usize::from(domain.0) >= self.shares.len() {
            self.add_shares(domain);
        }
        let at = self.at(domain);
        &mut self.shares[at]
    }

    /// Creates the missing shares up to that of a domain, at most [`DOMAINS_MAX`].
    #[cold]
    fn add_shares(&mut self, domain: DomainId) {
        let last = usize::from(domain.0).min(DOMAINS_MAX - 1);
        let known = self.shares.len();
        while self.shares.len() <= last
            && let Ok(share) = self.share()
        {
            self.shares.push(share);
        }
        if self.shares.len() > known {
            self.divide();
        }
    }

    /// Replaces the link of a domain that is gone, for another domain with its number.
    pub fn clear(&mut self, domain: DomainId) {
        if usize::from(domain.0) < self.shares.len()
            && let Ok(share) = self.share()
        {
            self.shares[usize::from(domain.0)] = share;
            self.divide();
        }
    }

    /// Records that a flow arrives. The domain becomes active, unless a request never waits for
    /// flows of this stage.
    #[inline]
    fn arrives(&mut self, now: Time, domain: DomainId, stage: Stage) -> &mut Link {
        let share = self.enter(domain);
        if !stage.is_scavenged() {
            share.used = now;
            if !share.is_active {
                share.is_active = true;
                self.divide();
            }
        }
        let at = self.at(domain);
        &mut self.shares[at].link
    }

    /// Gives each domain its part of the window.
    fn divide(&mut self) {
        let active = self.shares.iter().filter(|share| share.is_active).count() as u64;
        let window = self.config.window_bytes;
        let least = self.config.chunk_bytes.saturating_mul(2).min(window);
        for share in &mut self.shares {
            let among = if share.is_active { active } else { active + 1 };
            share.link.set_window((window / among).max(least), among == 1);
        }
    }

    /// Ends the activity of domains that have no flows any more.
    fn expire(&mut self, now: Time) {
        let mut changed = false;
        for share in &mut self.shares {
            if share.is_active && !share.is_busy() && now.since(share.used) >= ACTIVE_FOR {
                share.is_active = false;
                changed = true;
            }
        }
        if changed {
            self.divide();
        }
    }

    /// Explains a waiting flow, see [`Link::explain`].
    pub fn explain(&self, now: Time, domain: DomainId, flow: FlowId) -> Option<WaitingFlow> {
        let (at, mut known) = (self.at(domain), self.link(domain).explain(now, flow)?);
        let free = matches!(known.obstacle, Obstacle::Nothing | Obstacle::Window);
        let yields = self.shares[at].scavenges(self.levels_wait());
        if free && (yields || self.rests(now, at)) {
            known.obstacle = Obstacle::Turn;
        }
        Some(known)
    }

    /// Returns how many windows may be in flight because of bounds by peer, without `overcommit`.
    pub fn windows_max(&self) -> u32 {
        let active = self.shares.iter().filter(|share| share.is_active).count();
        if active > 1 { 1 } else { self.shares[0].link.windows_max() }
    }

    /// Reports whether another domain than this one is active.
    pub fn has_others(&self, domain: DomainId) -> bool {
        let at = self.at(domain);
        self.shares.iter().enumerate().any(|(other, share)| other != at && share.is_active)
    }

    /// Reports whether no flow of a domain waits.
    pub fn is_idle(&self, domain: DomainId) -> bool {
        self.link(domain).waiting_flows() == 0
    }

    /// Reports whether a domain holds more than its part of the window while flows of another
    /// active domain wait. It may have had all of the window, and more for several peers, before
    /// that one became active.
    #[must_use]
    pub fn keeps_others_waiting(&self, domain: DomainId) -> bool {
        let (at, link) = (self.at(domain), self.link(domain));
        let waits = |(other, share): (usize, &Share)| {
            other != at && share.is_active && share.link.waiting_flows() > 0
        };
        link.in_flight_bytes() > link.config().window_bytes
            && self.shares.iter().enumerate().any(waits)
    }

    /// Reports whether scavenged work of another domain waits for work of this one in the levels,
    /// which itself waits for bytes in flight. Both wait for ever if these never complete and the
    /// scavenger has no share of the port.
    #[must_use]
    pub fn keeps_scavengers_waiting(&self, domain: DomainId) -> bool {
        let (at, link) = (self.at(domain), self.link(domain));
        let waits = |(other, share): (usize, &Share)| {
            other != at && share.scavenges(true) && share.link.waiting_flows() > 0
        };
        self.config.scavenger_permille == 0
            && link.waits_in_levels()
            && link.in_flight_bytes() > 0
            && self.shares.iter().enumerate().any(waits)
    }

    /// Reports whether flows of a domain wait while others have a part of the window.
    pub fn is_limited(&self, domain: DomainId) -> bool {
        self.link(domain).waiting_flows() > 0 && self.has_others(domain)
    }

    fn levels_wait(&self) -> bool {
        self.shares.iter().any(|share| share.link.waits_in_levels())
    }

    /// Returns the number of other domains with flows that wait or are in flight.
    fn others_busy(&self, at: usize) -> u64 {
        let others = self.shares.iter().enumerate().filter(|&(other, _)| other != at);
        others.filter(|(_, share)| share.is_busy()).count() as u64
    }

    /// Reports whether a domain waits because it had a large piece and others are busy.
    fn rests(&self, now: Time, at: usize) -> bool {
        now < self.shares[at].throttled_until && self.others_busy(at) > 0
    }

    /// Charges a domain for bytes that it was permitted or sends on credit.
    #[inline]
    fn charge(&mut self, at: usize, bytes: u64) {
        let served = &mut self.shares[at].served;
        *served = served.saturating_add(bytes.min(PIECE_MAX));
        if *served >= SERVED_MAX {
            let less = SERVED_MAX / 2;
            self.clock = self.clock.saturating_sub(less);
            for share in &mut self.shares {
                share.served = share.served.saturating_sub(less);
            }
        }
    }

    /// Charges a domain for a permit, after which it may have to rest.
    #[inline]
    fn permitted(&mut self, now: Time, at: usize, bytes: u64) {
        self.charge(at, bytes);
        if bytes > self.config.chunk_bytes {
            let parts = 1 + self.others_busy(at);
            let on_wire = Span::transfer(bytes.min(PIECE_MAX), self.config.rate);
            self.shares[at].throttled_until = now + on_wire.times(parts);
        }
    }

    /// See [`Link::peek_permit`]. Scavenged flows wait while others have work in the levels.
    #[inline]
    #[must_use]
    pub fn peek_permit(&mut self, now: Time, domain: DomainId, spec: &FlowSpec) -> Option<Permit> {
        let permit = self.arrives(now, domain, spec.stage).peek_permit(now, spec)?;
        let yields =
            permit.level == Level::SCAVENGER && self.shares.len() > 1 && self.levels_wait();
        (!yields && !self.rests(now, self.at(domain))).then_some(permit)
    }

    /// See [`Link::commit_permit`]. The flow arrived with [`Self::peek_permit`].
    #[inline]
    pub fn commit_permit(&mut self, now: Time, domain: DomainId, spec: &FlowSpec, permit: Permit) {
        let share = self.enter(domain);
        debug_assert!(share.is_active || spec.stage.is_scavenged());
        share.link.commit_permit(now, spec, permit);
        self.permitted(now, self.at(domain), permit.bytes);
    }

    /// Counts bytes that a domain sent without a permit of its link, and charges its share.
    #[inline]
    pub fn add_in_flight(
        &mut self,
        now: Time,
        domain: DomainId,
        (stage, peer): (Stage, PeerId),
        level: Level,
        bytes: u64,
    ) {
        self.arrives(now, domain, stage).add_in_flight(now, stage, peer, level, bytes);
        self.charge(self.at(domain), bytes);
    }

    /// Removes delivered bytes from those that a domain has in flight.
    #[inline]
    pub fn remove_in_flight(
        &mut self,
        now: Time,
        domain: DomainId,
        peer: PeerId,
        level: Level,
        bytes: u64,
    ) {
        self.enter(domain).link.remove_in_flight(now, peer, level, bytes);
    }

    /// Removes bytes from a domain's in flight that were not delivered, and may never be.
    pub fn write_off(
        &mut self,
        now: Time,
        domain: DomainId,
        peer: PeerId,
        level: Level,
        bytes: u64,
    ) {
        self.enter(domain).link.write_off(now, peer, level, bytes);
    }

    /// Updates the state of a domain for an event.
    pub fn handle(&mut self, now: Time, domain: DomainId, event: Event) {
        let link = match &event {
            Event::FlowArrived(spec) => self.arrives(now, domain, spec.stage),
            _ => &mut self.enter(domain).link,
        };
        link.handle(now, event);
    }

    /// Returns the next action. Call it until it returns `None`.
    pub fn poll_action(&mut self, now: Time) -> Option<Action> {
        if let [only] = &mut self.shares[..] {
            return only.link.poll_action(now);
        }
        self.polled = now;
        self.expire(now);
        self.level_served();
        let levels_wait = self.levels_wait();
        let permille = u64::from(self.config.scavenger_permille);
        // The domains that have no turn now, or that had one and could not use it.
        let mut passed = [false; DOMAINS_MAX];
        for (at, passed) in passed.iter_mut().enumerate().take(self.shares.len()) {
            let share = &self.shares[at];
            let yields =
                share.scavenges(levels_wait) && (permille == 0 || now < share.scavenges_at);
            *passed = share.link.waiting_flows() == 0 || yields || self.rests(now, at);
        }
        loop {
            let count = self.shares.len();
            let turns = (0..count).map(|step| (self.turn + step) % count);
            let at = turns.filter(|&at| !passed[at]).min_by_key(|&at| self.shares[at].served)?;
            let scavenges = self.shares[at].scavenges(levels_wait);
            let Some(action) = self.shares[at].link.poll_action(now) else {
                passed[at] = true;
                continue;
            };
            if let Action::Permit { bytes, .. } = action {
                if scavenges {
                    let on_wire = Span::transfer(bytes, self.config.rate);
                    let pause = Span(on_wire.times(1000).0 / permille.max(1));
                    self.shares[at].scavenges_at = now + pause;
                }
                self.clock = self.clock.max(self.shares[at].served);
                self.permitted(now, at, bytes);
                self.turn = at + 1;
            }
            return Some(action);
        }
    }

    /// Raises the counts of domains that were idle, or that had no room in their parts.
    fn level_served(&mut self) {
        let behind = self.clock.saturating_sub(self.config.window_bytes);
        for share in &mut self.shares {
            let least = if share.link.waiting_flows() == 0 { self.clock } else { behind };
            share.served = share.served.max(least);
        }
    }

    /// Returns when to call [`SharedLink::poll_action`] if no event comes before.
    pub fn next_deadline(&self) -> Option<Time> {
        // A link whose domain had no turn may have a deadline that has passed.
        let is_alone = self.shares.len() == 1;
        let links = self.shares.iter().filter_map(|share| share.link.next_deadline());
        let links = links.filter(|&at| is_alone || at > self.polled);
        let levels_wait = self.shares.len() > 1 && self.levels_wait();
        let scavenges = |share: &&Share| {
            levels_wait && share.link.waiting_flows() > 0 && !share.link.waits_in_levels()
        };
        // A turn that has come and was not used waits for a completion.
        let turns = self.shares.iter().filter(scavenges).map(|share| share.scavenges_at);
        let rested = |share: &&Share| share.link.waiting_flows() > 0;
        let rests = self.shares.iter().filter(rested).map(|share| share.throttled_until);
        let quiet = |share: &&Share| !is_alone && share.is_active && !share.is_busy();
        let ends = self.shares.iter().filter(quiet).map(|share| share.used + ACTIVE_FOR);
        links.chain(turns.chain(rests).chain(ends).filter(|&at| at > self.polled)).min()
    }

    /// Returns the number of waiting flows of all domains.
    #[inline]
    pub fn waiting_flows(&self) -> usize {
        self.shares.iter().map(|share| share.link.waiting_flows()).sum()
    }

    /// Returns the bytes of all domains that are permitted and not yet completed.
    pub fn in_flight_bytes(&self) -> u64 {
        self.shares.iter().fold(0, |sum, share| sum.saturating_add(share.link.in_flight_bytes()))
    }

    /// Returns the sum of the states of all domains.
    pub fn snapshot(&self) -> LinkSnapshot {
        let mut sum = LinkSnapshot::default();
        for share in &self.shares {
            sum.add(&share.link.snapshot());
        }
        sum
    }
}
