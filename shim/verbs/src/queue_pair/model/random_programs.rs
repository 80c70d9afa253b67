//! Programs that post, poll and fail at random.

use std::collections::VecDeque;
use std::thread;

use laxity_ibverbs::{ibv_qp_state, ibv_wc, ibv_wc_status as status, ibv_wr_opcode as op};

use super::ModelConnection;

/// A pseudo-random sequence that is the same in each run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) as usize % sides
    }
}

/// A correct program, with what it knows.
struct ModelProgram {
    connection: ModelConnection,
    dice: Dice,
    next: u64,
    /// Ids and signals of work requests whose places aren't free.
    outstanding: VecDeque<(u64, bool)>,
    /// Ids of signaled work requests without a completion.
    expected: VecDeque<u64>,
    /// Ids of all that were posted and are not complete in case of an error.
    all: VecDeque<u64>,
    failed: Option<(u64, status::Type)>,
}

const OPCODES: [op::Type; 7] = [
    op::IBV_WR_RDMA_WRITE,
    op::IBV_WR_RDMA_READ,
    op::IBV_WR_RDMA_WRITE,
    op::IBV_WR_RDMA_READ,
    op::IBV_WR_SEND,
    op::IBV_WR_RDMA_WRITE_WITH_IMM,
    op::IBV_WR_ATOMIC_FETCH_AND_ADD,
];

impl ModelProgram {
    fn new(seed: u64) -> Self {
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let connection = ModelConnection::new(1 + dice.roll(12), 1 + dice.roll(2));
        if dice.roll(4) > 0 {
            connection.bundle();
        }
        Self {
            connection,
            dice,
            next: 1,
            outstanding: VecDeque::new(),
            expected: VecDeque::new(),
            all: VecDeque::new(),
            failed: None,
        }
    }

    /// Posts some work requests. The last one that fits is signaled, so that places become free.
    fn post(&mut self) {
        let room = self.connection.depth - self.outstanding.len();
        let count = 1 + self.dice.roll(3);
        let mut list = Vec::new();
        for at in 0..count.min(room) {
            let signaled = self.dice.roll(3) > 0 || at + 1 == room;
            let opcode = OPCODES[self.dice.roll(OPCODES.len())];
            list.push((self.next, opcode, signaled));
            self.next += 1;
        }
        if list.is_empty() {
            return;
        }
        let (error, taken) = self.connection.post(&list);
        assert_eq!((error, taken), (0, list.len()), "the program may post so many");
        for (id, _, signaled) in list {
            self.outstanding.push_back((id, signaled));
            self.all.push_back(id);
            if signaled {
                self.expected.push_back(id);
            }
        }
    }

    /// Posts one more than the program may. It is refused as without a bundle.
    fn post_too_many(&mut self) {
        if self.outstanding.len() == self.connection.depth && self.failed.is_none() {
            let has_bundle = self.connection.queue_pair.state.lock().bundle.is_some();
            if has_bundle {
                let posted = self.connection.post(&[(u64::MAX, op::IBV_WR_RDMA_READ, true)]);
                assert_eq!(posted, (libc::ENOMEM, 0));
            }
        }
    }

    fn poll(&mut self) -> usize {
        let entries = 1 + self.dice.roll(4);
        let got = self.connection.poll(entries);
        for wc in &got {
            self.check(wc);
        }
        got.len()
    }

    fn check(&mut self, wc: &ibv_wc) {
        assert_eq!(wc.qp_num, self.connection.device.pairs[0].qp_num, "the program's number");
        if wc.status == status::IBV_WC_SUCCESS {
            assert!(self.failed.is_none(), "nothing succeeds after a failure");
            assert_eq!(self.expected.pop_front(), Some(wc.wr_id), "each signaled one, in order");
            while self.all.front().is_some_and(|id| *id <= wc.wr_id) {
                self.all.pop_front();
            }
            assert!(
                self.connection.device.state.lock().executed.contains(&wc.wr_id),
                "not before it is executed"
            );
        } else {
            if self.failed.is_none() {
                self.failed = Some((wc.wr_id, wc.status));
                // Unsignaled ones before the first failure succeeded.
                while self.all.front().is_some_and(|id| *id < wc.wr_id) {
                    let before = self.all.pop_front();
                    assert!(before != self.expected.front().copied(), "a completion is lost");
                }
            }
            assert_eq!(self.all.pop_front(), Some(wc.wr_id), "each one once after a failure");
            if self.expected.front() == Some(&wc.wr_id) {
                self.expected.pop_front();
            }
        }
        while self.outstanding.front().is_some_and(|(id, _)| *id <= wc.wr_id) {
            self.outstanding.pop_front();
        }
    }

    /// Lets the device do something. Reports whether it could.
    fn step(&mut self, fails: bool) -> bool {
        let count = self.connection.device.pairs.len();
        let (index, completes) = (self.dice.roll(count), self.dice.roll(2) == 0);
        let mut state = self.connection.device.state.lock();
        let pair = &state.pairs[index];
        let is_idle = if completes { pair.done.is_empty() } else { pair.queue.is_empty() };
        if is_idle {
            return false;
        }
        if completes {
            state.complete(index);
        } else {
            state.execute(index, fails);
        }
        true
    }

