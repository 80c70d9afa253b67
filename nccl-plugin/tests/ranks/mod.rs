//! Memory that the ranks of a group share, waiting for them, and ranks by a socket of their own.

use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::{Duration, Instant};

use nccl_net_laxity::handle::{HANDLE_BYTES, Handle};
use nccl_net_laxity::rma::RmaHello;

/// Bytes of a rank's contribution to a registration.
pub(crate) const REGISTRATION_BYTES: usize = 28;

/// Memory that other ranks write.
pub(crate) type Words = Vec<AtomicU64>;

pub(crate) fn words(count: usize) -> Words {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

pub(crate) fn lo() -> SocketAddr {
    "127.0.0.1:0".parse().expect("an address")
}

/// Connects to a rank's listener, as a rank of a group of `ranks`.
pub(crate) fn stranger(handle: &[u8; HANDLE_BYTES], rank: u32, ranks: u32) -> TcpStream {
    let there = Handle::decode(handle).expect("a handle");
    let mut stream = TcpStream::connect(there.address).expect("connects");
    let hello = RmaHello { nonce: there.nonce, rank, ranks };
    stream.write_all(&hello.encode()).expect("sent");
    stream
}

/// Waits until `step` holds. The watchdog is generous, because machines are slow.
pub(crate) fn until(what: &str, mut step: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !step() {
        assert!(Instant::now() < end, "{what}: it does not come");
        thread::yield_now();
    }
}
