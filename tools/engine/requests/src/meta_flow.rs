//! The Meta controller's hand on the flow policy: tunes `K`, `U` and `E` of the levels by what was in time.
//!
//! H-MAS §4.3 has a Meta controller that exchanges request schedulers and takes back what made things worse; its
//! guards are kept here (one change per window, a pause in which nothing is tried, rollback against the window before),
//! with the thresholds of MFS §4.3, `Q_i = U · E^(−i)` for `i < K`, as what is changed. Neither paper tunes those online. Departures:
//!
//! * It climbs, one knob at a time, and tells a gain from chance: a trial stays only if more was in time than in the
//!   window before it by one standard error of the difference. What shows no gain is taken back, as is
//!   what shows a loss: a setting that somebody chose is not left for nothing.
//! * The paper's rule, rollback if `ν > ρ · ν_pre`, always fires at `ν_pre = 0`. With a gain demanded that can't come up.
//! * A window with too few requests is no window: it is counted with the next.

/// What is tuned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlowSetting {
    /// `K`, number of levels.
    pub levels: u8,
    /// `U` of the thresholds.
    pub scale: f64,
    /// `E` of the thresholds.
    pub base: f64,
}

/// How far it may go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guards {
    /// `K`, least and most.
    pub levels: (u8, u8),
    /// `U`.
    pub scale: (f64, f64),
    /// `E`.
    pub base: (f64, f64),
    /// Requests that make a window.
    pub requests_min: u32,
    /// Standard errors of a difference that is believed.
    pub errors_min: f64,
    /// Windows in which nothing is tried after every move has been, in vain.
    pub rest: u32,
}

impl Default for Guards {
    fn default() -> Self {
        Self {
            levels: (3, 12),
            scale: (0.0625, 4.0),
            base: (1.5, 16.0),
            requests_min: 50,
            errors_min: 1.0,
            rest: 8,
        }
    }
}

/// What was seen since the last window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Requests that had their first token, or missed it.
    pub requests: u32,
    /// Of these, in time.
    pub in_time: u32,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// Nothing.
    Keep,
    /// Put this in force: a trial.
    Try(FlowSetting),
    /// Put this in force again: the trial was no better.
    TakeBack(FlowSetting),
}

/// A change of one knob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Move {
    ScaleUp,
    ScaleDown,
    BaseUp,
    BaseDown,
    LevelsUp,
    LevelsDown,
}

const MOVES: [Move; 6] = [
    Move::ScaleUp,
    Move::ScaleDown,
    Move::BaseUp,
    Move::BaseDown,
    Move::LevelsUp,
    Move::LevelsDown,
];

/// The part of requests that was in time, and of how many.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Share {
    part: f64,
    of: f64,
}

impl Share {
    fn of(window: Window) -> Self {
        let of = f64::from(window.requests);
        // Nobody can have been in time more often than been there.
        let part = f64::from(window.in_time.min(window.requests)) / of;
        Self { part, of }
    }

    /// Variance of its estimate, not zero at the ends: one more of each kind was seen (Agresti and Coull's way).
    fn variance(&self) -> f64 {
        let of = self.of + 2.0;
        let part = (self.part * self.of + 1.0) / of;
        part * (1.0 - part) / of
    }
}

/// The controller. See the module.
#[derive(Clone, Debug)]
pub struct MetaFlow {
    guards: Guards,
    settled: FlowSetting,
    /// With what is settled, in the last window of it.
    before: Option<Share>,
    trial: Option<FlowSetting>,
    /// The move that is next, and how many were in vain since the last gain.
    next: usize,
    in_vain: usize,
    resting: u32,
    pending: Window,
}

impl MetaFlow {
    /// Starts from what is in force; that is brought within the guards by the first trial that stays only.
    #[must_use]
    pub const fn new(in_force: FlowSetting, guards: Guards) -> Self {
        Self {
            guards,
            settled: in_force,
            before: None,
            trial: None,
            next: 0,
            in_vain: 0,
            resting: 0,
            pending: Window {
                requests: 0,
                in_time: 0,
            },
        }
    }

    /// What is in force now.
    #[must_use]
    pub fn in_force(&self) -> FlowSetting {
        self.trial.unwrap_or(self.settled)
    }

    /// A window has ended.
    pub fn window(&mut self, seen: Window) -> Step {
        let pending = &mut self.pending;
        pending.requests = pending.requests.saturating_add(seen.requests);
        pending.in_time = pending.in_time.saturating_add(seen.in_time);
        if pending.requests < self.guards.requests_min.max(1) {
            return Step::Keep;
        }
        let seen = Share::of(std::mem::take(pending));
        match self.trial.take() {
            Some(trial) => self.judge(trial, seen),
            None => {
                self.before = Some(seen);
                self.attempt()
            }
        }
    }

    fn judge(&mut self, trial: FlowSetting, seen: Share) -> Step {
        let gained = self.before.is_some_and(|before| {
            let error = (before.variance() + seen.variance()).sqrt();
            seen.part - before.part > self.guards.errors_min * error
        });
        if gained {
            // The same move is tried again, from there.
            self.settled = trial;
            self.before = Some(seen);
            self.in_vain = 0;
            return self.attempt();
        }
        self.next = (self.next + 1) % MOVES.len();
        self.in_vain += 1;
        if self.in_vain >= MOVES.len() {
            self.in_vain = 0;
            self.resting = self.guards.rest;
        }
        Step::TakeBack(self.settled)
    }

