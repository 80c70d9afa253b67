//! State machines that establish a connection and are polled: the listener with its incoming
//! connections, and the connecting end.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::control_connection::{ControlConnection, Unheard};
use super::hello::{ClassQueuePair, End, LANES_MAX, Word};
use super::nic::Nic;
use super::receiver::{Receiver, Welcoming};
use super::sender::{Greeting, Sender};
use crate::backend::{self, Classes};
use crate::fault::{Fault, Result};
use crate::handle::{Carrier, Handle};
use crate::log;
use crate::socket::{accept, connect, is_connected, listen, random};

/// Largest number of accepted connections in the handshake. Further ones wait in the kernel.
const GUESTS_MAX: usize = 256;
/// Time after which a peer without a complete handshake is dropped.
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns a random number for a queue pair's first packet, so that packets of an earlier
/// connection don't match.
pub(super) fn first_packet() -> u32 {
    random() as u32 & 0x00ff_ffff
}

pub(super) fn end(
    nic: &Nic,
    address: u64,
    rkey: u32,
    lanes: impl Iterator<Item = ClassQueuePair>,
) -> End {
    End {
        gid: nic.gid,
        lid: nic.lid,
        mtu: nic.mtu,
        link: nic.link,
        rkey,
        address,
        lanes: lanes.collect(),
    }
}

pub(super) struct Listener {
    nic: Arc<Nic>,
    socket: TcpListener,
    nonce: u64,
    guests: Vec<IncomingConnection>,
}

struct IncomingConnection {
    talk: ControlConnection,
    since: Instant,
    state: Welcome,
}

enum Welcome {
    /// The peer's hello has not arrived.
    Hello,
    /// The welcome is sent, and the peer connects its queue pairs.
    Ready(Box<Welcoming>),
    /// The peer gets a refusal.
    Refused(Fault),
}

/// The state of an incoming connection.
enum Fate {
    Waits,
    Dropped,
    Failed(Fault),
    Connected(Box<Welcoming>),
}

impl Listener {
    /// Listens on a port of its own.
    ///
    /// # Errors
    /// The operating system refused.
    pub(super) fn new(nic: &Arc<Nic>, at: SocketAddr) -> Result<(Self, Handle)> {
        let socket = listen(at)?;
        let address =
            socket.local_addr().map_err(|error| Fault::system("the listener's address", error))?;
        let handle = Handle { carrier: Carrier::Verbs, address, nonce: random() };
        let listener =
            Self { nic: Arc::clone(nic), socket, nonce: handle.nonce, guests: Vec::new() };
        Ok((listener, handle))
    }

    fn ask_in(&mut self) -> Result<()> {
        while self.guests.len() < GUESTS_MAX
            && let Some(stream) = accept(&self.socket)?
        {
            self.guests.push(IncomingConnection {
                talk: ControlConnection::new(stream, self.nonce),
                since: Instant::now(),
                state: Welcome::Hello,
            });
        }
        Ok(())
    }
}

impl IncomingConnection {
    fn poll(&mut self, nic: &Arc<Nic>) -> Fate {
        let fate = self.step(nic);
        if matches!(fate, Fate::Waits)
            && self.since.elapsed() > PATIENCE
            && matches!(self.state, Welcome::Hello)
        {
            log::info(&format!(
                "{} connected and said nothing; its connection is dropped",
                self.talk.peer()
            ));
            return Fate::Dropped;
        }
        fate
    }

    fn dropped(&self, why: &Unheard) -> Fate {
        log::info(&format!("a connection from {} is dropped: {why}", self.talk.peer()));
        Fate::Dropped
    }

    fn step(&mut self, nic: &Arc<Nic>) -> Fate {
        if matches!(self.state, Welcome::Hello) {
            match self.talk.hear() {
                Ok(None) => return Fate::Waits,
                Ok(Some(Word::Hello(theirs))) => match Welcoming::new(nic, &theirs) {
                    Ok(welcoming) => {
                        self.talk.say(&Word::Welcome(welcoming.end()));
                        self.state = Welcome::Ready(Box::new(welcoming));
                    }
                    Err(fault) => {
                        self.talk.say(&Word::Refusal(fault.to_string()));
                        self.state = Welcome::Refused(fault);
                    }
                },
                Ok(Some(_)) => return self.dropped(&Unheard::Closed),
                Err(why) => return self.dropped(&why),
            }
        }
        match self.talk.flush() {
            Ok(true) => {}
            Ok(false) => return Fate::Waits,
            Err(error) => return self.dropped(&error.into()),
        }
        if let Welcome::Refused(fault) = &self.state {
            return Fate::Failed(fault.clone());
        }
        match self.talk.hear() {
            Ok(None) => Fate::Waits,
            Ok(Some(Word::Ready)) => match core::mem::replace(&mut self.state, Welcome::Hello) {
                Welcome::Ready(welcoming) => Fate::Connected(welcoming),
                _ => Fate::Dropped,
            },
            // The sender gave up.
            Ok(Some(Word::Refusal(why))) => {
                log::warn(&format!("{} does not connect after all: {why}", self.talk.peer()));
                Fate::Dropped
            }
            Ok(Some(_)) => self.dropped(&Unheard::Closed),
            Err(why) => self.dropped(&why),
        }
    }
}

