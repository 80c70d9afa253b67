//! Fits the coefficients of the compute-time model to recorded profiles, and says how far off the
//! model is: on what it was fitted to, on sizes that were kept from it, on the narrowest matrices
//! (those of the widest tensor parallelism) kept from it, and on a model kept from it. The last two
//! say most about models that nobody profiled.
//!
//! Every operator is fitted on the logarithm of (predicted / measured), so that 1 µs and 100 ms
//! count alike. All products share one set of coefficients, both norms another. The coefficients
//! that are written are those fitted to everything; those with a part kept out are made only to
//! be measured.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::coefficients::{self as of, Coefficients};
use super::gpu::Gpu;
use super::least_squares::{Parameter, least_squares};
use super::operator::{AllReduce, Gemm, LinearCost};
pub use super::profile::FitError;
use super::profile::{self, BYTES, Kind, Sample, Series};
use super::published;
pub use super::report::{Errors, FitReport, GpuFit, OperatorReport};

/// Of so many sizes in ascending order, one is kept out: the last.
const KEPT_OUT_EVERY: usize = 5;

/// Fits the coefficients of every built-in GPU to the profiles in a folder.
///
/// # Errors
/// See [`FitError`].
pub fn fit(profiles: &Path) -> Result<FitReport, FitError> {
    let mut report = FitReport::default();
    let mut all_reduce: Option<(of::AllReduce, String)> = None;
    for gpu in Gpu::built_in() {
        let files = |kind: &str| -> Result<Vec<PathBuf>, FitError> {
            profile::files(profiles, &format!("{}_", gpu.name), &format!("_{kind}.csv"))
        };
        let missing = |kind: &str| FitError::Missing {
            folder: profiles.to_owned(),
            expected: format!("{}_*_{kind}.csv", gpu.name),
        };
        let mut sources = Vec::new();
        let mut series = Vec::new();
        for file in files("linear")? {
            series.extend(profile::linear(&file)?);
            sources.push(name_of(&file));
        }
        if series.is_empty() {
            return Err(missing("linear"));
        }
        let linear = study(&gpu, &series, fit_linear, linear_ns, &mut report);
        if let Some(file) = files("all_reduce")?.first() {
            let series = [profile::all_reduce(file)?];
            let fitted = study(&gpu, &series, fit_all_reduce, all_reduce_ns, &mut report);
            all_reduce = Some((fitted, name_of(file)));
        }
        // As latencies and shares of NVLink, an all-reduce goes for a GPU that has no profile of
        // its own.
        let (all_reduce, source) = all_reduce.clone().ok_or_else(|| missing("all_reduce"))?;
        sources.push(source);
        report.gpus.push(GpuFit {
            coefficients: Coefficients {
                gemm: linear.gemm,
                stream: linear.stream,
                all_reduce,
                attention: attention(&gpu),
                linear_attention: linear_attention(),
            },
            gpu: gpu.name,
            sources,
        });
    }
    Ok(report)
}

fn name_of(file: &Path) -> String {
    let name = file.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// Some of the samples.
struct Cut<'a> {
    series: &'a [Series],
    wanted: &'a dyn Fn(&Series, &Sample) -> bool,
}

impl Cut<'_> {
    fn samples(&self, kind: Kind) -> Vec<Sample> {
        let mut samples = Vec::new();
        for one in self.series.iter().filter(|one| one.kind == kind) {
            let wanted = one.samples.iter().filter(|s| (self.wanted)(one, s));
            samples.extend(wanted);
        }
        samples
    }
}

/// One set of coefficients, fitted to everything and with parts kept out.
struct Study<'a, C> {
    gpu: &'a Gpu,
    predict: fn(&Gpu, &C, Kind, &Sample) -> f64,
    all: C,
    without_sizes: C,
    kept_out: BTreeSet<u64>,
    without_narrowest: Option<C>,
    narrowest: u32,
}

