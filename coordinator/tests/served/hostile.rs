//! Tests of honest clients beside connections that send nothing, or send slowly.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use laxity_wire::v1::ListHostsRequest;
use laxity_wire::v1::operator_client::OperatorClient;
use tonic::transport::Endpoint;

use crate::support::{Fixture, PATIENCE, config};

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

/// Returns the HTTP answer and the time until it came.
fn get(address: SocketAddr, path: &str) -> (String, Duration) {
    let begun = Instant::now();
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("set");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        .expect("written");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    (answer, begun.elapsed())
}

#[test]
fn the_page_answers_at_once_beside_slow_connections() {
    let fixture = Fixture::start(config(), Vec::new());
    let page = fixture.web.expect("a page");
    let _slow = slow(page, SLOW);
    for _ in 0..5 {
        let (answer, took) = get(page, "/api/state");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(took < SOON, "{took:?}");
    }
}

/// A coordinator in its own process, with a limit on open files.
struct Process {
    child: Child,
    address: SocketAddr,
    metrics: SocketAddr,
    folder: tempfile::TempDir,
}

impl Process {
    fn start(descriptors: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("coordinator.toml");
        let log = fs::File::create(folder.path().join("log")).expect("a file");
        let free = TcpListener::bind("127.0.0.1:0").expect("a port");
        let metrics = free.local_addr().expect("bound");
        drop(free);
        fs::write(&file, format!("metrics = \"{metrics}\"\n")).expect("written");
        let mut child = Command::new("bash")
            .args(["-c", "ulimit -n \"$0\"; exec \"$@\"", descriptors])
            .arg(env!("CARGO_BIN_EXE_laxity-coordinator"))
            .args(["--listen", "127.0.0.1:0", "--config"])
            .arg(file)
            .env_remove("LAXITY_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("bash runs");
        let mut line = String::new();
        let out = child.stdout.take().expect("a pipe");
        BufReader::new(out).read_line(&mut line).expect("text");
        let address = line.trim().strip_prefix("listening on ");
        Self {
            child,
            address: address.expect("where").parse().expect("an address"),
            metrics,
            folder,
        }
    }

    /// Lists the hosts as an operator. Returns the time until the answer came.
    fn asked(&self) -> Duration {
        let begun = Instant::now();
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let endpoint = Endpoint::from_shared(format!("http://{}", self.address));
            let channel = endpoint.expect("a URL").connect().await.expect("connected");
            let asked = OperatorClient::new(channel).list_hosts(ListHostsRequest {}).await;
            asked.expect("answered");
        });
        begun.elapsed()
    }

    fn log_lines(&self) -> usize {
        let log = fs::read_to_string(self.folder.path().join("log"));
        log.expect("text").lines().count()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn idle_connections_take_neither_the_descriptors_nor_the_places_of_others() {
    let process = Process::start("256");
    let _idle = slow(process.metrics, 2 * SLOW);
    let _more = slow(process.address, 2 * SLOW);
    for _ in 0..5 {
        let took = process.asked();
        assert!(took < SOON, "an operator waited {took:?}");
        let (answer, took) = get(process.metrics, "/metrics");
        assert!(answer.contains("laxity_coordinator_hosts "), "{answer}");
        assert!(took < SOON, "a scraper waited {took:?}");
    }
    let lines = process.log_lines();
    assert!(lines < 20, "{lines} lines in the log");
}

#[test]
fn a_lack_of_descriptors_neither_spins_nor_fills_the_log() {
    // Fewer than the page, the metrics and the gRPC port may use together.
    let process = Process::start("40");
    // All fit into the kernel's backlog, where connections wait that are not accepted.
    let _idle = slow(process.metrics, SLOW / 2);
    let _more = slow(process.address, SLOW / 2);
    std::thread::sleep(Duration::from_secs(2));
    let lines = process.log_lines();
    assert!(lines < 20, "{lines} lines in the log");
}
