//! The progress bar on standard error: completed runs, events per second, remaining time.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::host::thousands;

#[derive(Debug)]
pub(super) struct Progress {
    bar: ProgressBar,
    since: Instant,
}

impl Progress {
    pub(super) fn new(total: usize, done: usize, shown: bool) -> Self {
        let target =
            if shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(total as u64), target);
        bar.set_style(
            ProgressStyle::with_template(
                "{bar:30} {pos}/{len} runs, {msg}{elapsed} so far, {eta} to go",
            )
            .expect("a correct template"),
        );
        bar.set_position(done as u64);
        // Earlier runs must not affect the estimate of the remaining time.
        bar.reset_eta();
        if shown {
            bar.enable_steady_tick(Duration::from_millis(500));
        }
        Self { bar, since: Instant::now() }
    }

    pub(super) fn advance(&self, events: u64, failed: usize) {
        let rate = events as f64 / self.since.elapsed().as_secs_f64().max(1e-9);
        let failures = match failed {
            0 => String::new(),
            failed => format!("{failed} failed, "),
        };
        self.bar.set_message(format!("{failures}{} events/s, ", thousands(rate)));
        self.bar.inc(1);
    }

    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
