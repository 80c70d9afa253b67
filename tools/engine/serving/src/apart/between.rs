//! The work between the layers of a batch: KV of other processes arrives before its layer, KV for
//! other processes is sent after it, and the daemon gets hints about the batch's progress.

use std::net::SocketAddr;
use std::time::Instant;

use laxity_client::Hint;

use super::inbox::Key;
use super::{Net, Words};
use crate::carry::{Head, Kind};
use crate::model::{KvCache, Result, Watch, fail};

/// KV of a request's beginning that is on its way to this process.
#[derive(Clone, Debug)]
pub struct Import {
    pub request: u64,
    pub from: SocketAddr,
    pub blocks: Vec<u32>,
    /// Index of the first token whose KV arrives.
    pub first: usize,
    pub tokens: usize,
}

/// KV that is sent as soon as a layer is computed.
#[derive(Clone, Debug)]
pub struct Export {
    pub to: SocketAddr,
    /// Number of the request at the receiver.
    pub request: u64,
    /// Deadline of the KV, in ns of CLOCK_MONOTONIC.
    pub deadline_ns: u64,
    /// Whether the request was relegated, so that its KV goes to the scavenger.
    pub scavenged: bool,
    pub blocks: Vec<u32>,
    /// Index of the first token whose KV is sent.
    pub first: usize,
    pub tokens: usize,
}

/// The processes that gave KV, and the batches about whose progress each of them is informed.
pub type Holders = Vec<(SocketAddr, Vec<u64>)>;

/// The transfers of a batch to and from other processes.
#[derive(Default)]
pub struct Transfers {
    pub batch: u64,
    pub imports: Vec<Import>,
    pub exports: Vec<Export>,
    /// Whether the daemon gets hints about layers, because there is something to schedule.
    pub hints: bool,
    pub holders: Holders,
}

pub struct Between<'a> {
    /// The connections to other processes, if there are any.
    pub net: Option<&'a Net>,
    pub of: Transfers,
    pub meanwhile: &'a mut dyn FnMut(),
}

impl Watch for Between<'_> {
    fn before_layer(&mut self, layer: usize, kv: &dyn KvCache) -> Result<()> {
        let Some(net) = self.net else { return Ok(()) };
        (self.meanwhile)();
        if self.of.hints {
            let (batch, layer) = (self.of.batch, layer as u16);
            net.carrier.hint(Hint::LayerBegin { batch, layer });
            let mut running = net.running();
            (running.batch, running.layer) = (batch, layer);
            drop(running);
            // The daemon that schedules the KV is the one here if the KV is read.
            for (holder, batches) in &self.of.holders {
                if net.reads {
                    net.begin_layer(layer, batches);
                } else {
                    net.say(*holder, &Words::Layer { layer, batches: batches.clone() });
                }
            }
        }
        let began = Instant::now();
        for import in &self.of.imports {
            let key = Key::Reuse(import.request, layer as u16);
            let payload = net.inbox.wait(key, import.from, net.patience)?;
            let tokens = kv.import(layer, &import.blocks, import.first, &payload)?;
            if tokens != import.tokens {
                fail!("{} sent {tokens} tokens of KV, and said {}", import.from, import.tokens);
            }
        }
        if !self.of.imports.is_empty() {
            net.waited_for(began, &net.waited.0, "laxity_engine_kv_wait_seconds");
        }
        Ok(())
    }

    fn after_layer(&mut self, layer: usize, kv: &dyn KvCache) -> Result<()> {
        let Some(net) = self.net else { return Ok(()) };
        for export in self.of.exports.iter().filter(|export| export.tokens > 0) {
            let payload = kv.export(layer, &export.blocks, export.first, export.tokens)?;
            let head = kv_head(Kind::P2d, layer, self.of.batch, export.request, export.first);
            if export.scavenged {
                net.carrier.scavenge(export.to, head, payload);
            } else {
                net.carrier.send(export.to, head, export.deadline_ns, payload);
            }
        }
        Ok(())
    }
}

