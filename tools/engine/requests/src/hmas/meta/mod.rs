//! The Meta controller (H-MAS §3.4.1, Appendix C): which structure of the pool holds, decided once
//! in `ΔT_meta` from the long view, under guards that look at the short one.
//!
//! Who decides is a [`Selector`]: rules ([`Rules`]), a classifier ([`Classifier`]), a contextual
//! bandit ([`Bandit`]), change points and a table ([`ChangePoint`]), or a service outside
//! ([`External`]), which answers when it does.
//!
//! Guards, and how their holes are filled:
//! * **Anti-thrashing.** One decision in `ΔT`, and no switch within `ΔT` of another. A rollback
//!   takes the place of a decision: at once it would be a second switch within `ΔT`. Only the
//!   bypass may come sooner, and it leaves `ΔT` after it came at the earliest.
//! * **Rollback** (eq. 12) if `TTFT_99 > ρ · TTFT_99_pre`, or `ν > max(ρ · ν_pre, ν_pre + 0.02)`,
//!   with 50 requests in the window at least: as the paper has it, `ν > ρ · ν_pre` always holds
//!   after `ν_pre = 0`. What was rolled back from is not taken up again for some decisions.
//! * **Bypass** in extreme overload: FCFS, no budget, no limit. The fence stays: without it the
//!   engine thrashes exactly then.
//! * **Answers** of a service that are no JSON, name no structure of the pool or a hint out of
//!   range are rejected, and the rules decide in their place. So they do where no answer came
//!   within `ΔT`.

mod bandit;
mod change_point;
mod classifier;
pub mod external;
mod rules;

pub use bandit::Bandit;
pub use change_point::{ChangePoint, Regime, Table};
pub use classifier::Classifier;
pub use external::External;
pub use rules::Rules;

use super::pool::{Hints, Kind};
use super::qos::{Long, Short};
use crate::{Span, Time};

/// What [`Meta::take_rejected`] says of a question without an answer.
pub const UNANSWERED: &str = "no answer came until the next decision was due";

/// What was decided.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// The structure.
    pub kind: Kind,
    /// Numbers of it; those in force stay where there are none.
    pub hints: Option<Hints>,
    /// Availability first: FCFS, no limits.
    pub bypass: bool,
}

impl From<Kind> for Decision {
    fn from(kind: Kind) -> Self {
        Self {
            kind,
            hints: None,
            bypass: false,
        }
    }
}

/// What a selector answers.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// This.
    Decided(Decision),
    /// All stays as it is.
    Stay,
    /// It thinks about it: ask [`Selector::poll`].
    Pending,
    /// It said something that is no decision, and why not.
    Invalid(String),
}

/// What came of a decision, for those that learn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reward {
    /// What was in force.
    pub kind: Kind,
    /// Requests that ended in time over those that came, 0 to 1, in the time it was.
    pub value: f64,
}

/// Decides, `Π_meta`.
pub trait Selector: Send {
    /// How it is called on tables.
    fn name(&self) -> &'static str;

    /// Decides. Called once in `ΔT`.
    fn select(&mut self, now: Time, view: &Long, current: Kind) -> Answer;

    /// The answer that was pending, if it is there.
    fn poll(&mut self, now: Time) -> Option<Answer> {
        let _ = now;
        None
    }

    /// What the last decision came to; `view` is what it was made on.
    fn reward(&mut self, view: &Long, reward: Reward) {
        let _ = (view, reward);
    }
}

/// Lanes part at the 95th percentile: few are slow, and they are what others wait behind. With the
/// 70th, a third of all was slow, and the tail of times to first token was theirs.
fn lanes(view: &Long) -> Hints {
    let split_ms =
        (view.total_p95_ms as u64).clamp(*Hints::SPLITS_MS.start(), *Hints::SPLITS_MS.end());
    Hints {
        lane_split: Span::from_millis(split_ms),
        ..Hints::default()
    }
}

/// Always the same.
#[derive(Clone, Copy, Debug)]
pub struct Fixed(pub Kind);

impl Selector for Fixed {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn select(&mut self, _: Time, _: &Long, _: Kind) -> Answer {
        Answer::Decided(self.0.into())
    }
}

/// Extreme overload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bypass {
    /// It begins when at least this part of requests is late ...
    pub violations: f64,
    /// ... and so many are in line,
    pub queue: u32,
    /// or when blocks are taken from so many requests per second.
    pub drops_per_s: f64,
    /// It ends when less than this part is late.
    pub clear: f64,
}

