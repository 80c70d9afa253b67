//! Fuzzes facts about memory. The model remembers all calls: the last one about an address counts.

use laxity_client::Stage;
use laxity_client::memory::{self, MemoryError};
use laxity_client::scope::Scope;

use crate::Input;

/// The model's time grows with the square of this, or faster.
const STEPS_MAX: usize = 24;

/// A call that was accepted. Its value is `None` where it removed facts.
struct MemoryCall<T> {
    start: u64,
    end: u64,
    value: Option<T>,
}

/// All calls about one table, oldest first.
struct MemoryCalls<T>(Vec<MemoryCall<T>>);

impl<T: Copy> MemoryCalls<T> {
    fn at(&self, address: u64) -> Option<T> {
        self.0.iter().rev().find(|it| (it.start..it.end).contains(&address))?.value
    }

    /// Returns the addresses of a range at which the value may change.
    fn edges(&self, start: u64, end: u64) -> Vec<u64> {
        let edges = self.0.iter().flat_map(|it| [it.start, it.end]);
        let inside = edges.filter(|edge| (start..end).contains(edge));
        inside.chain([start]).collect()
    }
}

/// Returns the range of a call: near others, or any.
fn range(input: &mut Input<'_>) -> (u64, u64) {
    match input.byte() % 8 {
        0 => (input.word(), input.word()),
        1 => (u64::MAX - u64::from(input.byte()), u64::from(input.byte())),
        _ => (u64::from(input.byte()) << 12, u64::from(input.byte() % 32) << 12),
    }
}

pub(super) fn run(mut input: Input<'_>) {
    // The tables are those of the process.
    memory::forget(0, u64::MAX).expect("a range");
    assert!(memory::is_silent());
    let mut layers: MemoryCalls<(u16, Option<Stage>)> = MemoryCalls(Vec::new());
    let mut owners: MemoryCalls<[u64; 3]> = MemoryCalls(Vec::new());
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        let (kind, (address, bytes)) = (input.byte() % 4, range(&mut input));
        let end = address.checked_add(bytes).filter(|_| bytes > 0);
        let layer = u16::from(input.byte() % 4);
        let stage = Stage::ALL.get(usize::from(input.byte() % 8)).copied();
        let owner = [1, 2, 3].map(|part| part * u64::from(layer));
        let result = match kind {
            0 => memory::set_layer(address, bytes, layer, stage),
            1 => memory::claim_layer(address, bytes, layer, stage),
            2 => memory::set_owner(address, bytes, owner[0], owner[1], owner[2]),
            _ => memory::forget(address, bytes),
        };
        let start = address;
        let Some(end) = end else {
            assert_eq!(result, Err(MemoryError::NoRange { address, bytes }));
            continue;
        };
        let other = |edge: &u64| layers.at(*edge).is_some_and(|(there, _)| there != layer);
        if kind == 1 && layers.edges(start, end).iter().any(other) {
            let Err(MemoryError::Overlap { layer: there, start: from, length, .. }) = result else {
                panic!("{result:?} though another layer is there");
            };
            assert!(there != layer && from < end && from + length > start);
            continue;
        }
        assert_eq!(result, Ok(()));
        match kind {
            0 | 1 => layers.0.push(MemoryCall { start, end, value: Some((layer, stage)) }),
            2 => owners.0.push(MemoryCall { start, end, value: Some(owner) }),
            _ => {
                layers.0.push(MemoryCall { start, end, value: None });
                owners.0.push(MemoryCall { start, end, value: None });
            }
        }
        for edge in layers.edges(0, u64::MAX).into_iter().chain(owners.edges(0, u64::MAX)) {
            for address in [edge.saturating_sub(1), edge, edge.saturating_add(1)] {
                let (layer, owner) = (layers.at(address), owners.at(address));
                let [batch, request, deadline_ns] = owner.unwrap_or_default();
                let expected = Scope {
                    stage: layer.and_then(|(_, stage)| stage),
                    layer: layer.map(|(layer, _)| layer),
                    batch,
                    request,
                    deadline_ns,
                };
                let known = layer.is_some() || owner.is_some();
                assert_eq!(memory::at(address), known.then_some(expected), "{address:#x}");
            }
        }
    }
}

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let call = |kind: u8, at: u8, pages: u8, layer: u8| [kind, 2, at, pages, layer, 1];
    let cut = [call(0, 4, 8, 1), call(2, 6, 2, 3), call(1, 3, 4, 2), call(3, 7, 2, 0)].concat();
    let end = [[0, 1, 9, 9, 1, 1], [1, 1, 9, 8, 1, 1], [3, 1, 2, 3, 0, 0]].concat();
    vec![cut, end]
}
