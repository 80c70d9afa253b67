//! State machines that establish a connection and are polled: the listener with its incoming
//! connections, and the connecting end.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::control_connection::{ControlConnection, ReceiveError};
use super::hello::{ClassQueuePair, ControlMessage, End, LANES_MAX};
use super::nic::Nic;
use super::receiver::{VerbsReceiver, Welcoming};
use super::sender::{Greeting, VerbsSender};
use crate::backend::{self, TrafficClasses};
use crate::fault::{Fault, Result};
use crate::handle::{Carrier, Handle};
use crate::log;
use crate::socket::{accept, connect, is_connected, listen, random};

/// Largest number of accepted connections in the handshake. Further ones wait in the kernel.
const GUESTS_MAX: usize = 256;
/// Time after which a peer without a complete hello is dropped.
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

pub(super) struct VerbsListener {
    nic: Arc<Nic>,
    socket: TcpListener,
    nonce: u64,
    guests: Vec<IncomingConnection>,
}

struct IncomingConnection {
    control: ControlConnection,
    since: Instant,
    state: IncomingStep,
}

enum IncomingStep {
    /// The peer's hello has not arrived.
    Hello,
    /// The welcome is sent, and the peer connects its queue pairs.
    Ready(Box<Welcoming>),
    /// The peer gets a refusal.
    Refused(Fault),
}

enum IncomingState {
    Waits,
    Dropped,
    Failed(Fault),
    Connected(Box<Welcoming>),
}

impl VerbsListener {
    /// Listens on a port of its own.
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
                control: ControlConnection::new(stream, self.nonce),
                since: Instant::now(),
                state: IncomingStep::Hello,
            });
        }
        Ok(())
    }
}

impl IncomingConnection {
    fn poll(&mut self, nic: &Arc<Nic>) -> IncomingState {
        let state = self.step(nic);
        if matches!(state, IncomingState::Waits)
            && self.since.elapsed() > PATIENCE
            && matches!(self.state, IncomingStep::Hello)
        {
            log::info(&format!(
                "{} connected and said nothing; its connection is dropped",
                self.control.peer()
            ));
            return IncomingState::Dropped;
        }
        state
    }

    fn dropped(&self, why: &ReceiveError) -> IncomingState {
        log::info(&format!("a connection from {} is dropped: {why}", self.control.peer()));
        IncomingState::Dropped
    }

    fn step(&mut self, nic: &Arc<Nic>) -> IncomingState {
        if matches!(self.state, IncomingStep::Hello) {
            match self.control.hear() {
                Ok(None) => return IncomingState::Waits,
                Ok(Some(ControlMessage::Hello(theirs))) => match Welcoming::new(nic, &theirs) {
                    Ok(welcoming) => {
                        self.control.say(&ControlMessage::Welcome(welcoming.end()));
                        self.state = IncomingStep::Ready(Box::new(welcoming));
                    }
                    Err(fault) => {
                        self.control.say(&ControlMessage::Refusal(fault.to_string()));
                        self.state = IncomingStep::Refused(fault);
                    }
                },
                Ok(Some(_)) => return self.dropped(&ReceiveError::Closed),
                Err(why) => return self.dropped(&why),
            }
        }
        match self.control.flush() {
            Ok(true) => {}
            Ok(false) => return IncomingState::Waits,
            Err(error) => return self.dropped(&error.into()),
        }
        if let IncomingStep::Refused(fault) = &self.state {
            return IncomingState::Failed(fault.clone());
        }
        match self.control.hear() {
            Ok(None) => IncomingState::Waits,
            Ok(Some(ControlMessage::Ready)) => {
                match core::mem::replace(&mut self.state, IncomingStep::Hello) {
                    IncomingStep::Ready(welcoming) => IncomingState::Connected(welcoming),
                    _ => IncomingState::Dropped,
                }
            }
            // The sender gave up.
            Ok(Some(ControlMessage::Refusal(why))) => {
                log::warn(&format!("{} gave up its connect: {why}", self.control.peer()));
                IncomingState::Dropped
            }
            Ok(Some(_)) => self.dropped(&ReceiveError::Closed),
            Err(why) => self.dropped(&why),
        }
    }
}

