//! Experts in other processes. A layer's tokens go to the processes that hold their experts, and
//! the experts' outputs come back.
//!
//! Rank `e mod n` holds expert `e`. Unless ranks compute in lockstep, no rank waits for another's
//! batch. A thread of its own computes the tokens of other ranks beside the rank's own batch, so
//! ranks with different loads, or without any, need no common pace.
//!
//! A payload consists of the number of experts (u32), the number and row count of each expert (u32,
//! u32), and all rows (f32), little-endian.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use super::Net;
use super::between::kv_head;
use super::inbox::Key;
use crate::carry::{Arrival, Carrier, Head, Kind};
use crate::clock;
use crate::model::{ExpertPeers, ExpertRows, Experts, Result, fail};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranks {
    pub all: Vec<SocketAddr>,
    /// Index of this process in `all`.
    pub own: usize,
}

impl Ranks {
    pub fn holds(&self, expert: usize) -> bool {
        self.all.len() <= 1 || expert % self.all.len() == self.own
    }

    fn holder(&self, expert: usize) -> SocketAddr {
        self.all[expert % self.all.len()]
    }

    /// Returns the ranks in order, including this process. Empty if there is only this one.
    pub fn all(&self) -> &[SocketAddr] {
        if self.is_apart() { &self.all } else { &[] }
    }

    pub fn others(&self) -> impl Iterator<Item = SocketAddr> + use<'_> {
        let others = self.all.iter().enumerate();
        others.filter_map(|(rank, at)| (rank != self.own).then_some(*at))
    }

    pub const fn is_apart(&self) -> bool {
        self.all.len() > 1
    }
}

pub fn encode(groups: &[ExpertRows], hidden: usize) -> Vec<u8> {
    let mut bytes = (groups.len() as u32).to_le_bytes().to_vec();
    for group in groups {
        bytes.extend((group.expert as u32).to_le_bytes());
        bytes.extend(((group.rows.len() / hidden) as u32).to_le_bytes());
    }
    for group in groups {
        bytes.extend(group.rows.iter().flat_map(|number| number.to_le_bytes()));
    }
    bytes
}

/// Decodes the bytes of a peer.
/// Fails if the bytes have another form than those of [`encode`].
pub fn decode(bytes: &[u8], hidden: usize) -> Result<Vec<ExpertRows>> {
    let (words, rest) = bytes.as_chunks::<4>();
    let number = |at: usize| words.get(at).map(|word| u32::from_le_bytes(*word) as usize);
    let count = number(0).unwrap_or(usize::MAX);
    if !rest.is_empty() || count > words.len() / 2 {
        fail!("{} bytes are no experts' rows", bytes.len());
    }
    let mut groups = Vec::with_capacity(count);
    let mut at = 1 + 2 * count;
    for group in 0..count {
        let (Some(expert), Some(rows)) = (number(1 + 2 * group), number(2 + 2 * group)) else {
            fail!("{count} experts do not fit into {} bytes", bytes.len());
        };
        let end = rows.checked_mul(hidden).and_then(|count| count.checked_add(at));
        let Some(words) = end.and_then(|end| words.get(at..end)) else {
            fail!("{rows} rows of expert {expert} are not all there");
        };
        at += words.len();
        let rows = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        groups.push(ExpertRows { expert, rows });
    }
    if at != words.len() {
        fail!("{} bytes after the experts' rows", (words.len() - at) * 4);
    }
    Ok(groups)
}

pub const fn rows_head(kind: Kind, layer: usize, batch: u64, place: u64) -> Head {
    kv_head(kind, layer, batch, 0, place as usize)
}

/// Groups rows by the rank that holds their expert.
/// Fails if this process holds one of the experts.
pub fn by_rank(
    ranks: &Ranks,
    layer: usize,
    rows: Vec<ExpertRows>,
) -> Result<BTreeMap<SocketAddr, Vec<ExpertRows>>> {
    let mut by_rank: BTreeMap<SocketAddr, Vec<ExpertRows>> = BTreeMap::new();
    for rows in rows {
        if ranks.holds(rows.expert) {
            fail!("expert {} of layer {layer} ought to be here", rows.expert);
        }
        let holder = ranks.holder(rows.expert);
        by_rank.entry(holder).or_default().push(rows);
    }
    Ok(by_rank)
}

