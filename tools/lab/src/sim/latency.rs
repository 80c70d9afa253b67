//! `laxity sim train-latency`: trains a predictor of iteration times and writes it to a file. Its
//! data are the simulator's roofline or measured iterations. It prints the error on iterations that
//! were held out.

use std::path::PathBuf;

use super::error::SimCommandError;
use clap::Args;
use laxity_sim::compute::Gpu;
use laxity_sim::model::Model;
use laxity_sim::requests::latency::{Roofline, Slowed};
use laxity_sim::requests::latency_file::LatencyFile;
use laxity_sim::requests::measured;
use laxity_sim::requests::predictor::{Errors, Shape, Training, train, train_on};

use laxity_cli::output::{check, json, replace, say};
use laxity_cli::table;

pub(super) const HELP: &str = "\
Without --csv and --record, the predictor is trained on the simulator's roofline of a GPU and a
model. For a real machine, train it on measurements of that machine:

  --record  the file that laxity-engine --record FILE writes
  --csv     a table with a header. Columns: prefill_tokens (prompt tokens computed), prefix (tokens
            before them whose KV was cached), decodes (requests that computed one token), context
            (number of tokens that these attended to), ms (duration). Optional columns: chunks
            (number of prompts), pairs (prompt tokens times tokens attended to, if there were
            several chunks).

The error is measured on a tenth of the iterations, which is not used for training. Another tenth
determines the margin that 99.8 % of them stay within, at least 5 %; policies plan with this margin.
The file is JSON with a version.

Examples:
  laxity sim train-latency a100.json
  laxity sim train-latency h100.json --gpu h100 --model llama-3-8b --ratio 2.0
  laxity sim train-latency here.json --record engine.jsonl
  laxity sim train-latency here.json --csv iterations.csv --json
  laxity sim reproduce qoserve --latency-model here.json";

/// Arguments of `laxity sim train-latency`.
#[derive(Args)]
pub(crate) struct TrainArgs {
    /// File for the predictor
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Table with iterations to train on. The option can be repeated
    #[arg(long, value_name = "CSV")]
    csv: Vec<PathBuf>,
    /// Record of laxity-engine with iterations to train on. The option can be repeated
    #[arg(long, value_name = "RECORD")]
    record: Vec<PathBuf>,
    /// GPU of the roofline: a100, h100, or a file
    #[arg(long, default_value = "a100", conflicts_with_all = ["csv", "record"])]
    gpu: String,
    /// Model of the roofline, by name or by the path of a TOML file
    #[arg(long, default_value = "llama-3-8b", conflicts_with_all = ["csv", "record"])]
    model: String,
    /// Number of GPUs that share the model
    #[arg(
        long, value_name = "N", default_value_t = 1, conflicts_with_all = ["csv", "record"],
        value_parser = clap::value_parser!(u32).range(1..=64)
    )]
    tp: u32,
    /// Host time between two iterations of the roofline, in µs
    #[arg(long, value_name = "US", conflicts_with_all = ["csv", "record", "ratio"])]
    host_us: Option<u32>,
    /// Choose the host time so that chunks of 2500 tokens are this many times as fast as chunks of
    /// 256
    #[arg(long, value_name = "R", conflicts_with_all = ["csv", "record"])]
    ratio: Option<f64>,
    /// Factor by which iterations are slower than the roofline
    #[arg(long, value_name = "F", default_value_t = 1.0, conflicts_with_all = ["csv", "record"])]
    slower: f64,
    /// Number of iterations to draw from the roofline
    #[arg(
        long, value_name = "N", default_value_t = 20_000, conflicts_with_all = ["csv", "record"],
        value_parser = clap::value_parser!(u32).range(100..=10_000_000)
    )]
    iterations: u32,
    /// Number of trees in the forest
    #[arg(
        long, value_name = "N", default_value_t = 16,
        value_parser = clap::value_parser!(u16).range(1..=1000)
    )]
    trees: u16,
    /// Maximum depth of a tree
    #[arg(
        long, value_name = "N", default_value_t = 16,
        value_parser = clap::value_parser!(u16).range(1..=64)
    )]
    depth: u16,
    /// Seed of all random numbers
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// Print the error as JSON
    #[arg(long)]
    json: bool,
}

