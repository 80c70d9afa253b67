//! The process of one prefill host: drives the plugin, and answers the workers of vLLM.
//!
//! The first thread owns the plugin, because its interface is polled and has no file descriptor.
//! One thread reads the lines of each worker, and one waits for the signal to end.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use laxity_nccl_host::{Context, HostError, Plugin};
use nix::sys::signal::{SigSet, Signal};

use super::CollectivesSpec;
use super::counters::{Counters, LayerAnswer, LayerAsk, socket};
use super::failure;
use super::peer::{PeerError, PeerHost};
use super::rows::{Pattern, wire_bytes};
use crate::error::LabError;
use crate::{fabric, message, sandbox};

/// Pause between two polls while rows are under way. A message of 64 KiB takes 5 ms on the ports of
/// the defaults.
const POLL_BUSY: Duration = Duration::from_micros(200);

/// Pause otherwise. Rows of the peer may come at any time, and wait for so long.
const POLL_IDLE: Duration = Duration::from_millis(1);

/// Longest time until all peers are connected. They start together.
const CONNECT_WITHIN: Duration = Duration::from_secs(120);

/// Longest time of an exchange. The lab gives up a request alone after 30 s, and says less.
const EXCHANGE_WITHIN: Duration = Duration::from_secs(20);

enum LayerCommand {
    Exchange { layer: u32, tokens: u32, answer: Sender<LayerAnswer> },
    Count(Sender<Counters>),
    End,
}

/// An exchange whose layer waits.
struct Waiting {
    exchange: u64,
    layer: u32,
    bytes: u64,
    since: Instant,
    /// Hosts whose rows are not back.
    due: Vec<usize>,
    answer: Sender<LayerAnswer>,
}

/// *collectives*: runs the process of a host until SIGTERM.
pub fn run(spec: &str) -> Result<(), LabError> {
    let spec: CollectivesSpec = serde_json::from_str(spec)
        .map_err(|error| LabError::unreadable("what collectives to run", error))?;
    // Before any thread starts, which would stay in the old namespace.
    sandbox::enter_host(&fabric::namespace(spec.host))?;
    let (commands, incoming) = channel();
    await_end(commands.clone())?;
    let path = socket(&spec.folder, spec.host);
    let listener = UnixListener::bind(&path).map_err(LabError::file("listening at", &path))?;
    std::thread::spawn(move || {
        for worker in listener.incoming().flatten() {
            let commands = commands.clone();
            std::thread::spawn(move || {
                if let Err(error) = answer(worker, &commands) {
                    eprintln!("a worker's connection: {error}");
                }
            });
        }
    });
    serve(&spec, &incoming)
}

/// Ends the first thread on SIGTERM, so that the plugin is closed and writes its report.
fn await_end(commands: Sender<LayerCommand>) -> Result<(), LabError> {
    let term = SigSet::from(Signal::SIGTERM);
    // All later threads inherit it.
    term.thread_block().map_err(LabError::system("blocking a signal"))?;
    std::thread::spawn(move || {
        let _ = term.wait();
        let _ = commands.send(LayerCommand::End);
    });
    Ok(())
}

/// Answers the lines of a connection, one after another, until its other end closes it.
fn answer(stream: UnixStream, commands: &Sender<LayerCommand>) -> Result<(), LabError> {
    let failed = LabError::system("answering");
    let mut out = stream.try_clone().map_err(failed)?;
    for line in BufReader::new(stream).lines() {
        let line = line.map_err(LabError::system("reading a line"))?;
        let asked = serde_json::from_str(&line)
            .map_err(|error| LabError::unreadable("a worker's line", error))?;
        // If the first thread is gone, so is the process in a moment.
        let said = match asked {
            LayerAsk::Exchange { layer, tokens } => {
                let (answer, answers) = channel();
                let _ = commands.send(LayerCommand::Exchange { layer, tokens, answer });
                answers.recv().map(|answer| message::line(&answer))
            }
            LayerAsk::Counters => {
                let (answer, answers) = channel();
                let _ = commands.send(LayerCommand::Count(answer));
                answers.recv().map(|counters| message::line(&counters))
            }
        };
        let Ok(said) = said else { return Ok(()) };
        out.write_all(&said).map_err(LabError::system("answering"))?;
    }
    Ok(())
}

