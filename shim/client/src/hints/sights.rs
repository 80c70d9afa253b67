//! First sights of requests, from which the deadlines of transfers with an objective and no
//! deadline are counted.

use super::REQUESTS_MAX;
use super::bounded::Bounded;

/// The time of the first sight of each request, within limits.
#[derive(Debug)]
pub struct FirstSights(Bounded<u64>);

impl FirstSights {
    pub(super) fn new(requests: usize) -> Self {
        Self(Bounded::new(requests))
    }

    /// Returns the deadline of a transfer with an objective and no deadline. It is counted from the
    /// first sight of its request, or from now without a request.
    pub fn due(&mut self, now: u64, request: u64, objective_ns: u64) -> u64 {
        if request == 0 {
            return now.saturating_add(objective_ns);
        }
        // After twice the objective, the number counts as another request's, because an engine may
        // use numbers again.
        let is_over = |seen: u64| now.saturating_sub(seen) >= objective_ns.saturating_mul(2);
        let seen = match self.0.get(request) {
            Some(&seen) if !is_over(seen) => seen,
            _ => {
                self.0.insert(request, now);
                now
            }
        };
        seen.saturating_add(objective_ns)
    }

    /// Removes a request that has ended, since its number may be used again.
    pub(super) fn forget(&mut self, request: u64) {
        self.0.remove(request);
    }
}

impl Default for FirstSights {
    fn default() -> Self {
        Self::new(REQUESTS_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_objective_counts_from_the_first_sight_of_its_request() {
        let mut sights = FirstSights::default();
        assert_eq!(sights.due(100, 7, 50), 150);
        assert_eq!(sights.due(120, 7, 50), 150, "it is the same request");
        assert_eq!(sights.due(120, 8, 50), 170, "another one");
        assert_eq!(sights.due(130, 0, 50), 180, "nobody's");
        assert_eq!(sights.due(140, 0, 50), 190);
        assert_eq!(sights.due(199, 7, 50), 150, "late, and still the same");
        assert_eq!(sights.due(200, 7, 50), 250, "its number is used again");
        sights.forget(7);
        assert_eq!(sights.due(210, 7, 50), 260, "it has ended and come again");
    }
}
