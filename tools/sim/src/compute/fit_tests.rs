//! Tests of fitting: on made-up profiles, and on the recorded ones where they are.

use std::fmt::Write as _;
use std::fs;

use super::*;

const TOKENS: [u64; 20] = [
    1, 8, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
    16384, 32768,
];

/// A profile of a model as the coefficients say, with the name of its file.
fn profile_of(gpu: &Gpu, name: &str, hidden: f64, inner: f64) -> (String, String) {
    let of = Linear {
        gemm: gpu.coefficients.gemm.clone(),
        stream: gpu.coefficients.stream.clone(),
    };
    let operators = [
        ("emb", Kind::Embedding),
        ("input_layernorm", Kind::Norm),
        ("attn_pre_proj", Kind::Gemm),
        ("attn_rope", Kind::Rope),
        ("attn_post_proj", Kind::Gemm),
        ("post_attention_layernorm", Kind::Norm),
        ("mlp_up_proj", Kind::Gemm),
        ("mlp_act", Kind::Activation),
        ("mlp_down_proj", Kind::Gemm),
        ("add", Kind::Add),
    ];
    let mut text = String::from(
        "n_head,n_kv_head,n_embd,n_expanded_embd,num_tokens,num_tensor_parallel_workers",
    );
    for (operator, _) in operators {
        write!(text, ",{operator}_ms_median").unwrap();
    }
    for (tokens, tp) in TOKENS
        .iter()
        .flat_map(|tokens| [1.0, 2.0, 4.0, 8.0].map(|tp| (tokens, tp)))
    {
        write!(text, "\n32,8,{hidden},{inner},{tokens},{tp}").unwrap();
        for (operator, kind) in operators {
            let shape = match operator {
                "attn_pre_proj" => [1.5 * hidden / tp, hidden],
                "attn_post_proj" => [hidden, hidden / tp],
                "mlp_up_proj" => [2.0 * inner / tp, hidden],
                "mlp_down_proj" => [hidden, inner / tp],
                "attn_rope" => [2.0 * 1.25 * hidden / tp * BYTES, 0.0],
                "mlp_act" => [3.0 * inner / tp * BYTES, 0.0],
                "add" => [3.0 * hidden * BYTES, 0.0],
                _ => [2.0 * hidden * BYTES, 0.0],
            };
            let sample = Sample {
                size: *tokens,
                shape,
                tp: tp as u32,
                ns: 0.0,
            };
            write!(text, ",{}", linear_ns(gpu, &of, kind, &sample) / 1e6).unwrap();
        }
    }
    (format!("{}_{name}_linear.csv", gpu.name), text)
}

fn all_reduces_of(gpu: &Gpu) -> (String, String) {
    let mut text = String::from("num_workers,size,devices_per_node,all_reduce_ms_median\n");
    for gpus in [2, 4, 8_u32] {
        for kib in (1..40).map(|i| i * i * 40) {
            let sample = Sample {
                size: kib * 1024,
                shape: [f64::from(gpus), f64::from(gpus)],
                tp: 1,
                ns: 0.0,
            };
            let ns = all_reduce_ns(gpu, &gpu.coefficients.all_reduce, Kind::AllReduce, &sample);
            writeln!(text, "{gpus},{},{gpus},{}", sample.size, ns / 1e6).unwrap();
            // Over two servers: none of ours.
            writeln!(text, "{gpus},{},{},9", sample.size, gpus / 2).unwrap();
        }
    }
    (format!("{}_made_up_all_reduce.csv", gpu.name), text)
}

fn made_up() -> Vec<(String, String)> {
    let gpus = Gpu::built_in();
    vec![
        profile_of(&gpus[0], "small", 4096.0, 14336.0),
        profile_of(&gpus[0], "large", 8192.0, 28672.0),
        all_reduces_of(&gpus[0]),
        profile_of(&gpus[1], "small", 4096.0, 11008.0),
    ]
}

fn fitted(files: &[(String, String)]) -> Result<FitReport, FitError> {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    fit(folder.path())
}

fn same(found: &Coefficients, expected: &Coefficients, tolerance: f64) {
    for ((name, found), (_, expected)) in found.all().into_iter().zip(expected.all()) {
        let off = (found - expected).abs();
        assert!(
            off <= tolerance * expected,
            "{name}: {found}, not {expected}"
        );
    }
}

