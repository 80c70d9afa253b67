//! Measures the CPU time of an idle daemon.

use std::time::Duration;

use laxity_client::Stage;

use crate::bench::{Bench, Measured};
use crate::error::Result;
use crate::figure::{Gate, Limit, Quantile, Row, Unit};
use crate::hotpath::flow;
use crate::sample::Summary;
use crate::service::{Laxityd, Port};

const SILENT: usize = 8;

pub(crate) fn rows(bench: &mut Bench) {
    let gate = || [Gate::at_most(Quantile::P50, Limit::Value(0.1))];
    let row = Row::counting("idle", "idle laxityd, no client", Unit::PercentOfCore).gates(gate());
    bench.measure(row, |bench| idle(bench, 0));
    let title = format!("idle laxityd, {SILENT} silent clients");
    let row = Row::counting("idle-attached", title, Unit::PercentOfCore).gates(gate());
    bench.measure(row, |bench| idle(bench, SILENT));
}

/// Measures the CPU time of the daemon's process without any flows, in percent of a core.
fn idle(bench: &mut Bench, clients: usize) -> Result<Measured> {
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