/// Fits the coefficients of some operators, and reports errors with and without parts of the data:
/// of every operator, and of all of a layer together.
fn study<C>(
    gpu: &Gpu,
    series: &[Series],
    fit: fn(&Gpu, &Cut) -> C,
    predict: fn(&Gpu, &C, Kind, &Sample) -> f64,
    report: &mut FitReport,
) -> C {
    let fit = |wanted: &dyn Fn(&Series, &Sample) -> bool| fit(gpu, &Cut { series, wanted });
    let samples = || series.iter().flat_map(|one| one.samples.iter());
    let sizes: BTreeSet<u64> = samples().map(|sample| sample.size).collect();
    let kept_out: BTreeSet<u64> = sizes
        .into_iter()
        .skip(KEPT_OUT_EVERY - 1)
        .step_by(KEPT_OUT_EVERY)
        .collect();
    let splits: BTreeSet<u32> = samples().map(|sample| sample.tp).collect();
    let narrowest = splits.last().copied().unwrap_or(1);
    let study = Study {
        gpu,
        predict,
        all: fit(&|_, _| true),
        without_sizes: fit(&|_, sample| !kept_out.contains(&sample.size)),
        kept_out,
        without_narrowest: (splits.len() > 1).then(|| fit(&|_, sample| sample.tp < narrowest)),
        narrowest,
    };
    let profiles: BTreeSet<&str> = series.iter().map(|one| one.profile.as_str()).collect();
    for profile in &profiles {
        let without_model =
            (profiles.len() > 1).then(|| fit(&|other, _| other.profile != **profile));
        let of_profile = series.iter().filter(|one| one.profile == **profile);
        let mut layer = Vec::new();
        for one in of_profile {
            let row = study.report(one.operator, &[one], without_model.as_ref());
            report.operators.push(row);
            // An embedding is no part of a layer.
            layer.extend((one.kind != Kind::Embedding).then_some(one));
        }
        if layer.len() > 1 {
            let row = study.report("layer", &layer, without_model.as_ref());
            report.operators.push(row);
        }
    }
    study.all
}

impl<C> Study<'_, C> {
    /// The errors of the sum of some operators of one profile.
    fn report(
        &self,
        operator: &str,
        parts: &[&Series],
        without_model: Option<&C>,
    ) -> OperatorReport {
        let first = parts[0];
        let errors = |fitted: &C, wanted: &dyn Fn(&Sample) -> bool| {
            let lines = (0..first.samples.len()).filter(|&line| wanted(&first.samples[line]));
            Errors::of(lines.map(|line| {
                let (mut predicted, mut measured) = (0.0, 0.0);
                for one in parts {
                    let sample = &one.samples[line];
                    predicted += (self.predict)(self.gpu, fitted, one.kind, sample);
                    measured += sample.ns;
                }
                predicted / measured
            }))
        };
        let without_narrowest = self.without_narrowest.as_ref();
        OperatorReport {
            gpu: self.gpu.name.clone(),
            profile: first.profile.clone(),
            operator: operator.to_owned(),
            fitted: errors(&self.all, &|_| true),
            sizes_kept_out: errors(&self.without_sizes, &|sample| {
                self.kept_out.contains(&sample.size)
            }),
            narrowest_kept_out: without_narrowest
                .map(|fitted| errors(fitted, &|sample| sample.tp == self.narrowest)),
            model_kept_out: without_model.map(|fitted| errors(fitted, &|_| true)),
        }
    }
}

/// Five digits: more than the data can tell, and few enough that fitting again gives the same.
fn rounded(value: f64) -> f64 {
    format!("{value:.4e}").parse().expect("it was a number")
}

/// Residuals of predictions, for [`least_squares`].
fn residuals(samples: &[Sample], predict: impl Fn(&Sample) -> f64, out: &mut Vec<f64>) {
    out.clear();
    out.extend(samples.iter().map(|s| (predict(s) / s.ns).ln()));
}

/// What a profile of a model tells.
struct Linear {
    gemm: of::Gemm,
    stream: of::Streams,
}

fn fit_linear(gpu: &Gpu, cut: &Cut) -> Linear {
    let stream = |kind| fit_stream(gpu, &cut.samples(kind));
    Linear {
        gemm: fit_gemm(gpu, &cut.samples(Kind::Gemm)),
        stream: of::Streams {
            embedding: stream(Kind::Embedding),
            norm: stream(Kind::Norm),
            rope: stream(Kind::Rope),
            activation: stream(Kind::Activation),
            add: stream(Kind::Add),
        },
    }
}

fn linear_ns(gpu: &Gpu, fitted: &Linear, kind: Kind, sample: &Sample) -> f64 {
    let stream = match kind {
        Kind::Gemm | Kind::AllReduce => return gemm_ns(gpu, &fitted.gemm, sample),
        Kind::Embedding => &fitted.stream.embedding,
        Kind::Norm => &fitted.stream.norm,
        Kind::Rope => &fitted.stream.rope,
        Kind::Activation => &fitted.stream.activation,
        Kind::Add => &fitted.stream.add,
    };
    stream_ns(gpu, stream, sample)
}

fn gemm_ns(gpu: &Gpu, fitted: &of::Gemm, sample: &Sample) -> f64 {
    let [columns, depth] = sample.shape;
    Gemm::new(fitted, gpu, columns, depth, BYTES).ns(sample.size as f64, 1.0)
}

