//! A paper's claims without the rest of the program: `cargo run --release -p laxity-sim --example reproduce -- NAME [quick] [markdown]
//! [seeds=N]`.
//! For people: `laxity sim reproduce NAME`.

use std::num::NonZero;

use laxity_sim::requests::PAPERS;
use laxity_sim::requests::reproduction::Options;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |word: &str| arguments.iter().any(|argument| argument == word);
    let Some(paper) = PAPERS.iter().find(|paper| has(paper.name)) else {
        let known: Vec<&str> = PAPERS.iter().map(|paper| paper.name).collect();
        eprintln!("name one of: {}", known.join(", "));
        std::process::exit(2);
    };
    let seeds = arguments
        .iter()
        .find_map(|argument| argument.strip_prefix("seeds=")?.parse().ok())
        .unwrap_or(if has("quick") { 1 } else { 3 });
    let options = Options {
        seeds: (1..=seeds).collect(),
        quick: has("quick"),
        jobs: NonZero::<usize>::MIN,
        data: std::env::var_os("LAXITY_DATA").map(Into::into),
        progress: true,
    };
    match (paper.run)(&options) {
        Ok(found) if has("markdown") => println!("{}", found.markdown()),
        Ok(found) => println!("{}", found.table()),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}