impl Default for Bypass {
    fn default() -> Self {
        Self {
            violations: 0.98,
            queue: 5_000,
            drops_per_s: 50.0,
            clear: 0.5,
        }
    }
}

/// What the controller is set to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guards {
    /// `ΔT_meta`.
    pub every: Span,
    /// `ρ`.
    pub rho: f64,
    /// Requests that a guard window needs.
    pub least: u32,
    /// Decisions for which what was rolled back from is not taken up.
    pub banned: u32,
    /// The bypass, where there is one.
    pub bypass: Option<Bypass>,
}

impl Default for Guards {
    fn default() -> Self {
        Self {
            every: Span::from_millis(20_000),
            rho: 1.5,
            least: 50,
            banned: 4,
            bypass: Some(Bypass::default()),
        }
    }
}

/// Why a structure was taken up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The selector says so.
    Decided,
    /// What was before was better.
    Rollback,
    /// Overload.
    Bypass,
    /// It is over.
    Cleared,
}

/// A structure was taken up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switch {
    /// When.
    pub at: Time,
    /// What held before.
    pub from: Kind,
    /// What holds.
    pub to: Kind,
    /// Why.
    pub why: Why,
}

#[derive(Clone, Copy, Debug)]
struct Baseline {
    kind: Kind,
    hints: Hints,
    ttft_p99_ms: f64,
    violations: f64,
}

/// The controller.
pub struct Meta {
    selector: Box<dyn Selector>,
    guards: Guards,
    /// What decides in place of an answer that is none.
    rules: Rules,
    current: Kind,
    hints: Hints,
    next_look: Time,
    next_decision: Option<Time>,
    switched: Option<Time>,
    pending: bool,
    /// What held before the last switch, until the switch has proved itself.
    before: Option<Baseline>,
    bypass: Option<(Time, Kind)>,
    banned: Option<(Kind, u32)>,
    /// What the last decision was made on.
    seen: Option<Long>,
    /// Questions that are answered later or never, until they are taken.
    asked: u64,
    /// Answers that were turned away, until they are taken.
    rejected: Vec<String>,
}

impl std::fmt::Debug for Meta {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meta")
            .field("selector", &self.selector.name())
            .field("current", &self.current)
            .finish_non_exhaustive()
    }
}

impl Meta {
    /// How often guards look.
    const LOOK: Span = Span::from_millis(1_000);

    /// Begins with `first`.
    #[must_use]
    pub fn new(selector: Box<dyn Selector>, guards: Guards, first: Kind, hints: Hints) -> Self {
        Self {
            selector,
            guards,
            rules: Rules::default(),
            current: first,
            hints,
            next_look: Time::ZERO,
            next_decision: None,
            switched: None,
            pending: false,
            before: None,
            bypass: None,
            banned: None,
            seen: None,
            asked: 0,
            rejected: Vec::new(),
        }
    }

    /// What holds.
    #[must_use]
    pub const fn current(&self) -> Kind {
        self.current
    }

    /// Its numbers.
    #[must_use]
    pub const fn hints(&self) -> &Hints {
        &self.hints
    }

    /// The bypass holds.
    #[must_use]
    pub const fn bypasses(&self) -> bool {
        self.bypass.is_some()
    }

