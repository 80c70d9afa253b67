//! Iteration times: the roofline of [`crate::compute`] over all layers plus the host's time.
//!
//! No profile here covers the host's time (scheduling, sampling, launching), which determines the
//! gain of larger chunks. In QoServe's figure 4 chunks of 2500 have twice the throughput of 256,
//! but the gain of its dynamic chunks implies 1.4 times. Results are therefore shown for both
//! calibrations ([`Roofline::calibrated`]).

use laxity_requests::Span;
use laxity_requests::latency::{Composition, Latency};

use super::PaperError;
use crate::compute::{Compute, Gpu};
use crate::model::Model;

#[derive(Clone, Debug)]
pub struct Roofline {
    compute: Compute,
    layers_full: u64,
    layers_linear: u64,
    experts: u32,
    top_k: u32,
    host_ns: u64,
    pub kv_bytes_per_token: u64,
    pub weights_bytes: u64,
}

impl Roofline {
    /// Creates a roofline with a time of `host` between two iterations.
    ///
    /// # Panics
    /// Panics if `tp` is zero.
    pub fn new(gpu: &Gpu, model: &Model, tp: u32, host: Span) -> Self {
        let layers = u64::from(model.layers);
        let full = (0..model.layers).filter(|layer| model.is_full_attention(*layer));
        let layers_full = full.count() as u64;
        let kv = (0..model.layers).map(|layer| model.kv_bytes_per_token(layer));
        Self {
            compute: Compute::new(gpu, model, tp),
            layers_full,
            layers_linear: layers - layers_full,
            experts: model.experts,
            top_k: model.top_k,
            host_ns: host.0,
            kv_bytes_per_token: kv.sum(),
            weights_bytes: (model.parameters() as f64 * model.bytes_per_value) as u64,
        }
    }

    /// Creates a roofline whose host time makes the throughput of prompts with chunks of 2500
    /// tokens `ratio` times that with 256. Returns `None` if the ratio is larger even without host
    /// time.
    pub fn calibrated(gpu: &Gpu, model: &Model, tp: u32, ratio: f64) -> Option<Self> {
        let bare = Self::new(gpu, model, tp, Span::ZERO);
        let ns = |tokens| bare.iteration(&Composition::default().with_chunk(0, tokens)).0 as f64;
        let (small, large) = (ns(256), ns(2500));
        // Solves (2500 / (large + h)) / (256 / (small + h)) = ratio for h.
        let wanted = ratio * 256.0 / 2500.0;
        let host = (wanted * large - small) / (1.0 - wanted);
        (host >= 0.0 && wanted < 1.0).then_some(Self { host_ns: host as u64, ..bare })
    }

    /// Returns an A100, and Llama-3-8B on it with this calibration ([`Self::calibrated`]).
    pub(super) fn llama(ratio: f64) -> Result<(Gpu, Self), PaperError> {
        let (gpu, model) = (Gpu::named("a100")?, Model::named("llama-3-8b")?);
        let none =
            || PaperError::BuiltIn(format!("no host time makes chunks differ {ratio} times"));
        let roofline = Self::calibrated(&gpu, &model, 1, ratio).ok_or_else(none)?;
        Ok((gpu, roofline))
    }

    /// Returns the number of KV blocks of `block_tokens` tokens that fit beside the weights on `tp`
    /// GPUs. A tenth of the memory is left for other data.
    pub fn blocks(&self, gpu: &Gpu, tp: u32, block_tokens: u32) -> u32 {
        let memory = gpu.memory_bytes as f64 * f64::from(tp) * 0.9 - self.weights_bytes as f64;
        let block = (self.kv_bytes_per_token * u64::from(block_tokens)).max(1) as f64;
        (memory.max(0.0) / block) as u32
    }
}

impl Latency for Roofline {
    fn iteration(&self, of: &Composition) -> Span {
        if of.is_empty() {
            return Span::ZERO;
        }
        let prompts = (u64::from(of.prefill_tokens), of.prefill_pairs);
        let decodes = (u64::from(of.decodes), of.decode_context);
        let tokens = prompts.0 + decodes.0;
        let mlp = if self.experts > 1 {
            let pairs = tokens * u64::from(self.top_k);
            let used = pairs.min(u64::from(self.experts)) as u32;
            self.compute.experts_ns(pairs, used) + self.compute.shared_ns(tokens)
        } else {
            self.compute.mlp_ns(tokens)
        };
        // In models with linear attention layer 0 is linear. The last layer always has full
        // attention.
        let last = (self.layers_full + self.layers_linear - 1) as u16;
        let full = self.compute.mixed_attention_ns(prompts, decodes, last);
        let linear = match self.layers_linear {
            0 => 0,
            _ => self.compute.mixed_attention_ns(prompts, decodes, 0),
        };
        let requests = u64::from(of.chunks) + decodes.0;
        Span(
            self.layers_full * (full + mlp)
                + self.layers_linear * (linear + mlp)
                + self.compute.ends_ns(tokens, requests)
                + self.host_ns,
        )
    }
}

#[derive(Clone, Debug)]
pub struct Slowed {
    pub roofline: Roofline,
    pub factor: f64,
}

impl Latency for Slowed {
    fn iteration(&self, of: &Composition) -> Span {
        Span((self.roofline.iteration(of).0 as f64 * self.factor) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn llama() -> (Gpu, Model) {
        let gpu = Gpu::named("a100").expect("built in");
        (gpu, Model::named("llama-3-8b").expect("built in"))
    }

    #[test]
    fn a_calibration_has_the_ratio_that_was_asked_for() {
        let (gpu, model) = llama();
        for ratio in [1.4, 2.0] {
            let roofline = Roofline::calibrated(&gpu, &model, 1, ratio).expect("a host time");
            let rate = |tokens: u32| {
                let of = Composition::default().with_chunk(0, tokens);
                f64::from(tokens) / roofline.iteration(&of).0 as f64
            };
            let found = rate(2500) / rate(256);
            assert!((found - ratio).abs() < 0.01, "{found} for {ratio}");
        }
        assert!(Roofline::calibrated(&gpu, &model, 1, 0.5).is_none());
    }

    #[test]
    fn more_of_anything_takes_longer_and_nothing_takes_no_time() {
        let (gpu, model) = llama();
        let roofline = Roofline::new(&gpu, &model, 1, Span::from_millis(2));
        assert_eq!(roofline.iteration(&Composition::default()), Span::ZERO);
        let some = Composition::default().with_chunk(100, 256).with_decode(900);
        let took = roofline.iteration(&some);
        for more in [
            some.with_chunk(0, 256),
            some.with_decode(5000),
            Composition::default().with_chunk(9000, 256).with_decode(900),
        ] {
            assert!(roofline.iteration(&more) > took, "{more:?}");
        }
        // Decodes are bound by reading weights: 16 GB at 2 TB/s take 8 ms.
        let decode = roofline.iteration(&Composition::default().with_decode(100));
        assert!((Span::from_millis(7)..Span::from_millis(20)).contains(&decode), "{decode}");
    }
}
