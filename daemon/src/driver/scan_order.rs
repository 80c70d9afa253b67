//! Which clients are looked at in every round, and which in turns.

/// Lanes, over all clients, above which doorbells pay: each look costs a few nanoseconds.
const DOORBELL_ABOVE: usize = 256;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct ScanOrder {
    /// Indices of clients that are scanned every round, and of the others.
    pub(super) hot: Vec<u32>,
    pub(super) cold: Vec<u32>,
    next_cold: usize,
    /// Index of the client whose claims are looked at next.
    pub(super) next_refresh: usize,
    /// Lanes over all clients that a round looks at, when last counted.
    lanes: usize,
    doorbells: bool,
}

impl ScanOrder {
    /// A client has attached.
    pub(super) fn add(&mut self, index: u32) {
        self.hot.push(index);
    }

    /// A client has left.
    pub(super) fn remove(&mut self, index: u32) {
        self.hot.retain(|hot| *hot != index);
        self.cold.retain(|cold| *cold != index);
    }

    /// Whether clients ring doorbells.
    pub(super) const fn doorbells(&self) -> bool {
        self.doorbells
    }

    /// Looks that a round takes.
    pub(super) fn looks(&self) -> usize {
        self.lanes.max(self.hot.len()).max(1)
    }

    /// The client at this place is looked at in turns only.
    pub(super) fn cool(&mut self, at: usize) {
        let index = self.hot.swap_remove(at);
        self.cold.push(index);
    }

    /// The client is looked at in every round again.
    pub(super) fn warm(&mut self, index: u32) {
        if let Some(at) = self.cold.iter().position(|cold| *cold == index) {
            self.cold.swap_remove(at);
            self.hot.push(index);
            self.next_cold -= usize::from(at < self.next_cold);
        }
    }

    /// The next cold client.
    pub(super) fn take_cold(&mut self) -> Option<u32> {
        if self.next_cold >= self.cold.len() {
            self.next_cold = 0;
        }
        let index = self.cold.get(self.next_cold).copied();
        self.next_cold += 1;
        index
    }

    /// Takes note of how many lanes there are. Returns whether doorbells are switched by that.
    pub(super) fn count_lanes(&mut self, lanes: usize) -> bool {
        self.lanes = lanes;
        // Half as many switch them off again, so that a count at the border does not flap.
        let above = DOORBELL_ABOVE / if self.doorbells { 2 } else { 1 };
        core::mem::replace(&mut self.doorbells, lanes > above) != (lanes > above)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cold_client_has_its_turn_until_it_is_warm_again() {
        let mut order = ScanOrder::default();
        assert_eq!(order.take_cold(), None);
        (0..4).for_each(|index| order.add(index));
        (0..3).for_each(|_| order.cool(0));
        let mut turns: Vec<_> = (0..3).filter_map(|_| order.take_cold()).collect();
        turns.sort_unstable();
        assert_eq!((turns.len(), order.hot.len()), (3, 1));
        order.warm(turns[0]);
        order.remove(turns[1]);
        assert_eq!(
            (0..2).map(|_| order.take_cold()).collect::<Vec<_>>(),
            [Some(turns[2]); 2]
        );
        assert_eq!(order.looks(), 2);
    }

    #[test]
    fn doorbells_are_switched_on_above_a_count_of_lanes_and_off_at_half_of_it() {
        let mut order = ScanOrder::default();
        let counts = [
            DOORBELL_ABOVE,
            DOORBELL_ABOVE + 1,
            DOORBELL_ABOVE / 2 + 1,
            0,
        ];
        let seen = counts.map(|lanes| (order.count_lanes(lanes), order.doorbells()));
        assert_eq!(
            seen,
            [(false, false), (true, true), (false, true), (true, false)]
        );
    }
}
