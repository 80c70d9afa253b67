//! Answers in the format of OpenAI's clients: complete, or as server-sent events.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::ask::CompletionRequest;
use super::failed;
use super::tokens::TextDecoder;
use crate::engine::sequence::{Output, Reason};

static ANSWERS: AtomicU64 = AtomicU64::new(1);

pub(super) struct Writer {
    model: String,
    id: String,
    created: u64,
    prompt_tokens: usize,
    answer_tokens: usize,
    usage: bool,
    /// Tokens since the last event, if the client asked for tokens.
    token_ids: Option<Vec<u32>>,
    decoder: TextDecoder,
    text: String,
    reason: Option<Reason>,
}

impl Writer {
    pub(super) fn new(model: &str, asked: &CompletionRequest) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let number = ANSWERS.fetch_add(1, Ordering::Relaxed);
        Self {
            model: model.to_owned(),
            id: format!("cmpl-{:x}-{number}", created.as_nanos()),
            created: created.as_secs(),
            prompt_tokens: asked.prompt.len(),
            answer_tokens: 0,
            usage: asked.usage,
            token_ids: asked.token_ids.then(Vec::new),
            decoder: TextDecoder::default(),
            text: String::new(),
            reason: None,
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

    fn frame(&self, choices: &Value) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    fn choice(&self, text: &str) -> Value {
        json!({"index": 0, "text": text, "logprobs": null, "finish_reason": self.reason})
    }

    fn usage(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.answer_tokens,
            "total_tokens": self.prompt_tokens + self.answer_tokens,
        })
    }

    pub(super) fn whole(&self) -> Value {
        let mut choice = self.choice(&self.text);
        if let Some(tokens) = &self.token_ids {
            choice["token_ids"] = json!(tokens);
        }
        let mut whole = self.frame(&json!([choice]));
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
        let mut choice = self.choice(&text);
        if let Some(tokens) = &mut self.token_ids {
            choice["token_ids"] = json!(std::mem::take(tokens));
        }
        let mut events = line(&self.frame(&json!([choice])));
        if self.reason.is_some() {
            if self.usage {
                let mut last = self.frame(&json!([]));
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
