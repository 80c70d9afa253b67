//! Parses and checks the bodies and headers of requests.

use axum::http::{HeaderMap, StatusCode};
use laxity_requests::request::{Importance, Slo};
use serde::Deserialize;
use serde_json::{Value, json};

use super::tokens;
use crate::config::{Config, Limits};

/// Longest objective, in ms. It is one day.
const OBJECTIVE_MS_MAX: f64 = 86_400_000.0;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Objection {
    pub(super) status: StatusCode,
    pub(super) code: &'static str,
    param: Option<&'static str>,
    message: String,
}

impl Objection {
    pub(super) const fn new(
        status: StatusCode,
        code: &'static str,
        param: Option<&'static str>,
        message: String,
    ) -> Self {
        Self { status, code, param, message }
    }

    fn bad(code: &'static str, param: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code, Some(param), message.into())
    }

    pub(super) fn json(&self) -> Value {
        let kind =
            if self.status.is_server_error() { "server_error" } else { "invalid_request_error" };
        let (message, param, code) = (&self.message, &self.param, &self.code);
        json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
    }
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    Batches(Vec<Vec<u32>>),
}

#[derive(Debug, Default, Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

/// The body of a request. It includes unsupported fields, so that they can be rejected.
#[derive(Debug, Deserialize)]
struct Body {
    model: Option<String>,
    prompt: Option<Prompt>,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
    temperature: Option<f64>,
    #[serde(default)]
    stream: bool,
    stream_options: Option<StreamOptions>,
    #[serde(default)]
    ignore_eos: bool,
    /// Whether the answer includes its tokens as numbers, as in vLLM.
    #[serde(default)]
    return_token_ids: bool,
    n: Option<u64>,
    best_of: Option<u64>,
    top_p: Option<f64>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    echo: Option<bool>,
    logprobs: Option<Value>,
    stop: Option<Value>,
    suffix: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct CompletionRequest {
    pub(super) prompt: Vec<u32>,
    pub(super) output_max: u32,
    pub(super) stream: bool,
    pub(super) usage: bool,
    pub(super) ignore_eos: bool,
    pub(super) token_ids: bool,
}

impl CompletionRequest {
    pub(super) fn read(body: &[u8], config: &Config) -> Result<Self, Objection> {
        let body: Body = serde_json::from_slice(body).map_err(|error| {
            let what = format!("the body is not the JSON that is wanted here: {error}");
            Objection::new(StatusCode::BAD_REQUEST, "invalid_json", None, what)
        })?;
        let model = &config.model.name;
        if let Some(asked) = body.model.as_ref().filter(|asked| *asked != model) {
            let what = format!("there is no model `{asked}` here; there is `{model}`");
            let status = StatusCode::NOT_FOUND;
            return Err(Objection::new(status, "model_not_found", Some("model"), what));
        }
        body.refuse_what_is_not_done()?;
        let prompt = body.prompt(config.model.vocab)?;
        let output_max = body.output_max(&config.limits)?;
        let context = config.model.context;
        let count = prompt.len();
        if count + output_max as usize > context {
            let param = if count >= context { "prompt" } else { "max_tokens" };
            let what = format!(
                "the prompt has {count} tokens and the answer may have {output_max}: together more \
                 than the model's context of {context}"
            );
            return Err(Objection::bad("context_length_exceeded", param, what));
        }
        Ok(Self {
            prompt,
            output_max,
            stream: body.stream,
            usage: body.stream_options.is_some_and(|options| options.include_usage),
            ignore_eos: body.ignore_eos,
            token_ids: body.return_token_ids,
        })
    }
}

impl Body {
    fn refuse_what_is_not_done(&self) -> Result<(), Objection> {
        let not_one = |number: Option<u64>| number.is_some_and(|number| number != 1);
        let not_zero = |number: Option<f64>| number.is_some_and(|number| number != 0.0);
        let something = |value: &Option<Value>| match value {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Array(all)) => !all.is_empty(),
            Some(_) => true,
        };
        let refused = [
            ("n", not_one(self.n), "one answer only"),
            ("best_of", not_one(self.best_of), "one answer only"),
            ("temperature", not_zero(self.temperature), "only 0, the likeliest token"),
            ("top_p", self.top_p.is_some_and(|p| p != 1.0), "only 1"),
            ("presence_penalty", not_zero(self.presence_penalty), "only 0"),
            ("frequency_penalty", not_zero(self.frequency_penalty), "only 0"),
            ("echo", self.echo == Some(true), "only false"),
            ("logprobs", something(&self.logprobs), "only none"),
            ("stop", something(&self.stop), "only none"),
            ("suffix", self.suffix.as_ref().is_some_and(|s| !s.is_empty()), "only none"),
        ];
        let Some((name, _, what)) = refused.into_iter().find(|(_, refused, _)| *refused) else {
            return Ok(());
        };
        let what = format!("`{name}` is not done here: {what}");
        Err(Objection::bad("unsupported_value", name, what))
    }

