//! A client process for the fault tests. It submits many flows at once and writes permitted bytes
//! in order, as counted words that the receiving test can check.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use laxity_client::{Client, Direction, Flow, Hint, Mode, Options, Stage};
use serde::{Deserialize, Serialize};

use crate::process::{Daemon, PATIENCE, child, child_under, role, this_binary, wait_bounded};

pub(crate) const FLOWS: u64 = 40;
pub(crate) const FLOW_BYTES: u64 = 96 * 1024;
pub(crate) const TOTAL_BYTES: u64 = FLOWS * FLOW_BYTES;

#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Summary {
    pub(crate) scheduled_bytes: u64,
    pub(crate) bypassed_bytes: u64,
    pub(crate) unscheduled_ns: u64,
    pub(crate) reattaches: u64,
    pub(crate) observed_bytes: u64,
}

const MARK: &str = "SENDER ";

/// The part of a child process. It is not a test by itself, and does nothing without a role.
#[test]
fn sender_role() {
    match role().as_deref() {
        Some("hold") => send(Completion::Withheld),
        Some("complete") => send(Completion::AtOnce),
        Some("linger") => linger(),
        Some("glide") => glide(),
        Some("mode") => println!("MODE {:?}.", Options::from_env().mode),
        _ => {}
    }
}

#[test]
fn whoever_attaches_takes_the_lower_of_the_profiles_mode_and_its_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("mine.toml");
    std::fs::write(&path, "mode = \"observe\"\n").expect("a profile");
    let profile = path.to_str().expect("UTF-8");
    for (own, holds) in [("enforce", Mode::Observe), ("", Mode::Observe), ("off", Mode::Off)] {
        let variables = [("LAXITY_PROFILE", profile), ("LAXITY_MODE", own)];
        let (status, output) = wait_bounded(child("sender::sender_role", "mode", &variables));
        assert!(status.success(), "{output}");
        assert!(output.contains(&format!("MODE {holds:?}.")), "{output}");
    }
}

/// Starts a sender. With the role "hold", it reports no completion, so a bounded window makes flows
/// wait.
pub(crate) fn start(role: &str, socket: &Path, sink: &Path) -> Child {
    start_under(this_binary(), role, socket, sink)
}

/// Does the same as [`start`] by a command that runs this binary with the arguments that follow.
pub(crate) fn start_under(command: Command, role: &str, socket: &Path, sink: &Path) -> Child {
    let socket = socket.display().to_string();
    let sink = sink.display().to_string();
    child_under(
        command,
        "sender::sender_role",
        role,
        &[("LAXITY_SOCKET", &socket), ("SINK", &sink)],
    )
}

/// Waits until the child has ended successfully, and returns its summary.
pub(crate) fn finish(child: Child) -> Summary {
    let (status, output) = wait_bounded(child);
    assert!(status.success(), "the sender failed: {output}");
    // The test harness prints on the same line before the summary.
    let at = output.find(MARK).unwrap_or_else(|| panic!("no summary in: {output}"));
    let line = output[at + MARK.len()..].lines().next().unwrap_or_default();
    serde_json::from_str(line).expect("a summary")
}

/// Runs a sender that completes each flow, and checks that every byte was scheduled and arrived at
/// the socket `path`.
pub(crate) fn complete(daemon: &Daemon, path: &Path) {
    let sink = Sink::listen(path);
    let summary = finish(start("complete", &daemon.socket(), path));
    assert_eq!(summary.scheduled_bytes, TOTAL_BYTES, "{summary:?}");
    assert_eq!(sink.bytes(), TOTAL_BYTES);
}

/// Receives all that a sender writes, and checks that each word comes once and in order.
pub(crate) struct Sink {
    reader: std::thread::JoinHandle<u64>,
}

impl Sink {
    pub(crate) fn listen(path: &Path) -> Self {
        let listener = UnixListener::bind(path).expect("sink");
        Self {
            reader: std::thread::spawn(move || check(&mut listener.accept().expect("sender").0)),
        }
    }

    pub(crate) fn bytes(self) -> u64 {
        self.reader.join().expect("every word once, in order")
    }
}

fn check(stream: &mut UnixStream) -> u64 {
    stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
    let mut expected = 0_u64;
    let mut word = [0; 8];
    loop {
        match stream.read_exact(&mut word) {
            Ok(()) => {
                assert_eq!(u64::from_le_bytes(word), expected, "word out of order");
                expected += 1;
            }
            Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => return expected * 8,
            Err(e) => panic!("the sender went quiet: {e}"),
        }
    }
}

#[derive(Clone, Copy)]
enum Completion {
    Withheld,
    AtOnce,
}

