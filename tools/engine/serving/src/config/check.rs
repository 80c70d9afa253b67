//! Which values of the configuration are allowed.

use std::net::SocketAddr;

use super::{Config, ConfigError, Limits, Role};
use crate::endpoint::tokens::VOCAB_MIN;

/// Returns the error about a field unless its value is allowed.
#[expect(clippy::needless_pass_by_value, reason = "numbers and texts, mostly made for it")]
fn ensure(
    allowed: bool,
    field: &'static str,
    given: impl ToString,
    wanted: impl Into<String>,
) -> Result<(), ConfigError> {
    let (value, wanted) = (given.to_string(), wanted.into());
    if allowed { Ok(()) } else { Err(ConfigError::Value { field, value, wanted }) }
}

impl Config {
    pub fn check(&self) -> Result<(), ConfigError> {
        self.model.check()?;
        let wanted = format!("the endpoint's bytes and marks need {VOCAB_MIN} tokens");
        ensure(self.model.vocab >= VOCAB_MIN, "model.vocab", self.model.vocab, wanted)?;
        let (blocks, size) = (self.kv.blocks, self.kv.block_tokens);
        let both = format!("{blocks}, {size}");
        ensure(blocks > 0 && size > 0, "kv.blocks, kv.block_tokens", both, "both at least 1")?;
        let wanted = "times kv.block_tokens it has to stay below 2^32";
        ensure(blocks.checked_mul(size).is_some(), "kv.blocks", blocks, wanted)?;
        let wanted = "an iteration computes at least 1 token";
        ensure(self.schedule.tokens > 0, "schedule.tokens", 0, wanted)?;
        self.check_timing()?;
        check_limits(&self.limits)?;
        if let Some(dscp) = self.laxity.words_dscp {
            ensure(dscp <= 63, "laxity.words_dscp", dscp, "0 to 63")?;
        }
        if let Some(rate) = self.laxity.rate_mbit {
            let wanted = "a positive number of Mbit/s, or leave it out";
            ensure(rate.is_finite() && rate > 0.0, "laxity.rate_mbit", rate, wanted)?;
        }
        self.check_peers()
    }

    fn check_timing(&self) -> Result<(), ConfigError> {
        let Some(timing) = &self.timing else {
            let wanted = "this laxity-engine was built without a model that computes: give \
                          timing.layer_us, token_us, expert_us and row_us";
            return ensure(cfg!(feature = "compute"), "timing", "missing", wanted);
        };
        for (field, time) in timing.all() {
            ensure((0.0..=1e9).contains(&time), field, time, "0 to 1000000000 microseconds")?;
        }
        let wanted = "at least 2 with [timing]: a row begins with a number of 64 bits";
        ensure(self.model.hidden >= 2, "model.hidden", self.model.hidden, wanted)
    }

    fn check_peers(&self) -> Result<(), ConfigError> {
        let Some(peers) = &self.peers else {
            let role = format!("{:?}", self.role).to_lowercase();
            let wanted = "it needs [peers] with listen, and decode needs prefill, too";
            return ensure(self.role == Role::Whole, "role", role, wanted);
        };
        let fixed = |address: &SocketAddr| address.port() != 0 && !address.ip().is_unspecified();
        let wanted = "others know this process by it: give a real address and port";
        ensure(fixed(&peers.listen), "peers.listen", peers.listen, wanted)?;
        let right = (self.role == Role::Decode) != peers.prefill.is_empty();
        let wanted = "role = \"decode\" needs some, the other roles have none";
        ensure(right, "peers.prefill", format!("{:?}", peers.prefill), wanted)?;
        for (field, list) in [("peers.prefill", &peers.prefill), ("peers.reuse", &peers.reuse)] {
            let wanted = "this process itself is none of its peers";
            ensure(!list.contains(&peers.listen), field, peers.listen, wanted)?;
            for address in list {
                ensure(fixed(address), field, address, "give a real address and port")?;
            }
        }
        if !peers.experts.is_empty() {
            let (field, all) = ("peers.experts", format!("{:?}", peers.experts));
            let wanted = "the model has none (model.moe)";
            ensure(self.model.moe.is_some(), field, &all, wanted)?;
            let wanted = format!("this process ({}) has to be one of them", peers.listen);
            ensure(peers.experts.contains(&peers.listen), field, &all, wanted)?;
        }
        let may = peers.experts.len() >= 2 && self.timing.is_some();
        let wanted = "it needs two of peers.experts, and [timing]";
        ensure(!peers.lockstep || may, "peers.lockstep", true, wanted)?;
        if let Some(plugin) = &peers.nccl_plugin {
            let wanted = "it carries exchanges of ranks in step only: set peers.lockstep";
            ensure(peers.lockstep, "peers.nccl_plugin", plugin.display(), wanted)?;
        }
        ensure(self.laxity.stall_ms != Some(0), "laxity.stall_ms", 0, "at least 1")?;
        ensure(peers.patience_ms > 0, "peers.patience_ms", 0, "at least 1")
    }
}

fn check_limits(limits: &Limits) -> Result<(), ConfigError> {
    for (field, ms) in [("limits.ttft_ms", limits.ttft_ms), ("limits.tpot_ms", limits.tpot_ms)] {
        ensure(ms.is_finite() && ms > 0.0, field, ms, "a positive number of milliseconds")?;
    }
    let Limits { requests_max, output_max, output_default, .. } = *limits;
    let field = "limits.requests_max, output_max, output_default";
    let all = format!("{requests_max}, {output_max}, {output_default}");
    let some = requests_max > 0 && output_max > 0 && output_default > 0;
    ensure(some, field, all, "all at least 1")
}
