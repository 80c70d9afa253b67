//! A recording while it is read, in the order of the file and with the file's block ids.
//!
//! Recorders may write a request when it ends, or from several threads. Lines may therefore be out
//! of order and are sorted by time. Lines with the same time keep their order.

use std::collections::HashMap;
use std::path::Path;

use laxity_policy::Time;

use super::{MOST_BLOCKS, MOST_REQUESTS, Request, Requests, WorkloadError};

pub(super) struct TraceDraft {
    block_tokens: u32,
    lines: Vec<DraftLine>,
    hashes: Vec<u64>,
}

struct DraftLine {
    at_ns: i64,
    prompt_tokens: u32,
    output_tokens: u32,
    first_hash: usize,
    /// Number of ids so far, or `None` if the format has none.
    hashes: Option<u32>,
}

impl TraceDraft {
    pub(super) fn new(block_tokens: u32) -> Self {
        Self { block_tokens, lines: Vec::new(), hashes: Vec::new() }
    }

    /// Adds a request. `hashes` are the ids of its blocks, or `None` if the format has none. The id
    /// of a partial last block may be missing, because some engines cache only full blocks. Such a
    /// block gets a unique id. Any other number of ids is an error.
    pub(super) fn push(
        &mut self,
        at_ns: i64,
        prompt_tokens: u32,
        output_tokens: u32,
        hashes: Option<&[u64]>,
    ) -> Result<(), String> {
        let count = hashes.map(<[u64]>::len);
        let full = (prompt_tokens / self.block_tokens) as usize;
        let all = prompt_tokens.div_ceil(self.block_tokens) as usize;
        if let Some(found) = count
            && found != full
            && found != all
        {
            return Err(format!(
                "`hash_ids` has {found} ids; expected {all} for {prompt_tokens} tokens in blocks \
                 of {}",
                self.block_tokens
            ));
        }
        self.lines.push(DraftLine {
            at_ns,
            prompt_tokens,
            output_tokens: output_tokens.max(1),
            first_hash: self.hashes.len(),
            hashes: count.map(|count| count as u32),
        });
        self.hashes.extend_from_slice(hashes.unwrap_or_default());
        Ok(())
    }

    /// Returns the recording, sorted, with times from the first request and dense block ids.
    ///
    /// Ids are distinguished by the prefix before them. Mooncake's ids stand for the whole prefix
    /// already. Qwen-Bailian's are hashes of 16 tokens and may recur after another prefix, where no
    /// prefix cache could serve them.
    pub(super) fn finish(mut self, path: &Path) -> Result<Requests, WorkloadError> {
        self.lines.sort_by_key(|line| line.at_ns);
        let Some(first) = self.lines.first() else {
            return Err(WorkloadError::Empty { path: path.to_owned() });
        };
        let start_ns = first.at_ns;
        let most_blocks = self.hashes.len() + self.lines.len();
        within(self.lines.len() as u64, MOST_REQUESTS, "requests")?;
        within(most_blocks as u64, MOST_BLOCKS, "blocks")?;
        let mut ids: HashMap<(u32, u64), u32> = HashMap::with_capacity(self.hashes.len() / 2);
        let mut distinct_blocks = 0;
        let mut blocks = Vec::with_capacity(most_blocks);
        let mut list = Vec::with_capacity(self.lines.len());
        for line in &self.lines {
            let first_block = blocks.len();
            let mut before = u32::MAX;
            for &hash in &self.hashes[line.first_hash..][..line.hashes.unwrap_or(0) as usize] {
                before = *ids.entry((before, hash)).or_insert_with(|| {
                    distinct_blocks += 1;
                    distinct_blocks - 1
                });
                blocks.push(before);
            }
            let all = line.prompt_tokens.div_ceil(self.block_tokens);
            if line.hashes.is_some_and(|count| count < all) {
                blocks.push(distinct_blocks);
                distinct_blocks += 1;
            }
            list.push(Request {
                arrival: Time(line.at_ns.abs_diff(start_ns)),
                prompt_tokens: line.prompt_tokens,
                output_tokens: line.output_tokens,
                first_block: first_block as u32,
                blocks: (blocks.len() - first_block) as u32,
            });
        }
        Ok(Requests { list, blocks, distinct_blocks, block_tokens: self.block_tokens })
    }
}

pub(super) fn within(count: u64, most: u64, what: &'static str) -> Result<(), WorkloadError> {
    if count > most {
        return Err(WorkloadError::TooMany { most, what });
    }
    Ok(())
}