impl backend::Listener for Listener {
    fn accept(&mut self) -> Result<Option<Box<dyn backend::Receiver>>> {
        self.ask_in()?;
        let mut at = 0;
        while at < self.guests.len() {
            match self.guests[at].poll(&self.nic) {
                Fate::Waits => at += 1,
                Fate::Dropped => drop(self.guests.remove(at)),
                Fate::Failed(fault) => {
                    self.guests.remove(at);
                    return Err(fault);
                }
                Fate::Connected(welcoming) => {
                    let guest = self.guests.remove(at);
                    let receiver = Receiver::new(*welcoming, guest.talk.watch());
                    return Ok(Some(Box::new(receiver)));
                }
            }
        }
        Ok(None)
    }
}

pub(super) struct Connecting {
    nic: Arc<Nic>,
    to: SocketAddr,
    state: State,
    greeting: Option<Box<Greeting>>,
    nonce: u64,
}

enum State {
    Dialing(Option<TcpStream>),
    Greeted(ControlConnection),
    Ready(Option<(ControlConnection, Box<Sender>)>),
}

impl Connecting {
    /// Begins to connect to the receiver that a handle names.
    ///
    /// # Errors
    /// The operating system or the device refused.
    pub(super) fn new(
        nic: &Arc<Nic>,
        handle: &Handle,
        classes: &Classes,
        service_level: u8,
    ) -> Result<Self> {
        if classes.is_empty() || classes.len() > LANES_MAX {
            return Err(Fault::Internal(format!("a connection has {} classes", classes.len())));
        }
        Ok(Self {
            nic: Arc::clone(nic),
            to: handle.address,
            state: State::Dialing(Some(connect(handle.address, |_| Ok(()))?)),
            greeting: Some(Box::new(Greeting::new(nic, classes, service_level)?)),
            nonce: handle.nonce,
        })
    }

    fn lost(&self, why: &Unheard) -> Fault {
        Fault::Remote(format!("the receiver at {} is lost while connecting: {why}", self.to))
    }

    fn welcomed(&mut self, word: Word, mut talk: ControlConnection) -> Result<()> {
        let theirs = match word {
            Word::Welcome(theirs) => theirs,
            Word::Refusal(why) => {
                return Err(Fault::Remote(format!("the receiver at {} refuses: {why}", self.to)));
            }
            _ => return Err(self.lost(&Unheard::Closed)),
        };
        let Some(greeting) = self.greeting.take() else {
            return Err(Fault::Internal(String::from("greeted twice")));
        };
        match greeting.connect(&theirs) {
            Ok(sender) => {
                talk.say(&Word::Ready);
                self.state = State::Ready(Some((talk, Box::new(sender))));
                Ok(())
            }
            Err(fault) => {
                // The other end can log the fault, too.
                talk.say(&Word::Refusal(fault.to_string()));
                let _ = talk.flush();
                Err(fault)
            }
        }
    }
}

impl backend::Connecting for Connecting {
    fn poll(&mut self) -> Result<Option<Box<dyn backend::Sender>>> {
        self.nic.look()?;
        if let State::Dialing(stream) = &mut self.state {
            let there = match stream {
                Some(stream) => is_connected(stream, self.to)?,
                None => false,
            };
            let Some(stream) = stream.take_if(|_| there) else {
                return Ok(None);
            };
            let mut talk = ControlConnection::new(stream, self.nonce);
            if let Some(greeting) = &self.greeting {
                talk.say(&Word::Hello(greeting.end()));
            }
            self.state = State::Greeted(talk);
        }
        if let State::Greeted(talk) = &mut self.state {
            let heard = match talk.flush() {
                Ok(false) => return Ok(None),
                Ok(true) => talk.hear(),
                Err(error) => Err(error.into()),
            };
            let word = match heard {
                Ok(None) => return Ok(None),
                Ok(Some(word)) => word,
                Err(why) => return Err(self.lost(&why)),
            };
            if let State::Greeted(talk) = core::mem::replace(&mut self.state, State::Dialing(None))
            {
                self.welcomed(word, talk)?;
            }
        }
        if let State::Ready(ready) = &mut self.state
            && let Some((talk, _)) = ready
        {
            match talk.flush() {
                Ok(true) => {}
                Ok(false) => return Ok(None),
                Err(error) => return Err(self.lost(&error.into())),
            }
            if let Some((talk, mut sender)) = ready.take() {
                sender.watch(talk.watch());
                return Ok(Some(sender));
            }
        }
        Ok(None)
    }
}
