//! The contention-free TTFT of a request of the timed engine: its TTFT alone, on an idle fabric.
//!
//! The objective of a request is a multiple of this TTFT (MFS §6.1 measures it under low load). It
//! is computed, not measured, so it is the same for every policy. A lab run then plays a few
//! requests one by one and reports the error of the computation.
//!
//! Let `B` be a port's goodput, `t(b) = max(b − burst, 0) / B + δ` the time of a message of `b`
//! bytes on an idle path (an idle shaper sends a burst at once) and `m` the tokens of an iteration.
//! `c(m)` is the time of attention and experts in a layer, `a` the bytes of a token's rows for
//! experts on other hosts, `f` the bytes of KV to fetch in a layer, and `p` the bytes of KV that go
//! to decode:
//!
//! ```text
//! ready(l) = t((l + 1) · f)                          fetches of all layers are asked for at once
//! begin(l) = max(done(l − 1), ready(l))
//! done(l)  = begin(l) + c(m) + 2 · t(m · a)          rows to the experts and back
//! p2d(l)   = max(done(l), p2d(l − 1)) + p / B
//! TTFT     = p2d of the last layer of the last iteration + δ
//! ```

use crate::config::{LabConfig, Scaling};
use crate::fabric::BURST_BYTES;
use crate::serving::{ServingConfig, Times};

/// `δ`: time of a message besides its bytes at the port's rate, in ns. It covers two hops of store
/// and forward, and the wake-ups of daemon, sender and receiver. It is the same for all policies.
const MESSAGE_NS: f64 = 250_000.0;

fn message_ns(scaling: &Scaling, bytes: f64) -> f64 {
    let behind_burst = (bytes - f64::from(BURST_BYTES)).max(0.0);
    behind_burst * 1e9 / scaling.goodput_bytes_per_s + MESSAGE_NS
}

/// Returns how long a request keeps a unit busy if all its hosts share the request evenly, in ns.
/// The offered load is measured in this time.
pub fn service_ns(scaling: &Scaling, new_tokens: u32) -> u64 {
    let peers = scaling.ranks as u64 - 1;
    let phase = message_ns(scaling, (scaling.collective_bytes(new_tokens) * peers) as f64);
    let layer = scaling.compute_ns(new_tokens) as f64 + 2.0 * phase;
    (f64::from(scaling.layers) * layer) as u64
}

#[derive(Clone, Debug)]
pub struct Ideal {
    scaling: Scaling,
    serving: ServingConfig,
    times: Times,
}

impl Ideal {
    /// Returns the inputs of the timed engine of a lab, or `None` for another engine.
    pub fn new(config: &LabConfig) -> Option<Self> {
        Some(Self { scaling: config.scaling(), serving: config.serving(), times: config.times(0)? })
    }

    /// Returns the contention-free TTFT, in ns, of a request that computes `new` tokens and reuses
    /// `reused`. Of the reused tokens, `fetched` come over the network.
    pub fn ttft_ns(&self, new: u32, reused: u32, fetched: u32) -> u64 {
        let ns = |bytes: f64| bytes * 1e9 / self.scaling.goodput_bytes_per_s;
        let kv_bytes = self.serving.kv_bytes() as f64;
        let away = (self.scaling.ranks - 1) as f64;
        let row_bytes = (self.serving.hidden * 4) as f64;
        let (mut done, mut handed_over, mut left) = (0.0_f64, 0.0_f64, new);
        let mut first = true;
        while left > 0 {
            let tokens = left.min(self.serving.chunk_tokens);
            left -= tokens;
            let exchange = message_ns(&self.scaling, f64::from(tokens) * away * row_bytes);
            let compute = self.times.layer_ns(tokens);
            let to_decode = tokens + if first { reused } else { 0 };
            let p2d = ns(f64::from(to_decode) * kv_bytes);
            for layer in 0..self.serving.layers {
                let ready = if first && fetched > 0 {
                    let layers = (layer + 1) as f64;
                    message_ns(&self.scaling, layers * f64::from(fetched) * kv_bytes)
                } else {
                    0.0
                };
                done = done.max(ready) + compute + 2.0 * exchange;
                handed_over = done.max(handed_over) + p2d;
            }
            first = false;
        }
        (handed_over + MESSAGE_NS) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_work_never_takes_less_time() {
        let ideal = Ideal::new(&LabConfig::default()).unwrap();
        let mut last = 0;
        for tokens in [1, 10, 100, 1000, 5000] {
            let now = ideal.ttft_ns(tokens, 100, 100);
            assert!(now > last && now > ideal.ttft_ns(tokens, 0, 0));
            last = now;
        }
        assert!(Ideal::new(&LabConfig::real()).is_none());
    }

    #[test]
    fn the_average_request_of_the_default_lab_takes_a_fraction_of_a_second() {
        let ideal = Ideal::new(&LabConfig::default()).unwrap();
        let ms = ideal.ttft_ns(1000, 1000, 1000) as f64 / 1e6;
        assert!((100.0..700.0).contains(&ms), "{ms} ms");
    }
}
