//! Prefill, decode and experts in different processes: their answers equal those of one process,
//! with and without a daemon, and if one of them dies.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::running::{PATIENCE, Running, address, alone, eventually, model, prompt, with_model};

/// A daemon for all processes of a test, with a window so small that flows wait; killed when
/// dropped.
pub(crate) struct Daemon(Child);

impl Daemon {
    pub(crate) fn start(folder: &Path) -> (Self, PathBuf) {
        let own = std::env::current_exe().expect("own path");
        let folder_of_programs = own.parent().and_then(Path::parent);
        let program = folder_of_programs.expect("target/<profile>/deps").join("laxityd");
        assert!(program.exists(), "{program:?} is missing: `cargo build -p laxity-daemon` first");
        let socket = folder.join("laxityd.sock");
        let config = folder.join("laxityd.toml");
        let text = format!(
            "socket = {socket:?}\ncontrol = {:?}\nmetrics = \"\"\n[[nic]]\nname = \"test\"\nrate \
             = \"1Gbit\"\nchunk = \"4KiB\"\nwindow = \"16KiB\"\n",
            folder.join("control.sock")
        );
        std::fs::write(&config, text).expect("written");
        let child = Command::new(program)
            .arg("--config")
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(folder.join("laxityd.log")).expect("log"))
            .spawn()
            .expect("laxityd starts");
        eventually("the daemon listens", || socket.exists());
        (Self(child), socket)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn laxity(socket: Option<&Path>) -> String {
    socket.map_or(String::new(), |socket| format!("laxity = {{ socket = {socket:?} }}\n"))
}

pub(crate) fn list(addresses: &[SocketAddr]) -> String {
    let quoted: Vec<String> = addresses.iter().map(|address| format!("\"{address}\"")).collect();
    format!("[{}]", quoted.join(", "))
}

/// Two prefill processes and a decode process in front of them.
pub(crate) struct Cluster {
    pub(crate) decode: Running,
    pub(crate) prefill: Vec<Running>,
}

impl Cluster {
    pub(crate) fn start(folder: &Path, moe: bool, socket: Option<&Path>, chunk: u32) -> Self {
        let (laxity, kv) = (laxity(socket), "kv = { blocks = 64, block_tokens = 8 }");
        let common = with_model(moe, &format!("schedule = {{ tokens = {chunk} }}\n{kv}\n{laxity}"));
        Self::with(folder, moe, "", |_| common.clone())
    }

    /// Starts all processes. `of` returns the configuration of a process: 0 and 1 are the prefill
    /// processes, and 2 is the decode process. `peers` is added to the prefill processes' `peers`.
    pub(crate) fn with(
        folder: &Path,
        experts_apart: bool,
        peers: &str,
        of: impl Fn(usize) -> String,
    ) -> Self {
        let (ranks, front) = ([address(), address()], address());
        let experts = if experts_apart { list(&ranks) } else { "[]".to_owned() };
        let prefill = [0, 1].map(|rank| {
            let (own, other, rest) = (ranks[rank], ranks[1 - rank], of(rank));
            let config = format!(
                "role = 'prefill'\npeers = {{ listen = '{own}', experts = {experts}, reuse = \
                 ['{other}']{peers} }}\n{rest}"
            );
            Running::start(folder, &format!("prefill{rank}"), &config)
        });
        let (ranks, rest) = (list(&ranks), of(2));
        let config = format!(
            "role = 'decode'\npeers = {{ listen = '{front}', prefill = {ranks}, patience_ms = \
             20000 }}\n{rest}"
        );
        let decode = Running::start(folder, "decode", &config);
        Self { decode, prefill: prefill.into() }
    }

    pub(crate) fn sum(&self, metric: &str) -> f64 {
        self.prefill.iter().chain([&self.decode]).map(|engine| engine.metric(metric)).sum()
    }

