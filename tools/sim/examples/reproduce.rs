//! A paper's claims without the rest of the program: `cargo run --release -p laxity-sim --example reproduce -- NAME [quick] [markdown]`.
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
    let options = Options {
        seeds: if has("quick") { vec![1] } else { vec![1, 2, 3] },
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
