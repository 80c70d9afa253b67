//! Tests with clients that are silent, send slowly or do not read, beside an honest client.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use laxity_listen::http::{HttpLimits, HttpListener, rendered};

/// Longest wait for an expected event. It is long because test machines are busy.
const SOON: Duration = Duration::from_secs(20);

const LIMITS: HttpLimits = HttpLimits {
    connections_max: 8,
    head_max: Duration::from_secs(60),
    connection_max: Duration::from_secs(60),
    keep_alive: false,
};

/// Starts a server that runs until the process ends.
fn serve(limits: HttpLimits, body_bytes: usize) -> SocketAddr {
    let (sender, address) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let listener = HttpListener::bind(([127, 0, 0, 1], 0).into()).expect("an address");
            sender.send(listener.local_addr().expect("bound")).expect("a listener");
            let answer = rendered(move || "x".repeat(body_bytes));
            listener.serve("the test", limits, answer).await;
        });
    });
    address.recv_timeout(SOON).expect("an address")
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("a connection");
    stream.set_read_timeout(Some(SOON)).expect("a timeout");
    stream
}

fn ask(stream: &mut TcpStream) -> String {
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").expect("a request");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    text
}

/// Reports whether the server closes `stream` in time. Bytes that it sent before are ignored.
fn is_closed(mut stream: TcpStream) -> bool {
    let end = Instant::now() + SOON;
    let mut bytes = [0; 4096];
    while Instant::now() < end {
        match stream.read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
    false
}

#[test]
fn a_newcomer_is_answered_though_idle_connections_hold_every_place() {
    let address = serve(LIMITS, 3);
    let idle: Vec<_> = (0..100).map(|_| connect(address)).collect();
    let answer = ask(&mut connect(address));
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("xxx"), "{answer}");
    // Connections that made room are closed, and the others stay open.
    let mut closed = 0;
    for stream in idle {
        stream.set_read_timeout(Some(Duration::from_millis(1))).expect("a timeout");
        closed += usize::from((&stream).read(&mut [0]).is_ok_and(|bytes| bytes == 0));
    }
    assert!((92..=93).contains(&closed), "{closed} of 100");
}

#[test]
fn whoever_is_slow_to_ask_or_to_read_is_disconnected() {
    let limits = HttpLimits {
        head_max: Duration::from_millis(100),
        connection_max: Duration::from_millis(300),
        ..LIMITS
    };
    let address = serve(limits, 64 << 20);
    assert!(is_closed(connect(address)), "it said nothing");
    let mut slow = connect(address);
    slow.write_all(b"GET / HTTP/1.1\r\nHost:").expect("a part");
    assert!(is_closed(slow), "it never ended its head");
    let mut deaf = connect(address);
    deaf.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").expect("a request");
    std::thread::sleep(Duration::from_millis(600));
    let mut text = Vec::new();
    let end = deaf.read_to_end(&mut text);
    assert!(end.is_err() || text.len() < 64 << 20, "it got all {} bytes", text.len());
}

#[test]
fn only_get_is_answered_and_health_is_ok() {
    let address = serve(LIMITS, 3);
    for (request, status, end) in
        [("POST /metrics", "405", "use GET\n"), ("GET /health", "200", "OK")]
    {
        let mut stream = connect(address);
        write!(stream, "{request} HTTP/1.1\r\nHost: x\r\n\r\n").expect("a request");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        assert!(text.contains(status) && text.ends_with(end), "{text}");
    }
}