    pub(crate) fn logs(&self) -> String {
        self.prefill.iter().chain([&self.decode]).map(Running::log_text).collect()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.prefill.iter().chain([&self.decode]).all(Running::is_idle)
    }
}

/// Returns prompts of which four at a time have the same beginning.
fn prompts() -> Vec<Vec<u32>> {
    (0..8)
        .map(|number| {
            let mut tokens = prompt(number / 4, 70);
            tokens.extend(prompt(number, 3 + 11 * number as usize));
            tokens
        })
        .collect()
}

/// Sends all prompts twice, several at once, so that one prefill process reuses KV that the other
/// computed.
fn compare(cluster: &Cluster, alone: &[String], what: &str) {
    for _ in 0..2 {
        for (prompts, expected) in prompts().chunks(4).zip(alone.chunks(4)) {
            let answers = cluster.decode.complete_all(prompts, 10);
            assert_eq!(answers, expected, "{what}\n{}", cluster.logs());
        }
    }
    eventually("all blocks are free", || cluster.is_idle());
}

/// Compares the answers of processes with those of one, with and without a daemon. `check` gets the
/// bytes that went with a permit.
fn apart(moe: bool, chunk: u32, check: impl Fn(&Cluster, f64)) {
    let folder = tempfile::tempdir().expect("a folder");
    let alone = alone(folder.path(), &model(moe), &prompts(), 10);
    let (_daemon, socket) = Daemon::start(folder.path());
    for socket in [None, Some(socket.as_path())] {
        let cluster = Cluster::start(folder.path(), moe, socket, chunk);
        compare(&cluster, &alone, &format!("daemon: {}", socket.is_some()));
        let elsewhere = cluster.decode.metric("laxity_engine_prefilled_elsewhere_total");
        assert_eq!(elsewhere, 16.0, "all prompts\n{}", cluster.logs());
        let scheduled = cluster.sum("laxity_engine_scheduled_bytes_total");
        match socket {
            // A machine that is busy may keep the daemon from answering for longer than a flow
            // waits.
            Some(_) => assert!(scheduled > 100_000.0, "scheduled {scheduled}"),
            None => assert_eq!(scheduled, 0.0),
        }
        check(&cluster, scheduled);
        assert!(cluster.decode.terminate());
    }
}

#[test]
fn prefill_and_decode_apart_answer_as_one_process_does_with_and_without_a_daemon() {
    apart(false, 37, |cluster, scheduled| {
        for engine in &cluster.prefill {
            assert!(engine.metric("laxity_engine_prompt_tokens_total") > 0.0, "shared out");
        }
        assert!(cluster.sum("laxity_engine_sent_bytes_total{stage=\"p2d\"") > 0.0);
        let bypassed = cluster.sum("laxity_engine_bypassed_bytes_total");
        assert!(scheduled + bypassed > 100_000.0, "bypassed {bypassed}");
    });
}

#[test]
fn experts_in_two_processes_answer_as_those_in_one_with_and_without_a_daemon() {
    apart(true, 64, |cluster, _| {
        for engine in &cluster.prefill {
            let sent = engine.metric("laxity_engine_sent_bytes_total{stage=\"collective\"");
            assert!(sent > 10_000.0, "a rank sent {sent} bytes of collectives");
        }
    });
}

/// Kills one prefill process while prompts are under way, then the other.
fn survive(moe: bool) {
    let folder = tempfile::tempdir().expect("a folder");
    let prompts: Vec<Vec<u32>> = (0..4).map(|number| prompt(number, 300)).collect();
    let alone = alone(folder.path(), &model(moe), &prompts, 10);
    let mut cluster = Cluster::start(folder.path(), moe, None, 8);
    for victim in 0..2 {
        let mut dying = cluster.prefill.remove(0);
        std::thread::scope(|scope| {
            let answers = scope.spawn(|| cluster.decode.complete_all(&prompts, 10));
            let start = Instant::now();
            let patience = Duration::from_secs(2);
            while dying.health()["kv_blocks_used"] == 0 && start.elapsed() < patience {}
            dying.kill();
            let answers = answers.join().expect("answers");
            assert_eq!(answers, alone, "victim {victim}: {}", cluster.logs());
        });
    }
    assert!(cluster.decode.metric("laxity_engine_prefilled_after_all_total") > 0.0);
    eventually("all blocks are free", || cluster.is_idle());
}

#[test]
fn prefill_processes_that_die_at_work_cost_no_answer() {
    survive(false);
}

#[test]
fn a_process_that_dies_with_experts_costs_no_answer() {
    survive(true);
}

#[test]
fn kv_that_a_peer_has_is_fetched_and_answers_the_same_with_and_without_a_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let (_daemon, socket) = Daemon::start(folder.path());
    for socket in [None, Some(socket.as_path())] {
        let (has, lacks) = (address(), address());
        let sizes = "kv = { blocks = 64, block_tokens = 8 }\nschedule = { tokens = 19 }\n";
        let common = with_model(false, &(sizes.to_owned() + &laxity(socket)));
        let peers = format!("peers = {{ listen = '{has}' }}\n{common}");
        let first = Running::start(folder.path(), "has", &peers);
        let peers = format!("peers = {{ listen = '{lacks}', reuse = ['{has}'], ask_ms = 30000 }}");
        let second = Running::start(folder.path(), "lacks", &format!("{peers}\n{common}"));
        let tokens = prompt(3, 100);
        let expected = first.complete(&tokens, 9);
        assert_eq!(second.complete(&tokens, 9), expected, "{}", second.log_text());
        let fetched = second.metric("laxity_engine_prompt_tokens_fetched_total");
        assert_eq!(fetched, 96.0, "all full blocks before the last token");
        let computed = second.metric("laxity_engine_prompt_tokens_total");
        assert_eq!(computed, 4.0, "what was fetched is not computed");
        let sent = first.metric("laxity_engine_sent_bytes_total{stage=\"kv_reuse\"");
        // Three layers, keys and values of two heads of sixteen numbers.
        assert_eq!(sent, 96.0 * 3.0 * 2.0 * 32.0 * 4.0);
        assert_eq!(first.metric("laxity_engine_scheduled_bytes_total") > 0.0, socket.is_some());
        // It keeps the KV that it fetched.
        assert_eq!(second.complete(&tokens, 9), expected);
        assert_eq!(second.metric("laxity_engine_prompt_tokens_fetched_total"), 96.0);
        assert_eq!(second.metric("laxity_engine_prompt_tokens_found_total"), 96.0);
        eventually("all blocks are free", || first.is_idle() && second.is_idle());
    }
}

