//! What Laxity is compared with: the paper's baselines (MFS §6.3) and those a sceptic asks for.
//!
//! All run behind the interface of [`Link`](crate::link::Link), with its window, chunks and
//! tagging; what they take for one job ([`Granularity`](crate::config::Granularity)) and how
//! they order equals ([`Ties`](crate::config::Ties)) is configuration, because results turn on
//! it. The stage-agnostic ones (`fair`, `sjf`, `edf`, `karuna`) know neither `σ`, nor the pruned
//! set, nor a scavenger; `two_class` and `tent_edf` put weights and background into it, as an
//! operator would.

pub(crate) mod edf;
pub(crate) mod fair;
pub(crate) mod karuna;
pub(crate) mod sjf;
pub(crate) mod tent;
pub(crate) mod two_class;

use laxity_types::{Level, Stage};

use crate::config::{Granularity, Ties};
use crate::discipline::QueuePosition;
use crate::link::flows::{Flow, Tie};
use crate::link::port::Port;
use crate::link::queue::{Group, QueueId, Rank, Scope};
use crate::time::Time;

/// The last stage is the one with an explicit deadline (MFS §3.2); one without a deadline is not.
fn is_explicit(flow: &Flow) -> bool {
    flow.spec.stage == Stage::P2d && flow.deadline != Time::NEVER
}

fn tie(ties: Ties) -> Tie {
    match ties {
        Ties::Arrival => Tie::Arrival,
        Ties::Fair => Tie::Share,
        Ties::Shortest => Tie::Shortest,
    }
}

/// A position in `queue` at the configured granularity, where equals share.
fn shared(queue: QueueId, granularity: Granularity, level: Level) -> QueuePosition {
    let scope = scope(granularity);
    QueuePosition {
        tie: Tie::Share,
        ..QueuePosition::new(queue, scope, 0, level)
    }
}

fn scope(granularity: Granularity) -> Scope {
    match granularity {
        Granularity::Flow => Scope::Port,
        Granularity::Coflow => Scope::Coflow,
    }
}

/// Rank of a group whose queue is shared fairly: between coflows by what each has had.
fn share_rank(tier: u8, group: &Group) -> Option<Rank> {
    let (_, _, seq, _) = group.head()?;
    let major = if group.scope == Scope::Coflow {
        group.share
    } else {
        0
    };
    Some(Rank {
        tier,
        major,
        minor: 0,
        seq,
    })
}

/// Rank of a group by `key`; between coflows of the same key, by the tie rule.
fn key_rank(tier: u8, key: u64, ties: Ties, group: &Group) -> Option<Rank> {
    let (_, _, seq, _) = group.head()?;
    let minor = match (group.scope, ties) {
        (Scope::Coflow, Ties::Fair) => group.share,
        (Scope::Coflow, Ties::Shortest) => group.bytes,
        _ => 0,
    };
    Some(Rank {
        tier,
        major: key,
        minor,
        seq,
    })
}

/// Wire level by size, so that the fabric sees the order of a size-based policy too: one level
/// for each factor of four above one chunk, from `first` to `P_K`.
fn size_level(port: &Port, first: Level, bytes: u64) -> Level {
    let mut level = first;
    let mut edge = port.config.chunk_bytes;
    while level < port.ladder.lowest() && bytes > edge {
        edge = edge.saturating_mul(4);
        level.0 += 1;
    }
    level
}
