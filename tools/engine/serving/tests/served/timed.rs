//! Processes that take the time of computing instead of computing.

use crate::apart::{Cluster, Daemon, laxity};
use crate::running::{Running, alone, eventually, model, prompt};

const TIMING: &str = "layer_us = 300.0, token_us = 2.0, expert_us = 200.0, row_us = 1.0";

fn prompts() -> Vec<Vec<u32>> {
    let own = |number| prompt(number, 3 + 11 * number as usize);
    (0..6).map(|number| [prompt(9, 64), own(number)].concat()).collect()
}

#[test]
fn timed_processes_apart_or_in_step_answer_as_one_does_and_fetch_the_kv_that_one_holds() {
    let folder = tempfile::tempdir().unwrap();
    let (_daemon, socket) = Daemon::start(folder.path());
    let shape = model(true);
    let whole = format!("timing = {{ {TIMING} }}\n{shape}");
    let expected = alone(folder.path(), &whole, &prompts(), 6);
    let holds = folder.path().join("holds.json");
    std::fs::write(&holds, serde_json::to_string(&[prompt(9, 64)]).unwrap()).unwrap();
    let ways = [(None, false), (Some(socket.as_path()), false), (Some(socket.as_path()), true)];
    for (socket, lockstep) in ways {
        let common = format!(
            "kv = {{ blocks = 64, block_tokens = 8, keep_fetched = false }}\n{}{shape}",
            laxity(socket)
        );
        let peers = format!(", lockstep = {lockstep}, reads = {lockstep}");
        let cluster = Cluster::with(folder.path(), true, &peers, |process| {
            let held = if process == 0 { format!(", holds = {holds:?}") } else { String::new() };
            format!("timing = {{ {TIMING}{held} }}\n{common}")
        });
        let Cluster { decode, prefill } = &cluster;
        for (prompt, expected) in prompts().iter().zip(&expected) {
            assert_eq!(&decode.complete(prompt, 6), expected, "{}", decode.log_text());
        }
        let fetched = |engine: &Running| engine.metric("laxity_engine_prompt_tokens_fetched_total");
        assert_eq!(fetched(&prefill[0]), 0.0);
        // Prompts take turns. What was fetched is not kept.
        assert_eq!(fetched(&prefill[1]), 3.0 * 64.0);
        let sent =
            |stage| cluster.sum(&format!("laxity_engine_sent_bytes_total{{stage=\"{stage}\""));
        // Three layers, keys and values of two heads of sixteen numbers.
        assert_eq!(sent("kv_reuse"), 3.0 * 64.0 * 3.0 * 256.0);
        let tokens: usize = prompts().iter().map(Vec::len).sum();
        assert_eq!(sent("p2d"), tokens as f64 * 3.0 * 256.0);
        // One of a token's two experts is elsewhere: a row of 48 numbers there and one back, in
        // each layer.
        let computed = (tokens - 6 * 64) as f64;
        let rows = computed * 3.0 * 2.0 * 48.0 * 4.0;
        assert!((rows..rows * 1.2).contains(&sent("collective")), "{}", sent("collective"));
        // In step, each rank exchanges twice in each layer of each iteration, with a prompt of its
        // own or without.
        if lockstep {
            let exchanges = "laxity_engine_exchange_seconds_count";
            for engine in prefill {
                assert_eq!(engine.metric(exchanges), 6.0 * 3.0 * 2.0);
            }
        }
        let scheduled = prefill[0].metric("laxity_engine_scheduled_bytes_total");
        assert_eq!(scheduled > 0.0, socket.is_some(), "scheduled {scheduled}");
        eventually("all blocks are free", || decode.is_idle());
    }
}