/// Returns the error of an exchange with a host.
fn with(host: usize) -> impl FnOnce(PeerError) -> LabError {
    move |error| {
        let what = format!("the exchange with prefill host {host}");
        LabError::program(what, format!("failed: {error}"))
    }
}

fn serve(spec: &CollectivesSpec, incoming: &Receiver<LayerCommand>) -> Result<(), LabError> {
    let failed = |error: HostError| LabError::program("the NCCL plugin", error.to_string());
    let plugin = Plugin::load(&spec.plugin).map_err(failed)?;
    let context = plugin.init(1).map_err(failed)?;
    if context.devices().map_err(failed)? == 0 {
        let how = format!("has no device; it should have {}", fabric::HOST_PORT);
        return Err(LabError::program("the NCCL plugin", how));
    }
    let others = (0..spec.prefills).filter(|&host| host != spec.host);
    let listen =
        |host| PeerHost::listen(&context, &spec.folder, spec.host, host).map_err(with(host));
    let mut peers = others.map(listen).collect::<Result<Vec<_>, _>>()?;
    turns(spec, &context, &mut peers, incoming).inspect_err(|error| {
        // If this fails, the log still has the error.
        let _ = failure::note(&spec.folder, spec.host, error);
    })
}

/// Drives the plugin until the process is to end.
fn turns(
    spec: &CollectivesSpec,
    context: &Context,
    peers: &mut [PeerHost],
    incoming: &Receiver<LayerCommand>,
) -> Result<(), LabError> {
    let (pattern, started) = (Pattern::new(), Instant::now());
    let mut layers = Layers { token_bytes: spec.token_bytes, ..Layers::default() };
    loop {
        let busy = !layers.waiting.is_empty() || peers.iter().any(PeerHost::is_busy);
        let mut next = incoming.recv_timeout(if busy { POLL_BUSY } else { POLL_IDLE });
        while let Ok(command) = next {
            if matches!(command, LayerCommand::End) {
                return Ok(());
            }
            layers.take(command, peers);
            next = incoming.recv_timeout(Duration::ZERO);
        }
        if matches!(next, Err(RecvTimeoutError::Disconnected)) {
            return Ok(());
        }
        for peer in &mut *peers {
            let host = peer.host;
            let back = peer.turn(context, &pattern, &mut layers.counters).map_err(with(host))?;
            for exchange in back {
                layers.came_back(host, exchange)?;
            }
        }
        layers.check_times()?;
        if let Some(peer) = peers.iter().find(|peer| !peer.is_connected())
            && started.elapsed() > CONNECT_WITHIN
        {
            let what = format!("prefill host {} is not connected", peer.host);
            return Err(LabError::Timeout { what, within: CONNECT_WITHIN, said: String::new() });
        }
    }
}

/// The layers that wait, and the counters.
#[derive(Default)]
struct Layers {
    token_bytes: u32,
    waiting: Vec<Waiting>,
    next: u64,
    counters: Counters,
}

impl Layers {
    fn take(&mut self, command: LayerCommand, peers: &mut [PeerHost]) {
        match command {
            LayerCommand::Exchange { layer, tokens, answer } => {
                self.begin(layer, tokens, answer, peers);
            }
            LayerCommand::Count(answer) => {
                let open = self.waiting.len() as u64;
                // A controller that went away needs no answer.
                let _ = answer.send(Counters { open, ..self.counters });
            }
            LayerCommand::End => {}
        }
    }