pub const fn kv_head(kind: Kind, layer: usize, batch: u64, request: u64, first: usize) -> Head {
    Head {
        kind,
        layer: layer as u16,
        flow: 0,
        batch,
        request,
        place: first as u64,
        remaining_ns: 0,
        total: 0,
        offset: 0,
        len: 0,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;
    use crate::apart::inbox::Inbox;
    use crate::carry::incoming::listen;
    use crate::carry::{Carrier, Incoming, Options};
    use crate::model::shape::tests::tiny;
    use crate::model::timed::Timing;
    use crate::model::{Model as _, TimedModel};
    use crate::schedule::Room;

    fn net(taker: crate::carry::Taker) -> Net {
        let stall = Duration::from_millis(400);
        let options = Options { name: "test".to_owned(), stall, ..Options::default() };
        let here = "127.0.0.1:1".parse().unwrap();
        Net {
            carrier: Carrier::start(options, here, taker).unwrap(),
            inbox: Arc::new(Inbox::default()),
            peers: crate::apart::PeerAddresses::default(),
            patience: Duration::from_secs(60),
            ask_patience: Duration::from_secs(60),
            reads: false,
            plugin: None,
            bytes_per_s: None,
            running: Arc::default(),
            waited: Arc::default(),
        }
    }

    #[test]
    fn a_layer_waits_for_its_own_kv_only_and_its_kv_goes_before_the_next_is_computed() {
        let room = Room { blocks: 4, block_tokens: 4 };
        let timing = Timing::default();
        let model = TimedModel::new(&tiny(false), &timing, &|_| true, room);
        let pages = model.kv();
        let (arrived, arrivals) = channel();
        let taker: crate::carry::Taker = Arc::new(move |incoming| drop(arrived.send(incoming)));
        let to = listen("127.0.0.1:0".parse().unwrap(), Arc::clone(&taker)).unwrap();
        let net = net(Arc::new(|_| {}));
        let from = "127.0.0.1:2".parse().unwrap();
        model.fill(&[1, 2, 3, 4], &[0]).unwrap();
        let payload = pages.export(0, &[0], 0, 4).unwrap();
        for layer in 0..2 {
            net.inbox.expect(Key::Reuse(9, layer), from);
        }
        net.inbox.put(Key::Reuse(9, 0), payload.clone());
        let of = Transfers {
            batch: 5,
            imports: vec![Import { request: 9, from, blocks: vec![2], first: 0, tokens: 4 }],
            exports: vec![Export {
                to,
                request: 11,
                deadline_ns: 0,
                scavenged: false,
                blocks: vec![2, 3],
                first: 1,
                tokens: 3,
            }],
            ..Transfers::default()
        };
        let mut between = Between { net: Some(&net), of, meanwhile: &mut || {} };
        // The KV of layer 0 is here, and that of layer 1 is not.
        between.before_layer(0, pages).unwrap();
        assert_eq!(pages.export(0, &[2], 0, 4).unwrap(), payload);
        between.after_layer(0, pages).unwrap();
        let Ok(Incoming::Parcel(first)) = arrivals.recv_timeout(Duration::from_secs(60)) else {
            panic!("the KV of layer 0 did not come");
        };
        assert_eq!((first.head.layer, first.head.request, first.head.batch), (0, 11, 5));
        assert_eq!((first.head.kind, first.head.place), (Kind::P2d, 1));
        assert_eq!(first.payload, pages.export(0, &[2, 3], 1, 3).unwrap());
        let start = Instant::now();
        let inbox = Arc::clone(&net.inbox);
        let late = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(60));
            inbox.put(Key::Reuse(9, 1), payload)
        });
        between.before_layer(1, pages).unwrap();
        assert!(start.elapsed() >= Duration::from_millis(60), "layer 1 did not wait");
        assert!(late.join().unwrap());
        // Fewer tokens than announced are an error and must not leave a hole.
        net.inbox.expect(Key::Reuse(9, 2), from);
        net.inbox.put(Key::Reuse(9, 2), pages.export(0, &[0], 0, 1).unwrap());
        let error = between.before_layer(2, pages).unwrap_err().to_string();
        assert!(error.contains("1 tokens of KV, and said 4"), "{error}");
    }
}
