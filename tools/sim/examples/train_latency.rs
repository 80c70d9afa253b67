//! Trains a predictor of iteration times, says how far off it is, and writes it as JSON:
//! `cargo run --release -p laxity-sim --example train_latency -- GPU MODEL TP HOST_US FILE`, e.g. `a100 llama-3-8b 1 1700 forest.json`.

use laxity_requests::Span;
use laxity_sim::compute::Gpu;
use laxity_sim::model::Model;
use laxity_sim::requests::latency::Roofline;
use laxity_sim::requests::predictor::{Training, train};

type Failure = Box<dyn std::error::Error>;

fn main() {
    if let Err(failure) = trained() {
        eprintln!("{failure}");
        std::process::exit(1);
    }
}

fn trained() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [gpu, model, tp, host_us, file] = arguments.as_slice() else {
        return Err(
            "GPU MODEL TP HOST_US FILE are asked for, e.g. a100 llama-3-8b 1 1700 forest.json"
                .into(),
        );
    };
    let number = |what: &str, text: &str| {
        text.parse::<u32>()
            .map_err(|_| format!("{what} is {text}; expected a whole number"))
    };
    let (tp, host_us) = (number("TP", tp)?, number("HOST_US", host_us)?);
    if tp == 0 {
        return Err("TP is 0; expected 1 at least".into());
    }
    let host = Span::from_micros(host_us.into());
    let clock = Roofline::new(&Gpu::named(gpu)?, &Model::named(model)?, tp, host);
    let (forest, errors) = train(&clock, &Training::default())?;
    std::fs::write(file, serde_json::to_string(&forest)?)
        .map_err(|cause| format!("{file}: {cause}; name a file that can be written"))?;
    println!("{}", serde_json::to_string_pretty(&errors)?);
    println!(
        "{} trees of {} nodes in {file}",
        forest.trees(),
        forest.size()
    );
    Ok(())
}
