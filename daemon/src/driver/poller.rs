//! The sleep of the scheduler: an epoll of the clients' eventfds, the mailbox's doorbell and a
//! timer.
//!
//! All are watched for edges, so each write is an event and none needs to be read. A
//! level-triggered doorbell could stay readable: the scheduler may clear the mailbox's flag before
//! the sender writes the eventfd. The timer exists because epoll counts in milliseconds, which is
//! too coarse for the policy.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use laxity_policy::Span;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

const DOORBELL: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;

#[derive(Debug)]
pub(crate) struct Poller {
    epoll: Epoll,
    timer: TimerFd,
}

impl Poller {
    pub(crate) fn new(doorbell: BorrowedFd<'_>) -> nix::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let timer = TimerFd::new(
            ClockId::CLOCK_MONOTONIC,
            TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC,
        )?;
        let edge = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        epoll.add(doorbell, EpollEvent::new(edge, DOORBELL))?;
        epoll.add(timer.as_fd(), EpollEvent::new(edge, TIMER))?;
        Ok(Self { epoll, timer })
    }

    pub(crate) fn watch(&self, client: u32, eventfd: BorrowedFd<'_>) -> nix::Result<()> {
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        self.epoll.add(eventfd, EpollEvent::new(flags, u64::from(client)))
    }

    /// Stops watching an eventfd. Closing it is not enough, because the client holds a duplicate.
    pub(crate) fn forget(&self, eventfd: BorrowedFd<'_>) {
        let _ = self.epoll.delete(eventfd);
    }

    /// Sleeps for at most `limit`. Returns the clients whose doorbell woke it.
    pub(crate) fn sleep(&self, limit: Span) -> Vec<u32> {
        let mut events = [EpollEvent::empty(); 64];
        // A sleep without a limit needs no timer, and neither does a limit of zero, with which
        // epoll returns at once.
        let timed = limit > Span::ZERO && limit.0 <= 1 << 60;
        if timed {
            let at = TimeSpec::from_duration(Duration::from_nanos(limit.0));
            let _ = self.timer.set(Expiration::OneShot(at), TimerSetTimeFlags::empty());
        }
        // An interrupted or failed wait counts as an early wake-up, after which the caller scans
        // all.
        let timeout = if limit == Span::ZERO { EpollTimeout::ZERO } else { EpollTimeout::NONE };
        let count = self.epoll.wait(&mut events, timeout).unwrap_or(0);
        if timed {
            let _ = self.timer.unset();
        }
        events[..count]
            .iter()
            .map(EpollEvent::data)
            .filter(|data| *data < TIMER)
            .map(|data| data as u32)
            .collect()
    }
}
