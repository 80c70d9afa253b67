//! Counts system calls while client and daemon are awake. strace(1) traces the client's thread and
//! the daemon's scheduler thread while they exchange permits. A thread without calls never stops,
//! so the trace doesn't disturb the result.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use laxity_client::Stage;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::bench::{Bench, Measured};
use crate::error::BenchError;
use crate::figure::{Gate, Limit, Quantile, Row, Unit};
use crate::hotpath::flow;
use crate::machine::Cores;
use crate::peer::{Peer, SharedPage, medium};
use crate::sample::Summary;
use crate::service::{self, Laxityd};

/// The peer that submits flows until it is stopped.
pub(crate) const PERMITS_ROLE: &str = "permits";
const STOP: usize = 0;
const PERMITS: usize = 2;

/// Number of calls by name of the system call.
type Calls = BTreeMap<String, u64>;

pub(crate) fn rows(bench: &mut Bench) {
    let title = "system calls per million permits, both awake";
    let row = Row::counting("system-calls", title, Unit::PerMillion)
        .gates([Gate::at_most(Quantile::P50, Limit::Value(0.0))])
        .note("if one side loses its core, the other falls asleep, and those calls count.");
    bench.measure(row, |bench| {
        let far = bench.far_core()?;
        let stretch = 2 * bench.effort.stretch();
        let (mut all, mut permits, mut rates) = (<[Calls; 2]>::default(), 0, Vec::new());
        for _ in 0..bench.effort.repetitions.min(5) {
            let (counted, passed) = count(&bench.cores, far, stretch)?;
            let calls: u64 = counted.iter().flat_map(Calls::values).sum();
            rates.push(1e6 * calls as f64 / passed as f64);
            permits += passed;
            for (sum, calls) in all.iter_mut().zip(counted) {
                for (name, count) in calls {
                    *sum.entry(name).or_default() += count;
                }
            }
        }
        let list = |calls: &Calls| match calls.is_empty() {
            true => "none".to_owned(),
            false => {
                let each = calls.iter().map(|(name, count)| format!("{name} ×{count}"));
                each.collect::<Vec<_>>().join(", ")
            }
        };
        let (client, daemon) = (list(&all[0]), list(&all[1]));
        Ok(Measured {
            summary: Summary::of_numbers(rates),
            remark: Some(format!("{permits} permits in all; client: {client}; daemon: {daemon}.")),
        })
    });
}

/// Runs one repetition. Returns the calls of client and daemon, and the number of permits
/// meanwhile.
fn count(cores: &Cores, far: usize, stretch: Duration) -> Result<([Calls; 2], u64), BenchError> {
    let daemon = Laxityd::open(cores, far)?;
    let (page, memory) = SharedPage::create()?;
    let socket = daemon.socket();
    let arguments = ["--name", &socket.to_string_lossy()];
    let peer = Peer::spawn(PERMITS_ROLE, cores.near, Some(memory), &arguments)?;
    page.await_peer()?;
    std::thread::sleep(Duration::from_millis(20));
    let folder = tempfile::TempDir::with_prefix("laxity-strace-");
    let folder = folder.map_err(BenchError::system("make a folder"))?;
    let client = Strace::attach(peer.pid(), &folder.path().join("client"))?;
    let scheduler = Strace::attach(daemon.scheduler_thread()?, &folder.path().join("daemon"))?;
    let permits = page.word(PERMITS);
    let before = permits.load(Ordering::Relaxed);
    std::thread::sleep(stretch);
    let passed = permits.load(Ordering::Relaxed) - before;
    let calls = [client.finish()?, scheduler.finish()?];
    page.word(STOP).store(1, Ordering::Release);
    if passed == 0 {
        let why = "no permit passed while the two were traced";
        return Err(BenchError::Disturbed(why.to_owned()));
    }
    Ok((calls, passed))
}

struct Strace {
    child: Child,
    counts: PathBuf,
}

impl Strace {
    fn attach(thread: Pid, counts: &Path) -> Result<Self, BenchError> {
        let mut child = Command::new("strace")
            .args(["--summary-only", "--summary-columns=calls,name", "-p"])
            .arg(thread.to_string())
            .arg("-o")
            .arg(counts)
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| BenchError::Skip(format!("strace can't be started: {error}")))?;
        let mut said = String::new();
        if let Some(stderr) = child.stderr.take() {
            BufReader::new(stderr)
                .read_line(&mut said)
                .map_err(BenchError::system("listen to strace"))?;
        }
        if !said.contains("attached") {
            child.wait().map_err(BenchError::system("wait for strace"))?;
            return Err(BenchError::Skip(format!("strace can't attach: {}", said.trim())));
        }
        let counts = counts.to_owned();
        Ok(Self { child, counts })
    }

    /// Stops the trace. strace then writes a table with a count and a name in each line.
    fn finish(mut self) -> Result<Calls, BenchError> {
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGINT)
            .map_err(BenchError::system("stop strace"))?;
        self.child.wait().map_err(BenchError::system("wait for strace"))?;
        let text = std::fs::read_to_string(&self.counts)
            .map_err(BenchError::system("read strace's counts"))?;
        Ok(parse(&text))
    }
}

fn parse(table: &str) -> Calls {
    let row = |line: &str| {
        let (count, name) = line.trim().split_once(' ')?;
        Some((name.trim().to_owned(), count.parse().ok()?)).filter(|(name, _)| name != "total")
    };
    table.lines().filter_map(row).collect()
}

pub(crate) fn serve(socket: &str) -> Result<(), BenchError> {
    let page = SharedPage::map(&medium()?)?;
    let client = service::attach(PathBuf::from(socket), "permits")?;
    let mut lane = client.lane();
    let flow = flow(Stage::KvReuse);
    let (stop, permits) = (page.word(STOP), page.word(PERMITS));
    page.announce();
    let mut count = 0;
    while stop.load(Ordering::Relaxed) == 0 {
        let mut ticket = lane.submit(&flow);
        let permit = lane.wait(&mut ticket);
        lane.complete(&ticket, permit.bytes);
        if !permit.bypassed {
            count += 1;
            permits.store(count, Ordering::Relaxed);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn straces_table_is_read_without_its_sum() {
        let table = "    calls syscall\n--------- --------\n       12 futex\n        3 read\n\
                     --------- --------\n       15 total\n";
        let expected = [("futex".to_owned(), 12), ("read".to_owned(), 3)];
        assert_eq!(parse(table), Calls::from(expected));
        assert!(parse("").is_empty());
    }
}
