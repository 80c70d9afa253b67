//! Tests of the choice of a prefill process for a prompt, of its metrics, and of the stage of the
//! KV that it sends.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use laxity_engine::apart::{PrefillAsk, Words};
use laxity_engine::carry::incoming::listen;
use laxity_engine::carry::{Arrival, Carrier, Incoming, Kind, Options};
use laxity_engine::model::computed::Decoder;
use laxity_engine::model::{Model as _, ModelShape};
use laxity_engine::schedule::Room;
use laxity_requests::request::Importance;

use crate::apart::{Daemon, laxity};
use crate::running::{PATIENCE, Running, address, eventually, model, prompt, with_model};

/// A decode process that is a part of the test. It sends prompts to a prefill process and keeps the
/// messages and parcels that come back.
struct Asker {
    carrier: Carrier,
    heard: Receiver<Incoming>,
    model: [u8; 16],
    asked: u64,
}

impl Asker {
    fn new() -> Self {
        let (said, heard) = channel();
        let here = address();
        listen(here, Arc::new(move |incoming| drop(said.send(incoming)))).expect("listens");
        let stall = std::time::Duration::from_secs(5);
        let options = Options { name: "asker".to_owned(), stall, ..Options::default() };
        let carrier = Carrier::start(options, here, Arc::new(|_| {})).expect("a carrier");
        let text = model(false).replace("[model]\n", "");
        let shape: ModelShape = toml::from_str(&text).expect("a model");
        let room = Room { blocks: 1, block_tokens: 16 };
        let device = candle_core::Device::Cpu;
        let model = Decoder::load(&shape, &|_| true, &device, room).expect("a model");
        Self { carrier, heard, model: model.identity(), asked: 0 }
    }

    fn ask(&mut self, at: SocketAddr, tokens: Vec<u32>, remaining_ms: u64) {
        self.asked += 1;
        let words = Words::Prefill(PrefillAsk {
            request: self.asked,
            tokens,
            have: 0,
            wants_kv: true,
            remaining_ns: remaining_ms * 1_000_000,
            interactive: true,
            importance: Importance::Important,
            model: self.model,
        });
        let line = serde_json::to_string(&words).expect("JSON");
        self.carrier.say(at, line);
    }

    /// Waits for the first token of the last prompt and all of its KV, and returns the KV.
    fn hear(&self, at: SocketAddr) -> Vec<Arrival> {
        let mut parcels = Vec::new();
        let (mut bytes, mut first) = (0, false);
        while !(first && bytes == 64 * 3 * 256) {
            match self.heard.recv_timeout(PATIENCE).expect("it answers") {
                Incoming::Parcel(arrival) => {
                    bytes += arrival.payload.len();
                    parcels.push(arrival);
                }
                Incoming::Words(_, line) => {
                    let word: Words = serde_json::from_str(&line).expect("words");
                    first |= matches!(word, Words::First { .. });
                }
                // The engine of an earlier round is gone.
                Incoming::Lost(peer, _) if peer != at => {}
                other => panic!("{other:?}"),
            }
        }
        parcels
    }
}

#[test]
fn parts_of_a_prompt_are_due_while_those_after_them_still_have_time_for_the_wire() {
    let folder = tempfile::tempdir().unwrap();
    let mut asker = Asker::new();
    let mut spread = Vec::new();
    // A token has 768 bytes of KV, which take 10 ms at 0.6144 Mbit/s.
    for rate in ["", "laxity = { rate_mbit = 0.6144 }\n"] {
        let here = address();
        let peers = format!("role = 'prefill'\npeers = {{ listen = '{here}' }}");
        let config = with_model(false, &format!("{peers}\nschedule = {{ tokens = 16 }}\n{rate}"));
        let engine = Running::start(folder.path(), "prefill", &config);
        asker.ask(here, prompt(1, 64), 3_600_000);
        let parcels = asker.hear(here);
        assert!(parcels.iter().all(|parcel| parcel.head.kind == Kind::P2d));
        let due = |place: u64| {
            let of = parcels.iter().filter(|parcel| parcel.head.place == place);
            let all: Vec<f64> = of.map(|parcel| parcel.head.remaining_ns as f64 / 1e6).collect();
            assert_eq!(all.len(), 3, "a parcel a layer");
            all[0]
        };
        spread.push(due(48) - due(0));
        drop(engine);
    }
    // Without a rate, all parts have the request's deadline. The last part has less time left,
    // because it is sent later.
    assert!(spread[0] <= 0.0, "{spread:?}");
    // 480 ms for the 48 tokens after the first part, less what computing them took.
    assert!(spread[1] - spread[0] > 200.0, "{spread:?}");
}

#[test]
fn kv_of_requests_that_were_given_up_goes_below_all_levels() {
    let folder = tempfile::tempdir().unwrap();
    let (_daemon, socket) = Daemon::start(folder.path());
    let mut asker = Asker::new();
    let here = address();
    let peers = format!("role = 'prefill'\npeers = {{ listen = '{here}' }}");
    let schedule = format!("schedule = {{ policy = 'qoserve' }}\n{}", laxity(Some(&socket)));
    let config = with_model(false, &[peers, schedule].join("\n"));
    let engine = Running::start(folder.path(), "prefill", &config);
    let sent =
        |stage: &str| engine.metric(&format!("laxity_engine_sent_bytes_total{{stage=\"{stage}\""));
    let all = 64.0 * 3.0 * 256.0;
    // One request is in time. The other is relegated, because its deadline can't be met.
    asker.ask(here, prompt(1, 64), 3_600_000);
    asker.hear(here);
    assert_eq!((sent("p2d"), sent("background")), (all, 0.0));
    asker.ask(here, prompt(2, 64), 0);
    asker.hear(here);
    assert_eq!((sent("p2d"), sent("background")), (all, all));
    // KV of relegated requests has the scavenger's class if the daemon answers in time (the machine
    // may be busy).
    let scavenged = "laxity_engine_sent_bytes_total{stage=\"background\",dscp=\"8\"}";
    let mut number = 3;
    eventually("the daemon has put it into the scavenger", || {
        asker.ask(here, prompt(number, 64), 0);
        asker.hear(here);
        number += 1;
        engine.metric(scavenged) > 0.0
    });
    // For the receiver, a frame of background traffic is still KV.
    asker.ask(here, prompt(number, 64), 0);
    let parcels = asker.hear(here);
    assert!(parcels.iter().all(|parcel| parcel.head.kind == Kind::P2d));
}
