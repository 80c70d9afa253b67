//! A decision service outside (H-MAS Appendix C.2 "LLM-based selector"): a language model behind an
//! OpenAI-style endpoint, or any program.
//!
//! What is here asks and checks; who carries question and answer is the driver's
//! (`laxity-decisions` does over HTTP): it takes a [`Question`] from the [`Mailbox`], sends
//! [`chat_request`] to its endpoint, and puts the text of the answer back ([`chat_content`]). A
//! decision is made when the answer is there, and never waited for. An answer has to be one JSON
//! object of the form that the question states: a structure of the pool, hints in range, nothing
//! else.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::pool::{Hints, Kind};
use super::super::qos::Long;
use super::{Answer, Decision, Selector};
use crate::{Span, Time};

/// What is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Question {
    /// Its number: the answer names it.
    pub number: u64,
    /// What holds now.
    pub current: Kind,
    /// What may be chosen.
    pub pool: Vec<Kind>,
    /// `V_long`.
    pub view: Long,
}

/// An answer, as it has to be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Reply {
    policy: Kind,
    #[serde(default)]
    lane_split_ms: Option<u64>,
    #[serde(default)]
    fast_weight: Option<u32>,
    #[serde(default)]
    bypass: bool,
}

/// An answer is no decision.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// Not of the form that was asked for.
    #[error("the answer is no JSON object of the form that was asked for: {0}")]
    Form(String),
    /// A policy that there is, but may not be chosen.
    #[error("{0} is not in the pool of this question")]
    Pool(&'static str),
    /// A hint that makes no sense.
    #[error("{name} is {value}: it may be {least} to {most}")]
    Hint {
        /// Which.
        name: &'static str,
        /// What it was.
        value: u64,
        /// The least.
        least: u64,
        /// The most.
        most: u64,
    },
    /// The endpoint's own answer was none.
    #[error("the endpoint's answer has no choices[0].message.content: {0}")]
    Endpoint(String),
}

/// Checks an answer. Text around the object is not forgiven; a fence of a code block is, since
/// models put one there unasked.
///
/// # Errors
/// If it is no decision.
pub fn decision(answer: &str, pool: &[Kind], now: &Hints) -> Result<Decision, Invalid> {
    let text = answer.trim();
    let inner = text
        .strip_prefix("```json")
        .or_else(|| text.strip_prefix("```"))
        .and_then(|rest| rest.strip_suffix("```"));
    let reply: Reply = serde_json::from_str(inner.unwrap_or(text).trim())
        .map_err(|error| Invalid::Form(error.to_string()))?;
    if !pool.contains(&reply.policy) {
        return Err(Invalid::Pool(reply.policy.name()));
    }
    let check = |name, value: Option<u64>, least: u64, most: u64| match value {
        Some(value) if !(least..=most).contains(&value) => Err(Invalid::Hint {
            name,
            value,
            least,
            most,
        }),
        _ => Ok(()),
    };
    let (split, weight) = (Hints::SPLITS_MS, Hints::WEIGHTS);
    check(
        "lane_split_ms",
        reply.lane_split_ms,
        *split.start(),
        *split.end(),
    )?;
    check(
        "fast_weight",
        reply.fast_weight.map(u64::from),
        u64::from(*weight.start()),
        u64::from(*weight.end()),
    )?;
    let hints = Hints {
        lane_split: reply
            .lane_split_ms
            .map_or(now.lane_split, Span::from_millis),
        fast_weight: reply.fast_weight.unwrap_or(now.fast_weight),
    };
    let any = reply.lane_split_ms.is_some() || reply.fast_weight.is_some();
    Ok(Decision {
        kind: reply.policy,
        hints: any.then_some(hints),
        bypass: reply.bypass,
    })
}

/// A question as the body of a `POST /v1/chat/completions`, with the form of the answer as a JSON
/// schema.
#[must_use]
pub fn chat_request(model: &str, question: &Question) -> Value {
    let names: Vec<&str> = question.pool.iter().map(|kind| kind.name()).collect();
    let pool: Vec<String> = question.pool.iter().map(|kind| advice(*kind)).collect();
    let (split, weight) = (Hints::SPLITS_MS, Hints::WEIGHTS);
    let system = format!(
        "You choose the queueing policy of an LLM inference server once in a while; the view is of \
         the last minute, times in ms. \
         Prefer the current policy when nobody is late. The policies:\n{}\n\
         Answer with one JSON object and nothing else: {{\"policy\": one of {names:?}, \
         \"lane_split_ms\": null or {} to {}, total time from which on a request is in the slow \
         lane of two_lane, \
         \"fast_weight\": null or {} to {}, how much more work the fast lane gets, \
         \"bypass\": false, or true to take fcfs without limits in an overload that nothing helps \
         against}}.",
        pool.join("\n"),
        split.start(),
        split.end(),
        weight.start(),
        weight.end(),
    );
    let view = json!({ "current": question.current, "view": question.view });
    json!({
        "model": model,
        "temperature": 0,
        "messages": [
            { "role": "system", "content": system },
            { "role": "user", "content": view.to_string() },
        ],
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "decision",
                "strict": true,
                "schema": schema(&names),
            },
        },
    })
}