#[test]
fn the_coefficients_that_made_profiles_are_found_again() {
    let report = fitted(&made_up()).unwrap();
    for (fit, gpu) in report.gpus.iter().zip(Gpu::built_in()) {
        assert_eq!(fit.gpu, gpu.name);
        same(&fit.coefficients, &gpu.coefficients, 0.02);
    }
    // 3 profiles of 10 operators and a layer, and all-reduce.
    assert_eq!(report.operators.len(), 3 * 11 + 1);
    for operator in &report.operators {
        let kept_out = [&operator.narrowest_kept_out, &operator.model_kept_out];
        let of_all = [operator.fitted, operator.sizes_kept_out];
        for errors in of_all.iter().chain(kept_out.into_iter().flatten()) {
            assert!(errors.count > 0 && errors.p90 < 0.02, "{operator:?}");
        }
    }
    let table = report.table();
    assert!(table.contains("a100_large_linear"), "{table}");
    assert_eq!(table.lines().count(), report.operators.len() + 1);
}

#[test]
fn files_of_coefficients_are_read_back() {
    let report = fitted(&made_up()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for ((name, text), fit) in report.files().into_iter().zip(&report.gpus) {
        assert_eq!(name, format!("{}.toml", fit.gpu));
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        let read = Coefficients::named(path.to_str().unwrap()).unwrap();
        assert_eq!(read, fit.coefficients);
    }
}

#[test]
fn errors_say_file_line_column_and_what_was_expected() {
    let files = made_up();
    let error = |files: &[(String, String)]| {
        let error = fitted(files).unwrap_err().to_string();
        error
            .split_once("/a100")
            .map_or(error.clone(), |(_, rest)| rest.to_owned())
    };
    let mut bad = files.clone();
    bad[0].1 = bad[0]
        .1
        .replacen("\n32,8,4096,14336,1,2,", "\n32,8,4096,14336,1,two,", 1);
    assert_eq!(
        error(&bad),
        "_small_linear.csv, line 3: `num_tensor_parallel_workers`: expected a positive number, \
         found `two`"
    );
    let mut bad = files.clone();
    bad[0].1 = bad[0].1.replace("mlp_act_ms_median", "mlp_act_ms_mean");
    assert_eq!(
        error(&bad),
        "_small_linear.csv, line 1: expected a column `mlp_act_ms_median`"
    );
    let mut bad = files.clone();
    bad[0].1.push_str("\n1,2,3");
    assert!(error(&bad).contains("line: 82"), "{}", error(&bad));
    let mut bad = files.clone();
    bad[0].1 = bad[0].1.lines().take(4).collect::<Vec<_>>().join("\n");
    assert_eq!(
        error(&bad),
        "_small_linear.csv: expected 10 lines or more to fit to, found 3"
    );
    assert!(error(&files[..2]).ends_with("expected a file a100_*_all_reduce.csv"));
    assert!(error(&files[..3]).ends_with("expected a file h100_*_linear.csv"));
}

#[test]
fn published_figures_are_met() {
    for gpu in Gpu::built_in() {
        let of = attention(&gpu);
        let reached = |tokens: f64| of.compute * tokens / (tokens + of.context);
        if gpu.name == "a100" {
            // The abstract's range: 50 to 73 %.
            assert!((0.50..0.52).contains(&reached(512.0)), "{of:?}");
            assert!((0.72..0.74).contains(&reached(16384.0)), "{of:?}");
        } else {
            for (tokens, tflops) in published::FLASH_ATTENTION_3_H100 {
                let off = reached(tokens) * published::H100_TFLOPS / tflops - 1.0;
                assert!(off.abs() < 0.03, "{tokens}: {off}");
            }
        }
    }
    let of = linear_attention();
    for (tokens, heads, ms) in published::GATED_DELTA_NET_H200 {
        let per_token = of.token_ns + heads * of.bytes_per_head / published::H200_BYTES_PER_NS;
        let off = (of.overhead_us / 1e3 + tokens * per_token / 1e6) / ms - 1.0;
        assert!(off.abs() < 0.12, "{tokens} {heads}: {off}");
    }
}

#[test]
fn the_committed_coefficients_are_those_of_the_recorded_profiles() {
    let Some(folder) = laxity_tests::recorded_data() else {
        return;
    };
    let report = fit(&folder.join("profiles")).unwrap();
    eprintln!("{}", report.table());
    for (fit, gpu) in report.gpus.iter().zip(Gpu::built_in()) {
        same(&fit.coefficients, &gpu.coefficients, 1e-3);
    }
    for operator in &report.operators {
        let layer = operator.operator == "layer";
        let (median, p90) = if layer { (0.05, 0.11) } else { (0.12, 0.35) };
        for errors in [operator.fitted, operator.sizes_kept_out] {
            assert!(errors.median < median && errors.p90 < p90, "{operator:?}");
        }
        for errors in [operator.narrowest_kept_out, operator.model_kept_out] {
            let errors = errors.unwrap_or_default();
            assert!(errors.median < 0.16 && errors.p90 < 0.45, "{operator:?}");
            assert!(
                !layer || (errors.median < 0.05 && errors.p90 < 0.12),
                "{operator:?}"
            );
        }
    }
}
