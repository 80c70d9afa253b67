//! The QoS Agent (H-MAS §3.3, Appendix B.4): what happens, in a short view for the guards and the
//! fast loops, and a long one for the Meta controller.
//!
//! Views are made when they are asked for, about once a second. A request that has waited past the
//! deadline of its first token counts as a violation already: otherwise the more are stuck, the
//! better a window looks.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::Estimate;
use crate::job::Job;
use crate::request::{ApplicationId, Slo, Spec};
use crate::{Span, Time};

/// How far the views look back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Horizons {
    /// The short one.
    pub short: Span,
    /// The long one.
    pub long: Span,
}

impl Default for Horizons {
    fn default() -> Self {
        Self {
            short: Span::from_millis(10_000),
            long: Span::from_millis(60_000),
        }
    }
}

/// `V_short`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Short {
    /// Requests in line.
    pub queue: u32,
    /// Requests that hold blocks.
    pub running: u32,
    /// Of those whose first token came or was due, the part that was late: `ν`.
    pub violations: f64,
    /// How many those are.
    pub count: u32,
    /// 99th percentile of times to first token, ms: `TTFT_99`.
    pub ttft_p99_ms: f64,
    /// Mean time to the first token of those that got one, ms: the system's delay, `V_sys`.
    pub delay: f64,
    /// KV blocks held over blocks.
    pub occupancy: f64,
    /// Times that blocks were taken from a request, per second.
    pub drops_per_s: f64,
}

/// `V_long`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Long {
    /// Requests that came, per second.
    pub rps: f64,
    /// The most in a second.
    pub rps_peak: f64,
    /// Mean prompt, tokens.
    pub prompt_mean: f64,
    /// Mean answer as estimated, tokens.
    pub output_mean: f64,
    /// Mean `T_tot`, ms.
    pub total_mean_ms: f64,
    /// Standard deviation of `T_tot` over its mean.
    pub total_cv: f64,
    /// Its 70th percentile, ms.
    pub total_p70_ms: f64,
    /// The 95th, ms.
    pub total_p95_ms: f64,
    /// Part of `T_tot` of all that came that belongs to the longest tenth of requests.
    pub heavy_share: f64,
    /// Requests in line.
    pub queue: u32,
    /// Part of first tokens that were late or are overdue.
    pub ttft_violations: f64,
    /// Part of requests that ended whose mean time between tokens was too long.
    pub tpot_violations: f64,
    /// Median time to first token, ms.
    pub ttft_p50_ms: f64,
    /// 99th percentile, ms.
    pub ttft_p99_ms: f64,
    /// Requests that ended in time, per second.
    pub goodput: f64,
    /// Jain's index of what applications got of what they asked for: 1 if all got the same part.
    pub fairness: f64,
    /// Part of requests that came with a deadline for their first token.
    pub interactive: f64,
    /// Mean part of KV blocks held.
    pub occupancy: f64,
    /// Requests by task, the most frequent first: "unknown" is -1.
    pub tasks: Vec<(i32, u32)>,
}

impl Long {
    /// As numbers of about one, for models: load, mix, outcome.
    #[must_use]
    pub fn features(&self) -> Vec<f64> {
        vec![
            self.rps / 50.0,
            self.rps_peak / (self.rps + 1.0) / 4.0,
            (self.prompt_mean + 1.0).ln() / 10.0,
            (self.output_mean + 1.0).ln() / 10.0,
            self.total_cv / 4.0,
            self.heavy_share,
            (f64::from(self.queue) + 1.0).ln() / 10.0,
            self.ttft_violations,
            self.tpot_violations,
            self.interactive,
            self.occupancy,
        ]
    }
}

#[derive(Clone, Copy, Debug)]
struct Came {
    at: Time,
    prompt: u32,
    length: u32,
    total: Span,
    application: ApplicationId,
    task: i32,
    interactive: bool,
}

#[derive(Clone, Copy, Debug)]
struct First {
    at: Time,
    ttft: Span,
    late: bool,
}

#[derive(Clone, Copy, Debug)]
struct Ended {
    at: Time,
    application: ApplicationId,
    tokens: u32,
    slow: bool,
    good: bool,
}

/// What is overdue in line.
#[derive(Clone, Copy, Debug, Default)]
pub struct OverdueCounts {
    /// Requests in line.
    pub waiting: u32,
    /// Of those, the ones whose first token should be there.
    pub overdue: u32,
    /// The longest that one of those has waited.
    pub oldest: Span,
}

/// The agent.
#[derive(Clone, Debug, Default)]
pub struct Qos {
    horizons: Horizons,
    came: VecDeque<Came>,
    firsts: VecDeque<First>,
    ended: VecDeque<Ended>,
    drops: VecDeque<Time>,
    /// One a second: when, and the part of blocks held.
    occupancy: VecDeque<(Time, f64)>,
}

