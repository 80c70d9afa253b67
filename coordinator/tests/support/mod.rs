//! A real coordinator with daemons that report what a test wants, for tests of what operators see.

pub(crate) mod daemon;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use laxity_coordinator::config::Config;
use laxity_wire::v1::event::Event as Kind;
use laxity_wire::v1::operator_client::OperatorClient;
use laxity_wire::v1::{BatchArrived, Heartbeat, PortBytes, RequestLoad, from_daemon};
use tokio::runtime::{self, Runtime};
use tokio::sync::mpsc;
use tonic::transport::{Channel, Endpoint};

pub(crate) use self::daemon::PATIENCE;
use self::daemon::{Daemon, Served, hello};

#[derive(Clone, Debug)]
pub(crate) struct Script {
    /// The name of its host, which may contain any characters.
    pub(crate) host: String,
    /// The release of the daemon.
    pub(crate) software: String,
    pub(crate) nic: String,
    pub(crate) events: Vec<Kind>,
}

impl Script {
    /// Creates a daemon with a NIC of 50 GB/s.
    pub(crate) fn new(host: &str, events: Vec<Kind>) -> Self {
        Self { host: host.into(), software: "laxityd 0.1.0".into(), nic: "mlx5_0".into(), events }
    }
}

/// A coordinator with its daemons, on a thread of their own.
pub(crate) struct Fixture {
    pub(crate) served: Served,
    say: HashMap<String, mpsc::UnboundedSender<Vec<Kind>>>,
    runtime: Runtime,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.served.handle.stop();
        let _ = self.runtime.block_on(&mut self.served.running);
    }
}

/// Returns a configuration with a web page.
pub(crate) fn config() -> Config {
    Config::parse("[web]\nlisten = \"127.0.0.1:0\"\n", "test").expect("valid")
}

/// Sends a request, such as `GET /path`, with this `Host` header. Returns the answer.
pub(crate) fn ask(address: SocketAddr, request: &str, host: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("set");
    write!(stream, "{request} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
        .expect("written");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

impl Fixture {
    /// Starts the coordinator and the daemons, without waiting for an order.
    pub(crate) fn start(config: Config, daemons: Vec<Script>) -> Self {
        let runtime = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let served = runtime.block_on(Served::start(config));
        let mut say = HashMap::new();
        for daemon in daemons {
            let (sender, receiver) = mpsc::unbounded_channel();
            say.insert(daemon.host.clone(), sender);
            runtime.spawn(play(served.address, daemon, receiver));
        }
        Self { served, say, runtime }
    }

    /// Lets an operator act.
    pub(crate) fn operate(&self, act: impl AsyncFnOnce(&mut OperatorClient<Channel>)) {
        self.runtime.block_on(async { act(&mut self.served.operator().await).await });
    }

    pub(crate) fn say(&self, host: &str, events: Vec<Kind>) {
        self.say[host].send(events).expect("it listens");
    }

    pub(crate) fn leave(&mut self, host: &str) {
        self.say.remove(host).expect("it is there");
    }

    /// Returns the head and the body of the web page's answer.
    pub(crate) fn get(&self, path: &str) -> (String, String) {
        let answer = ask(self.served.web.expect("a page"), &format!("GET {path}"), "127.0.0.1");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        (head.to_owned(), body.to_owned())
    }

    /// Waits until the page's state is as `wanted`, and returns it.
    pub(crate) fn state(&self, wanted: impl Fn(&serde_json::Value) -> bool) -> serde_json::Value {
        let begun = Instant::now();
        loop {
            let (head, body) = self.get("/api/state");
            assert!(head.starts_with("HTTP/1.1 200"), "{head}");
            let state: serde_json::Value = serde_json::from_str(&body).expect("JSON");
            if wanted(&state) {
                return state;
            }
            assert!(begun.elapsed() < PATIENCE, "still {state:#}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Attends, sends the snapshot and then the events of the test, with heartbeats, until the
/// coordinator ends.
async fn play(address: SocketAddr, script: Script, mut told: mpsc::UnboundedReceiver<Vec<Kind>>) {
    let endpoint = Endpoint::new(format!("http://{address}")).expect("a URL");
    let mut greeting = hello(&script.host);
    greeting.software = script.software;
    for port in &mut greeting.ports {
        port.name.clone_from(&script.nic);
    }
    let daemon = Daemon::attend(endpoint.connect_lazy(), greeting).await;
    let mut daemon = daemon.expect("it is let in");
    daemon.snapshot(script.events).await;
    loop {
        tokio::select! {
            events = told.recv() => match events {
                Some(events) => daemon.report(events).await,
                None => return,
            },
            frame = daemon.next() => if frame.is_err() { return },
            () = tokio::time::sleep(Duration::from_millis(300)) => {
                daemon.say(from_daemon::Message::Heartbeat(Heartbeat {})).await;
            }
        }
    }
}

/// Returns the arrival of a batch with requests of (id, ms until due, MiB through the egress).
pub(crate) fn batch(id: u64, requests: &[(u64, i64, u64)]) -> Kind {
    let load = |&(request, left_ms, mib): &(u64, i64, u64)| RequestLoad {
        request,
        remaining_ns: Some(left_ms * 1_000_000),
        loads: vec![PortBytes { port: 0, bytes: mib << 20 }],
    };
    Kind::BatchArrived(BatchArrived {
        batch: id,
        compute_ns: 40_000_000,
        requests: requests.iter().map(load).collect(),
        layers: 80,
        ..BatchArrived::default()
    })
}
