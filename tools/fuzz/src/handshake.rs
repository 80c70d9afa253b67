//! Fuzzes the NCCL plugin's listener and the handle that its peers get through NCCL with arbitrary
//! bytes.
//!
//! The first byte selects the kind of input. One kind is a handle. The other is what a stranger
//! sends to a listener in two pieces. The first piece is a valid hello, possibly with a changed
//! byte. In each case the real peer must still connect, and its message must arrive complete.

use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nccl_net_laxity::backend::{
    Backend as _, Buffer, Listener, Message, Receiver, Sender, Sent, TrafficClasses,
};
use nccl_net_laxity::handle::{HANDLE_BYTES, Handle};
use nccl_net_laxity::settings::Settings;
use nccl_net_laxity::tcp::{HEAD_BYTES, HELLO_BYTES, Head, Part, StreamHello, Tcp};

use crate::input::{Input, connect};

const MESSAGE: usize = 100;
const ROOM: usize = 128;
const AFTER: usize = 20;
const UNTOUCHED: u8 = 0xa5;
const PATIENCE: Duration = Duration::from_secs(20);

fn tcp() -> &'static Tcp {
    static TCP: OnceLock<Tcp> = OnceLock::new();
    TCP.get_or_init(|| {
        let settings = Settings { interfaces: Some(String::from("lo")), ..Settings::default() };
        Tcp::new(&settings).expect("loopback")
    })
}

fn handle(bytes: &[u8]) {
    let mut handle = [0; HANDLE_BYTES];
    let count = bytes.len().min(HANDLE_BYTES);
    handle[..count].copy_from_slice(&bytes[..count]);
    match Handle::decode(&handle) {
        Ok(read) => {
            let again = Handle::decode(&read.encode());
            assert_eq!(again.ok(), Some(read), "what was read can be written");
        }
        Err(fault) => assert!(!fault.to_string().is_empty()),
    }
}

fn stranger(to: SocketAddr, pieces: [&[u8]; 2]) -> TcpStream {
    let mut stream = connect(to);
    for piece in pieces {
        // The listener may close the connection meanwhile.
        let _ = stream.write_all(piece);
    }
    stream
}

fn accepted(
    listener: &mut dyn Listener,
    wanted: usize,
    patience: Duration,
) -> Vec<Box<dyn Receiver>> {
    let end = Instant::now() + patience;
    let mut found = Vec::new();
    while found.len() < wanted && Instant::now() < end {
        found.extend(listener.accept().expect("strangers are no fault"));
    }
    found
}

/// Receives into one buffer of [`ROOM`] bytes. Returns the sizes of messages and the bytes. Checks
/// that nothing is written beyond the buffer.
fn receive(receiver: &mut dyn Receiver, steps: usize) -> (Vec<usize>, [u8; ROOM]) {
    let mut room = [UNTOUCHED; 2 * ROOM];
    let buffer = Buffer { address: room.as_mut_ptr() as usize, bytes: ROOM, region: None };
    receiver.post(buffer);
    let mut received = Vec::new();
    let mut left = steps;
    while left > 0 && receiver.progress(&mut received).is_ok() {
        left -= 1;
        // Bytes after the message must not be written either.
        if !received.is_empty() {
            left = left.min(AFTER);
        }
    }
    let sizes: Vec<usize> = received.iter().filter_map(|done| done.bytes).collect();
    assert!(sizes.iter().all(|size| *size <= ROOM));
    let (inside, beyond) = room.split_at(ROOM);
    assert!(beyond.iter().all(|byte| *byte == UNTOUCHED), "beyond the buffer");
    (sizes, inside.try_into().expect("half of the room"))
}

fn converse(listener: &mut dyn Listener, handle: &Handle) {
    let classes = TrafficClasses::from_slice(&[0]);
    let mut dialing = tcp().connect(0, handle, &classes, 0).expect("a socket");
    let end = Instant::now() + PATIENCE;
    let mut sender: Box<dyn Sender> = loop {
        if let Some(sender) = dialing.poll().expect("it listens") {
            break sender;
        }
        assert!(Instant::now() < end, "no connection");
    };
    let bytes = [7_u8; MESSAGE];
    assert!(sender.clear(MESSAGE).expect("no fault"));
    let buffer = Buffer { address: bytes.as_ptr() as usize, bytes: MESSAGE, region: None };
    sender.begin(Message { buffer, class: 0, accounted: false });
    sender.push(MESSAGE);
    let mut sent = Vec::<Sent>::new();
    while !sent.iter().any(|sent| sent.done) {
        sender.progress(&mut sent).expect("no fault");
    }
    // The stranger's bytes may also have made a connection. The real one is the one with the
    // message.
    let is_real = |mut receiver: Box<dyn Receiver>| {
        let (sizes, room) = receive(&mut *receiver, 1000);
        let untouched = room[MESSAGE..].iter().all(|byte| *byte == UNTOUCHED);
        sizes == [MESSAGE] && room[..MESSAGE] == bytes && untouched
    };
    while !accepted(listener, 1, PATIENCE).into_iter().any(is_real) {
        assert!(Instant::now() < end, "the real peer doesn't get through");
    }
    sender.close(false);
}

fn listener(mut input: Input<'_>) {
    let (mut listener, handle) = tcp().listen(0).expect("a port");
    let hello = StreamHello { nonce: handle.nonce, connection: 1, index: 0, streams: 1, dscp: 0 };
    let mut first = hello.encode();
    // Position and value of the change of the hello. A value of 0 changes nothing.
    let (at, change) = (usize::from(input.byte()), input.byte());
    first[at % HELLO_BYTES] ^= change;
    let rest = input.take(usize::MAX);
    let stranger = stranger(handle.address, [&first, rest]);
    let valid = change == 0;
    let patience = if valid { PATIENCE } else { Duration::from_millis(1) };
    let mut let_in = accepted(&mut *listener, 1, patience);
    assert!(!valid || let_in.len() == 1, "a true hello is let in");
    for receiver in &mut let_in {
        receive(&mut **receiver, 50);
    }
    converse(&mut *listener, &handle);
    drop(stranger);
}

pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.byte() % 4 {
        0 => listener(input),
        _ => handle(input.take(usize::MAX)),
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let address = SocketAddr::from(([127, 0, 0, 1], 4000));
    let of = |carrier| Handle { carrier, address, nonce: 7 };
    let with = |kind: u8, rest: &[u8]| [&[kind], rest].concat();
    let part = |message, offset, length| {
        let part = Part { message, total: 60, offset, length };
        let mut bytes = Head::Part(part).encode().to_vec();
        bytes.resize(HEAD_BYTES + length as usize, 9);
        bytes
    };
    let whole = [&[0, 0][..], &part(0, 0, 60)].concat();
    let halves = [&[0, 0][..], &part(0, 30, 30), &part(0, 0, 30)].concat();
    vec![
        with(1, &of(nccl_net_laxity::handle::Carrier::Tcp).encode()),
        with(1, &of(nccl_net_laxity::handle::Carrier::Verbs).encode()),
        with(0, &whole),
        with(0, &halves),
        with(0, &[12, 1]),
    ]
}
