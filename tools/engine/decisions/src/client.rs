//! Asks once, over HTTP/1.1. A connection for each question: there is one in `ΔT`, tens of seconds,
//! and an idle connection would be closed by then.

use std::error::Error as _;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use laxity_requests::hmas::meta::external::{self, Invalid, Question};
use laxity_requests::hmas::pool::Hints;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::counts::{Counts, Tally};
use crate::endpoint::Endpoint;

/// A decision and what a chat endpoint says around it; whatever is longer is none.
const ANSWER_BYTES_MAX: usize = 256 * 1024;

/// No decision came. The reaction is always the same: rules decide, and the next question is asked
/// when it is time.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// No connection, or one that broke: is it running?
    #[error("{address} cannot be reached: {why}")]
    Unreachable {
        /// What was asked.
        address: String,
        /// What happened.
        why: String,
    },
    /// No answer in time.
    #[error("no answer within {} ms", .0.as_millis())]
    Late(Duration),
    /// An answer with a status that is an error: what it says names the cause, as a model that is
    /// not there.
    #[error("the service answered {status}: {says}")]
    Refused {
        /// Of the answer.
        status: u16,
        /// How its text begins; what could steer a terminal is written as its code.
        says: String,
    },
    /// An answer that does not end.
    #[error("the answer is longer than {0} bytes")]
    TooLong(usize),
    /// An answer that is no decision.
    #[error(transparent)]
    Invalid(Invalid),
}

/// A service's text as people are shown it: characters that could steer a terminal, or rearrange
/// what is beside them, as their codes.
fn shown(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            // Nothing but what code would need to escape.
            '"' | '\'' | '\\' => shown.push(c),
            c => shown.extend(c.escape_debug()),
        }
    }
    shown
}

/// What is wrong with an answer, which may quote it.
fn invalid(why: Invalid) -> Failure {
    Failure::Invalid(match why {
        Invalid::Form(why) => Invalid::Form(shown(&why)),
        Invalid::Endpoint(why) => Invalid::Endpoint(shown(&why)),
        Invalid::Pool(_) | Invalid::Hint { .. } => why,
    })
}

/// Asks a service.
#[derive(Debug)]
pub struct Client {
    endpoint: Endpoint,
    tally: Tally,
}

impl Client {
    /// Nothing is connected yet.
    #[must_use]
    pub fn new(endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            tally: Tally::default(),
        }
    }

    /// Whom it asks.
    #[must_use]
    pub const fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// What came of all questions so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.tally.read()
    }

    /// The text of the answer, which is a decision that the question allows.
    ///
    /// # Errors
    /// If there is none in time.
    pub async fn ask(&self, question: &Question) -> Result<String, Failure> {
        let within = self.endpoint.timeout;
        let came = match tokio::time::timeout(within, self.exchange(question)).await {
            Ok(came) => came,
            Err(_) => Err(Failure::Late(within)),
        };
        self.tally.note(&came);
        came
    }

    /// As [`Self::ask`], for a caller that has no runtime and nothing else to do, as a simulator
    /// whose time stands still meanwhile.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn ask_blocking(&self, question: &Question) -> Result<String, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| self.unreachable(&error))?;
        let came = runtime.block_on(self.ask(question));
        // A name that is being resolved cannot be given up: nobody waits for it.
        runtime.shutdown_background();
        came
    }

    async fn exchange(&self, question: &Question) -> Result<String, Failure> {
        let (status, body) = self.post(question).await?;
        let body = String::from_utf8_lossy(&body);
        if !status.is_success() {
            let says: String = body.trim().chars().take(200).collect();
            return Err(Failure::Refused {
                status: status.as_u16(),
                says: shown(&says),
            });
        }
        let text = external::chat_content(&body).map_err(invalid)?;
        // Only whether it is one: the controller reads it again, with what holds then.
        external::decision(&text, &question.pool, &Hints::default()).map_err(invalid)?;
        Ok(text)
    }

    async fn post(&self, question: &Question) -> Result<(StatusCode, Bytes), Failure> {
        let endpoint = &self.endpoint;
        let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port))
            .await
            .map_err(|error| self.unreachable(&error))?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| self.broken(&error))?;
        // Ends with this call: a set aborts what is left in it.
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        let body = external::chat_request(&endpoint.model, question).to_string();
        let host = endpoint.uri.authority().map_or("", |a| a.as_str());
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(endpoint.uri.path())
            .header(header::HOST, host)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json");
        if let Some(key) = &endpoint.key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        let request = request
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| self.unreachable(&error))?;
        let response = sender
            .send_request(request)
            .await
            .map_err(|error| self.broken(&error))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX)
            .collect()
            .await
            .map_err(|error| {
                if error.is::<LengthLimitError>() {
                    return Failure::TooLong(ANSWER_BYTES_MAX);
                }
                self.unreachable(&error)
            })?;
        Ok((status, body.to_bytes()))
    }

    fn unreachable(&self, why: &dyn std::fmt::Display) -> Failure {
        Failure::Unreachable {
            address: self.endpoint.address(),
            why: why.to_string(),
        }
    }

    /// hyper says what failed, its source why.
    fn broken(&self, error: &hyper::Error) -> Failure {
        match error.source() {
            Some(source) => self.unreachable(&format_args!("{error}: {source}")),
            None => self.unreachable(error),
        }
    }
}
