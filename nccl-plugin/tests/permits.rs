//! Permits in any order, for connections over loopback with a difficult arbiter.
//!
//! The arbiter has a window of bytes in flight, like a port. It permits within that window in the
//! order that its temper defines, and never goes beyond. If a flow's completion depended on another
//! flow's permit, a window full of such flows would stay full, and the ring below would stop.
//! Therefore no flow may be overdue.

mod difficult;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use difficult::{Difficult, Temper, any_temper};
use laxity_client::Stage;
use nccl_net_laxity::arbiter::Arbiter;
use nccl_net_laxity::backend::{
    Backend as _, Buffer, Memory, MemoryRegistration, Message, Sender, Sent,
};
use nccl_net_laxity::comm::{Comm, CommSide, ReceiveSide, SendSide, Surroundings, TestOutcome};
use nccl_net_laxity::context::{Context, TRAFFIC_CLASS_UNSET};
use nccl_net_laxity::fault::{Fault, Result};
use nccl_net_laxity::report::Report;
use nccl_net_laxity::settings::Settings;
use nccl_net_laxity::tcp::Tcp;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseResult};

/// Ranks in a ring, all in this process. Connection `r` goes from rank `r` to rank `r + 1`.
struct Ring {
    arbiter: Arc<Difficult>,
    report: Arc<Report>,
    out: Vec<Arc<Comm>>,
    into: Vec<Arc<Comm>>,
}

fn ring(ranks: usize, arbiter: Difficult, wait_max: Duration) -> Ring {
    let settings = Settings { interfaces: Some(String::from("lo")), ..Settings::default() };
    let tcp = Tcp::new(&settings).expect("loopback");
    let mut made = Ring {
        arbiter: Arc::new(arbiter),
        report: Arc::default(),
        out: Vec::new(),
        into: Vec::new(),
    };
    for _ in 0..ranks {
        let classes = made.arbiter.classes(Stage::Collective);
        let (mut listener, handle) = tcp.listen(0).expect("a port");
        let mut dialing = tcp.connect(0, &handle, &classes, 0).expect("a socket");
        let (mut sender, mut receiver) = (None, None);
        while sender.is_none() || receiver.is_none() {
            if sender.is_none() {
                sender = dialing.poll().expect("no fault");
            }
            if receiver.is_none() {
                receiver = listener.accept().expect("no fault");
            }
        }
        let around = surroundings(&made.arbiter, &made.report, wait_max);
        let side = SendSide::new(sender.expect("made"), around);
        made.out.push(Comm::new(CommSide::Send(Box::new(side.into()))));
        let side = ReceiveSide::new(receiver.expect("made"), Arc::clone(&made.report));
        let side = CommSide::Receive(Box::new(side.into()));
        made.into.push(Comm::new(side));
    }
    made
}

fn surroundings(
    arbiter: &Arc<Difficult>,
    report: &Arc<Report>,
    wait_max: Duration,
) -> Surroundings {
    Surroundings {
        arbiter: Arc::clone(arbiter) as Arc<dyn Arbiter>,
        context: Arc::new(Context::new(1, TRAFFIC_CLASS_UNSET, Arc::default())),
        report: Arc::clone(report),
        wait_max,
        nic: String::from("lo"),
        classes: arbiter.classes(Stage::Collective),
    }
}

/// Returns the bytes that rank `rank` sends in `step`.
fn pattern(rank: usize, step: usize, bytes: usize) -> Vec<u8> {
    let start = rank.wrapping_mul(31).wrapping_add(step * 7);
    (0..bytes).map(|at| (start + at) as u8).collect()
}

fn offer(comm: &Comm, bytes: &[u8]) -> Option<u16> {
    let send_request =
        Buffer { address: bytes.as_ptr() as usize, bytes: bytes.len(), region: None };
    let side = comm.send_side().expect("its end");
    side.lock().offer(send_request, || None)
}

fn post(comm: &Comm, room: &mut [u8]) -> Option<u16> {
    let buffer = Buffer { address: room.as_mut_ptr() as usize, bytes: room.len(), region: None };
    let side = comm.receive_side().expect("its end");
    side.lock().post(buffer).expect("fits")
}

