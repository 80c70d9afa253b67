//! The flows of a call of `submitTransfer`.
//!
//! Consecutive requests of a call with the same direction, target and hints are one flow of up to
//! [`TOGETHER_BYTES`]. A call that moves a whole cache therefore doesn't fill the window at once,
//! and each layer comes in its turn. A request is never split, because the program uses its number.

use core::ffi::c_int;

use laxity_client::scope::Scope;

use crate::abi::{READ, TransferRequest, WRITE};

/// Largest flow of several requests, in bytes: the default chunk. One request may be larger.
pub(crate) const TOGETHER_BYTES: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) count: usize,
    pub(crate) bytes: u64,
    pub(crate) opcode: c_int,
    pub(crate) target: i32,
    pub(crate) said: Scope,
}

/// Returns the runs of a call, each of one request or of `together` bytes at most. Returns `None`
/// if the call is passed on unchanged, since it has no bytes or an unknown opcode.
pub(crate) fn split(
    requests: &[TransferRequest],
    together: u64,
    said_of: impl Fn(u64) -> Scope,
) -> Option<Vec<Run>> {
    let mut runs: Vec<Run> = Vec::new();
    for request in requests {
        if request.opcode != READ && request.opcode != WRITE {
            return None;
        }
        let said = said_of(request.source as u64);
        match runs.last_mut() {
            Some(run)
                if (run.opcode, run.target, run.said)
                    == (request.opcode, request.target_id, said)
                    && run.bytes.saturating_add(request.length) <= together =>
            {
                run.count += 1;
                run.bytes += request.length;
            }
            _ => runs.push(Run {
                count: 1,
                bytes: request.length,
                opcode: request.opcode,
                target: request.target_id,
                said,
            }),
        }
    }
    let moves = runs.iter().any(|run| run.bytes > 0);
    moves.then_some(runs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::ffi::c_void;

    fn request(opcode: c_int, source: usize, length: u64) -> TransferRequest {
        TransferRequest {
            opcode,
            source: source as *mut c_void,
            target_id: 1,
            target_offset: 0,
            length,
        }
    }

    fn shape(requests: &[TransferRequest], said: impl Fn(u64) -> Scope) -> Vec<(usize, u64)> {
        let runs = split(requests, 100, said).expect("runs");
        runs.iter().map(|run| (run.count, run.bytes)).collect()
    }

    #[test]
    fn alike_requests_leave_together_and_none_is_cut() {
        let silent = |_| Scope::default();
        let sizes = [40, 40, 40, 500, 10, 10];
        let requests: Vec<_> = sizes.map(|n| request(WRITE, 8, n)).into();
        let runs = shape(&requests, silent);
        assert_eq!(runs, [(2, 80), (1, 40), (1, 500), (2, 20)]);
        assert_eq!(runs.iter().map(|run| run.0).sum::<usize>(), requests.len());
    }

    #[test]
    fn what_belongs_to_different_layers_or_goes_another_way_leaves_apart() {
        let layers = |address: u64| Scope { layer: Some(address as u16), ..Scope::default() };
        let requests = [
            request(WRITE, 1, 10),
            request(WRITE, 1, 10),
            request(WRITE, 2, 10),
            request(READ, 2, 10),
        ];
        assert_eq!(shape(&requests, layers), [(2, 20), (1, 10), (1, 10)]);
    }

    #[test]
    fn what_is_not_known_or_moves_nothing_is_no_flow() {
        let silent = |_| Scope::default();
        assert!(split(&[request(7, 1, 10)], 100, silent).is_none());
        assert!(split(&[request(READ, 1, 0)], 100, silent).is_none());
        assert!(split(&[], 100, silent).is_none());
        let huge = [request(READ, 1, u64::MAX), request(READ, 1, u64::MAX)];
        assert_eq!(split(&huge, 100, silent).map(|runs| runs.len()), Some(2));
    }
}
