//! Scaling and clipping of a recording's lengths.
//!
//! A prompt of `L` tokens becomes one of `L' = min(round(s·L), longest)`, at least 1. Block `j` of
//! the new prompt covers the tokens `[j·B, min((j+1)·B, L'))`, which stand for the old tokens up to
//! `ceil(end / s)`. Its id is derived from `j` and the id of the last of these old blocks. Two
//! prompts that shared `m` old blocks share `floor(s·m)` new ones. Reuse thus stays the same,
//! except for the part of a block where two prompts diverge. A partial last block has a unique id.

use std::collections::HashMap;

use super::draft::within;
use super::{MOST_BLOCKS, Requests, WorkloadError};

pub(super) fn scaled(
    mut from: Requests,
    scale: f64,
    longest: u32,
) -> Result<Requests, WorkloadError> {
    let unscaled = scale == 1.0;
    if unscaled && from.list.iter().all(|r| r.prompt_tokens <= longest) {
        return Ok(from);
    }
    let size = u64::from(from.block_tokens);
    let length = |tokens: u32| {
        let wanted = (f64::from(tokens) * scale).round();
        wanted.clamp(1.0, f64::from(longest)) as u32
    };
    let hashed = from.list.iter().filter(|r| r.blocks > 0);
    let total = hashed.map(|r| u64::from(length(r.prompt_tokens)).div_ceil(size));
    within(total.sum(), MOST_BLOCKS, "blocks")?;
    let mut ids: HashMap<(u32, u64, bool), u32> = HashMap::new();
    let mut blocks = Vec::new();
    let old_blocks = std::mem::take(&mut from.blocks);
    for request in &mut from.list {
        let old = &old_blocks[request.first_block as usize..][..request.blocks as usize];
        request.prompt_tokens = length(request.prompt_tokens);
        request.first_block = blocks.len() as u32;
        if old.is_empty() {
            continue;
        }
        let tokens = u64::from(request.prompt_tokens);
        request.blocks = tokens.div_ceil(size) as u32;
        for block in 0..u64::from(request.blocks) {
            let end = ((block + 1) * size).min(tokens);
            let old_end = (end as f64 / scale - ROUNDING).ceil().max(1.0) as u64;
            let last = ((old_end - 1) / size).min(old.len() as u64 - 1);
            let partial = end < (block + 1) * size;
            let next = ids.len() as u32;
            let id = ids.entry((old[last as usize], block, partial));
            blocks.push(*id.or_insert(next));
        }
    }
    from.blocks = blocks;
    from.distinct_blocks = ids.len() as u32;
    Ok(from)
}

const ROUNDING: f64 = 1e-6;

#[cfg(test)]
mod tests {
    use super::*;

    fn requests(prompts: &[(u32, &'static [u32])]) -> Requests {
        super::super::tests::requests(prompts.iter().map(|&(tokens, ids)| (0, tokens, ids)))
    }

    /// Prompts of whole and partial blocks: tokens and ids.
    const PROMPTS: [(u32, &[u32]); 3] =
        [(64, &[0, 1, 2, 3]), (72, &[0, 1, 2, 3, 4]), (50, &[0, 1, 5, 6])];

    fn shared(requests: &Requests, a: usize, b: usize) -> usize {
        let blocks = |i: usize| requests.blocks_of(&requests.list[i]);
        let pairs = blocks(a).iter().zip(blocks(b));
        let leading = pairs.clone().take_while(|(a, b)| a == b).count();
        assert_eq!(leading, pairs.filter(|(a, b)| a == b).count());
        leading
    }

    #[test]
    fn a_factor_of_one_changes_nothing() {
        let from = requests(&PROMPTS);
        assert_eq!(scaled(from.clone(), 1.0, 72).unwrap(), from);
        // The general computation changes only the numbers of the ids.
        let far = scaled(from.clone(), 1.0 + 1e-12, 72).unwrap();
        assert_eq!(far.list, from.list);
        assert_eq!(far.blocks, from.blocks);
    }

    #[test]
    fn shared_prefixes_grow_and_shrink_with_lengths() {
        for (scale, lengths, with_second, with_third) in [
            (2.0, [128, 144, 100], 8, 4),
            (0.5, [32, 36, 25], 2, 1),
            (1.5, [96, 108, 75], 6, 3),
            (0.25, [16, 18, 13], 1, 0),
        ] {
            let to = scaled(requests(&PROMPTS), scale, 1000).unwrap();
            let found: Vec<u32> = to.list.iter().map(|r| r.prompt_tokens).collect();
            assert_eq!(found, lengths, "{scale}");
            assert_eq!(shared(&to, 0, 1), with_second, "{scale}");
            assert_eq!(shared(&to, 0, 2), with_third, "{scale}");
            for request in &to.list {
                assert_eq!(request.blocks, request.prompt_tokens.div_ceil(16));
            }
            let distinct: std::collections::BTreeSet<_> = to.blocks.iter().collect();
            assert_eq!(distinct.len(), to.distinct_blocks as usize);
        }
    }

    #[test]
    fn long_prompts_are_clipped_and_a_cut_block_is_another_block() {
        let to = scaled(requests(&PROMPTS), 1.0, 40).unwrap();
        assert!(to.list.iter().all(|r| r.prompt_tokens == 40 && r.blocks == 3));
        assert_eq!(shared(&to, 0, 1), 3);
        assert_eq!(shared(&to, 0, 2), 2);
        let to = scaled(requests(&[(40, &[0, 1, 2]), (64, &[0, 1, 3, 4])]), 1.0, 41).unwrap();
        assert_eq!(shared(&to, 0, 1), 2);
    }

    #[test]
    fn requests_without_blocks_have_only_their_length_changed() {
        let to = scaled(requests(&[(100, &[]), (1, &[])]), 0.3, 1000).unwrap();
        let lengths: Vec<u32> = to.list.iter().map(|r| r.prompt_tokens).collect();
        assert_eq!(lengths, [30, 1]);
        assert!(to.blocks.is_empty());
    }

    #[test]
    fn more_blocks_than_memory_should_hold_are_an_error() {
        let many: Vec<(u32, &[u32])> = vec![(1600, &[0]); 300];
        let result = scaled(requests(&many), 1e6, u32::MAX);
        assert!(matches!(result, Err(WorkloadError::TooMany { .. })));
    }
}
