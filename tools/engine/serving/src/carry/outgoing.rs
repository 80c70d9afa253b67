//! A connection to another process. It is marked before its handshake with the DSCP of all its
//! bytes. One thread writes to it, and another reads acknowledgements.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd as _};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrStorage, sockopt};

use super::frame::{ACK_BYTES, FRAME_BYTES_MAX, Head, Preamble, READ};

/// Longest time that a starting peer may take to listen.
const CONNECT_FOR: Duration = Duration::from_secs(2);
const CONNECT_EVERY: Duration = Duration::from_millis(50);

pub(super) enum Load {
    /// Bytes of a parcel, beginning at the head's offset.
    Bytes { head: Head, payload: Arc<Vec<u8>>, bytes: u64 },
    /// One line of text between engines, which belongs to no flow.
    Words(String),
}

pub(super) enum Said {
    /// The receiver acknowledged bytes of a flow.
    Arrived { flow: u64, bytes: u64 },
    /// The connection is gone.
    Gone { peer: SocketAddr, number: u64, why: String },
}

pub(super) struct Outgoing {
    loads: Sender<Load>,
    /// Number that distinguishes the connection from earlier ones to the same peer.
    pub(super) number: u64,
}

impl Outgoing {
    /// Connects in the background. The threads call `say`.
    pub(super) fn open<F>(to: (SocketAddr, u64), preamble: Preamble, say: F) -> io::Result<Self>
    where
        F: Fn(Said) + Send + Sync + 'static,
    {
        let (peer, number) = to;
        let (loads, incoming) = channel();
        let say = Arc::new(say);
        let what = if preamble.words { "words" } else { "parcels" };
        std::thread::Builder::new().name(format!("{what} out")).spawn(move || {
            if let Err(error) = write(to, preamble, &incoming, &say) {
                let why = error.to_string();
                say(Said::Gone { peer, number, why });
            }
        })?;
        Ok(Self { loads, number })
    }

    /// Passes a load to the writer. Returns false if the connection is gone.
    pub(super) fn give(&self, load: Load) -> bool {
        self.loads.send(load).is_ok()
    }
}

pub(super) fn mark(socket: &impl AsFd, peer: SocketAddr, dscp: u8) -> io::Result<()> {
    let class = i32::from(dscp) << 2;
    match peer {
        SocketAddr::V4(_) => socket::setsockopt(socket, sockopt::Ipv4Tos, &class)?,
        SocketAddr::V6(_) => socket::setsockopt(socket, sockopt::Ipv6TClass, &class)?,
    }
    Ok(())
}

fn connect(peer: SocketAddr, dscp: u8) -> io::Result<TcpStream> {
    let family = match peer {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket::socket(family, SockType::Stream, flags, None)?;
    mark(&socket, peer, dscp)?;
    socket::connect(socket.as_raw_fd(), &SockaddrStorage::from(peer))?;
    let stream = TcpStream::from(socket);
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn write<F>(
    (peer, number): (SocketAddr, u64),
    preamble: Preamble,
    loads: &Receiver<Load>,
    say: &Arc<F>,
) -> io::Result<()>
where
    F: Fn(Said) + Send + Sync + 'static,
{
    let start = std::time::Instant::now();
    let mut stream = loop {
        match connect(peer, preamble.dscp) {
            Ok(stream) => break stream,
            Err(error) if start.elapsed() > CONNECT_FOR => return Err(error),
            Err(_) => std::thread::sleep(CONNECT_EVERY),
        }
    };
    preamble.write(&mut stream)?;
    let mut reader = stream.try_clone()?;
    let hear = Arc::clone(say);
    std::thread::Builder::new().name("acknowledgements".to_owned()).spawn(move || {
        let mut ack = [0; ACK_BYTES];
        let why = loop {
            if let Err(error) = reader.read_exact(&mut ack) {
                break error.to_string();
            }
            let words = ack.as_chunks::<8>().0;
            let [flow, bytes] = [0, 1].map(|at| u64::from_le_bytes(words[at]));
            // The reader numbers its reads. A read by this process may have the same number.
            if flow & READ == 0 {
                hear(Said::Arrived { flow, bytes });
            }
        };
        // The writer may be blocked in a write that the peer will never read.
        let _ = reader.shutdown(std::net::Shutdown::Both);
        hear(Said::Gone { peer, number, why });
    })?;
    for load in loads {
        match load {
            Load::Words(mut line) => {
                line.push('\n');
                stream.write_all(line.as_bytes())?;
            }
            Load::Bytes { head, payload, bytes } => {
                let end = head.offset + bytes;
                let mut offset = head.offset;
                // A parcel of no bytes needs a frame, too, because its receiver waits for it.
                loop {
                    let len = (end - offset).min(FRAME_BYTES_MAX as u64);
                    let cut = Head { offset, len: len as u32, ..head };
                    stream.write_all(&cut.encode())?;
                    stream.write_all(&payload[offset as usize..(offset + len) as usize])?;
                    offset += len;
                    if offset >= end {
                        break;
                    }
                }
            }
        }
    }
    // An orderly end has nothing more to send. The reader ends when the peer closes its side.
    stream.shutdown(std::net::Shutdown::Write)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_has_its_mark_before_it_is_made() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = connect(listener.local_addr().unwrap(), 34).unwrap();
        let class = socket::getsockopt(&stream, sockopt::Ipv4Tos).unwrap();
        assert_eq!(class, 34 << 2);
    }
}
