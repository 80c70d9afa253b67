//! Which prefill process computes a prompt, what it says of itself, and how what it sends is
//! classed.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use laxity_engine::apart::Words;
use laxity_engine::carry::incoming::listen;
use laxity_engine::carry::{Arrival, Carrier, Incoming, Kind, Options};
use laxity_engine::model::computed::Decoder;
use laxity_engine::model::{Model as _, ModelShape};
use laxity_engine::schedule::Room;
use laxity_engine::schedule::places::Rule;
use laxity_requests::request::Importance;

use crate::apart::{Daemon, laxity, list};
use crate::running::{PATIENCE, Running, address, alone, eventually, model, prompt};

#[test]
fn every_rule_of_places_answers_as_one_process_does() {
    let folder = tempfile::tempdir().unwrap();
    let prompts: Vec<Vec<u32>> =
        (0..6).map(|number| prompt(number, 30 + 17 * number as usize)).collect();
    let alone = alone(folder.path(), &model(false), &prompts, 6);
    for rule in Rule::ALL {
        let name = rule.name();
        let common = format!(
            "schedule = {{ tokens = 32 }}\nkv = {{ blocks = 64, block_tokens = 8 }}\n{}",
            model(false)
        );
        let ranks = [address(), address()];
        let prefill: Vec<Running> = ranks
            .iter()
            .map(|here| {
                let config =
                    format!("role = \"prefill\"\npeers = {{ listen = \"{here}\" }}\n{common}");
                Running::start(folder.path(), &format!("{name}-{}", here.port()), &config)
            })
            .collect();
        let config = format!(
            "role = \"decode\"\npeers = {{ listen = \"{}\", prefill = {}, dispatch = \"{name}\", \
             prefill_ns = [1e6, 2e5, 0.0] }}\n{common}",
            address(),
            list(&ranks)
        );
        let decode = Running::start(folder.path(), name, &config);
        assert_eq!(decode.complete_all(&prompts, 6), alone, "{name}: {}", decode.explain());
        let elsewhere = decode.metric("laxity_engine_prefilled_elsewhere_total");
        assert_eq!(elsewhere, 6.0, "{name}: {}", decode.explain());
        let tokens: Vec<f64> = prefill
            .iter()
            .map(|engine| engine.metric("laxity_engine_prompt_tokens_total"))
            .collect();
        assert!(tokens.iter().all(|tokens| *tokens > 0.0), "{name}: {tokens:?}");
        eventually("nothing waits for a place", || decode.health()["requests"] == 0);
        assert!(decode.terminate(), "{name}");
    }
}

/// A decode process of a test's own: it speaks to a prefill process and keeps what that says and
/// sends.
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
        let options = Options {
            socket: None,
            name: "asker".to_owned(),
            nic: 0,
            stall: std::time::Duration::from_secs(5),
            words_dscp: 0,
        };
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
        let words = Words::Prefill {
            request: self.asked,
            tokens,
            have: 0,
            wants_kv: true,
            remaining_ns: remaining_ms * 1_000_000,
            interactive: true,
            importance: Importance::Important,
            ordinal: self.asked,
            model: self.model,
        };
        let line = serde_json::to_string(&words).expect("JSON");
        self.carrier.say(at, line);
    }

    /// The next report: prompt tokens, and requests.
    fn load(&self) -> (u64, u32) {
        loop {
            if let Incoming::Words(_, line) = self.heard.recv_timeout(PATIENCE).expect("it reports")
                && let Ok(Words::Load { load, .. }) = serde_json::from_str(&line)
            {
                return (load.prefill_tokens, load.waiting + load.running);
            }
        }
    }

    /// What came until the first token of the last prompt, and the reports after it.
    fn hear(&self, at: SocketAddr) -> (Vec<Arrival>, Vec<Words>) {
        let (mut parcels, mut words) = (Vec::new(), Vec::new());
        let (mut bytes, mut first, mut reported) = (0, false, false);
        // All of the KV, the token, and a report in which nothing is left.
        while !(first && reported && bytes == 64 * 3 * 256) {
            match self.heard.recv_timeout(PATIENCE).expect("it answers") {
                Incoming::Parcel(arrival) => {
                    bytes += arrival.payload.len();
                    parcels.push(arrival);
                }
                Incoming::Words(_, line) => {
                    let word: Words = serde_json::from_str(&line).expect("words");
                    first |= matches!(word, Words::First { .. });
                    reported |= matches!(&word, Words::Load { load, .. } if load.running == 0);
                    words.push(word);
                }
                // The engine before this one.
                Incoming::Lost(peer, _) if peer != at => {}
                other => panic!("{other:?}"),
            }
        }
        (parcels, words)
    }
}

