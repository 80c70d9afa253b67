//! `laxity sim reproduce hmas` with a decision service: a language model behind an OpenAI-style
//! endpoint, or any program that answers like one.

use std::env::VarError;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use laxity_decisions::{Client, Endpoint, Failure};
use laxity_sim::requests::hmas::{self, Service};

use super::claims::{self, ClaimsArgs};

pub(super) const HELP: &str = "\
With --decision-service, one more controller is compared: a service that is really asked, while
virtual time stands still. Its decision comes --decision-takes-ms later in virtual time. A decision
that takes longer than 20 s, the time between decisions, is never acted upon: the rules decide then,
as they do where an answer is no decision. docs/requests/hmas.md says what is asked, and what an
answer has to be. A key goes into the environment, as LAXITY_DECISION_KEY.

Examples:
  laxity sim reproduce hmas --quick
  laxity sim reproduce hmas --first-seed 11 --markdown tables.md
  laxity sim reproduce hmas --quick --decision-service http://127.0.0.1:8000/v1 \\
      --decision-model Qwen/Qwen3-8B --decision-takes-ms 2500";

/// Where the key is.
const KEY: &str = "LAXITY_DECISION_KEY";

/// Arguments of `laxity sim reproduce hmas`.
#[derive(Args)]
pub(crate) struct HmasArgs {
    #[command(flatten)]
    claims: ClaimsArgs,
    /// Also compare decisions of this OpenAI-style endpoint, e.g. http://127.0.0.1:8000/v1
    #[arg(long, value_name = "URL")]
    decision_service: Option<String>,
    /// The model that the service is asked for
    #[arg(
        long,
        value_name = "NAME",
        default_value = "default",
        requires = "decision_service"
    )]
    decision_model: String,
    /// What a decision takes in virtual time, whatever it really took
    #[arg(
        long,
        value_name = "MS",
        default_value_t = 1_000,
        requires = "decision_service",
        value_parser = clap::value_parser!(u64).range(..=3_600_000)
    )]
    decision_takes_ms: u64,
    /// How long the service is really waited for; an answer later than this is none
    #[arg(
        long,
        value_name = "S",
        default_value_t = 30,
        requires = "decision_service",
        value_parser = clap::value_parser!(u64).range(1..=3_600)
    )]
    decision_timeout_s: u64,
}

pub(super) fn run(args: &HmasArgs) -> Result<ExitCode> {
    let Some(url) = &args.decision_service else {
        return claims::run(&args.claims, hmas::reproduce);
    };
    let timeout = Duration::from_secs(args.decision_timeout_s);
    let mut endpoint =
        Endpoint::new(url, &args.decision_model, timeout).context("--decision-service")?;
    if let Some(key) = key(std::env::var(KEY))? {
        endpoint = endpoint.with_key(&key).context(KEY)?;
    }
    let client = Arc::new(greeted(endpoint)?);
    let asks = Arc::clone(&client);
    let service = Service {
        name: format!("service {}", args.decision_model),
        takes: Duration::from_millis(args.decision_takes_ms),
        ask: Arc::new(move |question| {
            asks.ask_blocking(question)
                .map_err(|failure| failure.to_string())
        }),
    };
    let done = claims::run(&args.claims, |options| {
        hmas::reproduce_with(options, Some(&service))
    })?;
    eprintln!("{}: {}", client.endpoint().address(), client.counts());
    Ok(done)
}

/// The key, if there is one. What is there and can be none is a mistake: it must not be that the
/// service is asked without.
fn key(found: Result<String, VarError>) -> Result<Option<String>> {
    match found {
        Ok(key) => Ok(Some(key)),
        Err(VarError::NotPresent) => Ok(None),
        // The cause would quote it, and a key must not get into a log.
        Err(VarError::NotUnicode(_)) => {
            bail!("{KEY} is no UTF-8, and no HTTP header can have it; set it anew, or unset it")
        }
    }
}

/// Before minutes are spent: is there a service, and does it have the model? What else goes wrong
/// is what is being measured. The client that is given counts from zero: the first question is of
/// no decision.
fn greeted(endpoint: Endpoint) -> Result<Client> {
    match Client::new(endpoint.clone()).ask_blocking(&hmas::example_question()) {
        Err(failure @ (Failure::Unreachable { .. } | Failure::Refused { .. })) => {
            bail!("--decision-service: {failure}")
        }
        Err(failure) => {
            eprintln!(
                "the decision service answered a first question badly, and goes on: {failure}"
            );
        }
        Ok(_) => {}
    }
    Ok(Client::new(endpoint))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::io::{self, Read as _, Write as _};
    use std::net::TcpListener;
    use std::os::unix::ffi::OsStringExt as _;

    use laxity_decisions::Counts;

    use super::*;

    #[test]
    fn the_greeting_is_sent_and_is_none_of_the_questions_that_are_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/v1", listener.local_addr().expect("bound"));
        let service = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("it is greeted");
            let mut first = [0; 4];
            stream.read_exact(&mut first).expect("a request");
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}";
            stream.write_all(answer).expect("it listens");
            // Until the client has what it wants: to close with bytes unread would reset the
            // connection.
            let _ = io::copy(&mut stream, &mut io::sink());
            first
        });
        let endpoint = Endpoint::new(&url, "m", Duration::from_secs(60)).expect("an address");
        let client = greeted(endpoint).expect("a bad answer is no reason to end");
        assert_eq!(&service.join().expect("it answered"), b"POST");
        assert_eq!(client.counts(), Counts::default());
    }

    #[test]
    fn only_a_variable_that_is_not_there_is_no_key() {
        let none = key(Err(VarError::NotPresent)).expect("none");
        assert_eq!(none, None);
        let some = key(Ok("sk-1".to_owned())).expect("one");
        assert_eq!(some.as_deref(), Some("sk-1"));
        let bytes = OsString::from_vec(b"sk-\xff".to_vec());
        let error = key(Err(VarError::NotUnicode(bytes))).expect_err("no text");
        let error = error.to_string();
        assert!(error.contains(KEY) && !error.contains("sk-"), "{error}");
        let endpoint = Endpoint::new("http://h", "m", Duration::from_secs(1)).expect("an address");
        let empty = key(Ok(String::new())).expect("there is one").expect("some");
        assert!(endpoint.with_key(&empty).is_err());
    }
}
