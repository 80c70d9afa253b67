//! Policies that Laxity is compared with: the baselines of MFS §6.3, and others.
//!
//! All run behind the interface of [`Link`](crate::link::Link), with its window, chunks and
//! tagging. [`Granularity`](crate::config::Granularity) says what a baseline treats as one job. It
//! is configuration, because it changes results. Equal jobs go by arrival. `fair`, `sjf`, `edf` and
//! `karuna` ignore `σ` and pruned requests, and never use the scavenger. They ignore stages too,
//! but `edf` and `karuna` count only the deadlines of the last stage. `two_class`, `tent_edf` and
//! `tent` put weights and background into the scavenger, as an operator would. `two_class_99` puts
//! all but collectives there.

pub(crate) mod edf;
pub(crate) mod fair;
pub(crate) mod karuna;
pub(crate) mod sjf;
pub(crate) mod tent;
pub(crate) mod tent_mlu;
pub(crate) mod two_class;
pub(crate) mod two_class_99;

use laxity_types::{Level, Stage};

use crate::config::Granularity;
use crate::discipline::QueuePosition;
use crate::link::flows::{Flow, Tie};
use crate::link::port::Port;
use crate::link::queue::{Group, GroupBy, QueueId, Rank};
use crate::time::Time;

/// Reports whether the flow is of the last stage (MFS §3.2) and has a deadline.
fn is_explicit(flow: &Flow) -> bool {
    flow.spec.stage == Stage::P2d && flow.deadline != Time::NEVER
}

/// Returns a position in `queue` at the configured granularity, where equal flows share.
fn shared(queue: QueueId, granularity: Granularity, level: Level) -> QueuePosition {
    let scope = scope(granularity);
    QueuePosition { tie: Tie::Share, ..QueuePosition::new(queue, scope, 0, level) }
}

fn scope(granularity: Granularity) -> GroupBy {
    match granularity {
        Granularity::Flow => GroupBy::Port,
        Granularity::Coflow => GroupBy::Coflow,
    }
}

/// Returns the rank of a group in a fairly shared queue. Coflows rank by the bytes they have had.
fn share_rank(tier: u8, group: &Group) -> Option<Rank> {
    let (_, _, seq, _) = group.head()?;
    let major = if group.scope == GroupBy::Coflow { group.share } else { 0 };
    Some(Rank { tier, major, minor: 0, seq })
}

/// Returns the rank of a group by `key`, and then by arrival.
fn key_rank(tier: u8, key: u64, group: &Group) -> Option<Rank> {
    let (_, _, seq, _) = group.head()?;
    Some(Rank { tier, major: key, minor: 0, seq })
}

/// Returns the level for a flow of this size, so that the fabric follows a size-based policy too:
/// one level for each factor of four above one chunk, from `first` to `P_K`.
fn size_level(port: &Port, first: Level, bytes: u64) -> Level {
    let mut level = first;
    let mut edge = port.config.chunk_bytes;
    while level < port.ladder.lowest() && bytes > edge {
        edge = edge.saturating_mul(4);
        level.0 += 1;
    }
    level
}
