//! Statistics of a workload that papers also report.

use serde::Serialize;

use super::Requests;

/// Statistics of a workload. Lengths are in tokens.
///
/// *Reuse* is what an unbounded prefix cache would find. It counts the tokens of a prompt's leading
/// blocks that an earlier request had. The cache is empty before the first request.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    pub requests: u64,
    /// Time from the first arrival to the last, in seconds.
    pub seconds: f64,
    /// Mean rate, in arrivals per second.
    pub rate: f64,
    /// Coefficient of variation of the gaps between arrivals. 1 for a Poisson process.
    pub gap_variation: f64,
    pub prompt_mean: f64,
    pub prompt_p50: u32,
    /// 99th percentile of the prompts' lengths.
    pub prompt_p99: u32,
    pub prompt_longest: u32,
    pub output_mean: f64,
    /// Reused tokens divided by all prompt tokens.
    pub reuse: f64,
    /// Mean over requests of the reused share of the prompt. It exceeds `reuse` if short prompts
    /// are mostly a shared prefix.
    pub reuse_per_request: f64,
    pub block_tokens: u32,
    pub distinct_blocks: u64,
    /// Share of all repeated uses of blocks that falls on the most used tenth of the blocks.
    pub hottest_tenth: f64,
}

impl Summary {
    pub fn of(requests: &Requests) -> Self {
        let mut uses = vec![0_u32; requests.distinct_blocks as usize];
        let mut lengths = Vec::with_capacity(requests.list.len());
        let (mut reused, mut prompts, mut outputs, mut shares) = (0_u64, 0_u64, 0_u64, 0.0);
        let (mut gap_square, mut before) = (0.0, None);
        for request in &requests.list {
            let blocks = requests.blocks_of(request);
            let known = blocks.iter().take_while(|&&id| uses[id as usize] > 0);
            let known = known.count() as u64 * u64::from(requests.block_tokens);
            let known = known.min(request.prompt_tokens.into());
            for &block in blocks {
                uses[block as usize] += 1;
            }
            lengths.push(request.prompt_tokens);
            prompts += u64::from(request.prompt_tokens);
            outputs += u64::from(request.output_tokens);
            reused += known;
            shares += known as f64 / f64::from(request.prompt_tokens);
            let gap = before.map_or(0.0, |before| seconds(request.arrival.since(before).0));
            gap_square += gap * gap;
            before = Some(request.arrival);
        }
        let over = |sum: f64, count: f64| if count > 0.0 { sum / count } else { 0.0 };
        let count = lengths.len() as f64;
        let ends = requests.list.first().zip(requests.list.last());
        let span = ends.map_or(0.0, |(a, b)| seconds(b.arrival.since(a.arrival).0));
        let gap = over(span, count - 1.0);
        let variance = over(gap_square, count - 1.0) - gap * gap;
        Self {
            requests: lengths.len() as u64,
            seconds: span,
            rate: over(1.0, gap),
            gap_variation: over(variance.max(0.0).sqrt(), gap),
            prompt_mean: over(prompts as f64, count),
            prompt_p50: percentile(&mut lengths, 0.5),
            prompt_p99: percentile(&mut lengths, 0.99),
            prompt_longest: percentile(&mut lengths, 1.0),
            output_mean: over(outputs as f64, count),
            reuse: over(reused as f64, prompts as f64),
            reuse_per_request: over(shares, count),
            block_tokens: requests.block_tokens,
            distinct_blocks: requests.distinct_blocks.into(),
            hottest_tenth: hottest_tenth(&mut uses),
        }
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// Returns the smallest value that at least the share `part` of the values does not exceed.
fn percentile(values: &mut [u32], part: f64) -> u32 {
    let Some(last) = values.len().checked_sub(1) else { return 0 };
    let rank = (values.len() as f64 * part).ceil() as usize;
    *values.select_nth_unstable(rank.saturating_sub(1).min(last)).1
}

fn hottest_tenth(uses: &mut [u32]) -> f64 {
    let reuses = |uses: &[u32]| uses.iter().map(|&uses| u64::from(uses.max(1) - 1)).sum::<u64>();
    let all = reuses(uses);
    let tenth = uses.len().div_ceil(10);
    if all == 0 {
        return 0.0;
    }
    let cold = uses.len() - tenth;
    uses.select_nth_unstable(cold);
    reuses(&uses[cold..]) as f64 / all as f64
}

#[cfg(test)]
mod tests {
    use super::super::tests::requests;
    use super::*;

    #[test]
    fn an_empty_workload_has_a_summary() {
        assert_eq!(Summary::of(&Requests::default()), Summary::default());
    }

    #[test]
    fn reuse_is_what_an_unbounded_cache_finds() {
        let prompts: [(u64, u32, &[u32]); 4] =
            [(0, 40, &[0, 1, 2]), (1, 40, &[0, 1, 2]), (2, 64, &[0, 1, 3, 4]), (6, 16, &[5])];
        let summary = Summary::of(&requests(prompts));
        // The second prompt is reused as a whole, and of the third two blocks.
        assert_eq!(summary.reuse, (40.0 + 32.0) / 160.0);
        assert_eq!(summary.reuse_per_request, (1.0 + 0.5) / 4.0);
        assert_eq!(summary.requests, 4);
        assert_eq!((summary.seconds, summary.rate), (6.0, 0.5));
        // Gaps of 1, 1 and 4 s have a deviation of √2 and a mean of 2.
        assert!((summary.gap_variation - 2.0_f64.sqrt() / 2.0).abs() < 1e-9);
        let lengths = (summary.prompt_p50, summary.prompt_p99, summary.prompt_longest);
        assert_eq!(lengths, (40, 64, 64));
        assert_eq!((summary.prompt_mean, summary.output_mean), (40.0, 2.0));
        // There are five repeated uses, two of which are of the hottest block.
        assert_eq!(summary.hottest_tenth, 0.4);
    }
}
