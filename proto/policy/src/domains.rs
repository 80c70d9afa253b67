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
//!    all of it. A domain that completes nothing thus holds its own part only.
//! 2. *Turns.* Domains whose parts have room are served by turns, a permit each.
//! 3. *Scavenger.* While any domain has work in the levels, a domain that has none gets
//!    `scavenger_permille` of the port, as in a [`Link`] (`scavenger.rs`). Such a domain is not
//!    active, so background work of one user takes no part of another's window.
//!
//! Bytes in flight exceed the window for a moment after a domain became active: the others complete
//! what they hold. Ranks and levels of different domains are not compared in the host, but the
//! levels on the wire are the same for all.

use laxity_types::{Deadline, Level, PeerId, Stage};

use crate::config::{InvalidConfig, LinkConfig};
use crate::event::{Action, Event, FlowSpec};
use crate::link::{Link, LinkSnapshot, Permit};
use crate::time::{Span, Time};

/// Maximum number of domains on a port. The driver numbers them from zero.
pub const DOMAINS_MAX: usize = 64;
/// How long a domain keeps its part of the window after its last flow. Pauses between the flows of
/// a program that computes are shorter.
pub const ACTIVE_FOR: Span = Span::from_millis(100);

/// The number of a trust domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainId(pub u8);

#[derive(Debug)]
struct Share {
    link: Link,
    /// When a flow that is not background work arrived last.
    used: Time,
    is_active: bool,
    /// When scavenged work may be permitted beside others' work in the levels.
    scavenges_at: Time,
}

/// The arbitration of one port for all its domains.
#[derive(Debug)]
pub struct SharedLink {
    /// The configuration of the whole port.
    config: LinkConfig,
    shares: Vec<Share>,
    /// The share that is polled first.
    turn: usize,
    /// When the port was polled last.
    polled: Time,
}

impl SharedLink {
    /// Creates a port without flows.
    ///
    /// # Errors
    /// Returns the first field of `config` that is out of range.
    pub fn new(config: LinkConfig) -> Result<Self, InvalidConfig> {
        let mut shared = Self { config, shares: Vec::new(), turn: 0, polled: Time::ZERO };
        shared.shares.push(shared.share()?);
        Ok(shared)
    }

    fn share(&self) -> Result<Share, InvalidConfig> {
        let link = Link::new(self.config.clone())?;
        Ok(Share { link, used: Time::ZERO, is_active: false, scavenges_at: Time::ZERO })
    }

