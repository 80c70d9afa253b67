//! Connections from other processes. Each has a thread that reads frames, assembles parcels and
//! sends acknowledgements.

use std::collections::HashMap;
use std::io::{self, BufRead as _, BufReader, ErrorKind, Read, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};

use super::frame::{ACK_BYTES, HEAD_BYTES, Head, Preamble, READ, WORDS_BYTES_MAX, invalid};
use super::outgoing::mark;
use super::{Arrival, Incoming, Taker};

/// Maximum number of incomplete parcels on one connection.
const OPEN_MAX: usize = 65_536;

/// Accepts connections in the background until the process ends. Returns the local address.
/// Fails if the address cannot be bound.
pub fn listen(address: SocketAddr, taker: Taker) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind(address)?;
    let here = listener.local_addr()?;
    std::thread::Builder::new().name("accept".to_owned()).spawn(move || {
        for stream in listener.incoming() {
            let taker = Taker::clone(&taker);
            let started = stream.and_then(|stream| {
                std::thread::Builder::new()
                    .name("in".to_owned())
                    .spawn(move || hear(stream, &taker))
            });
            if let Err(error) = started {
                tracing::warn!("a connection could not be taken: {error}");
                // If descriptors or threads have run out, other connections have to end first.
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
        }
    })?;
    Ok(here)
}

fn hear(mut stream: TcpStream, taker: &Taker) {
    let preamble = match Preamble::read(&mut stream) {
        Ok(preamble) => preamble,
        Err(error) => {
            tracing::warn!(peer = ?stream.peer_addr(), "a connection that is no engine's: {error}");
            return;
        }
    };
    // If the marks are refused, acknowledgements go out unmarked.
    if let Ok(peer) = stream.peer_addr()
        && let Err(error) = mark(&stream, peer, preamble.dscp)
    {
        tracing::warn!(%peer, "acknowledgements are not marked: {error}");
    }
    let heard = if preamble.words {
        words(&stream, preamble.listens, taker)
    } else {
        parcels(&mut stream, preamble.listens, taker)
    };
    let why = match heard {
        Ok(()) => "it closed the connection".to_owned(),
        Err(error) => error.to_string(),
    };
    taker(Incoming::Lost(preamble.listens, why));
}

fn words(stream: &TcpStream, from: SocketAddr, taker: &Taker) -> io::Result<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = String::new();
        let read = Read::by_ref(&mut reader).take(WORDS_BYTES_MAX).read_line(&mut line)?;
        if read == 0 {
            return Ok(());
        }
        if !line.ends_with('\n') {
            return Err(invalid("a line without an end"));
        }
        taker(Incoming::Words(from, line));
    }
}

fn parcels(stream: &mut TcpStream, from: SocketAddr, taker: &Taker) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut open: HashMap<u64, Vec<u8>> = HashMap::new();
    let mut reader = BufReader::with_capacity(512 << 10, stream.try_clone()?);
    loop {
        let mut bytes = [0; HEAD_BYTES];
        if let Err(error) = reader.read_exact(&mut bytes) {
            return if error.kind() == ErrorKind::UnexpectedEof && open.is_empty() {
                Ok(())
            } else {
                Err(error)
            };
        }
        let head = Head::decode(&bytes)?;
        let so_far = open.entry(head.flow).or_default();
        if so_far.len() as u64 != head.offset {
            let (flow, count) = (head.flow, so_far.len());
            return Err(invalid(format!("flow {flow}: byte {} after {count}", head.offset)));
        }
        let start = so_far.len();
        so_far.resize(start + head.len as usize, 0);
        reader.read_exact(&mut so_far[start..])?;
        let whole = so_far.len() as u64 == head.total;
        let mut ack = [0; ACK_BYTES];
        ack[..8].copy_from_slice(&head.flow.to_le_bytes());
        ack[8..].copy_from_slice(&u64::from(head.len).to_le_bytes());
        stream.write_all(&ack)?;
        if head.flow & READ != 0 {
            taker(Incoming::Part { flow: head.flow, bytes: u64::from(head.len) });
        }
        if whole && let Some(payload) = open.remove(&head.flow) {
            taker(Incoming::Parcel(Arrival { from, head, payload }));
        }
        if open.len() > OPEN_MAX {
            return Err(invalid("too many parcels at once"));
        }
    }
}
