//! The progress bar on standard error: completed runs, events per second, remaining time.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::host::thousands;

#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    since: Instant,
}

impl Progress {
    pub(crate) fn new(total: usize, done: usize, shown: bool) -> Self {
        let bar = if shown { ProgressBar::new(total as u64) } else { ProgressBar::hidden() };
        let template = "{bar:30} {pos}/{len} runs, {msg}{elapsed} so far, {eta} to go";
        bar.set_style(ProgressStyle::with_template(template).expect("a correct template"));
        bar.set_position(done as u64);
        // Earlier runs must not affect the estimate of the remaining time.
        bar.reset_eta();
        if shown {
            bar.enable_steady_tick(Duration::from_millis(500));
        }
        Self { bar, since: Instant::now() }
    }

    pub(crate) fn advance(&self, events: u64, failed: usize) {
        let rate = events as f64 / self.since.elapsed().as_secs_f64().max(1e-9);
        let failures = match failed {
            0 => String::new(),
            failed => format!("{failed} failed, "),
        };
        self.bar.set_message(format!("{failures}{} events/s, ", thousands(rate)));
        self.step();
    }

    pub(crate) fn step(&self) {
        self.bar.inc(1);
    }

    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
