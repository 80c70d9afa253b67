//! A real coordinator on its own thread, with daemons that report what a test wants, for tests of
//! what operators see.

pub(crate) mod daemon;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use laxity_coordinator::config::Config;
use laxity_coordinator::server::{Coordinator, CoordinatorHandle};
use laxity_wire::v1::event::Event as Kind;
use laxity_wire::v1::{BatchArrived, Heartbeat, PortBytes, RequestLoad, from_daemon};
use tokio::sync::mpsc;
use tonic::transport::Endpoint;

pub(crate) use self::daemon::PATIENCE;
use self::daemon::{Daemon, hello};

#[derive(Clone, Debug)]
pub(crate) struct Script {
    /// The name of its host, which may contain any characters.
    pub(crate) host: String,
    /// The release of the daemon.
    pub(crate) software: String,
    /// The name of its only NIC.
    pub(crate) nic: String,
    pub(crate) events: Vec<Kind>,
}

impl Script {
    /// Creates a daemon with a NIC of 50 GB/s.
    pub(crate) fn new(host: &str, events: Vec<Kind>) -> Self {
        Self { host: host.into(), software: "laxityd 0.1.0".into(), nic: "mlx5_0".into(), events }
    }
}

/// A coordinator with its daemons.
pub(crate) struct Fixture {
    pub(crate) address: SocketAddr,
    /// The address of the web page.
    pub(crate) web: Option<SocketAddr>,
    say: HashMap<String, mpsc::UnboundedSender<Vec<Kind>>>,
    handle: CoordinatorHandle,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.handle.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns a configuration with free ports and a web page.
pub(crate) fn config() -> Config {
    let text = "listen = \"127.0.0.1:0\"\n[web]\nlisten = \"127.0.0.1:0\"\n";
    Config::parse(text, "test").expect("valid")
}

impl Fixture {
    /// Starts the coordinator and the daemons, without waiting for an order.
    pub(crate) fn start(config: Config, daemons: Vec<Script>) -> Self {
        let (tell, told) = std::sync::mpsc::channel();
        let mut say = HashMap::new();
        let mut ears = Vec::new();
        for daemon in daemons {
            let (sender, receiver) = mpsc::unbounded_channel();
            say.insert(daemon.host.clone(), sender);
            ears.push((daemon, receiver));
        }
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async move {
                let coordinator = Coordinator::bind(config, 7).await.expect("it binds");
                let address = coordinator.address().expect("an address");
                let known = (address, coordinator.web_address(), coordinator.handle());
                tell.send(known).expect("somebody waits");
                for (daemon, receiver) in ears {
                    tokio::spawn(play(address, daemon, receiver));
                }
                coordinator.run().await.expect("it serves");
            });
        });
        let (address, web, handle) = told.recv().expect("it starts");
        Self { address, web, say, handle, thread: Some(thread) }
    }

    /// Makes the daemon of a host report events.
    pub(crate) fn say(&self, host: &str, events: Vec<Kind>) {
        self.say[host].send(events).expect("it listens");
    }

    /// Ends the stream of a daemon.
    pub(crate) fn leave(&mut self, host: &str) {
        self.say.remove(host).expect("it is there");
    }

    /// Returns the head and the body of the web page's answer.
    pub(crate) fn get(&self, path: &str) -> (String, String) {
        self.ask("GET", path, "127.0.0.1")
    }

    /// Requests `path` with this method and this `Host` header. Returns the head and the body of
    /// the answer.
    pub(crate) fn ask(&self, method: &str, path: &str, name: &str) -> (String, String) {
        let mut stream = TcpStream::connect(self.web.expect("a page")).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("set");
        let request =
            format!("{method} {path} HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).expect("written");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("an answer");
        let answer = String::from_utf8(answer).expect("text");
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
