//! The costs of decisions, each compared with a reference of the same run. A replica's iteration
//! (its events and the next plan) with 256 decoding requests and 10 000 queued ones may take 20 µs.
//! A dispatch over 64 instances may take 10 µs.
//!
//! `cargo bench -p laxity-requests` prints the table. `-- NAME` selects rows by a part of the name
//! or by the whole name. With `-- --strict` the exit status is 1 if a median is above its limit.
//! `-- --count N NAME` runs one row N times without timing, for callgrind
//! (`--toggle-collect='*decisions*measured*'`). Instruction counts are the same on a busy machine.
//!
//! Times are of single decisions. The fastest shows the cost of the code, and the median includes
//! the machine. If they differ much, other programs were running. `× FCFS` (or `× round robin`) and
//! `× chase` are ratios of medians. The unit of the latter is a walk over 256 cache lines in random
//! order in 2 MiB, about the memory accesses that 256 tokens need.

mod dispatch;
mod iteration;
mod reference;
mod workflow;

use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// A policy under test.
trait Subject {
    /// Prepares the next decision. Not measured.
    fn prepare(&mut self) {}
    /// Makes one or more decisions and returns their number.
    fn decide(&mut self) -> usize;
}

/// A row of the table.
struct Row {
    name: String,
    /// The kind of the row. Medians are compared with the first row of the same kind.
    kind: &'static str,
    limit_us: Option<f64>,
    make: Box<dyn Fn() -> Box<dyn Subject>>,
}

/// Decisions after which a subject is created again, so that ended requests don't change the load.
const ROUND: usize = 64;
/// Number of rounds of a row.
const ROUNDS: usize = 12;

/// Runs a decision. Not inlined, so that callgrind finds the function.
#[inline(never)]
fn measured(subject: &mut dyn Subject) -> usize {
    black_box(subject.decide())
}

#[derive(Clone, Copy)]
struct Figure {
    fastest_us: f64,
    median_us: f64,
    worst_us: f64,
}

fn time(row: &Row) -> Option<Figure> {
    let mut samples = Vec::with_capacity(ROUND * ROUNDS);
    for _ in 0..ROUNDS {
        let mut subject = (row.make)();
        for turn in 0..ROUND {
            subject.prepare();
            let begun = Instant::now();
            let decisions = measured(&mut *subject);
            let took = begun.elapsed();
            // The first decisions fill caches and don't count.
            if turn >= 4 && decisions > 0 {
                samples.push(took.as_secs_f64() * 1e6 / decisions as f64);
            }
        }
    }
    samples.sort_by(f64::total_cmp);
    let at = |share: f64| samples[(share * (samples.len() - 1) as f64) as usize];
    (!samples.is_empty()).then(|| Figure {
        fastest_us: samples[0],
        median_us: at(0.5),
        worst_us: at(0.99),
    })
}

fn rows() -> Vec<Row> {
    let mut rows = reference::rows();
    rows.extend(iteration::rows());
    rows.extend(dispatch::rows());
    rows.extend(workflow::rows());
    rows
}

struct Arguments {
    only: Vec<String>,
    count: Option<usize>,
    strict: bool,
}

fn arguments() -> Result<Arguments, String> {
    let mut found = Arguments { only: Vec::new(), count: None, strict: false };
    let mut all = std::env::args().skip(1);
    while let Some(argument) = all.next() {
        match argument.as_str() {
            // Cargo passes this argument.
            "--bench" => (),
            "--strict" => found.strict = true,
            "--count" => {
                let count = all.next().and_then(|count| count.parse().ok());
                found.count = Some(count.ok_or("--count wants a number")?);
            }
            other if other.starts_with('-') => {
                return Err(format!("{other} is unknown; see the head of this bench"));
            }
            name => found.only.push(name.to_owned()),
        }
    }
    Ok(found)
}

fn main() -> ExitCode {
    let arguments = match arguments() {
        Ok(arguments) => arguments,
        Err(wrong) => {
            eprintln!("decisions: {wrong}");
            return ExitCode::from(2);
        }
    };
    let all = rows();
    // A complete name selects only that row.
    let means = |part: &String, row: &Row| {
        row.name == *part
            || (row.name.contains(part.as_str()) && all.iter().all(|other| other.name != *part))
    };
    let wanted = |row: &&Row| {
        arguments.only.is_empty() || arguments.only.iter().any(|part| means(part, row))
    };
    if let Some(count) = arguments.count {
        for row in all.iter().filter(wanted) {
            let mut subject = (row.make)();
            let mut decisions = 0;
            for _ in 0..count {
                subject.prepare();
                decisions += measured(&mut *subject);
            }
            println!("{}: {count} times, {decisions} decisions", row.name);
        }
        return ExitCode::SUCCESS;
    }
    let missed = table(&all, wanted);
    if arguments.strict && missed > 0 {
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Measures and prints rows. Returns how many medians are above their limit.
fn table(all: &[Row], wanted: impl Fn(&&Row) -> bool) -> usize {
    let begun = Instant::now();
    println!("what decisions cost, µs; a median above its limit is missed");
    println!(
        "{:58} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7}",
        "", "fastest", "median", "99 %", "× first", "× chase", "limit"
    );
    let mut first: Vec<(&str, Figure)> = Vec::new();
    let mut chase = None;
    let mut missed = 0;
    for row in all {
        let needed =
            row.kind == reference::KIND || !first.iter().any(|(kind, _)| *kind == row.kind);
        if !needed && !wanted(&row) {
            continue;
        }
        let Some(figure) = time(row) else {
            println!("{:58} nothing was decided", row.name);
            missed += 1;
            continue;
        };
        if row.name == reference::CHASE {
            chase = Some(figure.median_us);
        }
        if !first.iter().any(|(kind, _)| *kind == row.kind) {
            first.push((row.kind, figure));
            println!();
        }
        let beside = first.iter().find(|(kind, _)| *kind == row.kind);
        let ratio = |of: Option<f64>| {
            of.map_or_else(String::new, |of| format!("{:.2}", figure.median_us / of))
        };
        let verdict = match row.limit_us {
            Some(limit) if figure.median_us > limit => {
                missed += 1;
                format!("≤ {limit} MISSED")
            }
            Some(limit) => format!("≤ {limit} ok"),
            None => String::new(),
        };
        println!(
            "{:58} {:>9.2} {:>9.2} {:>9.2} {:>9} {:>9} {verdict}",
            row.name,
            figure.fastest_us,
            figure.median_us,
            figure.worst_us,
            ratio(beside.map(|(_, first)| first.median_us)),
            ratio(chase),
        );
    }
    let spent = Duration::from_secs(begun.elapsed().as_secs());
    println!("\n{missed} missed, {spent:?}");
    missed
}