/// Trains a predictor and prints its error.
pub(super) fn run(args: &TrainArgs) -> Result<(), SimCommandError> {
    // Check that the file can be written before training takes minutes.
    check(&args.file)?;
    let found = if args.csv.is_empty() && args.record.is_empty() {
        sampled(args)?
    } else {
        from_measured(args)?
    };
    let mut text = serde_json::to_string(&found)?;
    text.push('\n');
    replace(&args.file, text.as_bytes())?;
    show(args, &found)
}

fn sampled(args: &TrainArgs) -> Result<LatencyFile, SimCommandError> {
    if !(0.01..=100.0).contains(&args.slower) {
        let why = format!("--slower is {}; expected 0.01 to 100", args.slower);
        return Err(SimCommandError::Usage(why));
    }
    let (gpu, model) = (Gpu::named(&args.gpu)?, Model::named(&args.model)?);
    let roofline = match args.ratio {
        None => Roofline::with_host_us(&gpu, &model, args.tp, args.host_us.unwrap_or(0)),
        Some(ratio) => Roofline::calibrated(&gpu, &model, args.tp, ratio).ok_or_else(|| {
            SimCommandError::Usage(format!(
                "--ratio {ratio}: no host time makes chunks of 2500 so much faster than those \
                     of 256 here; \
                     expected less than 9.7, and more than they are without any"
            ))
        })?,
    };
    let words = format!(
        "the roofline of {} on {}, tensor parallel {}, host {}, {:.2}× slower",
        args.model,
        args.gpu,
        args.tp,
        roofline.host(),
        args.slower
    );
    let clock = Slowed { roofline, factor: args.slower };
    let training = Training {
        iterations: args.iterations as usize,
        trees: args.trees.into(),
        depth: args.depth,
        seed: args.seed,
        ..Training::default()
    };
    let (forest, errors) = train(&clock, &training)?;
    Ok(LatencyFile::new(words, errors, forest))
}

fn from_measured(args: &TrainArgs) -> Result<LatencyFile, SimCommandError> {
    let mut rows = Vec::new();
    for file in &args.csv {
        rows.extend(measured::table(file)?);
    }
    for file in &args.record {
        rows.extend(measured::record(file)?);
    }
    let shape = Shape { trees: args.trees.into(), depth: args.depth, seed: args.seed };
    let (forest, errors) = train_on(&rows, shape)?;
    let files: Vec<String> = args
        .csv
        .iter()
        .chain(&args.record)
        .map(|file| {
            let name = file.file_name().unwrap_or(file.as_os_str());
            name.to_string_lossy().into_owned()
        })
        .collect();
    let words = format!("{} measured iterations from {}", rows.len(), files.join(", "));
    Ok(LatencyFile::new(words, errors, forest))
}

fn show(args: &TrainArgs, found: &LatencyFile) -> Result<(), SimCommandError> {
    let Errors { iterations, mean, p95, most, late, margin, late_with_margin } = found.errors;
    if args.json {
        return Ok(say(json(&serde_json::json!({
            "file": args.file,
            "trained_on": found.trained_on,
            "trees": found.forest.trees(),
            "nodes": found.forest.size(),
            "errors": found.errors,
        }))?)?);
    }
    let mut rows = table::table(&["what", "value"]);
    rows.add_row(["trained on", found.trained_on.as_str()]);
    rows.add_row([
        "forest".to_owned(),
        format!("{} trees of {} nodes in all", found.forest.trees(), found.forest.size()),
    ]);
    rows.add_row(["iterations held out".to_owned(), iterations.to_string()]);
    for (what, percent) in [
        ("mean absolute error", mean),
        ("95th percentile of it", p95),
        ("largest", most),
        ("longer than predicted + 5 %", late),
        ("margin that a policy plans with", margin * 100.0),
        ("longer than with that margin", late_with_margin),
    ] {
        rows.add_row([what.to_owned(), format!("{percent:.2} %")]);
    }
    say(rows)?;
    Ok(say(format!("predictor: {}", args.file.display()))?)
}