    /// Who decides.
    #[must_use]
    pub fn selector(&self) -> &'static str {
        self.selector.name()
    }

    /// Whether [`Self::look`] is due: views cost, so they are made about once a second.
    #[must_use]
    pub fn is_due(&self, now: Time) -> bool {
        now >= self.next_look
    }

    /// Questions to a service outside since this was asked last.
    pub fn take_asked(&mut self) -> u64 {
        std::mem::take(&mut self.asked)
    }

    /// Answers that were turned away since this was asked last.
    pub fn take_rejected(&mut self) -> Vec<String> {
        std::mem::take(&mut self.rejected)
    }

    /// Looks at the views, and decides if it is time to. `long` makes the long view, and the part
    /// of requests that ended in time since the last decision.
    pub fn look(
        &mut self,
        now: Time,
        short: &Short,
        long: impl FnOnce() -> (Long, f64),
    ) -> Option<Switch> {
        self.next_look = now + Self::LOOK;
        if let Some(switch) = self.emergency(now, short) {
            return Some(switch);
        }
        if self.bypass.is_some() {
            return None;
        }
        let due = *self.next_decision.get_or_insert(now + self.guards.every);
        if now < due {
            return self.late_answer(now, short);
        }
        self.next_decision = Some(now + self.guards.every);
        // The last moment of an answer to the question before.
        let asked = std::mem::take(&mut self.pending);
        let late = asked.then(|| self.selector.poll(now));
        let (long, good) = long();
        self.learn(good);
        if let Some(switch) = self.rollback(now, short) {
            return Some(switch);
        }
        self.banned = self
            .banned
            .and_then(|(kind, left)| (left > 1).then_some((kind, left - 1)));
        let answer = self.selector.select(now, &long, self.current);
        self.seen = Some(long);
        self.pending = answer == Answer::Pending;
        self.asked += u64::from(self.pending);
        let answer = match (answer, late) {
            (Answer::Pending, Some(Some(late))) => late,
            (Answer::Pending, Some(None)) => Answer::Invalid(UNANSWERED.to_owned()),
            (answer, _) => answer,
        };
        self.act(now, short, answer)
    }

    /// Enters and leaves the bypass.
    fn emergency(&mut self, now: Time, short: &Short) -> Option<Switch> {
        let limits = self.guards.bypass?;
        match self.bypass {
            None => {
                let overload = short.violations >= limits.violations && short.queue >= limits.queue;
                if !overload && short.drops_per_s < limits.drops_per_s {
                    return None;
                }
                self.enter_bypass(now)
            }
            Some((since, kind)) => {
                let over =
                    short.violations < limits.clear && short.drops_per_s < limits.drops_per_s;
                if !over || now < since + self.guards.every {
                    return None;
                }
                self.bypass = None;
                self.next_decision = Some(now + self.guards.every);
                self.take_up(now, kind, Why::Cleared)
            }
        }
    }

    fn enter_bypass(&mut self, now: Time) -> Option<Switch> {
        self.bypass = Some((now, self.current));
        self.before = None;
        self.pending = false;
        self.take_up(now, Kind::Fcfs, Why::Bypass)
    }

    /// `None` if it holds already.
    fn take_up(&mut self, now: Time, kind: Kind, why: Why) -> Option<Switch> {
        let from = std::mem::replace(&mut self.current, kind);
        if from == kind {
            return None;
        }
        self.switched = Some(now);
        Some(Switch {
            at: now,
            from,
            to: kind,
            why,
        })
    }

    fn may_switch(&self, now: Time) -> bool {
        self.switched.is_none_or(|at| now >= at + self.guards.every)
    }

    fn late_answer(&mut self, now: Time, short: &Short) -> Option<Switch> {
        if !self.pending || !self.may_switch(now) {
            return None;
        }
        let answer = self.selector.poll(now)?;
        self.pending = false;
        self.act(now, short, answer)
    }

    fn learn(&mut self, value: f64) {
        let Some(seen) = &self.seen else { return };
        let reward = Reward {
            kind: self.current,
            value,
        };
        self.selector.reward(seen, reward);
    }

    /// Eq. 12, on the window after the last switch.
    fn rollback(&mut self, now: Time, short: &Short) -> Option<Switch> {
        let before = self.before?;
        if short.count < self.guards.least {
            // Nothing is known yet: the window goes on.
            return None;
        }
        self.before = None;
        let rho = self.guards.rho;
        let worse = short.ttft_p99_ms > rho * before.ttft_p99_ms && before.ttft_p99_ms > 0.0;
        let late = (rho * before.violations).max(before.violations + 0.02);
        // Late tails of nobody's objective are no reason.
        if !(short.violations > late || worse && short.violations > 0.02) {
            return None;
        }
        self.banned = Some((self.current, self.guards.banned));
        self.hints = before.hints;
        self.take_up(now, before.kind, Why::Rollback)
    }

    fn act(&mut self, now: Time, short: &Short, answer: Answer) -> Option<Switch> {
        let decision = match answer {
            Answer::Decided(decision) => decision,
            Answer::Stay | Answer::Pending => return None,
            Answer::Invalid(why) => {
                self.rejected.push(why);
                let view = self.seen.clone()?;
                match self.rules.select(now, &view, self.current) {
                    Answer::Decided(decision) => decision,
                    _ => return None,
                }
            }
        };
        if decision.bypass {
            return self.enter_bypass(now);
        }
        let banned = self.banned.is_some_and(|(kind, _)| kind == decision.kind);
        if banned || decision.kind == self.current || !self.may_switch(now) {
            return None;
        }
        self.before = Some(Baseline {
            kind: self.current,
            hints: self.hints,
            ttft_p99_ms: short.ttft_p99_ms,
            violations: short.violations,
        });
        if let Some(hints) = decision.hints {
            self.hints = hints;
        }
        self.take_up(now, decision.kind, Why::Decided)
    }
}

#[cfg(test)]
#[path = "guards_tests.rs"]
mod tests;
