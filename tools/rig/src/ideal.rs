//! The contention-free TTFT of a request: what it would take alone, on an idle fabric.
//!
//! The SLO of a request is a multiple of this number (MFS §6.1 measures it under low load). It is
//! computed, not measured, so that it is the same number for every policy; a lab run then plays a
//! few requests one by one and reports how far the computation is off.
//!
//! With `B` a port's goodput, `t(b) = max(b − burst, 0) / B + δ` the time of a message of `b` bytes
//! on an idle path (a shaper that was idle lets a burst through at once), and per layer `f` bytes
//! of KV to fetch at a rank, `a` bytes that a rank sends in an all-to-all phase, `p` bytes of KV
//! that it hands over to decode, and compute time `c`:
//!
//! ```text
//! ready(l) = t((l + 1) · f)                          fetches of all layers are issued at once
//! begin(l) = max(done(l − 1), ready(l))
//! done(l)  = begin(l) + c + 2 · t(a)                 dispatch and combine
//! p2d(l)   = max(done(l), p2d(l − 1)) + R · p / B    all R ranks feed one decode port
//! TTFT     = p2d(L − 1) + δ
//! ```

use crate::config::Scaling;
use crate::fabric::BURST_BYTES;

/// `δ`: what a message takes besides its bytes at the port's rate. Two hops of store and forward,
/// the wake-up of the receiver and of its control message. The same for all policies.
const MESSAGE_NS: f64 = 250_000.0;

/// `t(b)`, ns.
fn message_ns(scaling: &Scaling, bytes: u64) -> f64 {
    let behind_burst = bytes.saturating_sub(u64::from(BURST_BYTES));
    behind_burst as f64 * 1e9 / scaling.goodput_bytes_per_s + MESSAGE_NS
}

/// Contention-free TTFT of a request that computes `new_tokens` and reuses `reused` of which
/// `fetched` come over the network, in ns.
#[must_use]
pub fn ttft_ns(scaling: &Scaling, new_tokens: u32, reused: u32, fetched: u32) -> u64 {
    let ns = |bytes: u64| bytes as f64 * 1e9 / scaling.goodput_bytes_per_s;
    let fetch = scaling.kv_bytes(fetched);
    let peers = scaling.ranks as u64 - 1;
    let phase = message_ns(scaling, scaling.collective_bytes(new_tokens) * peers);
    let p2d = ns(scaling.kv_bytes(new_tokens + reused) * scaling.ranks as u64);
    let compute = scaling.compute_ns(new_tokens) as f64;
    let (mut done, mut handed_over) = (0.0_f64, 0.0_f64);
    for layer in 0..scaling.layers {
        let ready = if fetched == 0 {
            0.0
        } else {
            message_ns(scaling, u64::from(layer + 1) * fetch)
        };
        done = done.max(ready) + compute + 2.0 * phase;
        handed_over = done.max(handed_over) + p2d;
    }
    (handed_over + MESSAGE_NS) as u64
}

/// Time for which a request keeps its unit busy when it runs alone, ns: the router's estimate.
#[must_use]
pub fn service_ns(scaling: &Scaling, new_tokens: u32) -> u64 {
    let bytes = scaling.collective_bytes(new_tokens) * (scaling.ranks as u64 - 1);
    let phase = message_ns(scaling, bytes);
    (f64::from(scaling.layers) * (scaling.compute_ns(new_tokens) as f64 + 2.0 * phase)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::LabConfig;

    fn ms(ns: u64) -> f64 {
        ns as f64 / 1e6
    }

    #[test]
    fn a_request_without_reuse_takes_its_layers_and_the_last_handover() {
        let scaling = Scaling {
            goodput_bytes_per_s: 1e8,
            collective_bytes_per_token: 1000.0 + f64::from(BURST_BYTES) / 100.0,
            kv_bytes_per_token: 300.0,
            layers: 4,
            layer_base_us: 1000.0,
            layer_token_us: 10.0,
            ranks: 2,
        };
        // 100 tokens: 2 ms of compute, 2 × (1 ms + δ) of all-to-all, 2 × 0.3 ms of hand-over.
        let delta = MESSAGE_NS / 1e6;
        let expected = 4.0 * (2.0 + 2.0 * (1.0 + delta)) + 0.6 + delta;
        assert!((ms(ttft_ns(&scaling, 100, 0, 0)) - expected).abs() < 1e-3);
        // Reuse that is local moves more bytes to decode, but that hides behind the next layer.
        let local = ms(ttft_ns(&scaling, 100, 100, 0));
        assert!((local - expected - 0.6).abs() < 1e-3);
        // Reuse over the network delays the first layer by its fetch.
        let fetched = ms(ttft_ns(&scaling, 100, 100, 100));
        let fetch = (30_000.0 - f64::from(BURST_BYTES)) / 1e8 * 1e3 + delta;
        assert!((fetched - local - fetch).abs() < 1e-3);
    }

    #[test]
    fn more_work_never_takes_less_time() {
        let scaling = LabConfig::default().scaling();
        let mut last = 0;
        for tokens in [1, 10, 100, 1000, 5000] {
            let now = ttft_ns(&scaling, tokens, 100, 100);
            assert!(now > last && now >= service_ns(&scaling, tokens));
            last = now;
        }
    }

    #[test]
    fn the_average_request_of_the_default_lab_takes_a_fraction_of_a_second() {
        let scaling = LabConfig::default().scaling();
        let ttft = ms(ttft_ns(&scaling, 1000, 1000, 1000));
        assert!((100.0..500.0).contains(&ttft), "{ttft} ms");
    }
}