#[test]
fn parts_of_a_prompt_are_due_while_those_after_them_still_have_time_for_the_wire() {
    let folder = tempfile::tempdir().unwrap();
    let mut asker = Asker::new();
    let mut spread = Vec::new();
    // 768 bytes of KV a token: 10 ms of a NIC of 0.6144 Mbit/s.
    for rate in ["", "laxity = { rate_mbit = 0.6144 }\n"] {
        let here = address();
        let config = format!(
            "role = \"prefill\"\npeers = {{ listen = \"{here}\" }}\nschedule = {{ tokens = 16 \
             }}\n{rate}{}",
            model(false)
        );
        let engine = Running::start(folder.path(), "prefill", &config);
        asker.ask(here, prompt(1, 64), 3_600_000);
        let (parcels, words) = asker.hear(here);
        assert!(parcels.iter().all(|parcel| parcel.head.kind == Kind::P2d));
        let due = |place: u64| {
            let of = parcels.iter().filter(|parcel| parcel.head.place == place);
            let all: Vec<f64> = of.map(|parcel| parcel.head.remaining_ns as f64 / 1e6).collect();
            assert_eq!(all.len(), 3, "a parcel a layer");
            all[0]
        };
        spread.push(due(48) - due(0));
        // One report an iteration; all count the prompt that it knows of.
        let reports: Vec<u64> = words
            .iter()
            .filter_map(|word| match word {
                Words::Load { latest, load, .. } => {
                    assert_eq!(*latest, asker.asked);
                    Some(load.prefill_tokens)
                }
                _ => None,
            })
            .collect();
        assert_eq!(reports, [48, 32, 16, 0]);
        drop(engine);
    }
    // Deadlines are the request's, and time passes between the first part and the last.
    assert!(spread[0] <= 0.0, "{spread:?}");
    // 480 ms for the 48 tokens after the first part, less what computing them took.
    assert!(spread[1] - spread[0] > 200.0, "{spread:?}");
}

#[test]
fn who_sent_prompts_before_is_told_of_the_load_that_others_bring_and_of_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let (mut first, mut second) = (Asker::new(), Asker::new());
    let here = address();
    let config = format!(
        "role = \"prefill\"\npeers = {{ listen = \"{here}\" }}\nschedule = {{ tokens = 1 }}\n{}",
        model(false)
    );
    let _engine = Running::start(folder.path(), "prefill", &config);
    first.ask(here, prompt(1, 64), 3_600_000);
    first.hear(here);
    // Longer than those wait for a report of whom nothing is computed.
    std::thread::sleep(std::time::Duration::from_millis(30));
    second.ask(here, prompt(2, 64), 3_600_000);
    let (busy, _) = first.load();
    assert!(busy > 0, "the other's prompt");
    second.hear(here);
    while first.load() != (0, 0) {}
    // A prompt that is cancelled is left out, too.
    second.ask(here, prompt(3, 200), 3_600_000);
    while second.load().0 == 0 {}
    let request = second.asked;
    let words = serde_json::to_string(&Words::Cancel { request }).expect("JSON");
    second.carrier.say(here, words);
    while second.load() != (0, 0) {}
}

#[test]
fn kv_of_requests_that_were_given_up_goes_below_all_levels() {
    let folder = tempfile::tempdir().unwrap();
    let (_daemon, socket) = Daemon::start(folder.path());
    let mut asker = Asker::new();
    let here = address();
    let config = format!(
        "role = \"prefill\"\npeers = {{ listen = \"{here}\" }}\nschedule = {{ policy = \"qoserve\" \
         }}\n{}{}",
        laxity(Some(&socket)),
        model(false)
    );
    let engine = Running::start(folder.path(), "prefill", &config);
    let sent =
        |stage: &str| engine.metric(&format!("laxity_engine_sent_bytes_total{{stage=\"{stage}\""));
    let all = 64.0 * 3.0 * 256.0;
    // In time, and given up since nobody could be.
    asker.ask(here, prompt(1, 64), 3_600_000);
    asker.hear(here);
    assert_eq!((sent("p2d"), sent("background")), (all, 0.0));
    asker.ask(here, prompt(2, 64), 0);
    asker.hear(here);
    assert_eq!((sent("p2d"), sent("background")), (all, all));
    // In the scavenger's class, whenever the daemon answers in time (the machine may be busy).
    let scavenged = "laxity_engine_sent_bytes_total{stage=\"background\",dscp=\"8\"}";
    let mut number = 3;
    eventually("the daemon has put it into the scavenger", || {
        asker.ask(here, prompt(number, 64), 0);
        asker.hear(here);
        number += 1;
        engine.metric(scavenged) > 0.0
    });
    // A frame is still one of KV to whoever gets it.
    asker.ask(here, prompt(number, 64), 0);
    let (parcels, _) = asker.hear(here);
    assert!(parcels.iter().all(|parcel| parcel.head.kind == Kind::P2d));
}
