//! A decision service outside of the simulation (Appendix C.2 "LLM-based selector"): it is really
//! asked, while virtual time stands still, and its answer comes when a decision takes so long in
//! virtual time. So what a slow or broken service costs can be seen without waiting for it, and how
//! long this machine's service really took changes nothing.
//!
//! Who asks is the caller's: this crate opens no connection.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use laxity_requests::Time;
use laxity_requests::hmas::meta::external::{Mailbox, Question};
use laxity_requests::hmas::meta::{Answer, External, Selector, UNANSWERED};
use laxity_requests::hmas::pool::Kind;
use laxity_requests::hmas::qos::Long;

use super::bed::{Measured, POOL};
use super::{Column, Experiment, Row, table};
use crate::requests::reproduction::Section;

/// Asks a service: the text of its answer, or why there is none.
pub type Ask = Arc<dyn Fn(&Question) -> Result<String, String> + Send + Sync>;

/// A service that decides.
#[derive(Clone)]
pub struct Service {
    /// How it is called on tables.
    pub name: String,
    /// What a decision takes in virtual time.
    pub takes: Duration,
    /// Asks it.
    pub ask: Ask,
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service")
            .field("name", &self.name)
            .field("takes", &self.takes)
            .finish_non_exhaustive()
    }
}

/// A question as the controller asks it, to see whether a service is there.
#[must_use]
pub fn example_question() -> Question {
    Question {
        number: 0,
        current: Kind::Fcfs,
        pool: POOL.to_vec(),
        view: Long::default(),
    }
}

/// An answer on its way.
struct Letter {
    due: Time,
    number: u64,
    text: Result<String, String>,
}

/// The selector that asks it.
pub(super) struct Asks {
    inner: External,
    mailbox: Mailbox,
    service: Service,
    letter: Option<Letter>,
}

impl Asks {
    pub(super) fn new(service: Service, pool: &[Kind]) -> Self {
        let inner = External::new(pool);
        Self {
            mailbox: inner.mailbox(),
            inner,
            service,
            letter: None,
        }
    }
}

impl Selector for Asks {
    fn name(&self) -> &'static str {
        "service"
    }

    fn select(&mut self, now: Time, view: &Long, current: Kind) -> Answer {
        let answer = self.inner.select(now, view, current);
        if let Some(question) = self.mailbox.take() {
            let takes = u64::try_from(self.service.takes.as_nanos()).unwrap_or(u64::MAX);
            self.letter = Some(Letter {
                due: Time(now.0.saturating_add(takes)),
                number: question.number,
                text: (self.service.ask)(&question),
            });
        }
        answer
    }

    fn poll(&mut self, now: Time) -> Option<Answer> {
        if let Some(letter) = self.letter.take_if(|letter| letter.due <= now) {
            self.mailbox.answer(letter.number, letter.text);
        }
        self.inner.poll(now)
    }
}

fn rejected(m: &Measured, late: bool) -> f64 {
    let of = |why: &&String| (why.as_str() == UNANSWERED) == late;
    m.log.rejected.iter().filter(of).count() as f64
}

/// What came of its questions, by place.
pub(super) fn answers(
    place: &Experiment<'_>,
    rows: &[Row],
    runs: &[Vec<Measured>],
) -> Option<Section> {
    let at = rows
        .iter()
        .position(|row| matches!(row.setting.chooses, super::Chooses::Service(_)))?;
    let columns: [Column; 5] = [
        ("questions", |m| m.log.asked as f64),
        ("rules instead: no decision", |m| rejected(m, false)),
        ("rules instead: too late", |m| rejected(m, true)),
        ("switches", |m| m.log.switches.len() as f64),
        ("goodput, %", |m| m.good),
    ];
    let first = runs[at].iter().flat_map(|m| &m.log.rejected).next();
    let notes = first.map_or_else(
        || "Every answer that was looked at was a decision.".to_owned(),
        |why| format!("The first that was turned away: {why}."),
    );
    let title = format!(
        "{}, {}: the decision service",
        place.scenario.name, place.name
    );
    Some(table(
        title,
        &rows[at..=at],
        &runs[at..=at],
        &columns,
        &notes,
    ))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::super::bed::{self, Setting};
    use super::super::{Chooses, Mix, RATE, Stretch, machine, traffic};
    use super::*;

    /// Asks and runs 100 s of the heavy mix, beyond what the machine serves: rules would say two
    /// lanes or EDF.
    fn run(takes_ms: u64, says: &'static str) -> (Measured, u64) {
        let asked = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&asked);
        let service = Service {
            name: "here".to_owned(),
            takes: Duration::from_millis(takes_ms),
            ask: Arc::new(move |question| {
                count.fetch_add(1, Ordering::Relaxed);
                assert!(!question.pool.is_empty());
                Ok(says.to_owned())
            }),
        };
        let bed = machine(1.4).expect("built in");
        let requests = traffic::requests(&[Stretch::steady(100.0, 1.5 * RATE, Mix::Heavy)], 4);
        let setting = Setting::new(Chooses::Service(service));
        let measured = bed::run(&setting, &bed, &requests, &[], 4);
        (measured, asked.load(Ordering::Relaxed))
    }

    fn first(m: &Measured) -> (Kind, Time) {
        let switch = m.log.switches.first().expect("a switch");
        (switch.to, switch.at)
    }

    #[test]
    fn what_a_service_says_holds_once_a_decision_has_taken_its_virtual_time() {
        let (soon, asked) = run(0, r#"{"policy": "wfq"}"#);
        assert_eq!(soon.log.asked, asked);
        assert!(soon.log.rejected.is_empty(), "{:?}", soon.log.rejected);
        let (kind, at) = first(&soon);
        assert_eq!(kind, Kind::Wfq);
        let (later, _) = run(8_000, r#"{"policy": "wfq"}"#);
        let (kind, after) = first(&later);
        assert_eq!(kind, Kind::Wfq);
        let between = after.since(at);
        assert!(
            (7_000..=9_500).contains(&(between.0 / 1_000_000)),
            "{between:?}"
        );
    }

    #[test]
    fn a_service_slower_than_decisions_are_leaves_them_to_the_rules() {
        let (never, asked) = run(30_000, r#"{"policy": "wfq"}"#);
        let (wrong, _) = run(0, r#"{"policy": "fastest"}"#);
        assert!(asked > 3);
        for m in [&never, &wrong] {
            assert_ne!(first(m).0, Kind::Wfq);
            assert!(m.log.switches.iter().all(|switch| switch.to != Kind::Wfq));
        }
        assert!(rejected(&never, true) > 2.0, "{:?}", never.log.rejected);
        assert!(rejected(&wrong, false) > 2.0, "{:?}", wrong.log.rejected);
    }
}