fn fit_gemm(gpu: &Gpu, samples: &[Sample]) -> of::Gemm {
    let parameters = [
        Parameter::new(4.0, 0.1, 50.0),
        Parameter::share(0.75),
        Parameter::share(0.8),
        Parameter::new(60.0, 0.1, 1000.0),
        Parameter::new(60.0, 0.1, 1000.0),
        Parameter::new(60.0, 0.1, 1000.0),
    ];
    let make = |p: &[f64; 6]| of::Gemm {
        overhead_us: p[0],
        compute: p[1],
        memory: p[2],
        rows: p[3],
        columns: p[4],
        depth: p[5],
    };
    let found = least_squares(parameters, |p, out| {
        let gemm = make(p);
        residuals(samples, |sample| gemm_ns(gpu, &gemm, sample), out);
    });
    make(&found.map(rounded))
}

fn stream_ns(gpu: &Gpu, fitted: &of::Stream, sample: &Sample) -> f64 {
    LinearCost::stream(fitted, gpu, sample.shape[0]).ns(sample.size as f64)
}

fn fit_stream(gpu: &Gpu, samples: &[Sample]) -> of::Stream {
    let parameters = [Parameter::new(2.0, 0.1, 50.0), Parameter::share(0.5)];
    let make = |p: &[f64; 2]| of::Stream {
        overhead_us: p[0],
        memory: p[1],
    };
    let found = least_squares(parameters, |p, out| {
        let stream = make(p);
        residuals(samples, |sample| stream_ns(gpu, &stream, sample), out);
    });
    make(&found.map(rounded))
}

fn all_reduce_ns(gpu: &Gpu, fitted: &of::AllReduce, _: Kind, sample: &Sample) -> f64 {
    // One row of one byte each.
    let gpus = sample.shape[0] as u32;
    AllReduce::new(fitted, gpu, gpus, 1.0).ns(sample.size as f64)
}

fn fit_all_reduce(gpu: &Gpu, cut: &Cut) -> of::AllReduce {
    let samples = cut.samples(Kind::AllReduce);
    let parameters = [
        Parameter::new(30.0, 1.0, 200.0),
        Parameter::share(0.3),
        Parameter::new(60.0, 1.0, 500.0),
        Parameter::new(5.0, 0.1, 100.0),
        Parameter::share(0.6),
    ];
    let make = |p: &[f64; 5]| of::AllReduce {
        small: of::Ring {
            latency_us: p[0],
            // Fitted, it is nothing.
            hop_us: 0.0,
            nvlink: p[1],
        },
        large: of::Ring {
            latency_us: p[2],
            hop_us: p[3],
            nvlink: p[4],
        },
    };
    let found = least_squares(parameters, |p, out| {
        let all_reduce = make(p);
        let predict = |s: &Sample| all_reduce_ns(gpu, &all_reduce, Kind::AllReduce, s);
        residuals(&samples, predict, out);
    });
    make(&found.map(rounded))
}

/// Attention: FlashAttention-3's curve on H100, FlashAttention-2's best with the same shape on
/// A100.
fn attention(gpu: &Gpu) -> of::Attention {
    let parameters = [Parameter::share(0.6), Parameter::new(100.0, 1.0, 5000.0)];
    let [compute, context] = least_squares(parameters, |[compute, context], out| {
        let reached = |tokens: f64| compute * tokens / (tokens + context);
        let measured = published::FLASH_ATTENTION_3_H100.iter();
        out.clear();
        out.extend(
            measured
                .map(|&(tokens, tflops)| (reached(tokens) * published::H100_TFLOPS / tflops).ln()),
        );
    });
    let compute = if gpu.name == "a100" {
        let (tokens, share) = published::FLASH_ATTENTION_2_A100;
        share * (tokens + context) / tokens
    } else {
        compute
    };
    of::Attention {
        compute: rounded(compute),
        context: rounded(context),
    }
}

/// Gated DeltaNet: the same on every GPU but for the memory rate.
fn linear_attention() -> of::LinearAttention {
    let parameters = [
        Parameter::new(20.0, 0.1, 200.0),
        Parameter::new(20.0, 0.1, 500.0),
        Parameter::new(6000.0, 10.0, 1e6),
    ];
    let found = least_squares(parameters, |[overhead_us, token_ns, bytes], out| {
        let measured = published::GATED_DELTA_NET_H200.iter();
        out.clear();
        out.extend(measured.map(|&(tokens, heads, ms)| {
            let per_token = token_ns + heads * bytes / published::H200_BYTES_PER_NS;
            ((overhead_us * 1e3 + tokens * per_token) / (ms * 1e6)).ln()
        }));
    });
    let [overhead_us, token_ns, bytes_per_head] = found.map(rounded);
    of::LinearAttention {
        overhead_us,
        token_ns,
        bytes_per_head,
    }
}

#[cfg(test)]
#[path = "fit_tests.rs"]
mod tests;