#[test]
fn a_daemon_that_dies_costs_no_answer() {
    let folder = tempfile::tempdir().unwrap();
    let prompts: Vec<Vec<u32>> = (0..4).map(|number| prompt(number, 200)).collect();
    let alone = alone(folder.path(), &model(true), &prompts, 10);
    let (daemon, socket) = Daemon::start(folder.path());
    let cluster = Cluster::start(folder.path(), true, Some(&socket), 16);
    std::thread::scope(|scope| {
        let answers = scope.spawn(|| cluster.decode.complete_all(&prompts, 10));
        eventually("something is scheduled", || {
            cluster.sum("laxity_engine_scheduled_bytes_total") > 0.0
        });
        drop(daemon);
        assert_eq!(answers.join().unwrap(), alone, "{}", cluster.logs());
    });
    for (prompt, expected) in prompts.iter().zip(&alone) {
        assert_eq!(&cluster.decode.complete(prompt, 10), expected, "{}", cluster.logs());
    }
    let after_all = cluster.decode.metric("laxity_engine_prefilled_after_all_total");
    assert_eq!(after_all, 0.0, "{}", cluster.logs());
    eventually("all blocks are free", || cluster.is_idle());
}

#[test]
fn a_long_answer_ends_though_others_come_all_the_time() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = prompt(1, 200);
    let expected = Running::start(folder.path(), "alone", &model(false)).complete(&tokens, 250);
    // The cache holds the KV of 512 tokens. The long answer needs 450 of them at its end, and loses
    // its blocks to others before.
    let cluster = Cluster::start(folder.path(), false, None, 64);
    let done = std::sync::atomic::AtomicBool::new(false);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for client in 0..4 {
            let (cluster, done) = (&cluster, &done);
            scope.spawn(move || {
                for round in 0.. {
                    // The long answer must have ended before this.
                    let late = start.elapsed() > PATIENCE + PATIENCE;
                    if late || done.load(std::sync::atomic::Ordering::Relaxed) {
                        return;
                    }
                    cluster.decode.complete(&prompt(2 + client * 50 + round % 50, 100), 20);
                }
            });
        }
        let answer = cluster.decode.complete(&tokens, 250);
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(answer, expected, "{}", cluster.logs());
    });
    eventually("all blocks are free", || cluster.is_idle());
}

#[test]
fn a_process_of_another_model_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let (other, front) = (address(), address());
    let config = with_model(false, &format!("role = 'prefill'\npeers = {{ listen = '{other}' }}"));
    let config = config.replace("seed = 7", "seed = 8");
    let prefill = Running::start(folder.path(), "prefill", &config);
    let config =
        format!("role = 'decode'\npeers = {{ listen = '{front}', prefill = ['{other}'] }}");
    let config = with_model(false, &config);
    let decode = Running::start(folder.path(), "decode", &config);
    let expected =
        Running::start(folder.path(), "alone", &model(false)).complete(&prompt(1, 50), 8);
    assert_eq!(decode.complete(&prompt(1, 50), 8), expected);
    let after_all = decode.metric("laxity_engine_prefilled_after_all_total");
    assert_eq!(after_all, 1.0, "{}", prefill.log_text());
    assert!(decode.log_text().contains("another model"), "{}", decode.log_text());
}

#[test]
fn whoever_goes_away_frees_its_blocks_in_all_processes() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(folder.path(), false, None, 8);
    let tokens = prompt(5, 400);
    let body = serde_json::json!({
        "prompt": tokens, "max_tokens": 100, "ignore_eos": true, "stream": true
    });
    let body = body.to_string();
    for _ in 0..3 {
        let open = cluster.decode.begin("/v1/completions", "", &body);
        eventually("it is being computed", || {
            let mut all = cluster.prefill.iter().chain([&cluster.decode]);
            all.any(|engine| engine.health()["kv_blocks_used"] != 0)
        });
        drop(open);
        eventually("all blocks are free", || cluster.is_idle());
    }
}
