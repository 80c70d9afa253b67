//! `laxity example-job`: a job for trying out a host, which needs no RDMA, no GPU and no engine.
//!
//! The job sends to itself over loopback. It submits each transfer to the daemon as any client
//! does, and sends only what is permitted. So `laxity top` shows it, and its end tells whether
//! every byte was scheduled and arrived, also over an upgrade of the daemon.

use std::collections::VecDeque;
use std::io::{self, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use laxity_cli::output::{OutputError, say};
use laxity_client::{Client, Direction, Flow, Lane, Options, Stage, Stats, Ticket};
use laxity_quantity::{Bytes, Nanos};
use laxity_shm::sleep::now_ns;
use thiserror::Error;

use crate::signals::Endings;

pub(crate) const HELP: &str = "\
Sends 1 Gbit/s over loopback, in transfers of the stages kv_reuse, collective and p2d. The daemon \
counts these bytes on its first NIC, although they never reach it. If the daemon's mode is \
`enforce`, other jobs' transfers on that NIC may wait for the example's.

Examples:
  # in one terminal, for a minute or until Ctrl-C
  laxity run --name example -- laxity example-job
  # in another one
  laxity top

Exit status: 0 if the daemon counted every byte; 1 if bytes went out unscheduled, or were lost.";

/// What the job sends. It is far less than loopback can carry, so the job needs little of a CPU.
const BYTES_PER_S: u64 = 125_000_000;
/// Number of transfers that are submitted at a time. Together they exceed a NIC's window, so that
/// transfers wait under `enforce`.
const FLOWS: usize = 12;
/// Bytes that are sent and completed at a time, as by a program with a send buffer of this size.
const PIECE: usize = 64 << 10;
/// Objective on the time to first token of each request, in nanoseconds.
const OBJECTIVE_NS: u64 = 1_000_000_000;

#[derive(Args)]
pub(crate) struct ExampleJobArgs {
    /// Seconds until the job ends
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u64,
}

/// The reason why the job could not run to its end.
#[derive(Debug, Error)]
pub(crate) enum ExampleJobError {
    #[error("cannot send over loopback: {0}")]
    Loopback(#[from] io::Error),
    #[error("cannot receive signals: {0}")]
    Signals(io::Error),
    #[error(transparent)]
    Output(#[from] OutputError),
}

pub(crate) fn example_job(args: &ExampleJobArgs) -> Result<ExitCode, ExampleJobError> {
    let endings = Endings::receive().map_err(ExampleJobError::Signals)?;
    let client = Client::attach(Options::from_env());
    let how = match client.refusal() {
        _ if client.is_attached() => "The daemon has admitted it; see `laxity top`".to_owned(),
        Some(refusal) => format!("The daemon refused it: {refusal}"),
        None => "There is no daemon".to_owned(),
    };
    let pid = std::process::id();
    say(format!("Sending over loopback for {} s as process {pid}. {how}.", args.seconds))?;
    let start = Instant::now();
    let limit = Duration::from_secs(args.seconds);
    let mut sender = LoopbackSender::new(client.lane())?;
    while start.elapsed() < limit && endings.wait(Duration::ZERO).is_none() {
        sender.submit();
        sender.send_permitted()?;
    }
    while !sender.waiting.is_empty() {
        sender.send_permitted()?;
    }
    let (sent, received) = sender.end()?;
    let (is_good, said) = outcome(sent, received, start.elapsed(), &client.stats());
    say(said)?;
    Ok(if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The sending end, with the transfers that are not completely sent.
struct LoopbackSender {
    lane: Lane,
    waiting: VecDeque<Ticket>,
    submitted: u64,
    stream: TcpStream,
    reader: thread::JoinHandle<io::Result<u64>>,
    start: Instant,
    sent: u64,
}

impl LoopbackSender {
    fn new(lane: Lane) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let stream = TcpStream::connect(listener.local_addr()?)?;
        let (mut receiving, _) = listener.accept()?;
        let reader = thread::spawn(move || io::copy(&mut receiving, &mut io::sink()));
        let start = Instant::now();
        Ok(Self { lane, waiting: VecDeque::new(), submitted: 0, stream, reader, start, sent: 0 })
    }

    /// Submits transfers until there are [`FLOWS`].
    fn submit(&mut self) {
        while self.waiting.len() < FLOWS {
            let flow = flow(self.submitted);
            self.submitted += 1;
            self.waiting.push_back(self.lane.submit(&flow));
        }
    }

    /// Sends what is permitted of each transfer, or waits a little for a permit.
    fn send_permitted(&mut self) -> io::Result<()> {
        let before = self.sent;
        for _ in 0..self.waiting.len() {
            let Some(mut ticket) = self.waiting.pop_front() else { break };
            if let Some(permit) = self.lane.poll(&mut ticket) {
                self.send(&ticket, permit.bytes)?;
            }
            if !ticket.is_done() {
                self.waiting.push_back(ticket);
            }
        }
        if self.sent == before {
            self.lane.wait_any(Duration::from_millis(20));
        }
        Ok(())
    }

    fn send(&mut self, ticket: &Ticket, mut bytes: u64) -> io::Result<()> {
        while bytes > 0 {
            let piece = bytes.min(PIECE as u64);
            self.stream.write_all(&[0; PIECE][..piece as usize])?;
            self.lane.complete(ticket, piece);
            bytes -= piece;
            self.sent += piece;
            let due = Duration::from_nanos(self.sent * 1_000 / (BYTES_PER_S / 1_000_000));
            thread::sleep(due.saturating_sub(self.start.elapsed()));
        }
        Ok(())
    }

    /// Returns the bytes that were sent, and those that arrived.
    fn end(self) -> io::Result<(u64, u64)> {
        self.stream.shutdown(Shutdown::Write)?;
        let received = self.reader.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))?;
        Ok((self.sent, received))
    }
}

/// Returns the `n`th transfer. A request fetches its prefix, exchanges activations, and passes its
/// KV cache on.
fn flow(n: u64) -> Flow {
    let request = n / 3 + 1;
    let flow = Flow { request, ..Flow::default() };
    match n % 3 {
        0 => Flow { stage: Stage::KvReuse, direction: Direction::Ingress, bytes: 2 << 20, ..flow },
        1 => Flow { stage: Stage::Collective, bytes: 256 << 10, ..flow },
        _ => {
            let deadline_ns = now_ns() + OBJECTIVE_NS;
            Flow { stage: Stage::P2d, bytes: 4 << 20, deadline_ns, ..flow }
        }
    }
}

/// Returns whether all bytes were scheduled and arrived, and the text about it.
fn outcome(sent: u64, received: u64, took: Duration, stats: &Stats) -> (bool, String) {
    let is_good = received == sent && stats.bypassed_bytes == 0;
    let [all, permitted, observed, unscheduled] =
        [sent, stats.scheduled_bytes, stats.observed_bytes, stats.bypassed_bytes]
            .map(|bytes| Bytes(bytes).about());
    let mut lines = vec![format!(
        "Sent {all} in {:.1} s: {permitted} with permits, {observed} only observed, {unscheduled} \
         unscheduled.",
        took.as_secs_f64(),
    )];
    if stats.reattaches > 0 {
        lines.push(format!(
            "Daemons that took over: {}, after {} without a daemon.",
            stats.reattaches,
            Nanos(stats.unscheduled_ns).about(),
        ));
    }
    if received != sent {
        lines.push(format!("Lost: {received} of {sent} bytes arrived."));
    }
    if stats.bypassed_bytes > 0 {
        lines.push("`laxity doctor` says why bytes go out unscheduled.".to_owned());
    }
    (is_good, lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn only_a_job_whose_bytes_were_all_scheduled_and_arrived_ends_well() {
        let good = Stats { scheduled_bytes: 7, observed_bytes: 3, ..Stats::default() };
        assert!(outcome(10, 10, SECOND, &good).0);
        assert!(outcome(10, 9, SECOND, &good).1.contains("9 of 10 bytes arrived"));
        assert!(!outcome(10, 9, SECOND, &good).0);
        let bypassed = Stats { bypassed_bytes: 1, ..good };
        let (is_good, said) = outcome(11, 11, SECOND, &bypassed);
        assert!(!is_good && said.contains("laxity doctor"), "{said}");
    }

    #[test]
    fn each_request_has_a_transfer_of_each_stage() {
        let stages: Vec<Stage> = (0..3).map(|n| flow(n).stage).collect();
        assert_eq!(stages, [Stage::KvReuse, Stage::Collective, Stage::P2d]);
        assert_eq!((flow(2).request, flow(3).request), (1, 2));
    }
}