    /// Returns the configuration of the whole port.
    #[must_use]
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
        }
        self.config = config;
        self.divide();
        Ok(())
    }

    /// Changes the rate and the window, see [`Link::set_capacity`].
    pub fn set_capacity(&mut self, now: Time, rate: u64, window_bytes: u64) {
        self.config.rate = rate.max(1);
        self.config.window_bytes = window_bytes.max(self.config.chunk_bytes);
        for share in &mut self.shares {
            share.link.set_capacity(now, rate, window_bytes);
        }
        self.divide();
    }

    fn at(&self, domain: DomainId) -> usize {
        usize::from(domain.0).min(self.shares.len() - 1)
    }

    /// Returns the link of a domain. A domain without flows and hints may have another's.
    #[must_use]
    pub fn link(&self, domain: DomainId) -> &Link {
        &self.shares[self.at(domain)].link
    }

    /// Returns the link of a domain, which is new if need be.
    fn enter(&mut self, domain: DomainId) -> &mut Share {
        let last = usize::from(domain.0).min(DOMAINS_MAX - 1);
        while self.shares.len() <= last
            && let Ok(share) = self.share()
        {
            self.shares.push(share);
        }
        let at = self.at(domain);
        &mut self.shares[at]
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

    /// Records that a flow arrives. The domain becomes active, unless it is background work.
    #[inline]
    fn arrives(&mut self, now: Time, domain: DomainId, stage: Stage) -> &mut Link {
        let share = self.enter(domain);
        if stage.deadline() != Deadline::None {
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
            share.link.set_window((window / among).max(least));
        }
    }

    /// Ends the activity of domains that have no flows any more.
    fn expire(&mut self, now: Time) {
        let mut changed = false;
        for share in &mut self.shares {
            let idle = share.link.waiting_flows() == 0 && share.link.in_flight_bytes() == 0;
            if share.is_active && idle && now.since(share.used) >= ACTIVE_FOR {
                share.is_active = false;
                changed = true;
            }
        }
        if changed {
            self.divide();
        }
    }

    /// Reports whether another domain than this one is active.
    #[must_use]
    pub fn has_others(&self, domain: DomainId) -> bool {
        let at = self.at(domain);
        self.shares.iter().enumerate().any(|(other, share)| other != at && share.is_active)
    }

    /// Reports whether no flow of a domain waits.
    #[must_use]
    pub fn is_idle(&self, domain: DomainId) -> bool {
        self.link(domain).waiting_flows() == 0
    }

    /// Reports whether a domain holds more than its part of the window. It may have had all of it
    /// before another domain became active.
    #[must_use]
    pub fn exceeds_its_part(&self, domain: DomainId) -> bool {
        let link = self.link(domain);
        self.has_others(domain) && link.in_flight_bytes() > link.config().window_bytes
    }

    /// Reports whether flows of a domain wait while others have a part of the window.
    #[must_use]
    pub fn is_limited(&self, domain: DomainId) -> bool {
        self.link(domain).waiting_flows() > 0 && self.has_others(domain)
    }

    fn levels_wait(&self) -> bool {
        self.shares.iter().any(|share| share.link.waits_in_levels())
    }

    /// See [`Link::peek_permit`]. Scavenged flows wait while others have work in the levels.
    #[must_use]
    pub fn peek_permit(&mut self, now: Time, domain: DomainId, spec: &FlowSpec) -> Option<Permit> {
        let permit = self.arrives(now, domain, spec.stage).peek_permit(now, spec)?;
        let yields =
            permit.level == Level::SCAVENGER && self.shares.len() > 1 && self.levels_wait();
        (!yields).then_some(permit)
    }

    /// See [`Link::commit_permit`].
    pub fn commit_permit(&mut self, now: Time, domain: DomainId, spec: &FlowSpec, permit: Permit) {
        self.arrives(now, domain, spec.stage).commit_permit(now, spec, permit);
    }

    /// See [`Link::launch`].
    pub fn launch(
        &mut self,
        now: Time,
        domain: DomainId,
        (stage, peer): (Stage, PeerId),
        level: Level,
        bytes: u64,
    ) {
        self.arrives(now, domain, stage).launch(now, stage, peer, level, bytes);
    }

    /// See [`Link::land`].
    pub fn land(&mut self, now: Time, domain: DomainId, peer: PeerId, level: Level, bytes: u64) {
        self.enter(domain).link.land(now, peer, level, bytes);
    }

    /// Updates the state of a domain for an event.
    pub fn handle(&mut self, now: Time, domain: DomainId, event: Event) {
        let link = match &event {
            Event::FlowArrived(spec) => self.arrives(now, domain, spec.stage),
            _ => &mut self.enter(domain).link,
        };
        link.handle(now, event);
    }

    /// Updates the state of whichever domain has the flow of the event.
    pub fn handle_any(&mut self, now: Time, event: &Event) {
        for share in &mut self.shares {
            share.link.handle(now, event.clone());
        }
    }

    /// Returns the next action. Call it until it returns `None`.
    pub fn poll_action(&mut self, now: Time) -> Option<Action> {
        if let [only] = &mut self.shares[..] {
            return only.link.poll_action(now);
        }
        self.polled = now;
        self.expire(now);
        let levels_wait = self.levels_wait();
        for step in 0..self.shares.len() {
            let at = (self.turn + step) % self.shares.len();
            let share = &mut self.shares[at];
            let scavenges = levels_wait && !share.link.waits_in_levels();
            if share.link.waiting_flows() == 0 || scavenges && now < share.scavenges_at {
                continue;
            }
            let Some(action) = share.link.poll_action(now) else { continue };
            if let Action::Permit { bytes, .. } = action {
                let on_wire = Span::transfer(bytes, self.config.rate);
                if scavenges {
                    share.scavenges_at = match u64::from(self.config.scavenger_permille) {
                        0 => Time::NEVER,
                        permille => now + Span(on_wire.times(1000).0 / permille),
                    };
                }
                self.turn = at + 1;
            }
            return Some(action);
        }
        None
    }

    /// Returns when to call [`SharedLink::poll_action`] if no event comes before.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        let links = self.shares.iter().filter_map(|share| share.link.next_deadline());
        let levels_wait = self.shares.len() > 1 && self.levels_wait();
        let scavenges = |share: &&Share| {
            levels_wait && share.link.waiting_flows() > 0 && !share.link.waits_in_levels()
        };
        // A turn that has come and was not used waits for a completion.
        let turns = self.shares.iter().filter(scavenges).map(|share| share.scavenges_at);
        links.chain(turns.filter(|&at| at > self.polled && at != Time::NEVER)).min()
    }

    /// Returns the number of waiting flows of all domains.
    #[must_use]
    pub fn waiting_flows(&self) -> usize {
        self.shares.iter().map(|share| share.link.waiting_flows()).sum()
    }

    /// Returns the bytes of all domains that are permitted and not yet completed.
    #[must_use]
    pub fn in_flight_bytes(&self) -> u64 {
        self.shares.iter().fold(0, |sum, share| sum.saturating_add(share.link.in_flight_bytes()))
    }

    /// Returns the sum of the states of all domains.
    #[must_use]
    pub fn snapshot(&self) -> LinkSnapshot {
        let mut sum = LinkSnapshot::default();
        for share in &self.shares {
            sum.add(&share.link.snapshot());
        }
        sum
    }
}
