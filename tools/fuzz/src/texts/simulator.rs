//! Fuzzes the files of the simulator: plans, recorded traces, models, GPUs and their coefficients.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;

use laxity_sim::compute::{Coefficients, Gpu};
use laxity_sim::model::{FileError, Model};
use laxity_sim::plan::Plan;
use laxity_sim::scenario::{Arrivals, Source, Workload};
use laxity_sim::workload::{self, Requests, Summary, WorkloadError};

use super::{NAME, check_line};

/// Most runs of a plan whose scenarios are made, so that an input takes milliseconds.
const RUNS_MAX: usize = 64;

fn plan(text: &str) {
    let plan = match Plan::parse("p", NAME, text) {
        Ok(plan) => plan,
        Err(error) => {
            assert!(!error.problem.trim().is_empty());
            assert!(!error.to_string().is_empty());
            if &*error.place.file == NAME && error.place.line > 0 {
                check_line(text, error.place.line);
            }
            return;
        }
    };
    let shown = plan.to_toml();
    let again = Plan::parse("p", "shown", &shown);
    let again = again.unwrap_or_else(|error| panic!("{error}\n{shown}"));
    assert_eq!(again.to_toml(), shown, "what was read can be written");
    let points = plan.axes.iter().map(|axis| axis.values.len()).product::<usize>();
    assert_eq!(plan.points().len(), points);
    if points * plan.variants.len() * plan.seeds.len() > RUNS_MAX {
        return;
    }
    match (plan.jobs(), again.jobs()) {
        (Ok(jobs), Ok(same)) => {
            assert_eq!(jobs.len(), points * plan.variants.len() * plan.seeds.len());
            for (job, same) in jobs.iter().zip(&same) {
                job.scenario.validate().expect("it was checked");
                assert_eq!(job.scenario, same.scenario, "{shown}");
            }
        }
        (Err(error), Err(_)) => assert!(!error.problem.is_empty()),
        (jobs, same) => panic!("{jobs:?} and written again {same:?}\n{shown}"),
    }
}

/// Calls `read` with the path of a file with these bytes.
fn with_file<T>(bytes: &[u8], read: impl FnOnce(PathBuf) -> T) -> T {
    use nix::sys::memfd::{MFdFlags, memfd_create};
    let memory = memfd_create(c"laxity-fuzz", MFdFlags::MFD_CLOEXEC).expect("memory");
    let mut file = File::from(memory);
    file.write_all(bytes).expect("memory");
    read(PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())))
}

fn check_requests(requests: &Requests) {
    assert!(!requests.list.is_empty() && requests.list.is_sorted_by_key(|it| it.arrival));
    for request in &requests.list {
        assert!(request.prompt_tokens > 0 && request.output_tokens > 0);
        let blocks = requests.blocks_of(request);
        assert!(blocks.iter().all(|id| *id < requests.distinct_blocks));
        let all = request.prompt_tokens.div_ceil(requests.block_tokens) as usize;
        assert!(blocks.is_empty() || blocks.len() == all, "{} blocks", blocks.len());
    }
    let summary = Summary::of(requests);
    assert_eq!(summary.requests, requests.list.len() as u64);
    let Summary { rate, gap_variation, reuse, reuse_per_request, hottest_tenth, .. } = summary;
    assert!([summary.seconds, rate, gap_variation].iter().all(|it| it.is_finite() && *it >= 0.0));
    for share in [reuse, reuse_per_request, hottest_tenth] {
        assert!((0.0..=1.0).contains(&share), "{summary:?}");
    }
}

