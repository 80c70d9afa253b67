//! Runs the lab with its defaults, or with a configuration in JSON given as the first argument,
//! and prints table and JSON: `cargo run --release --example lab -- '{"policies":["none"]}'`.
//! A second argument names the file for the page.

use std::process::ExitCode;

use laxity_rig::lab::{self, LabConfig};
use laxity_rig::report;

fn main() -> ExitCode {
    if let Some(code) = lab::internal_call() {
        return code;
    }
    let outcome = std::env::args_os()
        .nth(1)
        .map_or_else(
            || Ok(LabConfig::default()),
            |json| serde_json::from_str(&json.to_string_lossy()).map_err(Into::into),
        )
        .and_then(|config| lab::run(&config, true));
    match outcome {
        Ok(report) => {
            if let Some(page) = std::env::args_os().nth(2)
                && let Err(error) = std::fs::write(&page, report::html(&report))
            {
                eprintln!("lab: cannot write {}: {error}", page.display());
            }
            eprintln!("{}", report::table(&report));
            println!("{}", serde_json::to_string_pretty(&report).unwrap_or_default());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}
