//! Tests of honest clients beside connections that send nothing, or send slowly.

use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use laxity_wire::v1::ListHostsRequest;
use laxity_wire::v1::operator_client::OperatorClient;
use tonic::transport::Endpoint;

use crate::process::{PROGRAM, Process};
use crate::support::ask;

/// Number of slow connections. They fill the connection slots of any port several times.
const SLOW: usize = 150;
/// Longest wait of an honest client on a busy machine. Slow connections end after 10 s.
const SOON: Duration = Duration::from_secs(5);

/// Opens connections that send nothing, or half of a request.
fn slow(address: SocketAddr, count: usize) -> Vec<TcpStream> {
    let connect = |nth: usize| {
        let mut stream = TcpStream::connect(address).expect("it listens");
        if nth.is_multiple_of(2) {
            // The write fails if the server has already closed the connection.
            let _ = stream.write_all(b"GET / HTTP/1.1\r\nHo");
        }
        stream
    };
    (0..count).map(connect).collect()
}

/// A coordinator in its own process, with a limit on open files.
struct Limited {
    _process: Process,
    address: SocketAddr,
    metrics: SocketAddr,
    folder: tempfile::TempDir,
}

impl Limited {
    fn start(descriptors: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("coordinator.toml");
        let log = fs::File::create(folder.path().join("log")).expect("a file");
        let free = TcpListener::bind("127.0.0.1:0").expect("a port");
        let metrics = free.local_addr().expect("bound");
        drop(free);
        let text = format!("listen = \"127.0.0.1:0\"\nmetrics = \"{metrics}\"\n");
        fs::write(&file, text).expect("written");
        let mut command = Command::new("bash");
        command.args(["-c", "ulimit -n \"$0\"; exec \"$@\"", descriptors, PROGRAM]);
        let process = Process::by(command, &file, log);
        let address = process.address.parse().expect("an address");
        Self { _process: process, address, metrics, folder }
    }

    fn log_lines(&self) -> usize {
        let log = fs::read_to_string(self.folder.path().join("log"));
        log.expect("text").lines().count()
    }
}

#[tokio::test]
async fn idle_connections_take_neither_the_descriptors_nor_the_places_of_others() {
    let limited = Limited::start("256");
    let _idle = slow(limited.metrics, 2 * SLOW);
    let _more = slow(limited.address, 2 * SLOW);
    for _ in 0..5 {
        let begun = Instant::now();
        let endpoint = Endpoint::from_shared(format!("http://{}", limited.address));
        let channel = endpoint.expect("a URL").connect().await.expect("connected");
        let asked = OperatorClient::new(channel).list_hosts(ListHostsRequest {}).await;
        asked.expect("answered");
        let took = begun.elapsed();
        assert!(took < SOON, "an operator waited {took:?}");
        let begun = Instant::now();
        let answer = ask(limited.metrics, "GET /metrics", "127.0.0.1");
        assert!(answer.contains("laxity_coordinator_hosts "), "{answer}");
        let took = begun.elapsed();
        assert!(took < SOON, "a scraper waited {took:?}");
    }
    let lines = limited.log_lines();
    assert!(lines < 20, "{lines} lines in the log");
}

#[test]
fn a_lack_of_descriptors_neither_spins_nor_fills_the_log() {
    // Fewer than the page, the metrics and the gRPC port may use together.
    let limited = Limited::start("40");
    // All fit into the kernel's backlog, where connections wait that are not accepted.
    let _idle = slow(limited.metrics, SLOW / 2);
    let _more = slow(limited.address, SLOW / 2);
    std::thread::sleep(Duration::from_secs(2));
    let lines = limited.log_lines();
    assert!(lines < 20, "{lines} lines in the log");
}