impl backend::Listener for VerbsListener {
    fn accept(&mut self) -> Result<Option<Box<dyn backend::Receiver>>> {
        self.ask_in()?;
        let mut at = 0;
        while at < self.guests.len() {
            match self.guests[at].poll(&self.nic) {
                IncomingState::Waits => at += 1,
                IncomingState::Dropped => drop(self.guests.remove(at)),
                IncomingState::Failed(fault) => {
                    self.guests.remove(at);
                    return Err(fault);
                }
                IncomingState::Connected(welcoming) => {
                    let guest = self.guests.remove(at);
                    let receiver = VerbsReceiver::new(*welcoming, guest.control.watch());
                    return Ok(Some(Box::new(receiver)));
                }
            }
        }
        Ok(None)
    }
}

pub(super) struct VerbsConnecting {
    nic: Arc<Nic>,
    to: SocketAddr,
    state: ConnectState,
    greeting: Option<Box<Greeting>>,
    nonce: u64,
}

enum ConnectState {
    Dialing(Option<TcpStream>),
    Greeted(ControlConnection),
    Ready(Option<(ControlConnection, Box<VerbsSender>)>),
}

impl VerbsConnecting {
    /// Begins to connect to the receiver that a handle names.
    pub(super) fn new(
        nic: &Arc<Nic>,
        handle: &Handle,
        classes: &TrafficClasses,
        service_level: u8,
    ) -> Result<Self> {
        if classes.is_empty() || classes.len() > LANES_MAX {
            return Err(Fault::Internal(format!("a connection has {} classes", classes.len())));
        }
        Ok(Self {
            nic: Arc::clone(nic),
            to: handle.address,
            state: ConnectState::Dialing(Some(connect(handle.address, |_| Ok(()))?)),
            greeting: Some(Box::new(Greeting::new(nic, classes, service_level)?)),
            nonce: handle.nonce,
        })
    }

    fn lost(&self, why: &ReceiveError) -> Fault {
        Fault::Remote(format!("the receiver at {} is lost while connecting: {why}", self.to))
    }

    fn welcomed(&mut self, message: ControlMessage, mut control: ControlConnection) -> Result<()> {
        let theirs = match message {
            ControlMessage::Welcome(theirs) => theirs,
            ControlMessage::Refusal(why) => {
                return Err(Fault::Remote(format!("the receiver at {} refuses: {why}", self.to)));
            }
            _ => return Err(self.lost(&ReceiveError::Closed)),
        };
        let Some(greeting) = self.greeting.take() else {
            return Err(Fault::Internal("greeted twice".into()));
        };
        match greeting.connect(&theirs) {
            Ok(sender) => {
                control.say(&ControlMessage::Ready);
                self.state = ConnectState::Ready(Some((control, Box::new(sender))));
                Ok(())
            }
            Err(fault) => {
                // The other end can log the fault, too.
                control.say(&ControlMessage::Refusal(fault.to_string()));
                let _ = control.flush();
                Err(fault)
            }
        }
    }
}

impl backend::Connecting for VerbsConnecting {
    fn poll(&mut self) -> Result<Option<Box<dyn backend::Sender>>> {
        self.nic.look()?;
        if let ConnectState::Dialing(stream) = &mut self.state {
            let there = match stream {
                Some(stream) => is_connected(stream, self.to)?,
                None => false,
            };
            let Some(stream) = stream.take_if(|_| there) else { return Ok(None) };
            let mut control = ControlConnection::new(stream, self.nonce);
            if let Some(greeting) = &self.greeting {
                control.say(&ControlMessage::Hello(greeting.end()));
            }
            self.state = ConnectState::Greeted(control);
        }
        if let ConnectState::Greeted(control) = &mut self.state {
            let heard = match control.flush() {
                Ok(false) => return Ok(None),
                Ok(true) => control.hear(),
                Err(error) => Err(error.into()),
            };
            let message = match heard {
                Ok(None) => return Ok(None),
                Ok(Some(message)) => message,
                Err(why) => return Err(self.lost(&why)),
            };
            if let ConnectState::Greeted(control) =
                core::mem::replace(&mut self.state, ConnectState::Dialing(None))
            {
                self.welcomed(message, control)?;
            }
        }
        if let ConnectState::Ready(ready) = &mut self.state
            && let Some((control, _)) = ready
        {
            match control.flush() {
                Ok(true) => {}
                Ok(false) => return Ok(None),
                Err(error) => return Err(self.lost(&error.into())),
            }
            if let Some((control, mut sender)) = ready.take() {
                sender.watch(control.watch());
                return Ok(Some(sender));
            }
        }
        Ok(None)
    }
}
