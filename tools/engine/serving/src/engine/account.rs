//! A list of all requests of an engine for `/debug/requests`, with the state of each and its age.
//! It helps to explain why a client gets no answer.

use std::sync::atomic::Ordering;

use laxity_requests::job::Phase;
use serde_json::{Value, json};

use super::Engine;
use super::sequence::{Outlet, Sequence};
use crate::clock;

impl Engine {
    fn account_of(&self, stands: &str, sequence: &Sequence) -> Value {
        let job = self.schedulers.job(sequence.id);
        let phase = job.map(|job| match job.phase {
            Phase::Waiting => "waiting",
            Phase::Prefilling => "prefilling",
            Phase::Decoding => "decoding",
        });
        let for_whom = match &sequence.outlet {
            Outlet::Here(_) => Value::Null,
            Outlet::Away(to) => json!(to.to),
        };
        json!({
            "request": sequence.id.0,
            "name": sequence.name,
            "stands": stands,
            "phase": phase,
            "relegated": job.is_some_and(|job| job.relegated),
            "age_ms": clock::now().since(sequence.arrival).0 / 1_000_000,
            "prompt": sequence.prompt,
            "answer": sequence.generated(),
            "answer_max": sequence.output_max,
            "computed": sequence.computed,
            "blocks": sequence.blocks.len(),
            "dropped": job.map_or(0, |job| job.drops),
            "failures": sequence.failures,
            "wanted": sequence.is_wanted(),
            "for": for_whom,
        })
    }

    /// Returns the list, in order of the requests' numbers.
    pub(super) fn account(&self) -> Value {
        let scheduled = self.sequences.values().map(|s| ("scheduled", s));
        let asking = self.asking.values().map(|s| ("asking", s));
        let remote = self.remote.values().map(|r| ("elsewhere", &r.sequence));
        let placing = self.placing.values().map(|p| ("placing", &p.sequence));
        let outside = self.outside.iter().map(|s| ("outside", s));
        let mut all: Vec<(&str, &Sequence)> =
            scheduled.chain(asking).chain(remote).chain(placing).chain(outside).collect();
        all.sort_unstable_by_key(|(_, sequence)| sequence.id);
        let all: Vec<Value> =
            all.into_iter().map(|(stands, sequence)| self.account_of(stands, sequence)).collect();
        json!({
            "requests": all,
            "load": self.schedulers.load(),
            "open": self.gauges.open.load(Ordering::Relaxed),
            "blocks_used": self.blocks.used(),
            "imports": self.imports.len(),
            "inbox": self.net.as_ref().map_or(0, |net| net.inbox.len()),
            "lost": self.lost.keys().collect::<Vec<_>>(),
            "learned_iterations": self.schedulers.learned(),
        })
    }
}
