//! A paper's claims without the rest of the program: `cargo run --release -p laxity-sim --example reproduce -- NAME [quick] [markdown]
//! [seeds=N] [jobs=N]`.
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
    let number = |name: &str| {
        let mut all = arguments.iter();
        all.find_map(|argument| argument.strip_prefix(name)?.parse::<u64>().ok())
    };
    let seeds = number("seeds=").unwrap_or(if has("quick") { 1 } else { 3 });
    let jobs = number("jobs=").and_then(|jobs| NonZero::new(jobs as usize));
    let options = Options {
        seeds: (1..=seeds).collect(),
        quick: has("quick"),
        jobs: jobs.unwrap_or(NonZero::<usize>::MIN),
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