/// Reads a trace. The first byte says how requests arrive, and how long they are.
fn trace(source: Source, bytes: &[u8]) {
    let [how, bytes @ ..] = bytes else { return };
    let arrivals = [Arrivals::Recorded, Arrivals::Poisson, Arrivals::Bursty][usize::from(how % 3)];
    let result = with_file(bytes, |path| {
        let workload = Workload {
            source,
            file: Some(path),
            arrivals,
            seconds: 2.0,
            length_scale: [1.0, 0.5, 3.0][usize::from(how / 4 % 3)],
            ..Workload::default()
        };
        workload::load(&workload, 8.0, u64::from(*how))
    });
    match result {
        Ok(requests) => check_requests(&requests),
        Err(WorkloadError::Line { line, problem, .. }) => {
            assert!(line > 0 && !problem.is_empty());
            // A packed trace has more lines than its file.
            if !bytes.starts_with(&[0x1f, 0x8b]) {
                check_line(&String::from_utf8_lossy(bytes), line as usize);
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn check_error(text: &str, error: &FileError) {
    match error {
        FileError::Content { line, problem, .. } => {
            assert!(!problem.trim().is_empty());
            line.iter().for_each(|line| check_line(text, *line));
        }
        // A GPU names its coefficients, which may be a path.
        FileError::Unknown { .. } | FileError::Read { .. } => {
            assert!(!error.to_string().is_empty());
        }
    }
}

fn model(text: &str) {
    let named = |path: PathBuf| Model::named(&path.display().to_string());
    let model = match with_file(text.as_bytes(), named) {
        Ok(model) => model,
        Err(error) => return check_error(text, &error),
    };
    assert!(model.layers > 0 && model.heads > 0 && model.top_k <= model.experts);
    assert!(model.active_parameters() <= model.parameters());
    for layer in [0, model.layers - 1] {
        let bytes = (model.kv_bytes_per_token(layer), model.state_bytes(layer));
        assert!(bytes.0 == 0 || bytes.1 == 0, "a layer has one kind of attention");
    }
    let shown = toml::to_string(&model).expect("plain data");
    let again = with_file(shown.as_bytes(), named);
    assert_eq!(again.unwrap_or_else(|error| panic!("{error}\n{shown}")), model);
}

fn gpu(text: &str) {
    let named = |path: PathBuf| Gpu::named(&path.display().to_string());
    match with_file(text.as_bytes(), named) {
        Ok(gpu) => {
            let rates = [gpu.peak_flops, gpu.memory_bytes_per_second, gpu.nvlink_bytes_per_second];
            assert!(rates.iter().all(|rate| rate.is_finite() && *rate > 0.0), "{rates:?}");
            assert!(gpu.memory_bytes > 0);
        }
        Err(error) => check_error(text, &error),
    }
}

fn coefficients(text: &str) {
    let named = |path: PathBuf| Coefficients::named(&path.display().to_string());
    match with_file(text.as_bytes(), named) {
        Ok(read) => {
            let shown = toml::to_string(&read).expect("numbers");
            let again = with_file(shown.as_bytes(), named);
            assert_eq!(again.unwrap_or_else(|error| panic!("{error}\n{shown}")), read);
        }
        Err(error) => check_error(text, &error),
    }
}

pub(super) fn run(kind: u8, bytes: &[u8], text: &str) {
    match kind % 8 {
        0 => plan(text),
        1 => trace(Source::Mooncake, bytes),
        2 => trace(Source::Qwen, bytes),
        3 => trace(Source::Azure, bytes),
        4 => trace(Source::Burstgpt, bytes),
        5 => model(text),
        6 => gpu(text),
        _ => coefficients(text),
    }
}

const PLAN: &str = include_str!("plan.toml");

const MOONCAKE: &str = r#"
{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 3000.5, "input_length": 1600.0, "output_length": 0, "hash_ids": [0, 1, 3, 4]}
{"timestamp": 2000, "input_length": 512, "output_length": 7, "hash_ids": [9], "more": {}}
"#;

const QWEN: &str = r#"
{"chat_id": 1, "timestamp": 61.114, "input_length": 40, "output_length": 3, "hash_ids": [7, 8, 9]}
{"chat_id": 1, "timestamp": 62, "input_length": 33, "output_length": 1, "hash_ids": [8, 9]}
"#;

const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n\
    2023-11-16 23:59:59.5000000,4808,10\r\n2023-11-17 00:00:01.0000000,3180,8";

const BURSTGPT: &str = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
    5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087.0,0,1317,API log\n";

pub(super) fn seeds() -> Vec<(u8, &'static str)> {
    // The byte before a trace is how its requests arrive.
    let trace = |kind, how: &str, text: &str| -> (u8, &'static str) {
        (kind, Box::leak(format!("{how}{text}").into_boxed_str()))
    };
    vec![
        (0, PLAN),
        (0, include_str!("../../../sim/plans/smoke.toml")),
        (0, include_str!("../../../sim/plans/nic-rates.toml")),
        trace(1, "\0", MOONCAKE),
        trace(1, "\u{1}", MOONCAKE),
        trace(2, "\u{4}", QWEN),
        trace(3, "\0", AZURE),
        trace(4, "\u{a}", BURSTGPT),
        (5, include_str!("../../../sim/models/mixtral-8x7b.toml")),
        (5, include_str!("../../../sim/models/qwen3-coder-next.toml")),
        (6, include_str!("../../../sim/gpus/a100.toml")),
        (7, include_str!("../../../sim/fits/a100.toml")),
    ]
}
