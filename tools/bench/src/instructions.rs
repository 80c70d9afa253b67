//! Counts the instructions of a submit with credit. This program runs again under `valgrind
//! --tool=callgrind`, which collects only inside [`laxity_bench_credited_submit`]. The result is
//! the difference of two runs of different length, without one-time costs.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use laxity_client::{Flow, Lane, Stage, Ticket};

use crate::bench::{Bench, Measured};
use crate::clock::Clock;
use crate::error::{BenchError, Result};
use crate::figure::{Gate, Limit, Quantile, Row, Unit};
use crate::hotpath::flow;
use crate::machine::Cores;
use crate::sample::Summary;
use crate::service::{self, Laxityd, Port};

pub(crate) const CREDIT_ROLE: &str = "credit";
const BURST: usize = 32;
const BURSTS_SHORT: usize = 20;
const BURSTS_LONG: usize = 70;
const ATTEMPTS: usize = 8;

pub(crate) fn rows(bench: &mut Bench) {
    let row = Row::counting("credit-instructions", "submit with credit", Unit::Instructions)
        .gates([Gate::at_most(Quantile::P50, Limit::Value(50.0))])
        .note(
            "callgrind, with the call of a function that does nothing else; the daemon spins for \
        long, as valgrind makes the client slow.",
        );
    bench.measure(row, |bench| {
        let version = Command::new("valgrind").arg("--version").stdout(Stdio::null()).status();
        if !version.is_ok_and(|status| status.success()) {
            return Err(BenchError::Skip("valgrind is not installed".to_owned()));
        }
        let short = collect_patiently(&bench.cores, BURSTS_SHORT)?;
        let long = collect_patiently(&bench.cores, BURSTS_LONG)?;
        let submits = (BURSTS_LONG - BURSTS_SHORT) * BURST;
        let each = long.saturating_sub(short) as f64 / submits as f64;
        Ok(Measured::from(Summary::of_numbers(vec![each])))
    });
}

/// Collects and tries again on failure, because a daemon that loses its core renews no credit.
fn collect_patiently(cores: &Cores, bursts: usize) -> Result<u64> {
    let mut attempts = (0..ATTEMPTS).map(|_| collect(cores, bursts));
    let first = attempts.find(Result::is_ok);
    first.unwrap_or_else(|| collect(cores, bursts))
}

/// Runs the peer under callgrind. Returns the instructions inside the submits.
fn collect(cores: &Cores, bursts: usize) -> Result<u64> {
    let core = cores.far.unwrap_or(cores.near);
    let daemon = Laxityd::start(cores, core, Port::Open, "spin_us = 500000")?;
    let program = std::env::current_exe().map_err(BenchError::system("find this program"))?;
    let folder = tempfile::TempDir::with_prefix("laxity-callgrind-");
    let folder = folder.map_err(BenchError::system("make a folder"))?;
    let counts = folder.path().join("counts");
    let output = Command::new("valgrind")
        .arg("--tool=callgrind")
        .arg("--collect-atstart=no")
        .arg("--toggle-collect=laxity_bench_credited_submit")
        .arg(format!("--callgrind-out-file={}", counts.display()))
        .arg(program)
        .args(["peer", "--core", &cores.near.to_string(), "--count", &bursts.to_string()])
        .arg("--name")
        .arg(daemon.socket())
        .arg(CREDIT_ROLE)
        .stdin(Stdio::null())
        .output()
        .map_err(BenchError::system("run valgrind"))?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    let last = complaint.lines().rev().take(4).collect::<Vec<_>>().join(" / ");
    if !output.status.success() {
        return Err(BenchError::Failed(format!("under valgrind: {last}")));
    }
    let text =
        std::fs::read_to_string(&counts).map_err(BenchError::system("read callgrind's counts"))?;
    parse_total(&text)
        .ok_or_else(|| BenchError::Failed(format!("no total in callgrind's counts: {last}")))
}

/// Returns the count of a callgrind file: `summary:`, or `totals:` if the former is zero.
fn parse_total(text: &str) -> Option<u64> {
    text.lines()
        .filter_map(|line| line.strip_prefix("summary: ").or_else(|| line.strip_prefix("totals: ")))
        .filter_map(|counts| counts.split_whitespace().next()?.parse().ok())
        .max()
}

pub(crate) fn serve(socket: &str, bursts: usize) -> Result<()> {
    let client = service::attach(PathBuf::from(socket), "credit")?;
    let mut lane = client.lane();
    let flow = flow(Stage::Collective);
    let clock = Clock::calibrate();
    let pause = clock.ticks(30_000.0);
    let mut tickets = std::array::from_fn::<_, BURST, _>(|_| Ticket::default());
    let mut otherwise = 0;
    // The first collective of a lane has no credit yet. Its submit requests the credit.
    let mut first = lane.submit(&flow);
    let permit = lane.wait(&mut first);
    lane.complete(&first, permit.bytes);
    clock.pause(pause);
    for _ in 0..bursts {
        for ticket in &mut tickets {
            laxity_bench_credited_submit(&mut lane, &flow, ticket);
        }
        for ticket in &mut tickets {
            let permit = lane.poll(ticket);
            if permit.is_none_or(|permit| permit.bypassed) {
                otherwise += 1;
            }
            let permit = permit.unwrap_or_else(|| lane.wait(ticket));
            lane.complete(ticket, permit.bytes);
        }
        // Long enough to renew the credit, but too short for the daemon to sleep. A submit that
        // wakes the daemon is another figure.
        clock.pause(pause);
    }
    // These submits took another path. With too many of them the count is meaningless.
    let submits = bursts * BURST;
    if otherwise > submits / 100 {
        let why = format!("{otherwise} of {submits} submits found no credit or a full lane");
        return Err(BenchError::Failed(why));
    }
    Ok(())
}

/// Makes the measured submit. The count includes the call of this function. The name isn't mangled,
/// so that callgrind finds it.
#[unsafe(no_mangle)]
#[inline(never)]
extern "Rust" fn laxity_bench_credited_submit(lane: &mut Lane, flow: &Flow, ticket: &mut Ticket) {
    lane.submit_into(flow, ticket);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_of_a_callgrind_file_is_found() {
        let text = "version: 1\nevents: Ir\nfn=(1) x\n1 5\ntotals: 4242\n";
        assert_eq!(parse_total(text), Some(4242));
        assert_eq!(parse_total("version: 1\n"), None);
    }
}
