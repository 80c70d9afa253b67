//! One-sided operations with a difficult arbiter, which delays and reorders permits.
//!
//! Programs of several ranks run against a model: the content of memory, which writes precede a
//! signal, and when a source may be reused. The operations of a rank and context come from a queue
//! of 32 as NCCL's GIN proxy has it, whose producer spins until there is room.

mod difficult;
mod ranks;
mod standin;

use core::ffi::c_void;
use std::collections::VecDeque;
use std::io::{Read as _, Write as _};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use difficult::{Difficult, Temper, any_temper};
use laxity_client::{Stage, Stats};
use nccl_net_laxity::backend::{Backend as _, Memory, POINTER_HOST};
use nccl_net_laxity::report::Report;
use nccl_net_laxity::rma::{
    Around, Frame, HEAD_BYTES, Put, RegionSide, RmaContext, RmaGroup, RmaListener, RmaRegion,
    TransferEnds, test_request,
};
use nccl_net_laxity::verbs::{Verbs, VerbsOptions};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseResult};
use ranks::{REGISTRATION_BYTES, Words, lo, stranger, until, words};
use standin::{passes_over, passes_over_rdma};

/// Number of operations of a rank and context that may be unfinished.
const QUEUE: usize = 32;
/// Number of operations that a tick takes of each queue.
const POLL_BATCH: usize = 4;
/// Words of a slot, which the longest operation fills.
const SLOT: usize = 2048;

#[derive(Clone, Copy, Debug)]
enum Kind {
    Put,
    PutSignal,
    Signal,
    Get,
}

/// An operation of a program. Its number within its queue selects slot and content.
#[derive(Clone, Copy, Debug)]
struct Planned {
    context: usize,
    target: usize,
    kind: Kind,
    /// The words that it moves.
    words: usize,
}

/// The queue of a context and peer: a producer and a consumer index, as in NCCL's GIN proxy.
#[derive(Default)]
struct Queue {
    /// Operations that the GPU has not written yet.
    program: VecDeque<(usize, Planned)>,
    written: VecDeque<(usize, Planned)>,
    /// Requests that are not done, in order. Those that are done are `None`.
    unfinished: VecDeque<Option<(usize, usize, Planned)>>,
}

/// Listens, over RDMA if the environment says so.
fn listener() -> RmaListener {
    static VERBS: OnceLock<Verbs> = OnceLock::new();
    if std::env::var_os("LAXITY_NET").is_none_or(|net| net != "verbs") {
        return RmaListener::new(0, lo(), 0).expect("a port");
    }
    let verbs = VERBS.get_or_init(|| {
        Verbs::open(&VerbsOptions::default(), Some(lo())).expect("the stand-in's devices")
    });
    RmaListener::over(0, verbs.one_sided_at(0).expect("it has atomics"), 0).expect("a port")
}

/// Connects a group of ranks.
fn groups(ranks: usize) -> Vec<Arc<RmaGroup>> {
    let listeners: Vec<RmaListener> = (0..ranks).map(|_| listener()).collect();
    let handles: Vec<_> = listeners.iter().map(RmaListener::handle).collect();
    each(ranks, |rank| RmaGroup::connect(&listeners[rank], &handles, rank).expect("connects"))
}