fn forget<T>(list: &mut VecDeque<T>, before: Time, at: impl Fn(&T) -> Time) {
    while list.front().is_some_and(|first| at(first) < before) {
        list.pop_front();
    }
}

fn back(now: Time, span: Span) -> Time {
    Time(now.0.saturating_sub(span.0))
}

/// A quantile of a list that is sorted in place; 0 if it is empty.
fn quantile(values: &mut [u64], q: f64) -> f64 {
    values.sort_unstable();
    let Some(last) = values.len().checked_sub(1) else {
        return 0.0;
    };
    values[(q * last as f64).round() as usize] as f64
}

impl Qos {
    /// With such horizons.
    #[must_use]
    pub fn new(horizons: Horizons) -> Self {
        Self {
            horizons,
            ..Self::default()
        }
    }

    /// A request came.
    pub fn arrived(&mut self, now: Time, spec: &Spec, estimate: &Estimate) {
        self.came.push_back(Came {
            at: now,
            prompt: spec.prompt,
            length: estimate.length,
            total: estimate.total(),
            application: spec.application,
            task: estimate.task.map_or(-1, i32::from),
            interactive: spec.slo.is_interactive(),
        });
        forget(&mut self.came, back(now, self.horizons.long), |c| c.at);
    }

    /// A request's first token came.
    pub fn first(&mut self, now: Time, spec: &Spec) {
        self.firsts.push_back(First {
            at: now,
            ttft: now.since(spec.arrival),
            late: now > spec.first_deadline(),
        });
        forget(&mut self.firsts, back(now, self.horizons.long), |f| f.at);
    }

    /// A request ended: in time if its first token was, and its mean time between tokens is (eq.
    /// 1).
    pub fn ended(&mut self, now: Time, job: &Job) {
        let first = job.first_token.unwrap_or(now);
        let gaps = u64::from(job.generated.saturating_sub(job.spec.generated + 1));
        let tpot = now.since(first).0.checked_div(gaps).unwrap_or(0);
        let (slow, late) = match job.spec.slo {
            Slo::Interactive { tbt, .. } => (tpot > tbt, first > job.spec.first_deadline()),
            Slo::Batch { .. } => (false, now > job.spec.first_deadline()),
        };
        self.ended.push_back(Ended {
            at: now,
            application: job.spec.application,
            tokens: job.spec.prompt + job.generated,
            slow,
            good: !slow && !late,
        });
        forget(&mut self.ended, back(now, self.horizons.long), |e| e.at);
    }

    /// Blocks were taken from a request.
    pub fn dropped(&mut self, now: Time) {
        self.drops.push_back(now);
        forget(&mut self.drops, back(now, self.horizons.short), |at| *at);
    }

    /// Memory in use.
    pub fn memory(&mut self, now: Time, occupancy: f64) {
        let due = self
            .occupancy
            .back()
            .is_none_or(|(at, _)| now.since(*at) >= Span::from_millis(1000));
        if due {
            self.occupancy.push_back((now, occupancy));
            forget(&mut self.occupancy, back(now, self.horizons.long), |o| o.0);
        }
    }

    /// `V_short`.
    #[must_use]
    pub fn short(&self, now: Time, line: OverdueCounts, running: u32) -> Short {
        let from = back(now, self.horizons.short);
        let recent = self
            .firsts
            .iter()
            .rev()
            .take_while(|first| first.at >= from);
        let (mut ttfts, mut late) = (Vec::new(), 0_u32);
        for first in recent {
            ttfts.push(first.ttft.0);
            late += u32::from(first.late);
        }
        let came = ttfts.len() as u32;
        let sum: u64 = ttfts.iter().sum();
        if line.overdue > 0 {
            ttfts.push(line.oldest.0);
        }
        let count = came + line.overdue;
        let drops = self.drops.iter().filter(|at| **at >= from).count();
        Short {
            queue: line.waiting,
            running,
            violations: f64::from(late + line.overdue) / f64::from(count.max(1)),
            count,
            ttft_p99_ms: quantile(&mut ttfts, 0.99) / 1e6,
            delay: sum as f64 / f64::from(came.max(1)) / 1e6,
            occupancy: self.occupancy.back().map_or(0.0, |(_, share)| *share),
            drops_per_s: drops as f64 / (self.horizons.short.0 as f64 / 1e9),
        }
    }

