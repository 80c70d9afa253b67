//! System calls while both sides are awake: a tracer attaches to the client's thread and to the
//! daemon's scheduler thread with ptrace(2) while they exchange permits, and counts. A thread that
//! makes no call never stops, so the count does not disturb what it counts.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use laxity_client::Stage;

use nix::sys::ptrace::{self, Options};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::bench::{Bench, Measured, Row, Skip};
use crate::figure::{Gate, Limit, Quantile, Unit};
use crate::hotpath::flow;
use crate::machine::Cores;
use crate::peer::{Peer, SharedPage, medium};
use crate::sample::Summary;
use crate::service::{self, Laxityd, Port, Setup};

/// The peer that asks for permits until it is told to stop.
pub(crate) const PERMITS_ROLE: &str = "permits";

const STOP: usize = 0;
const PERMITS: usize = 2;

/// The row of this file.
pub(crate) fn rows(bench: &mut Bench) {
    let row = Row::counting(
        "system-calls",
        "system calls per million permits, both awake",
        Unit::PerMillion,
    )
    .gates([Gate::at_most(Quantile::P50, Limit::Value(0.0))])
    .note(
        "a side that loses its core to somebody else lets the other fall asleep, and that is \
        counted.",
    );
    bench.measure(row, |bench| {
        let far = bench.far_core()?;
        let stretch = 2 * bench.effort.stretch();
        let mut calls = Calls::default();
        let mut permits = 0;
        let mut rates = Vec::new();
        for _ in 0..bench.effort.repetitions.min(5) {
            let (counted, passed) = count(&bench.cores, far, stretch)?;
            rates.push(1e6 * counted.total() as f64 / passed as f64);
            calls.add(&counted);
            permits += passed;
        }
        Ok(Measured {
            summary: Summary::of_numbers(rates),
            remark: Some(format!("{permits} permits in all; {calls}.")),
        })
    });
}

/// How often each side made which call.
#[derive(Debug, Default)]
struct Calls {
    client: BTreeMap<u64, u64>,
    daemon: BTreeMap<u64, u64>,
}

impl Calls {
    fn total(&self) -> u64 {
        self.client.values().chain(self.daemon.values()).sum()
    }

    fn add(&mut self, other: &Self) {
        for (ours, theirs) in [
            (&mut self.client, &other.client),
            (&mut self.daemon, &other.daemon),
        ] {
            for (number, count) in theirs {
                *ours.entry(*number).or_default() += count;
            }
        }
    }
}

impl std::fmt::Display for Calls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, (side, calls)) in [("client", &self.client), ("daemon", &self.daemon)]
            .into_iter()
            .enumerate()
        {
            let list: Vec<String> = calls
                .iter()
                .map(|(number, count)| format!("{} ×{count}", call_name(*number)))
                .collect();
            let list = if list.is_empty() {
                "none".to_owned()
            } else {
                list.join(", ")
            };
            write!(f, "{}{side}: {list}", if i == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

/// Names of the calls that are likely here.
fn call_name(number: u64) -> String {
    let known = [
        (libc::SYS_futex, "futex"),
        (libc::SYS_membarrier, "membarrier"),
        (libc::SYS_epoll_wait, "epoll_wait"),
        (libc::SYS_epoll_pwait, "epoll_pwait"),
        (libc::SYS_epoll_pwait2, "epoll_pwait2"),
        (libc::SYS_read, "read"),
        (libc::SYS_write, "write"),
        (libc::SYS_poll, "poll"),
        (libc::SYS_recvfrom, "recvfrom"),
        (libc::SYS_recvmsg, "recvmsg"),
        (libc::SYS_sched_yield, "sched_yield"),
        (libc::SYS_timerfd_settime, "timerfd_settime"),
        (libc::SYS_restart_syscall, "restart_syscall"),
        (libc::SYS_clock_gettime, "clock_gettime"),
    ];
    known
        .iter()
        .find(|(nr, _)| nr.cast_unsigned() == number)
        .map_or_else(|| format!("call {number}"), |(_, name)| (*name).to_owned())
}

/// One repetition: the calls of both sides, and the permits that passed meanwhile.
fn count(cores: &Cores, far: usize, stretch: Duration) -> anyhow::Result<(Calls, u64)> {
    let daemon = Laxityd::start(
        cores,
        Setup {
            core: far,
            port: Port::Open,
            spin_us: None,
        },
    )?;
    let (page, memory) = SharedPage::create()?;
    let socket = daemon.socket();
    let peer = Peer::spawn(
        PERMITS_ROLE,
        cores.near,
        Some(memory),
        &["--name", &socket.to_string_lossy()],
    )?;
    page.await_peer()?;
    std::thread::sleep(Duration::from_millis(20));
    let scheduler = daemon.scheduler_thread()?;

    let mut tracer = Tracer::attach(peer.pid(), scheduler)?;
    let (stop, permits) = (page.word(STOP), page.word(PERMITS));
    let before = permits.load(Ordering::Relaxed);
    let calls = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(stretch);
            stop.store(1, Ordering::Release);
        });
        // Until the client has ended, which it does because it is told to.
        tracer.follow(stop)
    })?;
    let passed = permits.load(Ordering::Relaxed) - before;
    drop(peer);
    ensure!(passed > 0, "no permit passed while the two were traced");
    Ok((calls, passed))
}

