//! What enforcing would have done to the flows of a port that were only observed.
//!
//! A second [`Link`] gets the observed flows and the hints. Its permits go nowhere: the bytes are
//! taken to leave one after another at the rate of the port in force, and complete then. So this
//! is a simulation, fed by the real arrivals. It departs from reality in two ways: senders would
//! have submitted later if earlier flows had been delayed, and a receiver or a switch may be slower
//! than the port.
//!
//! Virtual time advances only when something happens on the port, or when the result is read. Flows
//! have ids of their own, because a flow may end here later than in reality.
//!
//! It runs on the scheduler's thread, so its work is bounded. It holds the flows of the next
//! seconds at most, drops its state if it can't keep pace, and does nothing while nothing is
//! observed.

use std::collections::{BTreeSet, HashMap, VecDeque};

use laxity_policy::config::InvalidConfig;
use laxity_policy::link::Link;
use laxity_policy::{Action, Event, FlowId, FlowSpec, Level, LinkConfig, Span, Stage, Time};
use laxity_wire::WouldStatus;

use super::ahead::AheadByJob;
use crate::stats::AheadCount;

const MINUTES_MAX: usize = 60;
const MINUTE: u64 = 60_000_000_000;
/// Maximum number of waiting flows. More means that the port is faster than its configured rate.
const WAITING_MAX: usize = 65_536;
/// The longest time that the bytes of all flows may take at the rate of the port. The size that a
/// flow states is not checked.
const AHEAD_MAX: Span = Span::from_millis(10_000);
/// Maximum number of steps at once. They keep the scheduler's thread for a millisecond or two.
const STEPS_MAX: usize = 1000;
/// How long hints are taken after the last flow.
const HINTED_FOR: Span = Span::from_millis(10_000);
/// The shortest time between two looks at the link without an event.
const LOOK_MIN: Span = Span::from_micros(10);

/// Returns the number of the minute of a time, from the clock's beginning.
const fn minute_of(at: Time) -> u64 {
    at.0 / MINUTE
}

/// A flow without a permit.
#[derive(Debug)]
struct Waiting {
    since: Time,
    bytes: u64,
    stage: Stage,
    job: usize,
}

#[derive(Debug)]
pub struct ShadowLink {
    link: Link,
    next: u64,
    waiting: HashMap<FlowId, Waiting>,
    /// Waiting flows that are no collectives, in the order of arrival.
    others: BTreeSet<FlowId>,
    /// Permitted bytes, by the time when they have left.
    wire: VecDeque<(Time, FlowId, u64)>,
    /// Bytes of flows that have not left.
    ahead: u64,
    last: Time,
    /// The time up to which the link has seen everything.
    seen: Time,
    /// Promotions before the latest minute.
    promotions: u64,
    /// Minutes in which something happened, by number.
    minutes: VecDeque<(u64, WouldStatus)>,
    ahead_by_job: AheadByJob,
}

impl ShadowLink {
    pub fn new(config: LinkConfig) -> Result<Self, InvalidConfig> {
        Ok(Self {
            link: Link::new(config)?,
            next: 1,
            waiting: HashMap::new(),
            others: BTreeSet::new(),
            wire: VecDeque::new(),
            ahead: 0,
            last: Time::ZERO,
            seen: Time::ZERO,
            promotions: 0,
            minutes: VecDeque::new(),
            ahead_by_job: AheadByJob::default(),
        })
    }

    /// Takes the capacity that others leave, as the real link does.
    pub fn set_capacity(&mut self, now: Time, rate: u64, window_bytes: u64) {
        self.advance(now);
        self.link.set_capacity(rate, window_bytes);
        self.serve(now);
    }

    /// Reports whether hints are of use: flows wait, or some came lately.
    pub fn is_hinted(&self, now: Time) -> bool {
        self.ahead > 0 || now.since(self.last) < HINTED_FOR
    }

    pub fn hint(&mut self, now: Time, event: Event) {
        self.advance(now);
        self.link.handle(now, event);
        self.serve(now);
    }

    /// Takes a flow of a job that was sent without a permit.
    pub fn flow(&mut self, now: Time, job: usize, spec: &FlowSpec) {
        self.advance(now);
        self.last = now;
        let ahead = self.ahead.saturating_add(spec.bytes);
        let is_lost = self.waiting.len() >= WAITING_MAX
            || Span::transfer(ahead, self.link.config().rate) > AHEAD_MAX;
        let minute = self.minute(now);
        minute.flows += 1;
        minute.bytes += spec.bytes;
        minute.lost_flows += u64::from(is_lost);
        if is_lost {
            return;
        }
        self.ahead = ahead;
        let flow = FlowId(self.next);
        self.next += 1;
        let (bytes, stage) = (spec.bytes, spec.stage);
        self.waiting.insert(flow, Waiting { since: now, bytes, stage, job });
        if stage != Stage::Collective {
            self.others.insert(flow);
        }
        self.link.handle(now, Event::FlowArrived(FlowSpec { flow, ..*spec }));
        self.serve(now);
    }

