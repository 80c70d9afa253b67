//! Load tests: many clients, some of which disconnect. `LAXITY_LOAD_SECONDS` is half of a test's
//! duration.

use std::io::Read as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::apart::{Cluster, Daemon};
use crate::running::{Answer, PATIENCE, Running, prompt, with_model};

fn seconds() -> u64 {
    std::env::var("LAXITY_LOAD_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(5)
}

/// Memory must not grow with the number of requests. In the second half of a test it may grow by a
/// quarter and this bound, for allocators and caches. Processes have 10 to 20 MiB, and grew by less
/// than 1 MiB in the second half of ten minutes (docs/engine.md).
const GROWTH_BYTES_MAX: u64 = 8 << 20;

/// Maximum number of answers to other clients while one client waits for its own. The engine serves
/// requests in order of arrival if they fit, so each other client overtakes it a few times at most.
/// A bound in seconds would depend on the speed of the machine.
const OVERTAKEN_MAX: u64 = 300;

/// An engine that sends a client nothing for this long hangs.
const STANDSTILL: Duration = Duration::from_secs(120);

/// The engines under load: the one that takes the requests, and the others. All print their state
/// if a client has no answer.
struct Loaded<'a> {
    front: &'a Running,
    behind: Vec<&'a Running>,
    ended: AtomicU64,
    answered: AtomicU64,
    refused: AtomicU64,
    left: AtomicU64,
}