/// Follows the client's thread and the daemon's from system call to system call. It sleeps in
/// waitpid(2) until one of them makes a call: looking for them in intervals would take the core
/// away from the client, and let a thread that did make a call wait.
struct Tracer {
    client: Pid,
    scheduler: Pid,
}

impl Tracer {
    fn attach(client: Pid, scheduler: Pid) -> anyhow::Result<Self> {
        for thread in [client, scheduler] {
            ptrace::seize(thread, Options::PTRACE_O_TRACESYSGOOD).map_err(|error| {
                anyhow::Error::new(Skip(format!(
                    "ptrace is not permitted here ({error}), so calls cannot be counted"
                )))
            })?;
            ptrace::interrupt(thread).context("stop the traced thread")?;
            waitpid(thread, Some(WaitPidFlag::__WALL)).context("await the traced thread")?;
        }
        for thread in [client, scheduler] {
            ptrace::syscall(thread, None).context("go on")?;
        }
        Ok(Self { client, scheduler })
    }

    /// Counts until `stop` is set, and follows on until the client has ended.
    fn follow(&mut self, stop: &AtomicU64) -> anyhow::Result<Calls> {
        let mut calls = Calls::default();
        loop {
            let flags = WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD;
            let status = waitpid(None::<Pid>, Some(flags)).context("follow the traced threads")?;
            let Some(thread) = status.pid() else { continue };
            let signal = match status {
                WaitStatus::Exited(..) | WaitStatus::Signaled(..) if thread == self.client => break,
                WaitStatus::Exited(..) | WaitStatus::Signaled(..) => {
                    anyhow::bail!("laxityd ended while it was traced: {status:?}")
                }
                WaitStatus::PtraceSyscall(_) => {
                    let info = ptrace::syscall_info(thread).context("which call")?;
                    if info.op == libc::PTRACE_SYSCALL_INFO_ENTRY
                        && stop.load(Ordering::Acquire) == 0
                    {
                        // SAFETY: `op` says that the kernel filled in `entry`.
                        let number = unsafe { info.u.entry.nr };
                        let side = if thread == self.client {
                            &mut calls.client
                        } else {
                            &mut calls.daemon
                        };
                        *side.entry(number).or_default() += 1;
                    }
                    None
                }
                WaitStatus::Stopped(_, signal) => Some(signal),
                _ => None,
            };
            ptrace::syscall(thread, signal).context("go on")?;
        }
        ptrace::interrupt(self.scheduler).context("stop the scheduler")?;
        let signal = match waitpid(self.scheduler, Some(WaitPidFlag::__WALL))? {
            WaitStatus::Stopped(_, signal) => Some(signal),
            _ => None,
        };
        ptrace::detach(self.scheduler, signal).context("let the scheduler go")?;
        Ok(calls)
    }
}

/// The peer's side: gated flows, one after the other.
pub(crate) fn serve(socket: &str) -> anyhow::Result<()> {
    let page = SharedPage::map(&medium()?)?;
    let client = service::attach(PathBuf::from(socket), "permits")?;
    let mut lane = client.lane();
    let flow = flow(Stage::KvReuse);
    let (stop, permits): (&AtomicU64, &AtomicU64) = (page.word(STOP), page.word(PERMITS));
    page.announce();
    let mut count = 0;
    while stop.load(Ordering::Relaxed) == 0 {
        let mut ticket = lane.submit(&flow);
        let permit = lane.wait(&mut ticket);
        lane.complete(&ticket, permit.bytes);
        if !permit.bypassed {
            count += 1;
            permits.store(count, Ordering::Relaxed);
        }
    }
    Ok(())
}
