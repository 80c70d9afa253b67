//! TCP sockets, several per connection, each with one class.
//!
//! A connection has `LAXITY_NSOCKS` sockets for each traffic class. Each socket is marked once: by
//! the connecting end before the TCP handshake, and by the other end after the hello. A message's
//! class can therefore be chosen freely, and no socket buffer reorders or re-marks data. Large
//! messages are spread over the sockets of their class.
//!
//! The calling thread does all work. NCCL's proxy thread polls anyway, and another thread would
//! compete with it.

mod frame;
mod inlet;
mod outlet;
mod receiver;
mod sender;
pub(crate) mod socket;

use std::collections::HashMap;
use std::io::{self, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

pub use frame::{HEAD_BYTES, HELLO_BYTES, Head, Part, StreamHello};

use crate::backend::{Backend, Connecting, Device, Listener, Receiver, Sender, TrafficClasses};
use crate::fault::{Fault, Result};
use crate::handle::{Carrier, Handle};
use crate::interfaces;
use crate::log;
use crate::settings::{Settings, ZeroCopy};
use crate::socket::{Stranger, accept, is_connected, listen, peer, random};
use crate::verbs::OneSidedPort;
use receiver::TcpReceiver;
use sender::TcpSender;

/// Time after which a socket without a complete hello is dropped.
const HELLO_WITHIN: Duration = Duration::from_secs(30);
/// Largest number of sockets without a complete hello.
const UNKNOWN_MAX: usize = 4096;
/// Largest number of connections of which only some sockets have arrived.
const PARTIAL_MAX: usize = 16384;

#[derive(Debug)]
pub struct Tcp {
    devices: Vec<Device>,
    addresses: Vec<SocketAddr>,
    sockets: usize,
    zero_copy: bool,
}

impl Tcp {
    /// Opens the network over the interfaces that the settings name.
    pub fn new(settings: &Settings) -> Result<Self> {
        let (devices, addresses) = interfaces::devices(settings)?.into_iter().unzip();
        Ok(Self {
            devices,
            addresses,
            sockets: settings.sockets,
            zero_copy: settings.zero_copy == ZeroCopy::Auto,
        })
    }
}

impl Backend for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn devices(&self) -> &[Device] {
        &self.devices
    }

    fn one_sided_at(&self, device: usize) -> Option<(SocketAddr, Option<OneSidedPort>)> {
        self.addresses.get(device).map(|address| (*address, None))
    }

    fn listen(&self, device: usize) -> Result<(Box<dyn Listener>, Handle)> {
        let listener = listen(self.addresses[device])?;
        let address = listener
            .local_addr()
            .map_err(|error| Fault::system("the listener's address", error))?;
        let nonce = random();
        let handle = Handle { carrier: Carrier::Tcp, address, nonce };
        let accepting = Accepting {
            listener,
            nonce,
            unknown: Vec::new(),
            partial: HashMap::new(),
            warned: false,
        };
        Ok((Box::new(accepting), handle))
    }

    fn connect(
        &self,
        device: usize,
        handle: &Handle,
        classes: &TrafficClasses,
        _service_level: u8,
    ) -> Result<Box<dyn Connecting>> {
        let connection = u128::from(random()) << 64 | u128::from(random());
        let streams = (classes.len() * self.sockets) as u16;
        let opening = (0..streams).map(|index| {
            let dscp = classes[usize::from(index) / self.sockets];
            let stream = socket::connect(self.addresses[device], handle.address, dscp)?;
            let hello = StreamHello { nonce: handle.nonce, connection, index, streams, dscp };
            Ok(Opening { stream, hello: hello.encode(), sent: 0, connected: false })
        });
        Ok(Box::new(Dialing {
            opening: opening.collect::<Result<_>>()?,
            to: handle.address,
            sockets: self.sockets,
            zero_copy: self.zero_copy,
        }))
    }
}

/// An outgoing socket that has not sent its hello.
struct Opening {
    stream: TcpStream,
    hello: [u8; HELLO_BYTES],
    sent: usize,
    connected: bool,
}

impl Opening {
    fn is_open(&mut self, to: SocketAddr) -> Result<bool> {
        if !self.connected {
            self.connected = is_connected(&self.stream, to)?;
        }
        while self.connected && self.sent < HELLO_BYTES {
            match self.stream.write(&self.hello[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(Fault::Remote(format!("{to} hung up during the hello: {error}")));
                }
            }
        }
        Ok(self.connected)
    }
}