    /// Returns the minutes in which something happened, the latest last.
    pub fn minutes(&mut self, now: Time) -> Vec<WouldStatus> {
        self.advance(now);
        let ago = |number| minute_of(now).saturating_sub(number);
        let minutes = self.minutes.iter();
        let minutes = minutes.map(|&(number, of)| WouldStatus { minutes_ago: ago(number), ..of });
        let mut minutes: Vec<WouldStatus> = minutes.collect();
        if let Some(last) = minutes.last_mut() {
            last.promotions += self.link.snapshot().promotions - self.promotions;
        }
        minutes
    }

    /// Returns the collectives that would have gone ahead, by minute and job. Call
    /// [`Self::minutes`] first.
    pub fn ahead_by_job(&self, now: Time) -> Vec<AheadCount> {
        self.ahead_by_job.counts(minute_of(now))
    }

    fn minute(&mut self, at: Time) -> &mut WouldStatus {
        let number = minute_of(at);
        if self.minutes.back().is_none_or(|(last, _)| *last < number) {
            let promotions = self.link.snapshot().promotions;
            if let Some((_, last)) = self.minutes.back_mut() {
                last.promotions += promotions - self.promotions;
            }
            self.promotions = promotions;
            if self.minutes.len() == MINUTES_MAX {
                self.minutes.pop_front();
            }
            self.minutes.push_back((number, WouldStatus::default()));
        }
        let last = self.minutes.len() - 1;
        &mut self.minutes[last].1
    }

    /// Lets everything happen that is due before `now`. Begins anew if that is too much.
    fn advance(&mut self, now: Time) {
        let mut steps = 0..STEPS_MAX;
        loop {
            let landing = self.wire.front().map(|(at, ..)| *at);
            let look = match self.waiting.is_empty() {
                true => None,
                false => self.link.next_deadline().map(|at| at.max(self.seen + LOOK_MIN)),
            };
            let Some(at) = landing.into_iter().chain(look).min().filter(|at| *at <= now) else {
                break;
            };
            if steps.next().is_none() {
                self.give_up(now);
                break;
            }
            while let Some(&(landed, flow, bytes)) = self.wire.front()
                && landed <= at
            {
                self.wire.pop_front();
                self.ahead = self.ahead.saturating_sub(bytes);
                self.link.handle(at, Event::BytesCompleted { flow, bytes });
            }
            self.serve(at);
        }
        self.seen = self.seen.max(now);
    }

    /// Forgets all flows, and counts those that wait as lost.
    fn give_up(&mut self, now: Time) {
        let lost = self.waiting.len() as u64;
        self.minute(now).lost_flows += lost;
        let promoted = self.link.snapshot().promotions - self.promotions;
        self.minute(now).promotions += promoted;
        // The configuration is that of a link, so it is valid.
        if let Ok(link) = Link::new(self.link.config().clone()) {
            self.link = link;
        }
        self.promotions = 0;
        (self.waiting, self.others, self.wire) = Default::default();
        self.ahead = 0;
    }

    /// Puts on the wire what the link permits.
    fn serve(&mut self, at: Time) {
        self.seen = self.seen.max(at);
        while let Some(action) = self.link.poll_action(at) {
            let Action::Permit { flow, bytes, level, .. } = action else { continue };
            let free = self.wire.back().map_or(at, |(left, ..)| (*left).max(at));
            let left = free + Span::transfer(bytes, self.link.config().rate);
            self.wire.push_back((left, flow, bytes));
            if let Some(waited) = self.waiting.remove(&flow) {
                self.first_permit(at, flow, &waited, level);
            }
        }
    }

