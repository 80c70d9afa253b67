//! The worker with engines. Each request to them is a transfer of the oracle, and each token of its
//! answer has 8 bytes: the content that belongs there if the token is the one that an engine alone
//! answers, or else another.
//!
//! One queue sends a request after the answer to the one before, so its transfers are in order.
//! Another one has several requests at a time.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinSet;

use super::engines::{EngineProcess, EngineSpec, prompts, question, runtime};
use super::frame::{Frame, content};
use super::oracle::LOST_QUEUES;
use super::task::{KILL_ENGINE, LOSE_THREAD, Outlet, Starved, Task, obey};
use crate::child::lock;
use crate::client::{ask, get};
use crate::counts::Counts;
use crate::error::LabError;

/// Longest time until a request has its answer, apart from time in which the worker did not run.
const ANSWER_MAX: Duration = Duration::from_secs(8);
/// Longest time until an engine has forgotten requests that have ended.
const FORGET_MAX: Duration = Duration::from_secs(3);
/// Longest time from SIGTERM until the end of an engine.
const END_MAX: Duration = Duration::from_secs(3);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Requests of the queue without order that are open at once.
const DEPTH: usize = 3;
/// Longest time after which a client goes away before it has its answer.
const ABANDONED_WITHIN_MS: u64 = 30;

struct Asker {
    endpoint: std::net::SocketAddr,
    outlet: Outlet,
    starved: Starved,
    stop: Arc<AtomicBool>,
    prompts: Vec<Vec<u32>>,
    answers: Vec<Vec<u32>>,
    rng: Mutex<ChaCha8Rng>,
    /// Number of the next transfer of the queue without order.
    next: AtomicU64,
    /// Whether the engine that answers was killed and does not listen again yet. Requests that fail
    /// then are sent again.
    front_is_down: AtomicBool,
    front_kills: AtomicU64,
}

impl Asker {
    fn draw(&self, below: u64) -> u64 {
        lock(&self.rng).random_range(0..below)
    }

    fn wrong(&self, why: String) {
        self.outlet.put(&[Frame::Wrong { why }]);
        self.stop.store(true, Ordering::Relaxed);
    }

    fn submit(&self, queue: u32, number: u64, in_order: bool) -> usize {
        let chosen = self.draw(self.prompts.len() as u64) as usize;
        let bytes = 8 * self.answers[chosen].len() as u64;
        self.outlet.put(&[Frame::Submitted { queue, number, bytes, in_order }]);
        chosen
    }

    /// Returns the answer to a prompt, or what is wrong.
    async fn answer(&self, chosen: usize) -> Result<Vec<u32>, String> {
        let answered = async {
            loop {
                // A request that begins before the kill may fail after the engine listens again.
                let was_killed = self.front_kills.load(Ordering::Relaxed);
                let question = question(chosen, self.prompts[chosen].clone());
                let answer = ask(self.endpoint, question, 0, |_, _| {}).await;
                match answer.error {
                    None => return Ok(answer.tokens),
                    Some(_)
                        if self.front_is_down.load(Ordering::Relaxed)
                            || was_killed != self.front_kills.load(Ordering::Relaxed) =>
                    {
                        tokio::time::sleep(LOOK_EVERY).await;
                    }
                    Some(error) => return Err(format!("prompt {chosen}: {error}")),
                }
            }
        };
        let (begin, before) = (Instant::now(), self.starved.ns());
        let late = async {
            loop {
                tokio::time::sleep(LOOK_EVERY).await;
                let starved = Duration::from_nanos(self.starved.ns() - before);
                if begin.elapsed().saturating_sub(starved) > ANSWER_MAX {
                    return;
                }
            }
        };
        tokio::select! {
            answer = answered => answer,
            () = late => Err(format!("prompt {chosen} has no answer after {ANSWER_MAX:?}")),
        }
    }

    fn report(&self, queue: u32, number: u64, chosen: usize, answer: Result<Vec<u32>, String>) {
        let tokens = match answer {
            Ok(tokens) => tokens,
            Err(why) => return self.wrong(format!("queue {queue}, transfer {number}: {why}")),
        };
        let expected = &self.answers[chosen];
        let word = |(at, token): (usize, &u32)| {
            let right = expected.get(at) == Some(token);
            content(if right { queue } else { queue + 1 }, number, 8 * at as u64, 8)
        };
        let payload = tokens.iter().enumerate().flat_map(word).collect();
        self.outlet.put(&[
            Frame::Bytes { queue, number, offset: 0, payload },
            Frame::Done { queue, number },
        ]);
        if &tokens != expected {
            self.wrong(format!("prompt {chosen} has the answer {tokens:?}, not {expected:?}"));
        }
    }

    async fn in_order(self: Arc<Self>) {
        let mut number = 0;
        while !self.stop.load(Ordering::Relaxed) {
            let chosen = self.submit(0, number, true);
            let answer = self.answer(chosen).await;
            self.report(0, number, chosen, answer);
            number += 1;
        }
        self.outlet.put(&[Frame::Ended { queue: 0, count: number }]);
    }

    async fn without_order(self: Arc<Self>) {
        let mut clients = JoinSet::new();
        for _ in 0..DEPTH {
            let own = Arc::clone(&self);
            clients.spawn(async move {
                while !own.stop.load(Ordering::Relaxed) {
                    // Nothing is awaited between the two, so numbers are submitted in order.
                    let number = own.next.fetch_add(1, Ordering::Relaxed);
                    let chosen = own.submit(1, number, false);
                    let answer = own.answer(chosen).await;
                    own.report(1, number, chosen, answer);
                }
            });
        }
        clients.join_all().await;
        let count = self.next.load(Ordering::Relaxed);
        self.outlet.put(&[Frame::Ended { queue: 1, count }]);
    }