    /// `V_long`.
    #[must_use]
    pub fn long(&self, now: Time, line: OverdueCounts) -> Long {
        let span_s = (self.horizons.long.0.min(now.0.max(1)) as f64 / 1e9).max(1e-3);
        let count = self.came.len().max(1) as f64;
        let mut totals: Vec<u64> = self.came.iter().map(|came| came.total.0).collect();
        let sum: f64 = totals.iter().map(|total| *total as f64).sum();
        let mean = sum / count;
        let variance = totals
            .iter()
            .map(|total| (*total as f64 - mean).powi(2))
            .sum::<f64>()
            / count;
        let total_p70_ms = quantile(&mut totals, 0.7) / 1e6;
        let total_p95_ms = quantile(&mut totals, 0.95) / 1e6;
        let heavy: f64 = totals[totals.len() - totals.len() / 10..]
            .iter()
            .map(|total| *total as f64)
            .sum();
        let mut seconds: BTreeMap<u64, u32> = BTreeMap::new();
        let mut tasks: BTreeMap<i32, u32> = BTreeMap::new();
        for came in &self.came {
            *seconds.entry(came.at.0 / 1_000_000_000).or_default() += 1;
            *tasks.entry(came.task).or_default() += 1;
        }
        let mut tasks: Vec<_> = tasks.into_iter().collect();
        tasks.sort_by_key(|(task, count)| (std::cmp::Reverse(*count), *task));
        let mut ttfts: Vec<u64> = self.firsts.iter().map(|first| first.ttft.0).collect();
        let late = self.firsts.iter().filter(|first| first.late).count() as u32;
        let due = self.firsts.len() as u32 + line.overdue;
        let slow = self.ended.iter().filter(|ended| ended.slow).count();
        let good = self.ended.iter().filter(|ended| ended.good).count();
        let part = |of: usize, all: usize| of as f64 / all.max(1) as f64;
        let interactive = self.came.iter().filter(|came| came.interactive).count();
        let held: f64 = self.occupancy.iter().map(|(_, share)| share).sum();
        let mean_of = |of: fn(&Came) -> u32| {
            let sum: u64 = self.came.iter().map(|came| u64::from(of(came))).sum();
            sum as f64 / count
        };
        Long {
            rps: self.came.len() as f64 / span_s,
            rps_peak: seconds.values().max().copied().map_or(0.0, f64::from),
            prompt_mean: mean_of(|came| came.prompt),
            output_mean: mean_of(|came| came.length),
            total_mean_ms: mean / 1e6,
            total_cv: if mean > 0.0 {
                variance.sqrt() / mean
            } else {
                0.0
            },
            total_p70_ms,
            total_p95_ms,
            heavy_share: if sum > 0.0 { heavy / sum } else { 0.0 },
            queue: line.waiting,
            ttft_violations: f64::from(late + line.overdue) / f64::from(due.max(1)),
            tpot_violations: part(slow, self.ended.len()),
            ttft_p50_ms: quantile(&mut ttfts, 0.5) / 1e6,
            ttft_p99_ms: quantile(&mut ttfts, 0.99) / 1e6,
            goodput: good as f64 / span_s,
            fairness: self.fairness(),
            interactive: part(interactive, self.came.len()),
            occupancy: held / self.occupancy.len().max(1) as f64,
            tasks,
        }
    }

    /// Requests that ended in time over those that came, in such a span; 1 if none came.
    #[must_use]
    pub fn good(&self, now: Time, span: Span) -> f64 {
        let from = back(now, span);
        let came = self.came.iter().rev().take_while(|came| came.at >= from);
        let recent = self.ended.iter().rev().take_while(|ended| ended.at >= from);
        let (came, good) = (came.count(), recent.filter(|ended| ended.good).count());
        if came == 0 {
            return 1.0;
        }
        (good as f64 / came as f64).min(1.0)
    }

    /// `(Σ x)² / (n Σ x²)`, with `x` what an application got of what it asked for, in tokens.
    fn fairness(&self) -> f64 {
        let mut shares: BTreeMap<ApplicationId, (f64, f64)> = BTreeMap::new();
        for came in &self.came {
            let share = shares.entry(came.application).or_default();
            share.0 += f64::from(came.prompt) + f64::from(came.length);
        }
        for ended in &self.ended {
            let share = shares.entry(ended.application).or_default();
            share.1 += f64::from(ended.tokens);
        }
        let parts = shares
            .values()
            .filter(|(asked, _)| *asked > 0.0)
            .map(|(asked, got)| (got / asked).min(1.0));
        let (mut count, mut sum, mut squares) = (0.0, 0.0, 0.0);
        for part in parts {
            count += 1.0;
            sum += part;
            squares += part * part;
        }
        if squares > 0.0 {
            sum * sum / (count * squares)
        } else {
            1.0
        }
    }
}