    fn first_permit(&mut self, at: Time, flow: FlowId, waited: &Waiting, level: Level) {
        self.others.remove(&flow);
        let overtakes = waited.stage == Stage::Collective
            && self.others.first().is_some_and(|first| *first < flow);
        let is_low = matches!(waited.stage, Stage::Weights | Stage::Background);
        let delay = at.since(waited.since);
        let minute = self.minute(at);
        minute.collectives_ahead += u64::from(overtakes);
        minute.pruned_flows += u64::from(level == Level::SCAVENGER && !is_low);
        if delay.0 > 0 {
            minute.delayed_flows += 1;
            minute.delayed_bytes += waited.bytes;
            minute.delay_ns += delay.0;
        }
        if overtakes {
            self.ahead_by_job.count(minute_of(at), waited.job, waited.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A port of 1 GB/s with a window of 4 MiB, so that 1 MiB takes about 1 ms.
    fn shadow() -> ShadowLink {
        let config = LinkConfig {
            rate: 1_000_000_000,
            chunk_bytes: MIB,
            window_bytes: 4 * MIB,
            ..LinkConfig::default()
        };
        ShadowLink::new(config).expect("a configuration")
    }

    fn at_ms(ms: u64) -> Time {
        Time::ZERO + Span::from_millis(ms)
    }

    fn spec(stage: Stage, bytes: u64) -> FlowSpec {
        FlowSpec::anonymous(FlowId(0), stage, bytes)
    }

    fn sum(shadow: &mut ShadowLink) -> WouldStatus {
        let mut sum = WouldStatus::default();
        for minute in shadow.minutes(Time::ZERO) {
            sum.flows += minute.flows;
            sum.delayed_flows += minute.delayed_flows;
            sum.delay_ns += minute.delay_ns;
            sum.collectives_ahead += minute.collectives_ahead;
        }
        sum
    }

    #[test]
    fn flows_that_fit_the_window_would_not_have_waited() {
        let mut shadow = shadow();
        for ms in 0..50 {
            shadow.flow(at_ms(ms * 10), 1, &spec(Stage::P2d, MIB));
        }
        let sum = sum(&mut shadow);
        assert_eq!((sum.flows, sum.delayed_flows, sum.collectives_ahead), (50, 0, 0));
    }

    #[test]
    fn a_collective_would_have_overtaken_what_waits_for_the_window() {
        let mut shadow = shadow();
        for _ in 0..40 {
            shadow.flow(at_ms(1), 1, &spec(Stage::P2d, MIB));
        }
        shadow.flow(at_ms(2), 2, &spec(Stage::Collective, MIB / 4));
        shadow.advance(at_ms(1000));
        let ahead = shadow.ahead_by_job(at_ms(1000));
        let row = AheadCount { minutes_ago: 0, job: 2, collectives: 1, bytes: MIB / 4 };
        assert_eq!(ahead, [row], "the job of the collective, not that of what it overtakes");
        let sum = sum(&mut shadow);
        assert_eq!((sum.flows, sum.collectives_ahead), (41, 1));
        assert!(sum.delayed_flows >= 36, "all beyond the window: {sum:?}");
        // The last of 40 MiB leaves after 42 ms, so the mean wait is about half of that.
        let mean_ms = sum.delay_ns / sum.delayed_flows / 1_000_000;
        assert!((10..=30).contains(&mean_ms), "{mean_ms} ms");
        assert!(shadow.waiting.is_empty() && shadow.others.is_empty() && shadow.wire.is_empty());
    }

    #[test]
    fn an_hour_is_remembered_and_what_waits_is_bounded() {
        let mut shadow = shadow();
        for minute in 0..70 {
            shadow.flow(Time(minute * MINUTE), 1, &spec(Stage::P2d, 1));
        }
        let minutes = shadow.minutes(Time(70 * MINUTE));
        let ago = |at: usize| minutes[at].minutes_ago;
        assert_eq!((minutes.len(), ago(0), ago(59)), (MINUTES_MAX, 60, 1));
        for _ in 0..WAITING_MAX + 100 {
            shadow.flow(Time(70 * MINUTE), 1, &spec(Stage::P2d, MIB));
        }
        assert!(shadow.waiting.len() <= WAITING_MAX);
        assert!(shadow.minutes(Time::ZERO).last().is_some_and(|minute| minute.lost_flows > 0));
    }
    #[test]
    fn a_flow_without_end_is_not_taken_and_one_that_takes_too_long_at_once_is_given_up() {
        let mut shadow = shadow();
        shadow.flow(at_ms(1), 1, &spec(Stage::P2d, 1 << 50));
        assert!(shadow.waiting.is_empty() && shadow.ahead == 0);
        shadow.flow(at_ms(1), 1, &spec(Stage::P2d, 5 << 30));
        shadow.flow(at_ms(1), 1, &spec(Stage::P2d, MIB));
        assert!(shadow.is_hinted(at_ms(60_000)));
        shadow.advance(at_ms(4000));
        assert!(shadow.waiting.is_empty() && shadow.wire.is_empty() && shadow.ahead == 0);
        assert!(!shadow.is_hinted(at_ms(60_000)), "it rests");
        let lost: u64 = shadow.minutes(Time::ZERO).iter().map(|minute| minute.lost_flows).sum();
        assert_eq!(lost, 1, "the endless one; the short one goes before the long one");
        shadow.flow(at_ms(5000), 1, &spec(Stage::P2d, MIB));
        shadow.advance(at_ms(5100));
        assert_eq!((shadow.ahead, shadow.waiting.len()), (0, 0), "it goes on");
    }
}