fn flow(number: u64) -> Flow {
    let stage = match number % 3 {
        0 => Stage::P2d,
        1 => Stage::KvReuse,
        _ => Stage::Collective,
    };
    Flow {
        stage,
        direction: Direction::Egress,
        layer: (number % 8) as u16,
        bytes: FLOW_BYTES,
        batch: 1 + number / 8,
        request: 1 + number / 4,
        ..Flow::default()
    }
}

/// Returns the path of the receiving socket, and a connection to it.
fn sink() -> (String, UnixStream) {
    let path = std::env::var("SINK").expect("SINK");
    let stream = UnixStream::connect(&path).expect("sink");
    (path, stream)
}

fn attach() -> Client {
    let mut options = Options::from_env();
    options.attach_timeout = Duration::from_secs(20);
    options.reattach_every = Duration::from_millis(50);
    Client::attach(options)
}

fn send(completion: Completion) {
    let (_, mut sink) = sink();
    let client = attach();
    assert!(client.is_scheduled(), "no daemon at the start");
    let mut lane = client.lane();
    for batch in 1..=FLOWS / 8 + 1 {
        lane.hint(Hint::BatchBegin { batch, layers: 8, layer_time_ns: 1_000_000 });
    }
    lane.hint(Hint::RequestJoin { batch: 1, request: 1, deadline_ns: 0, bytes: 0 });
    let mut tickets: Vec<_> = (0..FLOWS).map(|n| lane.submit(&flow(n))).collect();
    let mut word = 0_u64;
    let mut write = |bytes: u64| {
        assert!(bytes.is_multiple_of(8), "chunks are whole words in this test");
        let chunk: Vec<u8> = (word..word + bytes / 8).flat_map(u64::to_le_bytes).collect();
        sink.write_all(&chunk).expect("sink takes it");
        word += bytes / 8;
    };
    match completion {
        // Flows go in the order of submission, as in a queue pair.
        Completion::Withheld => {
            for ticket in &mut tickets {
                while !ticket.is_done() {
                    write(lane.wait(ticket).bytes);
                }
            }
        }
        // Flows go in the order of permits. A sender that completes flows must not wait for another
        // one first, or the window fills with flows that are not sent.
        Completion::AtOnce => {
            while !tickets.is_empty() {
                let mut permitted = false;
                for ticket in &mut tickets {
                    if let Some(permit) = lane.poll(ticket) {
                        write(permit.bytes);
                        lane.complete(ticket, permit.bytes);
                        permitted = true;
                    }
                }
                tickets.retain(|ticket| !ticket.is_done());
                if !permitted {
                    lane.wait_any(Duration::from_millis(20));
                }
            }
        }
    }
    lane.hint(Hint::RequestEnd { request: 1 });
    drop(sink);
    report(&client);
}

fn report(client: &Client) {
    let stats = serde_json::Map::from_iter(
        client.stats().reported().map(|(name, count)| (name.to_owned(), count.into())),
    );
    println!("\n{MARK}{}", serde_json::Value::from(stats));
}

/// Sends and completes collectives of one word, and never waits for a permit: late permits are
/// polled for. Ends when the file `SINK`.stop appears.
fn glide() {
    let (path, mut sink) = sink();
    let stop = Path::new(&path).with_extension("stop");
    let client = attach();
    let mut lane = client.lane();
    let start = Instant::now();
    let mut word = 0_u64;
    let mut late = Vec::new();
    while !stop.exists() || !late.is_empty() {
        assert!(start.elapsed() < PATIENCE, "nobody stops it");
        if !stop.exists() {
            late.push(lane.submit(&Flow { bytes: 8, stage: Stage::Collective, ..flow(0) }));
        }
        for ticket in &mut late {
            if let Some(permit) = lane.poll(ticket) {
                assert_eq!((permit.bytes, permit.last), (8, true), "once, and whole");
                sink.write_all(&word.to_le_bytes()).expect("sink takes it");
                word += 1;
                lane.complete(ticket, 8);
            }
        }
        late.retain(|ticket| !ticket.is_done());
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(sink);
    report(&client);
}

/// Sends and completes small flows until the parent closes the sink.
fn linger() {
    let (_, mut sink) = sink();
    let client = attach();
    let mut lane = client.lane();
    let start = Instant::now();
    for number in 0.. {
        let mut ticket = lane.submit(&Flow { bytes: 4096, ..flow(number) });
        loop {
            let permit = lane.wait(&mut ticket);
            lane.complete(&ticket, permit.bytes);
            if permit.last {
                break;
            }
        }
        // One byte tells the parent whether the flow was scheduled.
        let how = [u8::from(client.is_scheduled())];
        if sink.write_all(&how).is_err() || start.elapsed() > PATIENCE {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
