//! References of pure memory access: a copy of as many bytes as 256 jobs have, and a walk over as
//! many cache lines.

use std::hint::black_box;

use crate::{Row, Subject};

pub(crate) const KIND: &str = "reference";
pub(crate) const CHASE: &str = "reference: 256 cache lines in random order";

const COPIED: usize = 40 << 10;
const LINES: usize = (2 << 20) / 64;

struct Copy {
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Subject for Copy {
    fn decide(&mut self) -> usize {
        self.to.copy_from_slice(black_box(&self.from));
        black_box(&self.to);
        1
    }
}

/// Cache lines, each of which contains the index of the next.
struct Chase {
    lines: Vec<[u64; 8]>,
    at: usize,
}

impl Chase {
    fn new() -> Self {
        // The order is one cycle over all lines that no prefetcher can predict (Sattolo).
        let mut order: Vec<usize> = (0..LINES).collect();
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for last in (1..LINES).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            order.swap(last, (state >> 33) as usize % last);
        }
        let mut lines = vec![[0; 8]; LINES];
        for (at, next) in order.iter().enumerate() {
            lines[at][0] = *next as u64;
        }
        Self { lines, at: 0 }
    }
}

impl Subject for Chase {
    fn decide(&mut self) -> usize {
        for _ in 0..256 {
            self.at = self.lines[self.at][0] as usize;
        }
        black_box(self.at);
        1
    }
}

pub(crate) fn rows() -> Vec<Row> {
    let row = |name: &str, make: fn() -> Box<dyn Subject>| Row {
        name: name.to_owned(),
        kind: KIND,
        limit_us: None,
        make: Box::new(make),
    };
    vec![
        row("reference: copy of 40 KiB", || {
            Box::new(Copy { from: vec![1; COPIED], to: vec![0; COPIED] })
        }),
        row(CHASE, || Box::new(Chase::new())),
    ]
}
