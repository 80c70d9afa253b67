//! Measures the costs of a sleeping daemon: the first permit after a pause, the submit that wakes
//! it, and the CPU time of an idle daemon.

use std::time::Duration;

use laxity_client::Stage;

use crate::bench::{Bench, Measured};
use crate::error::BenchError;
use crate::figure::{Gate, Limit, Quantile, Row, Unit};
use crate::hotpath::flow;
use crate::sample::{Recorder, Summary};
use crate::service::{Laxityd, Port};

const NAP: Duration = Duration::from_millis(12);
const NAPS: usize = 60;
/// Clients that are attached and silent while the idle daemon is measured.
const SILENT: usize = 8;

pub(crate) fn rows(bench: &mut Bench) {
    let row = Row::latency("first-permit", "first permit from a sleeping daemon").note(format!(
        "the client spins, the daemon has slept for {} ms; futex or epoll wake-ups of this machine \
         are most of it.",
        NAP.as_millis()
    ));
    bench.measure(row, |bench| {
        let far = bench.far_core()?;
        bench.latencies_alone(|bench| naps(bench, far, true))
    });
    let row = Row::latency("waking-submit", "submit that wakes the daemon")
        .note("the submitter's share of the figure above: one write to an eventfd.");
    bench.measure(row, |bench| {
        let far = bench.far_core()?;
        bench.latencies_alone(|bench| naps(bench, far, false))
    });
    let gate = || [Gate::at_most(Quantile::P50, Limit::Value(0.1))];
    let row = Row::counting("idle", "idle laxityd, no client", Unit::PercentOfCore).gates(gate());
    bench.measure(row, |bench| idle(bench, 0));
    let title = format!("idle laxityd, {SILENT} silent clients");
    let row = Row::counting("idle-attached", title, Unit::PercentOfCore).gates(gate());
    bench.measure(row, |bench| idle(bench, SILENT));
}

/// Submits once after each pause. If `whole`, the time is that until the permit, else that of the
/// submit.
fn naps(bench: &Bench, core: usize, whole: bool) -> Result<crate::sample::Percentiles, BenchError> {
    let clock = bench.clock;
    let daemon = Laxityd::open(&bench.cores, core)?;
    let client = daemon.attach("bench")?;
    let mut lane = client.lane();
    let flow = flow(Stage::KvReuse);
    let mut recorder = Recorder::with_room_for(NAPS);
    for _ in 0..NAPS {
        std::thread::sleep(NAP);
        let begin = clock.begin();
        let mut ticket = lane.submit(&flow);
        let submitted = clock.end();
        let permit = loop {
            if let Some(permit) = lane.poll(&mut ticket) {
                break permit;
            }
        };
        let permitted = clock.end();
        if permit.bypassed {
            continue;
        }
        lane.complete(&ticket, permit.bytes);
        recorder.note(begin, if whole { permitted } else { submitted });
    }
    let percentiles = recorder.finish(clock);
    if percentiles.p50.is_nan() || percentiles.p50 <= 0.0 {
        let why = format!("every flow was bypassed: {:?}", client.stats());
        return Err(BenchError::Disturbed(why));
    }
    Ok(percentiles)
}

/// Measures the CPU time of the daemon's process without any flows, in percent of a core.
fn idle(bench: &mut Bench, clients: usize) -> Result<Measured, BenchError> {
    let seconds = bench.effort.idle_seconds;
    let core = bench.cores.far.unwrap_or(bench.cores.near);
    let daemon = Laxityd::start(&bench.cores, core, Port::Bounded, "")?;
    let mut attached = Vec::new();
    for i in 0..clients {
        let client = daemon.attach(&format!("silent-{i}"))?;
        let mut lane = client.lane();
        let mut ticket = lane.submit(&flow(Stage::KvReuse));
        let permit = lane.wait(&mut ticket);
        lane.complete(&ticket, permit.bytes);
        attached.push((client, lane));
    }
    // Work that follows a start or an attach must not count.
    std::thread::sleep(Duration::from_millis(500));
    let before = daemon.cpu_time()?;
    std::thread::sleep(Duration::from_secs(seconds));
    let used = daemon.cpu_time()?.saturating_sub(before);
    drop(attached);
    Ok(Measured {
        summary: Summary::of_numbers(vec![100.0 * used.as_secs_f64() / seconds as f64]),
        remark: Some(format!(
            "over {seconds} s: user and system time of all its threads, {:.2} ms.",
            used.as_secs_f64() * 1e3
        )),
    })
}
