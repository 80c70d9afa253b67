//! TCP connections: establishing them, whichever network carries the messages afterwards. Nothing
//! here blocks.

use std::io::{self, Read as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{
    self, AddressFamily, SockFlag, SockType, SockaddrStorage, setsockopt, sockopt,
};

use crate::fault::{Fault, Result};

/// Number of connects that may wait. A job of thousands of ranks makes as many at once.
const BACKLOG: i32 = 16384;

pub(crate) fn random() -> u64 {
    let mut bytes = [0; 8];
    // SAFETY: the call writes at most as many bytes as it is passed.
    let count = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if count == 8 {
        return u64::from_le_bytes(bytes);
    }
    // Kernels before 3.17 have no `getrandom`. Uniqueness matters most.
    laxity_shm::sleep::now_ns() ^ u64::from(std::process::id()) << 40
}

fn new(address: &SocketAddr) -> Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    socket::socket(family, SockType::Stream, flags, None)
        .map_err(|error| Fault::system("no socket can be made; see `ulimit -n`", error))
}

/// Listens at an address of this host, at any port.
pub(crate) fn listen(mut address: SocketAddr) -> Result<TcpListener> {
    address.set_port(0);
    let fd = new(&address)?;
    let failed = |error: Errno| {
        let what = format!("listen at {address} (NCCL_SOCKET_IFNAME?)");
        Fault::system(&what, error)
    };
    socket::bind(fd.as_raw_fd(), &SockaddrStorage::from(address)).map_err(failed)?;
    let backlog = socket::Backlog::new(BACKLOG).unwrap_or(socket::Backlog::MAXCONN);
    socket::listen(&fd, backlog).map_err(failed)?;
    Ok(TcpListener::from(fd))
}

/// Returns the next connection that has arrived, if there is one.
pub(crate) fn accept(listener: &TcpListener) -> Result<Option<TcpStream>> {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                if stream.set_nonblocking(true).is_ok() {
                    let _ = stream.set_nodelay(true);
                    return Ok(Some(stream));
                }
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN) => return Ok(None),
                // A signal came, or the connection broke before it was accepted.
                Some(
                    libc::EINTR
                    | libc::ECONNABORTED
                    | libc::EPROTO
                    | libc::ENETDOWN
                    | libc::EHOSTUNREACH
                    | libc::ENETUNREACH,
                ) => {}
                _ => return Err(Fault::system("accept; see `ulimit -n`", error)),
            },
        }
    }
}

/// Begins to connect, after `prepare` has set up the socket.
pub(crate) fn connect(
    to: SocketAddr,
    prepare: impl FnOnce(&TcpStream) -> Result<()>,
) -> Result<TcpStream> {
    let stream = TcpStream::from(new(&to)?);
    let _ = stream.set_nodelay(true);
    prepare(&stream)?;
    match socket::connect(stream.as_raw_fd(), &SockaddrStorage::from(to)) {
        Ok(()) | Err(Errno::EINPROGRESS | Errno::EINTR) => Ok(stream),
        Err(error) => Err(Fault::Remote(format!("connect to {to}: {error}"))),
    }
}

pub(crate) fn is_connected(stream: &TcpStream, to: SocketAddr) -> Result<bool> {
    if let Ok(Some(error)) = stream.take_error() {
        return Err(Fault::Remote(format!(
            "connect to {to}: {error}. Is the peer's process alive, and can this host reach that \
             address? NCCL_SOCKET_IFNAME says which is used there"
        )));
    }
    match stream.peer_addr() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
        Err(error) => Err(Fault::Remote(format!("connect to {to}: {error}"))),
    }
}

/// Times after which the kernel detects that a silent peer's host is gone.
pub(crate) struct KeepAlive {
    /// Seconds of silence before the first probe.
    pub(crate) idle_s: u32,
    /// Seconds between probes.
    pub(crate) every_s: u32,
    /// Number of unanswered probes after which the host counts as gone.
    pub(crate) times: u32,
}

impl KeepAlive {
    /// Makes the kernel probe the peer's host, also while nothing is in flight. A kernel without
    /// these options takes longer to detect that the host is gone.
    pub(crate) fn set(&self, stream: &TcpStream) {
        let _ = setsockopt(stream, sockopt::KeepAlive, &true);
        let _ = setsockopt(stream, sockopt::TcpKeepIdle, &self.idle_s);
        let _ = setsockopt(stream, sockopt::TcpKeepInterval, &self.every_s);
        let _ = setsockopt(stream, sockopt::TcpKeepCount, &self.times);
    }
}

/// An incoming connection whose hello of `N` bytes is not complete.
pub(crate) struct Stranger<const N: usize> {
    pub(crate) stream: TcpStream,
    hello: [u8; N],
    got: usize,
    since: Instant,
}

impl<const N: usize> Stranger<N> {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self { stream, hello: [0; N], got: 0, since: Instant::now() }
    }

    /// Reads the available bytes of the hello, and nothing behind it. Returns it once it is
    /// complete.
    pub(crate) fn hear(
        &mut self,
        within: Duration,
    ) -> core::result::Result<Option<[u8; N]>, String> {
        while self.got < N {
            match self.stream.read(&mut self.hello[self.got..]) {
                Ok(0) => return Err(String::from("hung up without a word")),
                Ok(count) => self.got += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let is_late = self.since.elapsed() > within;
                    let problem = || format!("said nothing for {} s", within.as_secs());
                    return if is_late { Err(problem()) } else { Ok(None) };
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(Some(self.hello))
    }
}

/// Returns the peer's address as text, for faults and the log.
pub(crate) fn peer(stream: &TcpStream) -> String {
    stream.peer_addr().map_or_else(|_| String::from("a peer that is gone"), |peer| peer.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_at_an_address_is_a_fault_that_names_it() {
        let listener = listen("127.0.0.1:0".parse().expect("an address")).expect("a port");
        let nobody = listener.local_addr().expect("bound");
        drop(listener);
        let stream = connect(nobody, |_| Ok(())).expect("begins");
        let began = Instant::now();
        let fault = loop {
            if let Err(fault) = is_connected(&stream, nobody) {
                break fault;
            }
            assert!(began.elapsed() < Duration::from_secs(20), "no answer");
        };
        assert!(fault.to_string().contains(&nobody.to_string()), "{fault}");
        assert_eq!(fault.code(), 6);
    }
}