/// Sends messages around the ring. A rank sends step s only when it has received step s − `ahead`
/// from the rank before it, as in a ring collective. At most `depth` receives are posted.
fn pass_around(ring: &Ring, sizes: &[usize], ahead: usize, depth: usize) -> TestCaseResult {
    let ranks = ring.out.len();
    let end = Instant::now() + Duration::from_secs(60);
    // The vectors have an entry per connection.
    let (mut received, mut sent) = (vec![0; ranks], vec![0; ranks]);
    let mut sending: Vec<VecDeque<(u16, Vec<u8>)>> = vec![VecDeque::new(); ranks];
    let mut posted: Vec<VecDeque<(u16, usize, Vec<u8>)>> = vec![VecDeque::new(); ranks];
    let mut offered: Vec<Option<Vec<u8>>> = vec![None; ranks];
    while received.iter().any(|steps| *steps < sizes.len())
        || sending.iter().any(|queue| !queue.is_empty())
    {
        prop_assert!(Instant::now() < end, "stands still at {received:?} of {}", sizes.len());
        for at in 0..ranks {
            // The plugin's sweeper does the same.
            let side = ring.out[at].send_side().expect("its end");
            if side.lock().lingers() {
                side.lock().sweep();
            }
            let next = received[at] + posted[at].len();
            if posted[at].len() < depth && next < sizes.len() {
                let mut room = vec![0; sizes[next] + 3];
                if let Some(index) = post(&ring.into[at], &mut room) {
                    posted[at].push_back((index, next, room));
                }
            }
            let before = (at + ranks - 1) % ranks;
            if sent[at] < sizes.len() && sent[at] < received[before] + ahead {
                let step = sent[at];
                let kept = offered[at].take();
                let bytes = kept.unwrap_or_else(|| pattern(at, step, sizes[step]));
                match offer(&ring.out[at], &bytes) {
                    Some(index) => {
                        sending[at].push_back((index, bytes));
                        sent[at] += 1;
                    }
                    None => offered[at] = Some(bytes),
                }
            }
            if let Some((index, _)) = sending[at].front()
                && ring.out[at].test(*index).expect("no fault") != TestOutcome::Pending
            {
                sending[at].pop_front();
            }
            if let Some((index, step, room)) = posted[at].front()
                && let TestOutcome::Done(Some(size)) = ring.into[at].test(*index).expect("no fault")
            {
                let (message, beyond) = room.split_at(size);
                prop_assert_eq!(message.len(), sizes[*step]);
                prop_assert!(message == pattern(at, *step, size), "other bytes");
                prop_assert!(beyond.iter().all(|byte| *byte == 0), "bytes beyond");
                posted[at].pop_front();
                received[at] += 1;
            }
        }
    }
    Ok(())
}

fn close(ring: &Ring) {
    for comm in &ring.out {
        comm.send_side().expect("its end").lock().close();
    }
    for comm in &ring.into {
        comm.receive_side().expect("its end").lock().close();
    }
}

fn any_size() -> impl Strategy<Value = usize> {
    prop_oneof![0..200_usize, 1000..100_000_usize, Just(700_000)]
}

proptest! {
    #![proptest_config(Config { cases: 24, ..Config::default() })]

    #[test]
    fn a_ring_goes_round_whatever_the_order_of_permits_and_nothing_is_overdue(
        temper in any_temper(),
        ranks in 2..5_usize,
        sizes in prop::collection::vec(any_size(), 1..24),
        window in prop_oneof![Just(1_u64), Just(64 << 10), Just(1 << 20)],
        chunk in prop_oneof![Just(4096_u64), Just(64 << 10), Just(u64::MAX)],
        ahead in 1..4_usize,
        depth in 1..9_usize,
    ) {
        let ring = ring(ranks, Difficult::new(temper, window, chunk), Duration::from_secs(20));
        pass_around(&ring, &sizes, ahead, depth)?;
        close(&ring);
        let total = (sizes.iter().sum::<usize>() * ranks) as u64;
        prop_assert_eq!(ring.arbiter.completed.load(Ordering::Relaxed), total);
        prop_assert!(ring.arbiter.flows.lock().is_empty(), "flows are left over");
        let line = ring.report.line("tcp", &laxity_client::Stats::default()).end();
        let rows = line.matches("\"overdue\":").count();
        let on_time = line.matches("\"overdue\":0}").count();
        prop_assert!(rows == on_time && line.contains("\"overdue_rest_bytes\":0"), "{}", line);
        // The first chunk may exceed the window.
        let largest = *sizes.iter().max().expect("some") as u64;
        let most = ring.arbiter.most_in_flight.load(Ordering::Relaxed);
        prop_assert!(most <= window.max(chunk.min(largest)), "{most} in flight");
    }
}

