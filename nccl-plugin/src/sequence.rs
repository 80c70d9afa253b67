//! In which layer a communicator's collectives are, from their sequence alone.
//!
//! NCCL knows no layers. But every layer of a model issues the same few collectives (two
//! all-to-alls with expert parallelism, two all-reduces with tensor parallelism), so a forward pass
//! is a sequence with a period, and the layer is the number of periods since the pass began. A pass
//! begins where the sequence pauses (a kernel launch of the next batch, the sampler), or where the
//! sizes change as a whole: another batch has another number of tokens.
//!
//! It is a guess, used where the engine says nothing: it changes nothing of a collective's place
//! (their relative layer index is 0 in any case, MFS §4.4.1), and is shown in traces and reports.
//! Until a period has been seen [`CONFIRMED`] times nothing is said.

/// Longest period: collectives of one layer.
const PERIOD_MAX: usize = 8;
/// Periods that have to look alike before anything is said.
const CONFIRMED: usize = 3;
/// Signatures remembered.
const HISTORY: usize = PERIOD_MAX * (CONFIRMED + 1);
/// A pause this many times the usual one ends a pass.
const PAUSE_FACTOR: u64 = 8;
/// Pauses shorter than this never do, ns.
const PAUSE_MIN_NS: u64 = 200_000;
/// Weight of the newest pause in the average, as a power of 2.
const PAUSE_SHIFT: u32 = 3;

/// What two collectives have in common if they are the same one of two layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Which function.
    pub function: u8,
    /// Bytes.
    pub bytes: u64,
}

/// Follows one communicator.
#[derive(Debug, Default)]
pub struct Sequence {
    last: Option<u64>,
    history: Vec<Signature>,
    /// Collectives since the pass began.
    since_begin: usize,
    period: Option<usize>,
    last_ns: u64,
    usual_pause_ns: u64,
}

impl Sequence {
    /// Collective number `number` of the communicator was seen at `now`; its layer, if that can be
    /// said. Collectives that were seen before give the layer that is current.
    pub fn observe(&mut self, now_ns: u64, number: u64, signature: Signature) -> Option<u16> {
        if self.last != Some(number) {
            self.follow(now_ns, number, signature);
        }
        let period = self.period?;
        u16::try_from((self.since_begin - 1) / period).ok()
    }

    fn follow(&mut self, now_ns: u64, number: u64, signature: Signature) {
        let pause_ns = now_ns.saturating_sub(self.last_ns);
        let first = self.last.is_none();
        let paused = !first
            && self.usual_pause_ns > 0
            && pause_ns > PAUSE_MIN_NS.max(self.usual_pause_ns.saturating_mul(PAUSE_FACTOR));
        if !first && !paused {
            let usual = self.usual_pause_ns;
            self.usual_pause_ns = if usual == 0 {
                pause_ns.max(1)
            } else {
                usual - (usual >> PAUSE_SHIFT) + (pause_ns >> PAUSE_SHIFT)
            };
        }
        // One that breaks the period begins a pass, too, unless the history is still being learnt.
        let breaks = self.period.is_some_and(|period| {
            let before = self.history.len().checked_sub(period);
            before.is_some_and(|at| self.history[at] != signature)
        });
        let gap = self.last.is_some_and(|last| number != last.wrapping_add(1));
        if paused || breaks || gap {
            self.since_begin = 0;
            if breaks || gap {
                self.history.clear();
                self.period = None;
            }
        }
        if self.history.len() == HISTORY {
            self.history.remove(0);
        }
        self.history.push(signature);
        self.since_begin += 1;
        self.last = Some(number);
        self.last_ns = now_ns;
        if self.period.is_none() {
            self.period = self.find_period();
        }
    }

    /// The shortest period with which all of the history agrees.
    fn find_period(&self) -> Option<usize> {
        let seen = &self.history;
        (1..=PERIOD_MAX).find(|&period| {
            seen.len() >= period * CONFIRMED
                && seen[period..]
                    .iter()
                    .zip(seen)
                    .all(|(later, earlier)| later == earlier)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes of `layers` layers with these sizes each; layers as they were told.
    fn run(
        sequence: &mut Sequence,
        from: u64,
        begin_ns: u64,
        sizes: &[u64],
        layers: u64,
    ) -> Vec<Option<u16>> {
        let mut told = Vec::new();
        for at in 0..layers * sizes.len() as u64 {
            let signature = Signature {
                function: 1,
                bytes: sizes[(at % sizes.len() as u64) as usize],
            };
            let layer = sequence.observe(begin_ns + at * 50_000, from + at, signature);
            // Each message of a collective asks.
            assert_eq!(
                sequence.observe(begin_ns + at * 50_000 + 10, from + at, signature),
                layer
            );
            told.push(layer);
        }
        told
    }

    #[test]
    fn dispatch_and_combine_make_a_layer_once_three_looked_alike() {
        let mut sequence = Sequence::default();
        let told = run(&mut sequence, 0, 0, &[100, 300], 6);
        assert_eq!(told[..5], [None; 5]);
        assert_eq!(told[5], Some(2));
        assert_eq!(told[6..], [3, 3, 4, 4, 5, 5].map(Some));
    }

    #[test]
    fn a_pause_begins_the_next_pass_at_layer_0() {
        let mut sequence = Sequence::default();
        run(&mut sequence, 0, 0, &[100, 300], 6);
        let told = run(&mut sequence, 12, 20_000_000, &[100, 300], 3);
        assert_eq!(told, [0, 0, 1, 1, 2, 2].map(Some));
    }

    #[test]
    fn another_batch_size_begins_a_pass_that_has_to_be_learnt() {
        let mut sequence = Sequence::default();
        run(&mut sequence, 0, 0, &[100, 300], 6);
        let told = run(&mut sequence, 12, 600_000, &[70, 210], 6);
        assert_eq!(told[..5], [None; 5]);
        assert_eq!(told[11], Some(5));
    }

    #[test]
    fn without_a_period_nothing_is_said() {
        let mut sequence = Sequence::default();
        for at in 0..200_u64 {
            let signature = Signature {
                function: 1,
                bytes: at * at,
            };
            assert_eq!(sequence.observe(at, at, signature), None);
        }
    }
}