impl Loaded<'_> {
    fn of<'a>(front: &'a Running, behind: Vec<&'a Running>) -> Loaded<'a> {
        let zero = || AtomicU64::new(0);
        Loaded { front, behind, ended: zero(), answered: zero(), refused: zero(), left: zero() }
    }

    /// Returns `what` and the state of all engines, for a client without an answer.
    fn explain(&self, what: &str) -> String {
        let mut text = format!("{what}\n");
        for engine in std::iter::once(&self.front).chain(&self.behind) {
            text.push_str(&engine.explain());
        }
        text
    }

    /// Sends a request and waits for the answer. Panics if too many other clients are answered
    /// first, or if nothing comes for too long.
    fn ask(&self, name: &str, body: &str) -> Answer {
        let (begun, start) = (self.ended.load(Ordering::Relaxed), Instant::now());
        let stream = self.front.begin("/v1/completions", "x-slo-ttft-ms: 2000\r\n", body);
        stream.set_read_timeout(Some(STANDSTILL)).expect("timeout");
        let answer = Answer::read(stream).unwrap_or_else(|| {
            let what = format!("{name} has no answer after {:?}: {body}", start.elapsed());
            panic!("{}", self.explain(&what))
        });
        let overtaken = self.ended.load(Ordering::Relaxed) - begun;
        assert!(
            overtaken <= OVERTAKEN_MAX,
            "{}",
            self.explain(&format!("{overtaken} others were answered before {name}: {body}"))
        );
        // A refused request has overtaken no other.
        if answer.status == 200 {
            self.ended.fetch_add(1, Ordering::Relaxed);
        }
        answer
    }

    fn client(&self, number: u32, end: Instant) {
        let mut round = number;
        while Instant::now() < end {
            round = round.wrapping_mul(1_103_515_245).wrapping_add(12_345);
            let dice = round >> 16;
            let tokens = prompt(dice % 7, 20 + (dice % 200) as usize);
            let most = 1 + dice % 40;
            let stream = !dice.is_multiple_of(3);
            let body = serde_json::json!({
                "prompt": tokens, "max_tokens": most, "ignore_eos": true, "stream": stream
            });
            if dice.is_multiple_of(5) {
                // Reads a little or nothing, and disconnects.
                let mut stream = self.front.begin("/v1/completions", "", &body.to_string());
                if dice.is_multiple_of(2) {
                    let _ = stream.read(&mut [0; 64]);
                }
                self.left.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            let name = format!("client-{number}-{round}");
            let answer = self.ask(&name, &body.to_string());
            match answer.status {
                200 => {
                    self.answered.fetch_add(1, Ordering::Relaxed);
                    // A stream that was cut off is no answer.
                    let whole = if stream {
                        answer.events().last().is_some_and(|last| last == "[DONE]")
                    } else {
                        answer.json()["usage"]["completion_tokens"] == most
                    };
                    assert!(whole, "{}", self.explain(&format!("{name}: {}", answer.body)));
                }
                429 => {
                    assert_eq!(answer.error().0, "too_many_requests", "{}", answer.body);
                    std::thread::sleep(Duration::from_millis(20));
                    self.refused.fetch_add(1, Ordering::Relaxed);
                }
                status => panic!("{}", self.explain(&format!("{name}: {status}: {}", answer.body))),
            }
        }
    }

    /// Runs clients that wait for their answers and clients that disconnect, more than the engine
    /// admits.
    fn load(&self) {
        let end = Instant::now() + Duration::from_secs(seconds());
        std::thread::scope(|scope| {
            for number in 0..32 {
                scope.spawn(move || self.client(number, end));
            }
        });
        let counts =
            [&self.answered, &self.refused, &self.left].map(|count| count.load(Ordering::Relaxed));
        assert!(counts[0] > 20 && counts[2] > 0, "{counts:?}");
    }

    /// Loads an engine for twice [`seconds`], and compares its memory after both halves.
    fn twice(&self) {
        let start = self.front.memory();
        self.load();
        let before = self.front.memory();
        self.load();
        let after = self.front.memory();
        // docs/engine.md has these numbers. `cargo test -- --nocapture` prints them.
        println!(
            "{} s: {} answered, {} turned away, {} left; memory {} KiB at the start, {} KiB half \
             way, {} KiB at the end",
            2 * seconds(),
            self.answered.load(Ordering::Relaxed),
            self.refused.load(Ordering::Relaxed),
            self.left.load(Ordering::Relaxed),
            start >> 10,
            before >> 10,
            after >> 10,
        );
        assert!(after < before + before / 4 + GROWTH_BYTES_MAX, "{before} bytes, then {after}");
    }

    fn nothing_is_left(&self) {
        let start = Instant::now();
        let engines = || std::iter::once(&self.front).chain(&self.behind);
        while let Some(engine) = engines().find(|engine| !engine.is_idle()) {
            assert!(
                start.elapsed() < PATIENCE,
                "{}",
                self.explain(&format!("something is left of the load: {}", engine.health()))
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        let failed: f64 =
            engines().map(|engine| engine.metric("laxity_engine_batches_failed_total")).sum();
        assert_eq!(failed, 0.0, "{}", self.explain("batches failed"));
        println!("nothing left {:?} after the end: 0 requests, 0 blocks", start.elapsed());
    }
}

#[test]
fn under_load_nothing_is_stuck_and_nothing_leaks() {
    let folder = tempfile::tempdir().unwrap();
    let kv = "kv = { blocks = 96, block_tokens = 16 }";
    let limits = "limits = { requests_max = 24 }\nschedule = { tokens = 64 }";
    let config = with_model(false, &[kv, limits].join("\n"));
    let engine = Running::start(folder.path(), "whole", &config);
    let loaded = Loaded::of(&engine, Vec::new());
    loaded.twice();
    loaded.nothing_is_left();
}

#[test]
fn under_load_processes_apart_leak_nothing_either() {
    let folder = tempfile::tempdir().unwrap();
    let (_daemon, socket) = Daemon::start(folder.path());
    let cluster = Cluster::start(folder.path(), true, Some(&socket), 64);
    let loaded = Loaded::of(&cluster.decode, cluster.prefill.iter().collect());
    loaded.twice();
    loaded.nothing_is_left();
    assert!(cluster.sum("laxity_engine_scheduled_bytes_total") > 0.0);
}