    /// Sends a request, and goes away soon.
    async fn be_lost(self: Arc<Self>, queue: u32) {
        let chosen = self.submit(queue, 0, false);
        let patience = Duration::from_millis(self.draw(ABANDONED_WITHIN_MS));
        match tokio::time::timeout(patience, self.answer(chosen)).await {
            Ok(answer) => {
                self.report(queue, 0, chosen, answer);
                self.outlet.put(&[Frame::Ended { queue, count: 1 }]);
            }
            Err(_) => self.outlet.put(&[Frame::Abandoned { queue }]),
        }
    }

    async fn all(self: Arc<Self>, mut lose: UnboundedReceiver<()>) {
        let mut tasks = JoinSet::new();
        tasks.spawn(Arc::clone(&self).in_order());
        tasks.spawn(Arc::clone(&self).without_order());
        let mut queue = LOST_QUEUES;
        while lose.recv().await.is_some() {
            queue += 1;
            tasks.spawn(Arc::clone(&self).be_lost(queue));
        }
        tasks.join_all().await;
    }
}

/// Sends requests to three engines until the driver ends the worker.
pub(super) fn run(task: Task, outlet: &Outlet, stop: &Arc<AtomicBool>) -> Result<(), LabError> {
    let starved = Starved::watch();
    let control = runtime()?;
    // This thread starts all engines, which end with it.
    let mut engines = EngineSpec::cluster(&task.socket, task.seed.is_multiple_of(2))
        .into_iter()
        .map(|spec| EngineProcess::start(&task.programs.program, &task.handle, spec))
        .collect::<Result<Vec<_>, _>>()?;
    for engine in &mut engines {
        if let Err(error) = engine.await_ready(&control) {
            outlet.put(&[Frame::Wrong { why: error.to_string() }]);
            return Err(error);
        }
    }
    let mut rng = ChaCha8Rng::seed_from_u64(task.seed);
    let asker = Arc::new(Asker {
        endpoint: engines[0].spec.endpoint,
        outlet: outlet.clone(),
        starved,
        stop: Arc::clone(stop),
        prompts: prompts(),
        answers: task.answers,
        rng: Mutex::new(ChaCha8Rng::seed_from_u64(rng.random())),
        next: AtomicU64::new(0),
        front_is_down: AtomicBool::new(false),
        front_kills: AtomicU64::new(0),
    });
    let (lose, lost) = unbounded_channel();
    let clients = runtime()?;
    let asking = std::thread::spawn({
        let asker = Arc::clone(&asker);
        move || clients.block_on(asker.all(lost))
    });
    obey(stop, |command| match command {
        KILL_ENGINE => {
            let chosen = rng.random_range(0..engines.len());
            if chosen == 0 {
                asker.front_is_down.store(true, Ordering::Relaxed);
                asker.front_kills.fetch_add(1, Ordering::Relaxed);
            }
            let victim = &mut engines[chosen];
            let wrong = victim.look();
            let replaced = victim.replace().and_then(|()| victim.await_ready(&control));
            if chosen == 0 {
                asker.front_is_down.store(false, Ordering::Relaxed);
            }
            let error = replaced.err().map(|error| error.to_string());
            wrong.or(error).into_iter().for_each(|why| asker.wrong(why));
        }
        LOSE_THREAD => {
            // The clients end only after a panic, which is found below.
            let _ = lose.send(());
        }
        _ => {}
    });
    drop(lose);
    if asking.join().is_err() {
        return Err(LabError::Inside("a client of the engines panicked".to_owned()));
    }
    for why in end(&mut engines, &control, outlet) {
        outlet.put(&[Frame::Wrong { why }]);
    }
    Ok(())
}

/// Ends all engines in order. Returns what is wrong.
fn end(engines: &mut [EngineProcess], control: &Runtime, outlet: &Outlet) -> Vec<String> {
    let mut wrong = Vec::new();
    let (mut scheduled, mut bypassed) = (0, 0);
    for engine in &mut *engines {
        wrong.extend(engine.look());
        let give_up = Instant::now() + FORGET_MAX;
        let left = control.block_on(forgets(engine, give_up)).err();
        let text = control.block_on(get(engine.spec.endpoint, "/metrics"));
        let counts = match text {
            Ok(text) => Counts::read(&text),
            Err(error) => {
                wrong.push(format!("{} has no metrics: {error}", engine.spec.name));
                continue;
            }
        };
        let of = |name: &str| counts.get(name) as u64;
        scheduled += of("scheduled_bytes_total");
        bypassed += of("bypassed_bytes_total");
        if let Some(left) = left {
            wrong.push(format!(
                "{} has {left} at the end, and {} requests run and {} wait{}",
                engine.spec.name,
                of("requests_running"),
                of("requests_waiting"),
                engine.process.tail()
            ));
        }
    }
    outlet.put(&[Frame::Counted { scheduled, bypassed }]);
    engines.iter_mut().for_each(|engine| engine.process.signal(Signal::SIGTERM));
    let give_up = Instant::now() + END_MAX;
    wrong.extend(engines.iter_mut().filter_map(|engine| engine.await_end(give_up)));
    wrong
}

/// Waits until an engine has no request and no block in use. If that does not happen in time,
/// returns the requests and blocks that are left.
async fn forgets(engine: &EngineProcess, give_up: Instant) -> Result<(), String> {
    loop {
        let left = match get(engine.spec.endpoint, "/health").await {
            Ok(text) => {
                let health: Value = serde_json::from_str(&text).unwrap_or_default();
                if health["requests"] == 0 && health["kv_blocks_used"] == 0 {
                    return Ok(());
                }
                text
            }
            Err(error) => error.to_string(),
        };
        if Instant::now() > give_up {
            return Err(left);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