    /// The next move that leads somewhere.
    fn attempt(&mut self) -> Step {
        if self.resting > 0 {
            self.resting -= 1;
            return Step::Keep;
        }
        for _ in 0..MOVES.len() {
            let to = self.moved(MOVES[self.next]);
            if to != self.settled {
                self.trial = Some(to);
                return Step::Try(to);
            }
            self.next = (self.next + 1) % MOVES.len();
        }
        Step::Keep
    }

    fn moved(&self, by: Move) -> FlowSetting {
        let FlowSetting {
            levels,
            scale,
            base,
        } = self.settled;
        let (mut to, guards) = (self.settled, &self.guards);
        let within = |value: f64, (least, most): (f64, f64)| value.max(least).min(most);
        match by {
            Move::ScaleUp => to.scale = within(scale * 2.0, guards.scale),
            Move::ScaleDown => to.scale = within(scale / 2.0, guards.scale),
            Move::BaseUp => to.base = within(base * 2.0, guards.base),
            // The base stays above one: half of what it is above it.
            Move::BaseDown => to.base = within(1.0 + (base - 1.0) / 2.0, guards.base),
            Move::LevelsUp => to.levels = (levels.saturating_add(2)).min(guards.levels.1),
            Move::LevelsDown => to.levels = (levels.saturating_sub(2)).max(guards.levels.0),
        }
        to
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const START: FlowSetting = FlowSetting {
        levels: 8,
        scale: 0.5,
        base: 4.0,
    };

    fn window(requests: u32, in_time: u32) -> Window {
        Window { requests, in_time }
    }

    #[test]
    fn what_makes_things_worse_is_taken_back_at_the_next_window() {
        let mut meta = MetaFlow::new(START, Guards::default());
        let Step::Try(trial) = meta.window(window(1_000, 900)) else {
            panic!("the first full window is followed by a trial");
        };
        assert_eq!(trial.scale, 1.0);
        assert_eq!(meta.window(window(1_000, 700)), Step::TakeBack(START));
        assert_eq!(meta.in_force(), START);
    }

    #[test]
    fn what_shows_no_gain_beyond_chance_is_taken_back_too() {
        let mut meta = MetaFlow::new(START, Guards::default());
        meta.window(window(100, 90));
        assert_eq!(meta.window(window(100, 92)), Step::TakeBack(START));
    }

    #[test]
    fn a_gain_stays_and_the_same_move_is_tried_again() {
        let mut meta = MetaFlow::new(START, Guards::default());
        meta.window(window(1_000, 600));
        let Step::Try(further) = meta.window(window(1_000, 800)) else {
            panic!("on it goes");
        };
        assert_eq!(further.scale, 2.0);
        let back = FlowSetting {
            scale: 1.0,
            ..START
        };
        assert_eq!(meta.window(window(1_000, 810)), Step::TakeBack(back));
    }

    #[test]
    fn few_requests_make_no_window() {
        let mut meta = MetaFlow::new(START, Guards::default());
        assert_eq!(meta.window(window(49, 0)), Step::Keep);
        assert!(matches!(meta.window(window(1, 0)), Step::Try(_)));
    }

    #[test]
    fn when_every_move_was_in_vain_it_rests() {
        let guards = Guards::default();
        let mut meta = MetaFlow::new(START, guards);
        let mut steps = Vec::new();
        for _ in 0..2 * MOVES.len() as u32 + guards.rest {
            steps.push(meta.window(window(100, 90)));
        }
        let tried = steps.iter().filter(|s| matches!(s, Step::Try(_))).count();
        assert_eq!(tried, MOVES.len());
        let rest = &steps[2 * MOVES.len()..];
        assert!(rest.iter().all(|step| *step == Step::Keep), "{rest:?}");
        assert!(matches!(meta.window(window(100, 90)), Step::Try(_)));
    }

    #[test]
    fn it_finds_the_best_of_a_hill() {
        // Best at U = 0.125; each doubling away costs a tenth.
        let mut meta = MetaFlow::new(START, Guards::default());
        for _ in 0..40 {
            let off = (meta.in_force().scale / 0.125).log2().abs();
            let in_time = (950.0 - 100.0 * off) as u32;
            meta.window(window(1_000, in_time));
        }
        assert_eq!(meta.settled.scale, 0.125, "{meta:?}");
    }

    proptest! {
        #[test]
        fn it_stays_within_its_guards_one_knob_at_a_time(
            windows in prop::collection::vec((0..500_u32, 0..600_u32), 1..200),
        ) {
            let guards = Guards::default();
            let mut meta = MetaFlow::new(START, guards);
            let mut before = START;
            for (requests, in_time) in windows {
                let step = meta.window(window(requests, in_time));
                let now = meta.in_force();
                match step {
                    Step::Keep => prop_assert_eq!(now, before),
                    Step::Try(to) | Step::TakeBack(to) => prop_assert_eq!(now, to),
                }
                let changed = u8::from(now.levels != before.levels)
                    + u8::from(now.scale != before.scale)
                    + u8::from(now.base != before.base);
                prop_assert!(changed <= 1, "{before:?} {now:?}");
                prop_assert!((guards.levels.0..=guards.levels.1).contains(&now.levels));
                prop_assert!((guards.scale.0..=guards.scale.1).contains(&now.scale));
                prop_assert!((guards.base.0..=guards.base.1).contains(&now.base));
                before = now;
            }
        }
    }
}