/// Calls `run` for each of `0..count` in a thread of its own. Returns the results in order.
fn each<T: Send>(count: usize, run: impl Fn(usize) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let start = |at| {
            let run = &run;
            scope.spawn(move || run(at))
        };
        let threads: Vec<_> = (0..count).map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// A rank with its memory. Each operation has a slot of its own in each kind of memory.
struct Rank {
    context: Arc<RmaContext>,
    group: Arc<RmaGroup>,
    source: Words,
    target: Words,
    /// What gets read from, which never changes.
    stock: Words,
    signals: Words,
    regions: Vec<Arc<RmaRegion>>,
    queues: Vec<Queue>,
}

struct Cluster {
    arbiter: Arc<Difficult>,
    report: Arc<Report>,
    ranks: Vec<Rank>,
    contexts: usize,
    /// The operations of all ranks, as they were planned.
    programs: Vec<Vec<Planned>>,
}

fn content(rank: usize, number: usize, word: usize) -> u64 {
    ((rank as u64 + 1) << 48 | (number as u64 + 1) << 24) + word as u64
}

fn stock(rank: usize, word: usize) -> u64 {
    (rank as u64 + 1) << 56 | word as u64
}

impl Cluster {
    fn new(
        programs: &[Vec<Planned>],
        contexts: usize,
        arbiter: Difficult,
        wait_max: Duration,
    ) -> Self {
        Self::of(&groups(programs.len()), programs, contexts, arbiter, wait_max)
    }

    /// Returns a cluster of the first ranks of a group.
    fn of(
        groups: &[Arc<RmaGroup>],
        programs: &[Vec<Planned>],
        contexts: usize,
        arbiter: Difficult,
        wait_max: Duration,
    ) -> Self {
        let (arbiter, report) = (Arc::new(arbiter), Arc::<Report>::default());
        let longest = programs.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let ranks = each(groups.len(), |rank| {
            let group = Arc::clone(&groups[rank]);
            let around = around(&arbiter, &report, wait_max);
            let context = RmaContext::new(&group, contexts as i32, around).expect("contexts");
            let source = words(longest * SLOT);
            let target = words(groups.len() * longest * SLOT);
            let stock_words = words(SLOT);
            for (at, word) in stock_words.iter().enumerate() {
                word.store(stock(rank, at), Release);
            }
            let signals = words(groups.len() * contexts);
            let register = |memory: &Words| {
                let (address, bytes) = (memory.as_ptr() as usize, memory.len() * 8);
                let memory = Memory { address, bytes, kind: POINTER_HOST, dma_buf: None };
                group.register(memory).expect("registered")
            };
            let regions = [&source, &target, &stock_words, &signals].map(register).into();
            let mut queues: Vec<Queue> = Vec::new();
            queues.resize_with(groups.len() * contexts, Queue::default);
            for (number, planned) in programs[rank].iter().enumerate() {
                let queue = planned.target * contexts + planned.context;
                queues[queue].program.push_back((number, *planned));
            }
            Rank { context, group, source, target, stock: stock_words, signals, regions, queues }
        });
        Self { arbiter, report, ranks, contexts, programs: programs.to_vec() }
    }

    /// Returns the first word of an operation's slot at its target.
    fn slot(&self, rank: usize, number: usize) -> usize {
        let longest = self.programs.iter().map(Vec::len).max().unwrap_or(0).max(1);
        (rank * longest + number) * SLOT
    }

    fn call(&self, rank: usize, number: usize, planned: Planned) -> *mut c_void {
        let own = &self.ranks[rank];
        let side = |region: usize, word: usize| RegionSide {
            region: Arc::clone(&own.regions[region]),
            offset: word as u64 * 8,
        };
        let (context, target) = (planned.context as i32, planned.target as u32);
        let bytes = planned.words as u64 * 8;
        let near = side(0, number * SLOT);
        if matches!(planned.kind, Kind::Get) {
            let ends = TransferEnds { near, far: side(2, 0) };
            return own.context.get(context, target, Some(&ends), bytes).expect("taken");
        }
        for word in 0..planned.words {
            own.source[number * SLOT + word].store(content(rank, number, word), Release);
        }
        let signal = side(3, rank * self.contexts + planned.context);
        let put = Put {
            ends: Some(TransferEnds { near, far: side(1, self.slot(rank, number)) })
                .filter(|_| !matches!(planned.kind, Kind::Signal)),
            bytes: if matches!(planned.kind, Kind::Signal) { 0 } else { bytes },
            signal: (!matches!(planned.kind, Kind::Put)).then_some((signal, 1)),
        };
        own.context.put(context, target, put).expect("taken")
    }

    /// Does what NCCL's thread does in a tick, and what a GPU does meanwhile.
    fn tick(&mut self, rank: usize) {
        for queue in 0..self.ranks[rank].queues.len() {
            let queue = &mut self.ranks[rank].queues[queue];
            // The GPU writes what the queue has room for.
            while queue.written.len() + queue.unfinished.len() < QUEUE
                && let Some(next) = queue.program.pop_front()
            {
                queue.written.push_back(next);
            }
            let mut finished = Vec::new();
            for entry in &mut queue.unfinished {
                if let Some((request, number, planned)) = *entry
                    && test_request(request as *mut c_void).expect("no fault")
                {
                    *entry = None;
                    finished.push((number, planned));
                }
            }
            while queue.unfinished.front().is_some_and(Option::is_none) {
                queue.unfinished.pop_front();
            }
            for (number, planned) in finished {
                self.finished(rank, number, planned);
            }
        }
        for queue in 0..self.ranks[rank].queues.len() {
            for _ in 0..POLL_BATCH {
                let next = self.ranks[rank].queues[queue].written.pop_front();
                let Some((number, planned)) = next else { break };
                let request = self.call(rank, number, planned);
                let entry = Some((request as usize, number, planned));
                self.ranks[rank].queues[queue].unfinished.push_back(entry);
            }
        }
        self.ranks[rank].context.progress();
    }

    /// Checks a get that is done, and destroys the source of a put that is done.
    fn finished(&self, rank: usize, number: usize, planned: Planned) {
        let own = &self.ranks[rank];
        for word in 0..planned.words {
            let place = &own.source[number * SLOT + word];
            if matches!(planned.kind, Kind::Get) {
                assert_eq!(place.load(Acquire), stock(planned.target, word), "a get is not whole");
            }
            place.store(u64::MAX, Release);
        }
    }

    /// Checks that all writes that precede a signal are visible.
    fn check_signals(&self, target: usize) {
        for rank in 0..self.ranks.len() {
            for context in 0..self.contexts {
                let word = &self.ranks[target].signals[rank * self.contexts + context];
                let mut seen = word.load(Acquire);
                let program = self.programs[rank].iter().enumerate();
                let mut of_queue = program
                    .filter(|(_, planned)| planned.target == target && planned.context == context);
                while seen > 0 {
                    let (number, planned) = of_queue.next().expect("no more signals than planned");
                    self.check_target(rank, number, *planned);
                    seen -= u64::from(matches!(planned.kind, Kind::PutSignal | Kind::Signal));
                }
            }
        }
    }

    fn check_target(&self, rank: usize, number: usize, planned: Planned) {
        if matches!(planned.kind, Kind::Put | Kind::PutSignal) {
            let at = self.slot(rank, number);
            for word in 0..planned.words {
                let found = self.ranks[planned.target].target[at + word].load(Acquire);
                assert_eq!(
                    found,
                    content(rank, number, word),
                    "rank {rank}, {number}: {planned:?}"
                );
            }
        }
    }

    fn is_over(&self) -> bool {
        let over = |queue: &Queue| {
            queue.program.is_empty() && queue.written.is_empty() && queue.unfinished.is_empty()
        };
        self.ranks.iter().all(|rank| rank.queues.iter().all(over))
    }

    /// Runs all programs to their end.
    fn run(&mut self) {
        let mut ticks = 0;
        until("the end of all programs", || {
            for rank in 0..self.ranks.len() {
                self.tick(rank);
                if ticks % 64 == 0 {
                    self.check_signals(rank);
                }
            }
            ticks += 1;
            self.is_over()
        });
        // Local completion comes before the data are at the target.
        let expected = |target: usize| -> u64 {
            let all = self.programs.iter().flatten();
            let signals = all.filter(|planned| {
                planned.target == target && matches!(planned.kind, Kind::PutSignal | Kind::Signal)
            });
            signals.count() as u64
        };
        for target in 0..self.ranks.len() {
            let signals = &self.ranks[target].signals;
            until("all signals", || {
                signals.iter().map(|word| word.load(Acquire)).sum::<u64>() == expected(target)
            });
            self.check_signals(target);
        }
        for (rank, program) in self.programs.iter().enumerate() {
            for (number, planned) in program.iter().enumerate() {
                until("the last puts", || {
                    let at = self.slot(rank, number) + planned.words.saturating_sub(1);
                    let last = self.ranks[planned.target].target[at].load(Acquire);
                    !matches!(planned.kind, Kind::Put) || planned.words == 0 || last != 0
                });
                self.check_target(rank, number, *planned);
            }
        }
        for (rank, own) in self.ranks.iter().enumerate() {
            assert!((0..SLOT).all(|at| own.stock[at].load(Acquire) == stock(rank, at)));
        }
    }

    /// Ticks until the arbiter knows that everything is complete, and closes all ranks.
    fn close(&self) {
        until("the last completions are reported", || {
            self.ranks.iter().for_each(|rank| rank.context.progress());
            self.arbiter.flows.lock().is_empty()
        });
        self.ranks.iter().for_each(|rank| rank.context.close());
        self.close_groups();
    }

    fn close_groups(&self) {
        each(self.ranks.len(), |rank| self.ranks[rank].group.close());
    }

    fn count(&self, name: &str) -> u64 {
        let line = self.report.line("tcp", &Stats::default()).end();
        let start = line.find(&format!("\"{name}\":")).expect("it is reported") + name.len() + 3;
        let digits: String = line[start..].chars().take_while(char::is_ascii_digit).collect();
        digits.parse().expect("a number")
    }
}

fn any_planned(ranks: usize, contexts: usize) -> impl Strategy<Value = Planned> {
    let kind = prop_oneof![
        3 => Just(Kind::Put),
        2 => Just(Kind::PutSignal),
        2 => Just(Kind::Signal),
        1 => Just(Kind::Get),
    ];
    let words = prop_oneof![Just(0_usize), Just(1), 2..64_usize, 900..SLOT];
    (0..contexts, 0..ranks, kind, words).prop_map(|(context, target, kind, words)| Planned {
        context,
        target,
        kind,
        words,
    })
}

fn any_programs() -> impl Strategy<Value = (usize, Vec<Vec<Planned>>)> {
    (2..4_usize, 1..4_usize).prop_flat_map(|(ranks, contexts)| {
        let program = prop::collection::vec(any_planned(ranks, contexts), 0..60);
        (Just(contexts), prop::collection::vec(program, ranks))
    })
}

proptest! {
    #![proptest_config(Config { cases: 24, ..Config::default() })]

    #[test]
    fn every_program_ends_as_the_model_says_whatever_the_order_of_permits(
        (contexts, programs) in any_programs(),
        temper in any_temper(),
        window in prop_oneof![Just(1_u64), Just(64 << 10), Just(1 << 20)],
        chunk in prop_oneof![Just(4096_u64), Just(64 << 10), Just(u64::MAX)],
    ) {
        let arbiter = Difficult::new(temper, window, chunk);
        let mut cluster = Cluster::new(&programs, contexts, arbiter, Duration::from_secs(50));
        cluster.run();
        cluster.close();
        prop_assert_eq!(cluster.count("rma_overdue"), 0);
        let all: usize = programs.iter().map(Vec::len).sum();
        prop_assert_eq!(cluster.count("rma_operations"), all as u64);
        let bytes = |planned: &Planned| match planned.kind {
            Kind::Signal => 0,
            _ => planned.words as u64 * 8,
        };
        let moved: u64 = programs.iter().flatten().map(bytes).sum();
        prop_assert_eq!(cluster.count("rma_bytes"), moved);
        prop_assert!(cluster.arbiter.completed.load(Relaxed) <= moved);
        // A flow may begin though its first chunk exceeds the window.
        let largest = (QUEUE * contexts * SLOT * 8) as u64;
        let most = cluster.arbiter.most_in_flight.load(Relaxed);
        prop_assert!(most <= window.max(chunk.min(largest)), "{most} in flight");
    }
}

/// A dispatch and a combine of expert parallelism: many small puts to all peers, then a barrier.
fn dispatch(ranks: usize, tokens: usize, contexts: usize) -> Vec<Vec<Planned>> {
    let program = |rank: usize| {
        let put = move |at: usize| Planned {
            context: at % contexts,
            target: (rank + 1 + at % (ranks - 1)) % ranks,
            kind: if at.is_multiple_of(17) { Kind::PutSignal } else { Kind::Put },
            words: 896 + at % 2 * 896,
        };
        let barrier = move |at: usize| Planned {
            context: at / ranks,
            target: at % ranks,
            kind: Kind::Signal,
            words: 0,
        };
        (0..tokens).map(put).chain((0..ranks * contexts).map(barrier)).collect()
    };
    (0..ranks).map(program).collect()
}

fn dispatched(temper: Temper, window: u64, chunk: u64, wait_max: Duration) -> Cluster {
    let arbiter = Difficult::new(temper, window, chunk);
    let programs = dispatch(3, 700, 2);
    let mut cluster = Cluster::new(&programs, 2, arbiter, wait_max);
    cluster.run();
    cluster
}

#[test]
fn thousands_of_operations_end_and_a_tick_asks_once_per_rank() -> TestCaseResult {
    for temper in [Temper::Newest, Temper::Largest, Temper::Random(7)] {
        let cluster = dispatched(temper, 256 << 10, 64 << 10, Duration::from_secs(50));
        cluster.close();
        prop_assert_eq!(cluster.count("rma_overdue"), 0);
        let held = cluster.count("rma_held");
        let flows = cluster.arbiter.submitted();
        prop_assert!(held > 1400 && flows * 2 < held, "{flows} flows of {held} operations");
    }
    Ok(())
}

#[test]
fn without_any_permit_operations_go_unscheduled_after_the_longest_wait_and_are_counted() {
    let cluster = dispatched(Temper::Never, 1 << 20, 64 << 10, Duration::from_millis(2));
    cluster.close();
    assert_eq!(cluster.count("rma_overdue"), cluster.count("rma_held"));
    assert!(cluster.count("rma_held") > 0);
    // What begins, ends.
    let cluster = dispatched(Temper::Begins, 64 << 20, 4096, Duration::from_millis(2));
    cluster.close();
    assert!(cluster.count("rma_overdue") > 0);
}

#[test]
fn small_operations_pass_unless_one_of_their_context_is_held_before_them() {
    let planned = |context, kind, words| Planned { context, target: 1, kind, words };
    let program = [
        planned(0, Kind::Signal, 0),
        planned(0, Kind::Put, 1),
        planned(0, Kind::Put, 100),
        planned(0, Kind::Signal, 0),
        planned(1, Kind::PutSignal, 1),
        planned(0, Kind::Get, 1),
    ];
    let arbiter = Difficult::new(Temper::Never, 1 << 20, 4096);
    let programs = [program.to_vec(), Vec::new()];
    let cluster = Cluster::new(&programs, 2, arbiter, Duration::from_secs(60));
    let requests: Vec<*mut c_void> =
        program.iter().enumerate().map(|(at, planned)| cluster.call(0, at, *planned)).collect();
    assert_eq!(cluster.count("rma_held"), 2);
    let done = |at: usize| test_request(requests[at]).expect("no fault");
    for at in [0, 1, 4, 5] {
        until("what passes is done", || done(at));
    }
    cluster.ranks[0].context.progress();
    assert!(!done(2) && !done(3));
    assert_eq!(cluster.arbiter.flows.lock().len(), 1);
    // A context that is destroyed gives back what it holds.
    cluster.ranks[0].context.close();
    assert!(cluster.arbiter.flows.lock().is_empty() && test_request(requests[2]).is_err());
    cluster.close_groups();
}

#[test]
fn no_signal_goes_out_behind_a_put_whose_source_was_deregistered() {
    let arbiter = Difficult::new(Temper::Never, 1 << 20, 4096);
    let planned = Planned { context: 0, target: 1, kind: Kind::PutSignal, words: 100 };
    let programs = [vec![planned], Vec::new()];
    let cluster = Cluster::new(&programs, 1, arbiter, Duration::from_millis(1));
    let held = cluster.call(0, 0, planned);
    cluster.ranks[0].group.deregister(&cluster.ranks[0].regions[0]);
    until("it fails", || test_request(held).is_err());
    thread::sleep(Duration::from_millis(20));
    cluster.ranks[1].context.progress();
    assert_eq!(cluster.ranks[1].signals[0].load(Acquire), 0);
    cluster.close_groups();
}

/// Some releases of NCCL only test requests and never call `rmaProgress`.
#[test]
fn tests_alone_report_all_bytes_and_notice_a_daemon_that_comes() {
    let planned = Planned { context: 0, target: 1, kind: Kind::PutSignal, words: 100 };
    let arbiter = Difficult::new(Temper::Newest, 1 << 20, 1 << 20);
    arbiter.is_gone.store(true, Relaxed);
    let programs = [vec![planned; 4], Vec::new()];
    let cluster = Cluster::new(&programs, 1, arbiter, Duration::from_secs(60));
    let call = |at: usize| cluster.call(0, at, planned);
    let done = |request| test_request(request).expect("no fault");
    let first = call(0);
    cluster.arbiter.is_gone.store(false, Relaxed);
    thread::sleep(Duration::from_millis(2));
    until("the first is done", || done(first));
    assert_eq!(cluster.count("rma_held"), 0);
    let held = [1, 2, 3].map(call);
    assert_eq!(cluster.count("rma_held"), 3);
    let was_done = done(held[0]);
    until("all signals", || {
        cluster.ranks[1].context.progress();
        cluster.ranks[1].signals[0].load(Acquire) == 4 || done(held[2])
    });
    thread::sleep(Duration::from_millis(20));
    assert!(was_done || done(held[0]));
    until("the second is done", || done(held[1]));
    assert!(cluster.arbiter.flows.lock().is_empty(), "{:?}", cluster.arbiter.flows.lock());
    cluster.close_groups();
}

/// Connects two ranks of a group of three. The third is a thread that registers nothing of its own,
/// and dies when `end` does.
fn two_and_a_mortal(end: Receiver<()>) -> Vec<Arc<RmaGroup>> {
    let listeners = [(); 2].map(|()| RmaListener::new(0, lo(), 0).expect("a port"));
    let handles = [&listeners[0], &listeners[1], &listeners[0]].map(RmaListener::handle);
    thread::spawn(move || {
        let streams = [0, 1].map(|rank| stranger(&handles[rank], 2, 3));
        // Of each exchange, one more can be sent than was received.
        for number in 0..4_u32 {
            for mut stream in &streams {
                let size = REGISTRATION_BYTES as u64;
                let head = Frame::Exchange { number: number.into(), bytes: size }.encode();
                let (id, mut data) = (number.to_le_bytes(), [0; REGISTRATION_BYTES]);
                data[..4].copy_from_slice(&id);
                data[8..16].copy_from_slice(&(1_u64 << 40).to_le_bytes());
                stream.write_all(&[head.as_slice(), &data].concat()).expect("sent");
                stream
                    .read_exact(&mut [0; HEAD_BYTES + REGISTRATION_BYTES])
                    .expect("a contribution");
            }
        }
        let _ = end.recv();
    });
    each(2, |rank| RmaGroup::connect(&listeners[rank], &handles, rank).expect("connects"))
}

#[test]
fn what_is_held_for_a_lost_rank_fails_and_the_rest_stays_scheduled() {
    let arbiter = Difficult::new(Temper::Never, 1 << 20, 4096);
    let planned = |target| Planned { context: 0, target, kind: Kind::PutSignal, words: 100 };
    let programs = [vec![planned(1); 40], Vec::new()];
    let (end, mortal) = channel();
    let groups = two_and_a_mortal(mortal);
    let cluster = Cluster::of(&groups, &programs, 1, arbiter, Duration::from_secs(60));
    let [of_lost, others] = [2, 1].map(|rank| {
        let calls = (0..20).map(|at| cluster.call(0, 20 * (rank - 1) + at, planned(rank)));
        calls.collect::<Vec<_>>()
    });
    cluster.ranks[0].context.progress();
    let is_held = |request: &*mut c_void| !test_request(*request).expect("no fault");
    assert!(of_lost.iter().chain(&others).all(is_held));
    drop(end);
    until("the loss is noticed", || cluster.ranks[0].context.has_failed());
    for request in of_lost {
        until("it fails", || test_request(request).is_err());
    }
    cluster.ranks[0].context.progress();
    assert!(others.iter().all(is_held));
    assert_eq!(cluster.arbiter.flows.lock().len(), 1);
    cluster.ranks[0].context.close();
    assert!(cluster.arbiter.flows.lock().is_empty());
    cluster.close_groups();
}

/// Returns what a context needs.
fn around(arbiter: &Arc<Difficult>, report: &Arc<Report>, wait_max: Duration) -> Around {
    Around {
        arbiter: arbiter.clone(),
        report: Arc::clone(report),
        wait_max,
        nic: String::from("lo"),
        stage: Stage::Collective,
        dscp: 0,
        service_level: 0,
    }
}

#[test]
fn a_rank_that_can_make_no_queue_pairs_tells_the_others() {
    if std::env::var_os("STANDIN_NO_QUEUE_PAIRS").is_none() {
        let this = "a_rank_that_can_make_no_queue_pairs_tells_the_others";
        return passes_over(&[this], &[("STANDIN_NO_QUEUE_PAIRS", "1")]);
    }
    let listener = listener();
    let there = listener.handle();
    let other = thread::spawn(move || {
        let mut stream = stranger(&there, 1, 2);
        // What this rank contributes doesn't matter. The other one has to contribute twice.
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
        [0, 1].map(|number| {
            stream.write_all(&Frame::Exchange { number, bytes: 1 }.encode()).expect("sent");
            stream.write_all(&[0]).expect("sent");
            let mut head = [0; HEAD_BYTES];
            stream.read_exact(&mut head).expect("a contribution");
            let Ok(Frame::Exchange { bytes, .. }) = Frame::decode(&head) else {
                panic!("{head:?}");
            };
            let mut data = vec![0; bytes as usize];
            stream.read_exact(&mut data).expect("the contribution");
            data
        })
    });
    let group = RmaGroup::connect(&listener, &[there, there], 0).expect("connects");
    let arbiter = Arc::new(Difficult::new(Temper::Never, 1, 1));
    let around = around(&arbiter, &Arc::default(), Duration::ZERO);
    let fault = RmaContext::new(&group, 1, around).err().expect("no queue pairs");
    assert!(fault.to_string().contains("queue pair"), "{fault}");
    assert_eq!(other.join().expect("no panic")[1], [1]);
    group.close();
}

#[test]
fn permits_in_any_order_end_over_rdma_too() {
    passes_over_rdma(&[
        "every_program_ends_as_the_model_says_whatever_the_order_of_permits",
        "thousands_of_operations_end_and_a_tick_asks_once_per_rank",
        "small_operations_pass_unless_one_of_their_context_is_held_before_them",
        "no_signal_goes_out_behind_a_put_whose_source_was_deregistered",
        "tests_alone_report_all_bytes_and_notice_a_daemon_that_comes",
    ]);
}
