//! What a daemon behind a socket would cost: a 64-byte message each way over a pair of unix
//! sockets, both sides polling without blocking, so that no wake-up is in the figure.

use std::os::fd::{AsRawFd, OwnedFd};

use anyhow::Context;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, SockType, recv, send};

use crate::clock::Clock;
use crate::peer::{Peer, medium, socket_pair};
use crate::sample::{Percentiles, Recorder};

/// The peer that sends back what it receives.
pub(crate) const ECHO_ROLE: &str = "echo-socket";

const MESSAGE_BYTES: usize = 64;

/// One repetition over sockets of `kind`.
pub(crate) fn round_trip(
    clock: Clock,
    far: usize,
    round_trips: usize,
    kind: SockType,
) -> anyhow::Result<Percentiles> {
    let (ours, theirs) = socket_pair(kind)?;
    let _peer = Peer::spawn(ECHO_ROLE, far, Some(theirs), &[])?;
    let mut message = [7; MESSAGE_BYTES];
    let mut recorder = Recorder::with_room_for(round_trips);
    let warm_up = round_trips / 10 + 1;
    for i in 0..warm_up + round_trips {
        let begin = clock.begin();
        send(ours.as_raw_fd(), &message, MsgFlags::MSG_DONTWAIT).context("send")?;
        receive(&ours, &mut message)?;
        let end = clock.end();
        if i >= warm_up {
            recorder.note(begin, end);
        }
    }
    Ok(recorder.finish(clock))
}

/// Polls until a message is there; its length.
fn receive(socket: &OwnedFd, message: &mut [u8; MESSAGE_BYTES]) -> anyhow::Result<usize> {
    loop {
        match recv(socket.as_raw_fd(), message, MsgFlags::MSG_DONTWAIT) {
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            other => return other.context("receive"),
        }
    }
}

/// The peer's side.
pub(crate) fn serve() -> anyhow::Result<()> {
    let socket = medium()?;
    let mut message = [0; MESSAGE_BYTES];
    while receive(&socket, &mut message)? > 0 {
        send(socket.as_raw_fd(), &message, MsgFlags::MSG_DONTWAIT).context("answer")?;
    }
    Ok(())
}
