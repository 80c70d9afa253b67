//! The wait before the next attempt to reach a coordinator.
//!
//! The wait doubles with each failure. Each wait is drawn from the upper half of its range. So the
//! hosts of a cluster do not all connect at once after a failover.

use std::time::Duration;

/// Waits that double with each failure.
#[derive(Clone, Debug)]
pub struct Backoff {
    least: Duration,
    most: Duration,
    next: Duration,
}

impl Backoff {
    /// Makes waits from `least` to `most`.
    pub fn new(least: Duration, most: Duration) -> Self {
        Self { least, most: most.max(least), next: least }
    }

    /// Makes the next wait short, after a useful stream.
    pub fn reset(&mut self) {
        self.next = self.least;
    }

    /// Returns the next wait. `random` is any number.
    pub fn wait(&mut self, random: u64) -> Duration {
        let range = self.next;
        self.next = range.saturating_mul(2).min(self.most);
        let half = range / 2;
        half + half.mul_f64(random as f64 / u64::MAX as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn waits_double_up_to_the_most_and_start_anew_after_a_success() {
        let mut backoff = Backoff::new(ms(100), ms(1000));
        let waits: Vec<_> = (0..6).map(|_| backoff.wait(u64::MAX)).collect();
        assert_eq!(waits, [100, 200, 400, 800, 1000, 1000].map(ms), "the upper ends");
        backoff.reset();
        assert_eq!(backoff.wait(0), ms(50), "the lower end");
    }

    #[test]
    fn a_wait_is_in_the_upper_half_of_its_range() {
        for random in (0..u64::MAX).step_by(usize::MAX / 97) {
            let wait = Backoff::new(ms(100), ms(1000)).wait(random);
            assert!((ms(50)..=ms(100)).contains(&wait), "{wait:?}");
        }
    }
}