/// A connection that is being established.
struct Dialing {
    opening: Vec<Opening>,
    to: SocketAddr,
    sockets: usize,
    zero_copy: bool,
}

impl Connecting for Dialing {
    fn poll(&mut self) -> Result<Option<Box<dyn Sender>>> {
        for opening in &mut self.opening {
            if !opening.is_open(self.to)? {
                return Ok(None);
            }
        }
        let streams = self.opening.drain(..).map(|opening| opening.stream).collect();
        Ok(Some(Box::new(TcpSender::new(streams, self.sockets, self.zero_copy))))
    }
}

/// The sockets of one connection, as far as they have arrived.
type PartialConnection = Vec<Option<TcpStream>>;

struct Accepting {
    listener: TcpListener,
    nonce: u64,
    unknown: Vec<Stranger<HELLO_BYTES>>,
    partial: HashMap<u128, PartialConnection>,
    warned: bool,
}

impl Accepting {
    /// Accepts all sockets that have connected.
    fn take(&mut self) -> Result<()> {
        while self.unknown.len() < UNKNOWN_MAX
            && let Some(stream) = accept(&self.listener)?
        {
            socket::notice_silence(&stream);
            self.unknown.push(Stranger::new(stream));
        }
        Ok(())
    }

    /// Reads hellos. Returns the sockets of a connection that is complete.
    fn sort(&mut self) -> Option<Vec<TcpStream>> {
        let mut complete = None;
        let mut at = 0;
        while at < self.unknown.len() && complete.is_none() {
            let heard = self.unknown[at].hear(HELLO_WITHIN);
            let verdict = match heard
                .and_then(|hello| hello.map(|bytes| StreamHello::decode(&bytes)).transpose())
            {
                Ok(None) => {
                    at += 1;
                    continue;
                }
                Ok(Some(hello)) if hello.nonce != self.nonce => {
                    Err(String::from("means another listener"))
                }
                Ok(Some(hello)) => Ok(hello),
                Err(problem) => Err(problem),
            };
            let stranger = self.unknown.swap_remove(at);
            match verdict {
                Ok(hello) => complete = self.join(hello, stranger.stream),
                Err(problem) => self.refuse(&stranger.stream, &problem),
            }
        }
        complete
    }

    /// Adds a socket to its connection. Returns all sockets if the connection is complete.
    fn join(&mut self, hello: StreamHello, stream: TcpStream) -> Option<Vec<TcpStream>> {
        if self.partial.len() >= PARTIAL_MAX && !self.partial.contains_key(&hello.connection) {
            self.refuse(&stream, "is one too many");
            return None;
        }
        let is_v4 = stream.local_addr().is_ok_and(|address| address.is_ipv4());
        socket::mark(&stream, is_v4, hello.dscp);
        let streams = usize::from(hello.streams);
        let partial = self.partial.entry(hello.connection).or_default();
        if partial.is_empty() {
            partial.resize_with(streams, || None);
        }
        // A socket whose index exceeds the first socket's count doesn't come from this plugin.
        let place = partial.get_mut(usize::from(hello.index))?;
        *place = Some(stream);
        if partial.iter().any(Option::is_none) {
            return None;
        }
        let partial = self.partial.remove(&hello.connection)?;
        Some(partial.into_iter().flatten().collect())
    }

    /// Drops a stranger's socket. Warns only once, because port scanners exist.
    fn refuse(&mut self, stream: &TcpStream, problem: &str) {
        let text = format!(
            "a connection from {} was dropped: it {problem}. If this job hangs now, a node does \
             without this plugin, or with another release: set NCCL_NET_PLUGIN=laxity and \
             NCCL_NET=Laxity on all",
            peer(stream)
        );
        if self.warned {
            log::info(&text);
        } else {
            self.warned = true;
            log::warn(&text);
        }
    }
}

impl Listener for Accepting {
    fn accept(&mut self) -> Result<Option<Box<dyn Receiver>>> {
        self.take()?;
        let streams = self.sort();
        Ok(streams.map(|streams| Box::new(TcpReceiver::new(streams)) as Box<dyn Receiver>))
    }
}