/// What a policy of the pool is for.
fn advice(kind: Kind) -> String {
    let when = match kind {
        Kind::Fcfs => "in order of arrival: when nothing else is better",
        Kind::Edf => "earliest deadline: when deadlines are missed though lengths are alike",
        Kind::Llf => "least laxity: as edf, when lengths differ and there is no overload",
        Kind::Sjf => "shortest request: when the queue is long and most requests are short",
        Kind::Srtf => "shortest time left: as sjf, when long requests have been served in part",
        Kind::TwoLane => {
            "short requests beside long ones: when they wait behind them (total_cv and \
             ttft_violations high)"
        }
        Kind::Wfq => "fair shares of applications: when fairness is low",
        Kind::Stride => "fair shares of applications: as wfq",
        Kind::Mlfq => "whoever got least so far: when lengths are not known",
        Kind::Priority => "by importance: when important requests are late",
    };
    format!("{}: {when}", kind.name())
}

fn schema(names: &[&str]) -> Value {
    json!({
        "type": "object",
        "properties": {
            "policy": { "type": "string", "enum": names },
            "lane_split_ms": {
                "type": ["integer", "null"],
                "minimum": Hints::SPLITS_MS.start(),
                "maximum": Hints::SPLITS_MS.end(),
            },
            "fast_weight": {
                "type": ["integer", "null"],
                "minimum": Hints::WEIGHTS.start(),
                "maximum": Hints::WEIGHTS.end(),
            },
            "bypass": { "type": "boolean" },
        },
        "required": ["policy", "lane_split_ms", "fast_weight", "bypass"],
        "additionalProperties": false,
    })
}

/// The text that a chat endpoint answered.
///
/// # Errors
/// If the endpoint's answer is not of that form, as when it is an error.
pub fn chat_content(body: &str) -> Result<String, Invalid> {
    let value: Value =
        serde_json::from_str(body).map_err(|error| Invalid::Endpoint(error.to_string()))?;
    value["choices"][0]["message"]["content"]
        .as_str()
        .map(ToOwned::to_owned)
        .ok_or_else(|| {
            let start: String = body.chars().take(200).collect();
            Invalid::Endpoint(start)
        })
}

/// Between a controller and who carries its questions.
#[derive(Clone, Debug, Default)]
pub struct Mailbox(Arc<Mutex<Letters>>);

#[derive(Debug, Default)]
struct Letters {
    question: Option<Question>,
    /// Who waits for one.
    carrier: Option<Waker>,
    answers: VecDeque<(u64, Result<String, String>)>,
}

