//! Answers in the format of OpenAI's clients: complete, or as server-sent events.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::ask::{Asked, Shape};
use super::failed;
use super::tokens::Decoder;
use crate::engine::sequence::{Output, Reason};

static ANSWERS: AtomicU64 = AtomicU64::new(1);

pub(super) struct Writer {
    shape: Shape,
    model: String,
    id: String,
    created: u64,
    prompt_tokens: usize,
    answer_tokens: usize,
    usage: bool,
    /// Tokens since the last event, if the client asked for tokens.
    token_ids: Option<Vec<u32>>,
    decoder: Decoder,
    text: String,
    reason: Option<Reason>,
    begun: bool,
}

impl Writer {
    pub(super) fn new(shape: Shape, model: &str, asked: &Asked) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let number = ANSWERS.fetch_add(1, Ordering::Relaxed);
        let kind = match shape {
            Shape::Text => "cmpl",
            Shape::Chat => "chatcmpl",
        };
        Self {
            shape,
            model: model.to_owned(),
            id: format!("{kind}-{:x}-{number}", created.as_nanos()),
            created: created.as_secs(),
            prompt_tokens: asked.prompt.len(),
            answer_tokens: 0,
            usage: asked.usage,
            token_ids: asked.token_ids.then(Vec::new),
            decoder: Decoder::default(),
            text: String::new(),
            reason: None,
            begun: false,
        }
    }

    fn add(&mut self, output: &Output) -> String {
        match output {
            Output::Token(token) => {
                self.answer_tokens += 1;
                if let Some(tokens) = &mut self.token_ids {
                    tokens.push(*token);
                }
                self.decoder.push(*token)
            }
            Output::Finished(reason) => {
                self.reason = Some(*reason);
                self.decoder.finish()
            }
            Output::Failed(_) => String::new(),
        }
    }

    pub(super) fn take(&mut self, output: &Output) {
        let text = self.add(output);
        self.text.push_str(&text);
    }

    fn frame(&self, object: &str, choices: &Value) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    fn reason(&self) -> Value {
        match self.reason {
            None => Value::Null,
            Some(Reason::Stop) => json!("stop"),
            Some(Reason::Length) => json!("length"),
        }
    }

    fn usage(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.answer_tokens,
            "total_tokens": self.prompt_tokens + self.answer_tokens,
        })
    }

    pub(super) fn whole(&self) -> Value {
        let reason = self.reason();
        let (object, choice) = match self.shape {
            Shape::Text => (
                "text_completion",
                json!({"index": 0, "text": self.text, "logprobs": null, "finish_reason": reason}),
            ),
            Shape::Chat => {
                let message = json!({"role": "assistant", "content": self.text});
                let choice = json!({"index": 0, "message": message, "finish_reason": reason});
                ("chat.completion", choice)
            }
        };
        let mut choice = choice;
        if let Some(tokens) = &self.token_ids {
            choice["token_ids"] = json!(tokens);
        }
        let mut whole = self.frame(object, &json!([choice]));
        whole["usage"] = self.usage();
        whole
    }

    /// Returns the events that an output adds to a stream: none, one or more.
    pub(super) fn event(&mut self, output: &Output) -> String {
        if let Output::Failed(failure) = output {
            // The status was sent long before, so clients expect an event with the error.
            return line(&failed(failure).json());
        }
        let text = self.add(output);
        let reason = self.reason();
        let (object, choice) = match self.shape {
            Shape::Text => (
                "text_completion",
                json!({"index": 0, "text": text, "logprobs": null, "finish_reason": reason}),
            ),
            Shape::Chat => {
                let delta = match (self.begun, self.reason) {
                    (false, _) => json!({"role": "assistant", "content": text}),
                    (true, Some(_)) if text.is_empty() => json!({}),
                    (true, _) => json!({"content": text}),
                };
                (
                    "chat.completion.chunk",
                    json!({"index": 0, "delta": delta, "finish_reason": reason}),
                )
            }
        };
        let mut choice = choice;
        if let Some(tokens) = &mut self.token_ids {
            choice["token_ids"] = json!(std::mem::take(tokens));
        }
        self.begun = true;
        let mut events = line(&self.frame(object, &json!([choice])));
        if self.reason.is_some() {
            if self.usage {
                let mut last = self.frame(object, &json!([]));
                last["usage"] = self.usage();
                events.push_str(&line(&last));
            }
            events.push_str("data: [DONE]\n\n");
        }
        events
    }
}

fn line(value: &Value) -> String {
    format!("data: {value}\n\n")
}