#[test]
fn without_any_permit_messages_go_unscheduled_after_the_longest_wait() {
    let arbiter = Difficult::new(Temper::Never, 1 << 20, 1 << 20);
    let ring = ring(2, arbiter, Duration::from_millis(20));
    let began = Instant::now();
    pass_around(&ring, &[100, 50_000, 3], 2, 4).expect("goes round");
    assert!(began.elapsed() >= Duration::from_millis(3 * 20), "nothing waited");
    close(&ring);
    let line = ring.report.line("tcp", &laxity_client::Stats::default()).end();
    assert!(line.contains("\"overdue\":6"), "{line}");
    assert!(ring.arbiter.flows.lock().is_empty(), "flows are left over");
}

#[test]
fn a_message_of_which_only_the_beginning_is_permitted_goes_on_after_the_longest_wait() {
    let arbiter = Difficult::new(Temper::Begins, 64 << 20, 4096);
    let ring = ring(2, arbiter, Duration::from_millis(20));
    pass_around(&ring, &[100_000, 5, 20_000], 2, 4).expect("goes round");
    close(&ring);
    let line = ring.report.line("tcp", &laxity_client::Stats::default()).end();
    let rest = 2 * (100_000 - 4096 + 20_000 - 4096);
    assert!(line.contains(&format!("\"overdue_rest_bytes\":{rest}")), "{line}");
    assert!(ring.arbiter.flows.lock().is_empty(), "flows are left over");
}

#[test]
fn a_connection_that_closes_gives_back_what_it_holds() {
    let arbiter = Difficult::new(Temper::Newest, 1 << 20, 4096);
    let ring = ring(2, arbiter, Duration::from_secs(60));
    let mut room = vec![0_u8; 900_000];
    post(&ring.into[0], &mut room).expect("taken");
    let bytes = vec![1_u8; 800_000];
    let end = Instant::now() + Duration::from_secs(30);
    while ring.arbiter.flows.lock().is_empty() {
        assert!(Instant::now() < end, "nothing was submitted");
        let _ = offer(&ring.out[0], &bytes);
    }
    close(&ring);
    assert!(ring.arbiter.flows.lock().is_empty(), "flows are left over");
}

/// A sender over a network whose receiver names the room of each message, as that over verbs is.
struct Rooms {
    posted: &'static [usize],
    begun: Arc<AtomicU64>,
}

impl Sender for Rooms {
    fn register(&mut self, _memory: Memory) -> Result<MemoryRegistration> {
        Ok(Box::new(()))
    }

    fn deregister(&mut self, _region: MemoryRegistration) -> Result<()> {
        Ok(())
    }

    fn clear(&mut self, bytes: usize) -> Result<bool> {
        let room = self.posted[self.begun.load(Ordering::Relaxed) as usize];
        let small = || Fault::Argument(format!("{bytes} bytes, and a buffer of {room}"));
        if bytes > room { Err(small()) } else { Ok(true) }
    }

    fn begin(&mut self, _message: Message<'_>) -> u64 {
        self.begun.fetch_add(1, Ordering::Relaxed)
    }

    fn push(&mut self, _bytes: usize) {}

    fn progress(&mut self, _sent: &mut Vec<Sent>) -> Result<()> {
        Ok(())
    }

    fn close(self: Box<Self>, _kept: bool) {}
}

/// Otherwise the second message would be in the buffer of the first.
#[test]
fn no_message_follows_one_that_does_not_fit() {
    let begun = Arc::<AtomicU64>::default();
    let sender = Box::new(Rooms { posted: &[4, 8], begun: Arc::clone(&begun) });
    let arbiter = Arc::new(Difficult::new(Temper::Newest, 64, 64));
    let around = surroundings(&arbiter, &Arc::default(), Duration::from_secs(5));
    let comm = Comm::new(CommSide::Send(Box::new(SendSide::new(sender, around).into())));
    for bytes in [&[0; 8][..], &[0; 4]] {
        let request = offer(&comm, bytes).expect("its result is that of the test");
        assert!(matches!(comm.test(request), Err(Fault::Argument(_))), "{} bytes", bytes.len());
    }
    assert_eq!(begun.load(Ordering::Relaxed), 0);
}
