//! Load: many clients for a while, some of whom go away. `LAXITY_LOAD_SECONDS` makes it longer.

use std::io::Read as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::apart::{Cluster, Daemon};
use crate::running::{Running, eventually, model, prompt};

fn seconds() -> u64 {
    std::env::var("LAXITY_LOAD_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(5)
}

/// Memory must not grow with the requests that were served. What is allowed is what allocators and caches take on the way.
const GROWTH_BYTES_MAX: u64 = 64 << 20;

/// Loads an engine twice as long as asked for; memory after the first half is what it may have after the second, and a little.
fn load_twice(engine: &Running) {
    load(engine);
    let before = engine.memory();
    load(engine);
    let after = engine.memory();
    assert!(
        after < before + before / 4 + GROWTH_BYTES_MAX,
        "{before} bytes, then {after}"
    );
}

/// Loads an engine: clients that wait for their answers, clients that go away, more of both than are let in.
fn load(engine: &Running) {
    let end = Instant::now() + Duration::from_secs(seconds());
    let (answered, refused, left) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for client in 0..32_u32 {
            let (answered, refused, left) = (&answered, &refused, &left);
            scope.spawn(move || {
                let mut round = client;
                while Instant::now() < end {
                    round = round.wrapping_mul(1_103_515_245).wrapping_add(12_345);
                    let dice = round >> 16;
                    let tokens = prompt(dice % 7, 20 + (dice % 200) as usize);
                    let body = serde_json::json!({"prompt": tokens, "max_tokens": 1 + dice % 40, "ignore_eos": true, "stream": dice % 3 != 0});
                    if dice % 5 == 0 {
                        // Reads a little, or nothing, and goes.
                        let mut stream = engine.begin("/v1/completions", "", &body.to_string());
                        if dice % 2 == 0 {
                            let _ = stream.read(&mut [0; 64]);
                        }
                        left.fetch_add(1, Ordering::Relaxed);
                        continue;
                    }
                    let answer = engine.post("/v1/completions", "x-slo-ttft-ms: 2000\r\n", &body.to_string());
                    match answer.status {
                        200 => answered.fetch_add(1, Ordering::Relaxed),
                        429 => {
                            std::thread::sleep(Duration::from_millis(20));
                            refused.fetch_add(1, Ordering::Relaxed)
                        }
                        status => panic!("{status}: {}\n{}", answer.body, engine.log_text()),
                    };
                }
            });
        }
    });
    let counts = [&answered, &refused, &left].map(|count| count.load(Ordering::Relaxed));
    assert!(counts[0] > 20 && counts[2] > 0, "{counts:?}");
}

#[test]
fn under_load_nothing_is_stuck_and_nothing_leaks() {
    let folder = tempfile::tempdir().unwrap();
    let config = format!(
        "kv = {{ blocks = 96, block_tokens = 16 }}\nschedule = {{ tokens = 64 }}\nlimits = {{ requests_max = 24 }}\n{}",
        model(false)
    );
    let engine = Running::start(folder.path(), "whole", &config, &[]);
    load_twice(&engine);
    eventually("nothing is left", || {
        let health = engine.health();
        health["requests"] == 0 && health["kv_blocks_used"] == 0
    });
    assert_eq!(
        engine.metric("laxity_engine_batches_failed_total"),
        0.0,
        "{}",
        engine.log_text()
    );
}

#[test]
fn under_load_processes_apart_leak_nothing_either() {
    let folder = tempfile::tempdir().unwrap();
    let (_daemon, socket) = Daemon::start(folder.path());
    let cluster = Cluster::start(folder.path(), true, Some(&socket), true, 64);
    load_twice(&cluster.decode);
    eventually("nothing is left", || cluster.is_idle());
    assert_eq!(
        cluster.sum("laxity_engine_batches_failed_total"),
        0.0,
        "{}",
        cluster.logs()
    );
    assert!(cluster.sum("laxity_engine_scheduled_bytes_total") > 0.0);
}