    fn check_executed(&self) {
        let state = self.connection.device.state.lock();
        let in_order = state.executed.iter().zip(1..).all(|(id, wanted)| *id == wanted);
        assert!(in_order, "each one once and in order: {:?}", state.executed);
        if let Some((id, status::IBV_WC_REM_ACCESS_ERR)) = self.failed {
            assert!(state.executed.len() < id as usize || state.executed.last() < Some(&id));
        }
    }

    /// Runs the device until nothing is left, without a poll of the program unless `polls`.
    fn drain(&mut self, polls: bool) {
        for round in 0..100_000 {
            self.connection.queue_pair.pump();
            let mut moved = (0..16).fold(false, |moved, _| self.step(false) | moved);
            if polls {
                moved |= self.poll() > 0;
            }
            let waits = !self.connection.queue_pair.state.lock().waiting.is_empty();
            let state = self.connection.device.state.lock();
            let is_idle = state.pairs.iter().all(|p| p.queue.is_empty() && p.done.is_empty());
            if is_idle && !waits && (!polls || (state.completed.is_empty() && !moved)) {
                return;
            }
            drop(state);
            if round % 1000 == 999 {
                thread::yield_now();
            }
        }
        panic!("it hangs: {:?} {:?}", self.connection.queue_pair, self.connection.device.state);
    }
}

/// What happens in the middle of a random program.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mishap {
    None,
    Failure,
    ErrorState,
    Reset,
}

fn run(seed: u64, mishap: Mishap) -> u64 {
    let mut program = ModelProgram::new(seed);
    let when = program.dice.roll(300);
    for at in 0..300 {
        if program.dice.roll(40) == 0 && program.connection.may_be_bundled() {
            program.connection.bundle();
        }
        match program.dice.roll(6) {
            0 => program.post(),
            1 => drop(program.poll()),
            2 => program.post_too_many(),
            _ => {
                let fails = mishap == Mishap::Failure && at >= when;
                program.step(fails && program.failed.is_none());
            }
        }
        if at == when {
            match mishap {
                Mishap::None | Mishap::Failure => {}
                Mishap::ErrorState => drop(program.connection.modify(ibv_qp_state::IBV_QPS_ERR)),
                Mishap::Reset => {
                    assert_eq!(program.connection.modify(ibv_qp_state::IBV_QPS_RESET), 0);
                    program.check_executed();
                    return program.connection.device.state.lock().barriers;
                }
            }
        }
        program.check_executed();
    }
    if mishap == Mishap::None && program.failed.is_none() {
        // What was posted is executed even if the program never polls again.
        program.drain(false);
        assert_eq!(program.connection.device.state.lock().executed.len() as u64, program.next - 1);
    }
    program.drain(true);
    program.check_executed();
    assert!(program.expected.is_empty(), "lost completions: {:?}", program.expected);
    if let Some((_, status)) = program.failed {
        assert!(program.all.is_empty(), "lost after a failure: {:?}", program.all);
        let first = if mishap == Mishap::Failure {
            status::IBV_WC_REM_ACCESS_ERR
        } else {
            status::IBV_WC_WR_FLUSH_ERR
        };
        assert_eq!(status, first, "the status of the failure itself");
    }
    program.connection.device.state.lock().barriers
}

fn run_many(mishap: Mishap) {
    let barriers: u64 = (0..3000)
        .map(|seed| {
            let ran = std::panic::catch_unwind(|| run(seed, mishap));
            ran.unwrap_or_else(|_| panic!("seed {seed} of {mishap:?}"))
        })
        .sum();
    assert!(barriers > 3000, "only {barriers} barriers were used");
}

#[test]
fn each_work_request_is_executed_once_in_order_and_completes_in_order() {
    run_many(Mishap::None);
}

#[test]
fn after_a_failure_each_work_request_completes_once_with_its_own_status() {
    run_many(Mishap::Failure);
}

#[test]
fn a_change_to_the_error_state_completes_what_waits_and_what_is_in_flight() {
    run_many(Mishap::ErrorState);
}

#[test]
fn a_queue_pair_that_was_reset_is_used_again_without_its_bundle() {
    let connection = ModelConnection::new(4, 2);
    connection.bundle();
    assert_eq!(connection.modify(ibv_qp_state::IBV_QPS_SQD), libc::EINVAL, "siblings can't follow");
    assert_eq!(connection.modify(ibv_qp_state::IBV_QPS_RESET), 0);
    assert_eq!(connection.modify(ibv_qp_state::IBV_QPS_RTS), 0);
    assert_eq!(connection.post(&[(1, op::IBV_WR_RDMA_READ, true)]), (0, 1));
    let mut state = connection.device.state.lock();
    assert_eq!(state.pairs.iter().map(|pair| pair.queue.len()).collect::<Vec<_>>(), [1, 0, 0]);
    state.execute(0, false);
    state.complete(0);
    drop(state);
    assert_eq!(connection.poll(2).iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [1]);
}

#[test]
fn a_reset_drops_what_waits_and_posts_nothing_more() {
    run_many(Mishap::Reset);
}