    fn begin(
        &mut self,
        layer: u32,
        tokens: u32,
        answer: Sender<LayerAnswer>,
        peers: &mut [PeerHost],
    ) {
        let (exchange, since) = (self.next, Instant::now());
        self.next += 1;
        let bytes = u64::from(tokens) * u64::from(self.token_bytes);
        // The experts of the other hosts get equal parts.
        let each = bytes.div_ceil(peers.len().max(1) as u64);
        let mut due = Vec::new();
        for peer in peers.iter_mut().filter(|_| each > 0) {
            peer.dispatch(exchange, each);
            self.counters.due_bytes += 2 * wire_bytes(each);
            due.push(peer.host);
        }
        let waiting = Waiting { exchange, layer, bytes, since, due, answer };
        if waiting.due.is_empty() {
            self.end(&waiting);
        } else {
            self.waiting.push(waiting);
        }
    }

    fn came_back(&mut self, host: usize, exchange: u64) -> Result<(), LabError> {
        let unknown = || {
            let what = format!("prefill host {host}");
            LabError::program(what, format!("sent back rows of exchange {exchange}, unasked"))
        };
        let place = self.waiting.iter().position(|waiting| waiting.exchange == exchange);
        let place = place.ok_or_else(unknown)?;
        let due = &mut self.waiting[place].due;
        due.remove(due.iter().position(|&of| of == host).ok_or_else(unknown)?);
        if due.is_empty() {
            let waiting = self.waiting.swap_remove(place);
            self.end(&waiting);
        }
        Ok(())
    }

    fn end(&mut self, waiting: &Waiting) {
        let waited_ns = waiting.since.elapsed().as_nanos() as u64;
        self.counters.exchanges += 1;
        self.counters.waited_ns += waited_ns;
        // A worker that died meanwhile needs no answer.
        let _ = waiting.answer.send(LayerAnswer { waited_ns });
    }

    fn check_times(&self) -> Result<(), LabError> {
        let late = self.waiting.iter().find(|of| of.since.elapsed() > EXCHANGE_WITHIN);
        let Some(Waiting { layer, bytes, due, .. }) = late else { return Ok(()) };
        let what = format!(
            "an exchange of {bytes} bytes at layer {layer} still waits for rows of prefill hosts \
             {due:?}"
        );
        let said = "; lower vllm.collective_token_bytes or the load, if the port is overloaded";
        Err(LabError::Timeout { what, within: EXCHANGE_WITHIN, said: said.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_goes_on_when_all_hosts_have_sent_its_rows_back() {
        let mut layers = Layers::default();
        let (answer, answers) = channel();
        let waiting = Waiting {
            exchange: 4,
            layer: 1,
            bytes: 10,
            since: Instant::now(),
            due: vec![1, 2],
            answer,
        };
        layers.waiting.push(waiting);
        layers.check_times().unwrap();
        layers.came_back(2, 4).unwrap();
        assert!(answers.try_recv().is_err());
        let twice = layers.came_back(2, 4).unwrap_err().to_string();
        assert!(twice.contains("unasked"), "{twice}");
        layers.came_back(1, 4).unwrap();
        answers.try_recv().unwrap();
        assert_eq!((layers.counters.exchanges, layers.waiting.len()), (1, 0));
    }

    #[test]
    fn an_exchange_that_does_not_end_is_named() {
        let Some(since) = Instant::now().checked_sub(2 * EXCHANGE_WITHIN) else { return };
        let (answer, _answers) = channel();
        let due = vec![1];
        let waiting = Waiting { exchange: 0, layer: 3, bytes: 99, since, due, answer };
        let layers = Layers { waiting: vec![waiting], ..Layers::default() };
        let said = layers.check_times().unwrap_err().to_string();
        for part in ["layer 3", "99 bytes", "[1]", "collective_token_bytes"] {
            assert!(said.contains(part), "{said}");
        }
    }
}
