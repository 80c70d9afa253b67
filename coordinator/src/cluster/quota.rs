//! Shares of a total. Each host has a reserved part, may use the shared rest, and gets no more than
//! a cap. So memory is bounded, and no host can use up the part of another.

/// Parts of a total that hosts take and give back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Quota {
    reserved: usize,
    /// Maximum number of entries of one host, shared ones included.
    host_max: usize,
    shared_max: usize,
    shared: usize,
}

impl Quota {
    /// Reserves half of `total` in equal parts for `hosts_max` hosts, but no more than `host_max`
    /// for each. All hosts share the rest.
    pub(crate) const fn new(total: usize, hosts_max: usize, host_max: usize) -> Self {
        let hosts_max = if hosts_max == 0 { 1 } else { hosts_max };
        let share = total / 2 / hosts_max;
        let reserved = if share < host_max { share } else { host_max };
        Self { reserved, host_max, shared_max: total - reserved * hosts_max, shared: 0 }
    }

    /// Takes one more entry for a host that holds `held`. Returns whether the host may have it.
    pub(crate) const fn take(&mut self, held: &mut usize) -> bool {
        if *held >= self.host_max {
            return false;
        }
        if *held >= self.reserved {
            if self.shared >= self.shared_max {
                return false;
            }
            self.shared += 1;
        }
        *held += 1;
        true
    }

    pub(crate) const fn give(&mut self, held: &mut usize) {
        if *held == 0 {
            return;
        }
        if *held > self.reserved {
            self.shared -= 1;
        }
        *held -= 1;
    }

    /// Reports whether the shared part is what hosts hold beyond their reserved parts.
    pub(super) fn is_shared_by(&self, held: impl Iterator<Item = usize>) -> bool {
        let beyond = held.map(|held| held.saturating_sub(self.reserved));
        beyond.sum::<usize>() == self.shared
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_greedy_host_leaves_the_others_what_is_reserved_for_them() {
        let mut quota = Quota::new(100, 10, 1000);
        let (mut greedy, mut modest) = (0, 0);
        while quota.take(&mut greedy) {}
        assert_eq!(greedy, 55);
        for _ in 0..5 {
            assert!(quota.take(&mut modest));
        }
        assert!(!quota.take(&mut modest));
        quota.give(&mut greedy);
        assert!(quota.take(&mut modest));
    }

    proptest! {
        #[test]
        fn the_total_is_never_exceeded_and_everything_comes_back(
            steps in proptest::collection::vec((0_usize..4, any::<bool>()), 0..400),
            total in 8_usize..100, host_max in 1_usize..40,
        ) {
            let mut quota = Quota::new(total, 4, host_max);
            let mut held = [0; 4];
            for (host, take) in steps {
                if take {
                    let room = held[host] < (total / 8).min(host_max);
                    let got = quota.take(&mut held[host]);
                    prop_assert!(got || !room, "what is reserved is there");
                } else {
                    quota.give(&mut held[host]);
                }
                prop_assert!(held.iter().sum::<usize>() <= total);
                prop_assert!(held.iter().all(|&one| one <= host_max));
            }
            for one in &mut held {
                while *one > 0 {
                    quota.give(one);
                }
            }
            prop_assert_eq!(quota.shared, 0);
        }
    }
}
