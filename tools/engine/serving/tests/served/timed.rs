//! Processes that take the time of computing instead of computing.

use crate::apart::{Daemon, laxity, list};
use crate::running::{Running, address, alone, eventually, model, prompt};

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
        let (ranks, front) = ([address(), address()], address());
        let common = format!(
            "kv = {{ blocks = 64, block_tokens = 8, keep_fetched = false }}\n{}",
            laxity(socket)
        );
        let prefill = [0, 1].map(|rank| {
            let held = [format!(", holds = {holds:?}"), String::new()];
            let config = format!(
                "role = \"prefill\"\npeers = {{ listen = \"{}\", experts = {}, reuse = {}, \
                 lockstep = {lockstep}, reads = {lockstep} }}\n\
                 timing = {{ {TIMING}{} }}\n{common}{shape}",
                ranks[rank],
                list(&ranks),
                list(&[ranks[1 - rank]]),
                held[rank],
            );
            Running::start(folder.path(), &format!("prefill{rank}"), &config)
        });
        let config = format!(
            "role = \"decode\"\npeers = {{ listen = \"{front}\", prefill = {} }}\n\
             timing = {{ {TIMING} }}\n{common}{shape}",
            list(&ranks),
        );
        let decode = Running::start(folder.path(), "decode", &config);
        for (prompt, expected) in prompts().iter().zip(&expected) {
            assert_eq!(&decode.complete(prompt, 6), expected, "{}", decode.log_text());
        }
        let fetched = |engine: &Running| engine.metric("laxity_engine_prompt_tokens_fetched_total");
        assert_eq!(fetched(&prefill[0]), 0.0);
        // Prompts take turns. What was fetched is not kept.
        assert_eq!(fetched(&prefill[1]), 3.0 * 64.0);
        let sent = |stage| {
            let name = format!("laxity_engine_sent_bytes_total{{stage=\"{stage}\"");
            prefill.iter().map(|engine| engine.metric(&name)).sum::<f64>()
        };
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
            let counts = prefill.each_ref().map(|engine| engine.metric(exchanges));
            assert_eq!(counts, [6.0 * 3.0 * 2.0; 2]);
        }
        let scheduled = prefill[0].metric("laxity_engine_scheduled_bytes_total");
        assert_eq!(scheduled > 0.0, socket.is_some(), "scheduled {scheduled}");
        eventually("all blocks are free", || decode.health()["kv_blocks_used"] == 0);
    }
}
