//! Workloads of requests. Lengths come from a recording or from its statistics. Arrivals are
//! Poisson with a rate that may change. Classes, applications and importance are drawn per request.

use std::path::Path;

use laxity_requests::request::{ApplicationId, ClassId, Importance, RequestId, Slo, Spec};
use laxity_requests::{Span, Time};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha12Rng;
use rand_distr::{Distribution as _, Exp1, LogNormal};

use crate::workload::{WorkloadError, read_azure};

#[derive(Clone, Copy, Debug)]
pub struct Class {
    pub slo: Slo,
    pub share: f64,
}

#[derive(Clone, Debug)]
pub enum Lengths {
    Recorded(Vec<(u32, u32)>),
    LogNormal { prompt: (f64, f64, u32), output: (f64, f64, u32) },
}

impl Lengths {
    /// Reads the lengths of Azure's 2023 code trace.
    /// Returns an error if the file is not a readable trace.
    pub fn azure(path: &Path) -> Result<Self, WorkloadError> {
        let recorded = read_azure(path)?;
        let pairs = recorded
            .list
            .iter()
            .map(|request| (request.prompt_tokens, request.output_tokens.max(1)));
        Ok(Self::Recorded(pairs.collect()))
    }

    /// Returns lengths with the medians and 90th percentiles of Azure's 2023 code trace (prompts
    /// 1930 and 6251, outputs 8 and 43: QoServe table 2).
    pub const fn like_azure_code() -> Self {
        // A log-normal distribution has σ = ln(p90 / p50) / 1.2816.
        Self::LogNormal { prompt: (1930.0, 0.917, 8192), output: (8.0, 1.312, 1024) }
    }

    /// Returns lengths with the medians and 90th percentiles of Azure's 2023 conversation trace
    /// (prompts 928 and 3830, outputs 41 and 342: QoServe table 2).
    pub const fn like_azure_conversation() -> Self {
        Self::LogNormal { prompt: (928.0, 1.106, 8192), output: (41.0, 1.655, 1024) }
    }

    fn draw(&self, rng: &mut ChaCha12Rng) -> (u32, u32) {
        match self {
            Self::Recorded(pairs) => pairs[rng.random_range(0..pairs.len())],
            Self::LogNormal { prompt, output } => {
                let mut one = |(median, sigma, most): (f64, f64, u32)| {
                    let of = LogNormal::new(median.ln(), sigma).expect("σ is a finite number");
                    (of.sample(rng) as u32).clamp(1, most)
                };
                (one(*prompt), one(*output))
            }
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Phase {
    pub lasts: Span,
    /// Rate of arrivals, in requests per second.
    pub rate: f64,
}

#[derive(Clone, Debug)]
pub struct Recipe {
    pub lengths: Lengths,
    pub phases: Vec<Phase>,
    /// Classes of service. Unless `applications` exceeds one, a request's application is its class.
    pub classes: Vec<Class>,
    pub applications: u32,
    pub low: f64,
    pub output_max: u32,
}

/// A request with its output length, which only the driver may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    pub spec: Spec,
    pub output: u32,
}

impl Recipe {
    /// Returns the requests in order of arrival. The same seed gives the same requests.
    ///
    /// # Panics
    /// Panics if there is no class, or if recorded lengths are empty.
    pub fn requests(&self, seed: u64) -> Vec<Asked> {
        let mut arrivals = ChaCha12Rng::seed_from_u64(seed);
        let mut content = arrivals.clone();
        content.set_stream(2);
        let shares: f64 = self.classes.iter().map(|class| class.share).sum();
        let mut asked = Vec::new();
        let mut begins = Time::ZERO;
        for phase in &self.phases {
            let ends = begins + phase.lasts;
            let mut now = begins;
            // At a rate of zero the next arrival is infinitely far away.
            loop {
                let gap: f64 = Exp1.sample(&mut arrivals);
                now = now + Span((gap / phase.rate * 1e9) as u64);
                if now >= ends {
                    break;
                }
                let mut at = content.random::<f64>() * shares;
                let mut class = 0;
                while class + 1 < self.classes.len() && at >= self.classes[class].share {
                    at -= self.classes[class].share;
                    class += 1;
                }
                let (prompt, output) = self.lengths.draw(&mut content);
                let application = content.random_range(0..self.applications.max(1));
                let low = content.random::<f64>() < self.low;
                let output = output.min(self.output_max);
                asked.push(Asked {
                    spec: Spec {
                        id: RequestId(asked.len() as u64),
                        arrival: now,
                        prompt,
                        output_max: self.output_max,
                        class: ClassId(class as u16),
                        application: ApplicationId(
                            class as u32 * self.applications.max(1) + application,
                        ),
                        importance: if low { Importance::Low } else { Importance::Important },
                        slo: self.classes[class].slo,
                        ..Spec::default()
                    },
                    output,
                });
            }
            begins = ends;
        }
        asked
    }
}