/// The other ranks as the peers of a batch.
pub struct RemoteExperts<'a> {
    pub net: &'a Net,
    pub hidden: usize,
    pub batch: u64,
    pub deadline_ns: u64,
    /// Number of the last exchange, across batches.
    pub exchange: &'a mut u64,
    pub open: Vec<SocketAddr>,
    /// Time when the rows of this exchange were sent.
    pub began: Instant,
}

impl ExpertPeers for RemoteExperts<'_> {
    fn dispatch(&mut self, layer: usize, rows: Vec<ExpertRows>) -> Result<()> {
        *self.exchange += 1;
        let by_rank = by_rank(&self.net.peers.ranks, layer, rows)?;
        self.open.clear();
        self.began = Instant::now();
        for (to, groups) in by_rank {
            self.net.inbox.expect(Key::Combine(*self.exchange, to), to);
            let head = rows_head(Kind::Dispatch, layer, self.batch, *self.exchange);
            let payload = encode(&groups, self.hidden);
            self.net.carrier.send(to, head, self.deadline_ns, payload);
            self.open.push(to);
        }
        Ok(())
    }

    fn collect(&mut self, _layer: usize) -> Result<Vec<ExpertRows>> {
        let (mut made, mut apart) = (Vec::new(), false);
        for from in std::mem::take(&mut self.open) {
            let key = Key::Combine(*self.exchange, from);
            let payload = self.net.inbox.wait(key, from, self.net.patience)?;
            made.extend(decode(&payload, self.hidden)?);
            apart = true;
        }
        if apart {
            self.net.waited_for_experts(self.began);
        }
        Ok(made)
    }
}

/// Computes other ranks' tokens, in a thread of its own, until the sender is dropped.
pub fn serve(
    experts: Arc<dyn Experts>,
    hidden: usize,
    carrier: Carrier,
) -> std::io::Result<Sender<Arrival>> {
    let (sender, arrivals) = channel();
    std::thread::Builder::new()
        .name("experts".to_owned())
        .spawn(move || answer(&*experts, hidden, &carrier, &arrivals))?;
    Ok(sender)
}

fn answer(experts: &dyn Experts, hidden: usize, carrier: &Carrier, arrivals: &Receiver<Arrival>) {
    for arrival in arrivals {
        let layer = arrival.head.layer as usize;
        let made = decode(&arrival.payload, hidden).and_then(|groups| experts.run(layer, groups));
        let made = made.unwrap_or_else(|error| {
            // An answer without the expert reports the failure, because the asker waits.
            tracing::error!(from = %arrival.from, "tokens for experts: {error}");
            Vec::new()
        });
        let head = Head { kind: Kind::Combine, ..arrival.head };
        let deadline_ns = match arrival.head.remaining_ns {
            0 => 0,
            remaining => clock::now().0.saturating_add(remaining),
        };
        carrier.send(arrival.from, head, deadline_ns, encode(&made, hidden));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rows_come_back_as_they_were() {
        let groups = vec![
            ExpertRows { expert: 3, rows: vec![1, 2, 3, u32::MAX] },
            ExpertRows { expert: 9, rows: vec![7, 8] },
        ];
        assert_eq!(decode(&encode(&groups, 2), 2).unwrap(), groups);
        assert_eq!(decode(&encode(&[], 2), 2).unwrap(), []);
        let mut short = encode(&groups, 2);
        short.truncate(short.len() - 4);
        assert!(decode(&short, 2).is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_refused_or_make_sense(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            hidden in 1..9_usize,
        ) {
            if let Ok(groups) = decode(&bytes, hidden) {
                prop_assert!(groups.iter().all(|group| group.rows.len() % hidden == 0));
            }
        }
    }
}