impl Mailbox {
    fn open<T>(&self, with: impl FnOnce(&mut Letters) -> T) -> T {
        with(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The question that waits to be carried. A later one takes the place of one that was not.
    #[must_use]
    pub fn take(&self) -> Option<Question> {
        self.open(|letters| letters.question.take())
    }

    /// As [`Self::take`], for a carrier that waits: it is woken when there is a question. One
    /// carrier at a time.
    pub fn poll_take(&self, context: &mut Context<'_>) -> Poll<Question> {
        self.open(|letters| {
            if let Some(question) = letters.question.take() {
                return Poll::Ready(question);
            }
            letters.carrier = Some(context.waker().clone());
            Poll::Pending
        })
    }

    fn ask(&self, question: Question) {
        let carrier = self.open(|letters| {
            letters.question = Some(question);
            letters.carrier.take()
        });
        // Outside of the lock: whoever is woken takes it.
        if let Some(carrier) = carrier {
            carrier.wake();
        }
    }

    /// What came back: the text of the answer, or why there is none.
    pub fn answer(&self, number: u64, text: Result<String, String>) {
        self.open(|letters| letters.answers.push_back((number, text)));
    }
}

/// The selector that asks.
#[derive(Clone, Debug)]
pub struct External {
    pool: Vec<Kind>,
    mailbox: Mailbox,
    asked: u64,
}

impl External {
    /// It may choose of `pool`.
    #[must_use]
    pub fn new(pool: &[Kind]) -> Self {
        Self {
            pool: pool.to_vec(),
            mailbox: Mailbox::default(),
            asked: 0,
        }
    }

    /// The carrier's end.
    #[must_use]
    pub fn mailbox(&self) -> Mailbox {
        self.mailbox.clone()
    }
}

impl Selector for External {
    fn name(&self) -> &'static str {
        "external"
    }

    fn select(&mut self, _: Time, view: &Long, current: Kind) -> Answer {
        self.asked += 1;
        let question = Question {
            number: self.asked,
            current,
            pool: self.pool.clone(),
            view: view.clone(),
        };
        self.mailbox.ask(question);
        Answer::Pending
    }

    fn poll(&mut self, _: Time) -> Option<Answer> {
        loop {
            let (number, text) = self.mailbox.open(|letters| letters.answers.pop_front())?;
            // An answer to what was asked before is about what was.
            if number != self.asked {
                continue;
            }
            let answer = text
                .and_then(|text| {
                    decision(&text, &self.pool, &Hints::default()).map_err(|e| e.to_string())
                })
                .map_or_else(Answer::Invalid, Answer::Decided);
            return Some(answer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POOL: [Kind; 3] = [Kind::Fcfs, Kind::Edf, Kind::TwoLane];

    fn checked(answer: &str) -> Result<Decision, Invalid> {
        decision(answer, &POOL, &Hints::default())
    }

    #[test]
    fn only_an_answer_of_the_form_that_was_asked_for_is_a_decision() {
        let decided = checked(r#"{"policy": "two_lane", "lane_split_ms": 700}"#).expect("valid");
        assert_eq!(decided.kind, Kind::TwoLane);
        let split = decided.hints.map(|hints| hints.lane_split);
        assert_eq!(split, Some(Span::from_millis(700)));
        assert!(checked("```json\n{\"policy\": \"edf\"}\n```").is_ok());
        assert_eq!(checked(r#"{"policy": "sjf"}"#), Err(Invalid::Pool("sjf")));
        for bad in [
            "",
            "edf",
            "I would take {\"policy\": \"edf\"}",
            r#"{"policy": "round_robin"}"#,
            r#"{"policy": "edf", "reason": "because"}"#,
            r#"{"policy": "edf", "fast_weight": -1}"#,
            r#"{"policy": null}"#,
            r#"{"policy": "edf"} {"policy": "fcfs"}"#,
        ] {
            assert!(matches!(checked(bad), Err(Invalid::Form(_))), "{bad}");
        }
        let bad = checked(r#"{"policy": "edf", "fast_weight": 99}"#);
        assert!(
            matches!(bad, Err(Invalid::Hint { value: 99, .. })),
            "{bad:?}"
        );
    }

    #[test]
    fn an_endpoint_that_answers_with_an_error_gives_no_text() {
        let good = r#"{"choices": [{"message": {"role": "assistant", "content": "{}"}}]}"#;
        assert_eq!(chat_content(good), Ok("{}".to_owned()));
        for bad in [r#"{"error": {"message": "no such model"}}"#, "<html>", "{}"] {
            assert!(
                matches!(chat_content(bad), Err(Invalid::Endpoint(_))),
                "{bad}"
            );
        }
    }

    #[test]
    fn a_late_answer_to_an_old_question_is_not_taken() {
        let mut external = External::new(&POOL);
        let mailbox = external.mailbox();
        external.select(Time::ZERO, &Long::default(), Kind::Fcfs);
        let first = mailbox.take().expect("a question");
        external.select(Time(1), &Long::default(), Kind::Fcfs);
        mailbox.answer(first.number, Ok(r#"{"policy": "edf"}"#.to_owned()));
        assert_eq!(external.poll(Time(2)), None);
        mailbox.answer(2, Err("the endpoint did not answer in time".to_owned()));
        assert!(matches!(external.poll(Time(3)), Some(Answer::Invalid(_))));
    }

    #[test]
    fn the_question_states_the_pool_and_the_view() {
        let question = Question {
            number: 1,
            current: Kind::Fcfs,
            pool: POOL.to_vec(),
            view: Long {
                rps: 12.5,
                ..Long::default()
            },
        };
        let body = chat_request("some-model", &question);
        assert_eq!(body["model"], "some-model");
        let schema = &body["response_format"]["json_schema"]["schema"];
        let names = &schema["properties"]["policy"]["enum"];
        assert_eq!(names, &json!(["fcfs", "edf", "two_lane"]));
        let system = body["messages"][0]["content"].as_str().expect("text");
        for kind in Kind::ALL {
            let told = system.contains(&format!("\n{}: ", kind.name()));
            assert_eq!(told, POOL.contains(&kind), "{system}");
        }
        let user = body["messages"][1]["content"].as_str().expect("text");
        let user: Value = serde_json::from_str(user).expect("JSON");
        assert_eq!(user["view"]["rps"], 12.5);
    }
}
