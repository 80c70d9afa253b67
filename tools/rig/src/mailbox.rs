//! Control messages between workers: a unix stream per ordered pair, non-blocking both ways, so
//! that two workers that write to each other never wait for each other.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use crate::message::{self, Message};

struct Outgoing {
    stream: UnixStream,
    pending: Vec<u8>,
}

struct Incoming {
    stream: UnixStream,
    pending: Vec<u8>,
}

/// The mailbox of one worker.
pub struct Mailbox {
    folder: PathBuf,
    listener: UnixListener,
    outgoing: HashMap<usize, Outgoing>,
    incoming: Vec<Option<Incoming>>,
}

fn socket_path(folder: &Path, host: usize) -> PathBuf {
    folder.join(format!("mail{host}.sock"))
}

impl Mailbox {
    /// Makes the mailbox of a host in the run's folder.
    ///
    /// # Errors
    /// The folder does not exist, or the host has a mailbox already.
    pub fn listen(folder: &Path, host: usize) -> io::Result<Self> {
        let listener = UnixListener::bind(socket_path(folder, host))?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            folder: folder.to_owned(),
            listener,
            outgoing: HashMap::new(),
            incoming: Vec::new(),
        })
    }

    /// Connects to the mailbox of another host.
    ///
    /// # Errors
    /// It has none.
    pub fn connect(&mut self, host: usize) -> io::Result<()> {
        let stream = UnixStream::connect(socket_path(&self.folder, host))?;
        stream.set_nonblocking(true)?;
        self.outgoing.insert(
            host,
            Outgoing {
                stream,
                pending: Vec::new(),
            },
        );
        Ok(())
    }

    /// The listening socket, to be polled.
    #[must_use]
    pub fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// An incoming stream, to be polled.
    #[must_use]
    pub fn incoming(&self, number: usize) -> Option<BorrowedFd<'_>> {
        self.incoming
            .get(number)?
            .as_ref()
            .map(|incoming| incoming.stream.as_fd())
    }

    /// Accepts what waits and returns the numbers of the new streams.
    ///
    /// # Errors
    /// The host has run out of descriptors.
    pub fn accept(&mut self) -> io::Result<Vec<usize>> {
        let mut accepted = Vec::new();
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    accepted.push(self.incoming.len());
                    self.incoming.push(Some(Incoming {
                        stream,
                        pending: Vec::new(),
                    }));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(accepted),
                Err(error) => return Err(error),
            }
        }
    }

    /// Leaves a message for another host; [`Mailbox::flush`] sends it.
    pub fn post(&mut self, host: usize, message: &Message) {
        if let Some(outgoing) = self.outgoing.get_mut(&host) {
            outgoing.pending.extend(message::line(message));
        }
    }

    /// Writes what the streams take; true if something is left over.
    ///
    /// # Errors
    /// A peer is gone.
    pub fn flush(&mut self) -> io::Result<bool> {
        let mut left = false;
        for outgoing in self.outgoing.values_mut() {
            while !outgoing.pending.is_empty() {
                match outgoing.stream.write(&outgoing.pending) {
                    Ok(count) => drop(outgoing.pending.drain(..count)),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        left = true;
                        break;
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(left)
    }

    /// Reads the messages that a stream has.
    ///
    /// # Errors
    /// The peer speaks something else. That it is gone is no error.
    pub fn receive(&mut self, number: usize) -> io::Result<Vec<Message>> {
        let Some(incoming) = self.incoming[number].as_mut() else {
            return Ok(Vec::new());
        };
        let mut buffer = [0; 16 << 10];
        loop {
            match incoming.stream.read(&mut buffer) {
                Ok(0) => {
                    self.incoming[number] = None;
                    return Ok(Vec::new());
                }
                Ok(count) => incoming.pending.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(message::lines(&mut incoming.pending)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_reach_the_other_mailbox_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let mut a = Mailbox::listen(folder.path(), 0).unwrap();
        let mut b = Mailbox::listen(folder.path(), 1).unwrap();
        a.connect(1).unwrap();
        for request in 0..5000 {
            a.post(1, &Message::Finished { request });
        }
        assert_eq!(b.accept().unwrap(), [0]);
        let mut got = Vec::new();
        loop {
            let left = a.flush().unwrap();
            got.extend(b.receive(0).unwrap());
            if !left {
                break;
            }
        }
        got.extend(b.receive(0).unwrap());
        let expected: Vec<_> = (0..5000)
            .map(|request| Message::Finished { request })
            .collect();
        assert_eq!(got, expected);
        a.post(7, &Message::Finished { request: 1 });
        assert!(
            !a.flush().unwrap(),
            "a host without mailbox takes nothing and harms nothing"
        );
    }
}