    fn prompt(&self, vocab: usize) -> Result<Vec<u32>, Objection> {
        let missing = || Objection::bad("missing_field", "prompt", "`prompt` is missing");
        let prompt = match self.prompt.as_ref().ok_or_else(missing)? {
            Prompt::Text(text) => tokens::encode(text),
            // An empty list matches both kinds of lists.
            Prompt::Tokens(tokens) if tokens.is_empty() => {
                return Err(Objection::bad("empty_prompt", "prompt", "the prompt has no token"));
            }
            Prompt::Tokens(tokens) => tokens.clone(),
            Prompt::Texts(texts) if texts.len() == 1 => tokens::encode(&texts[0]),
            Prompt::Batches(all) if all.len() == 1 && !all[0].is_empty() => all[0].clone(),
            Prompt::Texts(_) | Prompt::Batches(_) => {
                let what = "one prompt a request, and not an empty one";
                return Err(Objection::bad("unsupported_value", "prompt", what));
            }
        };
        if let Some(token) = prompt.iter().find(|token| **token as usize >= vocab) {
            let what = format!("token {token} is none of the model's {vocab}");
            return Err(Objection::bad("invalid_value", "prompt", what));
        }
        Ok(prompt)
    }

    fn output_max(&self, limits: &Limits) -> Result<u32, Objection> {
        let Limits { output_default, output_max, .. } = *limits;
        let asked = self.max_completion_tokens.or(self.max_tokens);
        let asked = asked.unwrap_or_else(|| u64::from(output_default.min(output_max)));
        if asked == 0 {
            let what = "max_tokens is 0; an answer has at least 1 token";
            return Err(Objection::bad("invalid_value", "max_tokens", what));
        }
        if asked > u64::from(output_max) {
            let what =
                format!("max_tokens is {asked}; at most {output_max} here (limits.output_max)");
            return Err(Objection::bad("too_many_tokens", "max_tokens", what));
        }
        Ok(asked as u32)
    }
}

/// Returns the time in the first of these headers that is there, in nanoseconds.
fn nanoseconds(
    headers: &HeaderMap,
    names: &[&'static str],
    default_ms: f64,
) -> Result<u64, Objection> {
    let given = match names.iter().find_map(|&name| Some((name, headers.get(name)?))) {
        None => default_ms,
        Some((name, value)) => {
            let text = value.to_str().unwrap_or("(no text)").trim();
            let number = text.parse::<f64>().unwrap_or(f64::NAN);
            if !(number > 0.0 && number <= OBJECTIVE_MS_MAX) {
                let what = format!(
                    "{name} is `{text}`: it has to be a number of milliseconds above 0 and at most \
                     {OBJECTIVE_MS_MAX} (a day)"
                );
                return Err(Objection::bad("impossible_objective", name, what));
            }
            number
        }
    };
    Ok((given * 1e6) as u64)
}

/// Returns the objectives in the headers: of the first token and later ones, or of the last.
pub(super) fn slo(headers: &HeaderMap, limits: &Limits) -> Result<Slo, Objection> {
    const TTFT: [&str; 2] = ["x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"];
    const TPOT: [&str; 2] = ["x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"];
    const TTLT: &str = "x-slo-ttlt-ms";
    if headers.contains_key(TTLT) {
        let mut others = TTFT.into_iter().chain(TPOT);
        if let Some(other) = others.find(|name| headers.contains_key(*name)) {
            let what = format!(
                "{other} and {TTLT} exclude each other: either tokens are read as they come, or \
                 the end is waited for"
            );
            return Err(Objection::bad("impossible_objective", other, what));
        }
        // The default is never used, because the header is present.
        return Ok(Slo::Batch { ttlt: nanoseconds(headers, &[TTLT], limits.ttft_ms)? });
    }
    Ok(Slo::Interactive {
        ttft: nanoseconds(headers, &TTFT, limits.ttft_ms)?,
        tbt: nanoseconds(headers, &TPOT, limits.tpot_ms)?,
    })
}

pub(super) fn importance(headers: &HeaderMap) -> Result<Importance, Objection> {
    const NAME: &str = "x-laxity-importance";
    let Some(given) = headers.get(NAME) else { return Ok(Importance::default()) };
    match given.to_str().unwrap_or("(no text)").trim() {
        "paid" => Ok(Importance::Important),
        "free" => Ok(Importance::Low),
        other => {
            let what = format!("{NAME} is `{other}`: `paid` (the default) or `free`");
            Err(Objection::bad("invalid_value", NAME, what))
        }
    }
}

/// Returns the index of the prefill process that a router chose for this prompt.
pub(super) fn prefill(headers: &HeaderMap, config: &Config) -> Result<Option<usize>, Objection> {
    const NAME: &str = "x-laxity-prefill";
    let Some(given) = headers.get(NAME) else { return Ok(None) };
    let text = given.to_str().unwrap_or("(no text)").trim();
    let count = config.peers.as_ref().map_or(0, |peers| peers.prefill.len());
    match text.parse() {
        Ok(number) if number < count => Ok(Some(number)),
        _ => {
            let what = format!(
                "{NAME} is `{text}`: the number of one of the {count} of peers.prefill, from 0"
            );
            Err(Objection::bad("invalid_value", NAME, what))
        }
    }
}
