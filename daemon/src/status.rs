//! Converts a snapshot to the operator's `status`.

use laxity_policy::{Level, Stage, Time};
use laxity_shm::registration::Release;
use laxity_shm::sleep::now_ns;
use laxity_wire::{
    AheadStatus, ClientStatus, ClusterStatus, DistrustedOwner, LevelStatus, PermittedBytes,
    PortStatus, StageStatus, Status, Totals, WaitStatus,
};

use crate::config::AccessConfig;
use crate::coordinator::exchange::CoordinatorExchange;
use crate::metrics::{level_name, rows};
use crate::owner::Owner;
use crate::refusals::Refusals;
use crate::stats::{AheadCount, ClientSnapshot, JobUser, PortSnapshot, Snapshot, WaitHistogram};

/// Converts `snapshot` for an operator. The other arguments come from outside the scheduler. The
/// service adds what it knows itself.
pub fn status(
    snapshot: &Snapshot,
    uptime_ms: u64,
    (refusals, access): (&Refusals, &AccessConfig),
    exchange: Option<&CoordinatorExchange>,
) -> Status {
    let ports: Vec<PortStatus> = snapshot.ports.iter().map(|p| port(snapshot, p)).collect();
    let all = &snapshot.all_clients;
    let scheduler = &snapshot.scheduler;
    let stages = || snapshot.ports.iter().flat_map(|port| &port.counters.stages);
    let totals = Totals {
        attached_clients: snapshot.clients.len() as u64,
        attachments: scheduler.attachments,
        refusals: refusals.count(),
        flows: all.flows,
        cancelled_flows: all.cancelled_flows,
        overflowed_flows: all.overflowed_flows,
        submitted_bytes: all.submitted_bytes,
        permitted_bytes: all.permitted_bytes,
        observed_bytes: all.observed_bytes,
        credited_bytes: stages().map(|stage| stage.credited_bytes).sum(),
        completed_bytes: all.completed_bytes,
        written_off_bytes: all.written_off_bytes,
        set_aside_bytes: all.set_aside_bytes,
        bypassed_bytes: all.bypassed_bytes,
        withdrawn_bytes: all.withdrawn_bytes,
        deadline_misses: stages().map(|stage| stage.deadline_misses).sum(),
        promotions: snapshot.ports.iter().map(|port| port.counters.promotions).sum(),
        demotions: snapshot.ports.iter().map(|port| port.counters.demotions).sum(),
        pruned_requests: scheduler.pruned_requests,
        orders: scheduler.orders,
        unknown_nic_flows: all.unknown_nic_flows,
        garbage_records: all.garbage_records,
    };
    Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        uptime_ms,
        policy: snapshot.policy.name().to_owned(),
        mode: snapshot.mode.name().to_owned(),
        marking: snapshot.marking.name().to_owned(),
        bypass: snapshot.bypass,
        clients: snapshot.clients.iter().map(|c| client(snapshot, c)).collect(),
        ports,
        distrusted: snapshot.distrusted.iter().map(|one| distrusted(snapshot, one)).collect(),
        refused: refusals.latest(access),
        totals,
        cluster: exchange.map(|exchange| cluster(exchange, snapshot)),
        scheduler: scheduler.status,
        ..Status::default()
    }
}

fn cluster(exchange: &CoordinatorExchange, snapshot: &Snapshot) -> ClusterStatus {
    let (in_force, age) = exchange.in_force(Time(now_ns()));
    ClusterStatus {
        order: if in_force { "cluster" } else { "own" }.to_owned(),
        age_ms: age.map(|age| age.0 / 1_000_000),
        fetches: snapshot.fetches,
        ..exchange.view()
    }
}

fn distrusted(snapshot: &Snapshot, (owner, until): &(Owner, Time)) -> DistrustedOwner {
    DistrustedOwner {
        uid: owner.uid,
        cgroup: owner.cgroup.to_string(),
        for_ms: until.since(snapshot.at).0 / 1_000_000,
    }
}

fn client(snapshot: &Snapshot, client: &ClientSnapshot) -> ClientStatus {
    ClientStatus {
        id: client.id,
        pid: client.pid,
        uid: client.owner.uid,
        name: client.name.to_string(),
        library: client.release.to_string(),
        library_is_older: client.release < Release::ours(),
        mode: client.mode.name().to_owned(),
        attached_ms: snapshot.at.since(client.attached).0 / 1_000_000,
        lanes: client.lanes,
        flows: client.flows,
        waiting_flows: client.waiting_flows,
        submitted_bytes: client.counters.submitted_bytes,
        permitted_bytes: client.counters.permitted_bytes,
        observed_bytes: client.counters.observed_bytes,
        completed_bytes: client.counters.completed_bytes,
        bypassed_bytes: client.counters.bypassed_bytes,
        unknown_nic_flows: client.counters.unknown_nic_flows,
        garbage_records: client.counters.garbage_records,
        quarantined_lanes: client.quarantined_lanes,
        owed_bytes: client.owed_bytes,
        held: client.held,
        distrusted: client.distrusted,
        limited: client.limited,
        pod: client.pod.as_deref().cloned(),
    }
}

fn port(snapshot: &Snapshot, port: &PortSnapshot) -> PortStatus {
    let link = &port.link;
    let levels = rows(port.levels).map(|row| LevelStatus {
        level: level_name(row),
        dscp: snapshot.dscp[row],
        sl: snapshot.sl.map(|sl| sl[row]),
        waiting_flows: link.waiting_by_level[row].flows,
        waiting_bytes: link.waiting_by_level[row].bytes,
        permitted_bytes: port.counters.stages.iter().map(|s| s.permitted_bytes[row]).sum(),
    });
    let stages = Stage::ALL.map(|stage| {
        let counted = &port.counters.stages[stage.index()];
        let waiting = link.waiting_by_stage[stage.index()];
        StageStatus {
            stage: stage.name().to_owned(),
            waiting_flows: waiting.flows,
            waiting_bytes: waiting.bytes,
            submitted_bytes: counted.submitted_bytes,
            permitted_bytes: counted.permitted_bytes.iter().sum(),
            completed_bytes: counted.completed_bytes,
            deadline_misses: counted.deadline_misses,
            wait: wait(&counted.wait),
        }
    });
    let permitted = Stage::ALL.into_iter().flat_map(|stage| {
        let bytes = port.counters.stages[stage.index()].permitted_bytes;
        (0..Level::ROWS).filter(move |row| bytes[*row] > 0).map(move |row| PermittedBytes {
            stage: stage.name().to_owned(),
            level: level_name(row),
            bytes: bytes[row],
        })
    });
    let left = port.residual.map(|it| it.capacity).unwrap_or_default();
    PortStatus {
        nic: port.nic,
        name: port.name.to_string(),
        direction: port.direction.to_owned(),
        absent: port.is_absent,
        rate_assumed: port.is_rate_assumed,
        rate_bytes_per_s: port.rate,
        rate_in_force_bytes_per_s: port.rate_in_force,
        counters: port.residual.map(|it| it.source.to_owned()),
        counters_stale: left.stale,
        foreign_bytes: port.counters.foreign_bytes,
        foreign_bytes_per_s: left.foreign_rate,
        congestion_bytes_per_s: left.lost_rate,
        congestion_signals: port.counters.signals,
        policy: snapshot.policy.name().to_owned(),
        in_flight_bytes: link.in_flight_bytes,
        window_bytes: port.window_bytes,
        load: link.rho,
        waiting_flows: link.waiting_by_stage.iter().map(|tally| tally.flows).sum(),
        waiting_bytes: link.waiting_by_stage.iter().map(|tally| tally.bytes).sum(),
        held_flows: link.held.flows,
        held_bytes: link.held.bytes,
        levels: levels.collect(),
        stages: stages.into(),
        permitted: permitted.collect(),
        promotions: port.counters.promotions,
        demotions: port.counters.demotions,
        would: port.would.clone(),
        would_ahead: port.ahead.iter().map(|count| ahead(snapshot, count)).collect(),
    }
}

fn ahead(snapshot: &Snapshot, count: &AheadCount) -> AheadStatus {
    let job = snapshot.jobs.get(count.job);
    AheadStatus {
        minutes_ago: count.minutes_ago,
        job: job.map_or_else(String::new, |job| job.name.to_string()),
        user: match job.map(|job| &job.user) {
            Some(JobUser::Uid(uid)) => format!("uid {uid}"),
            Some(JobUser::Namespace(name)) => format!("namespace {name}"),
            Some(JobUser::Several) | None => String::new(),
        },
        collectives: count.collectives,
        bytes: count.bytes,
    }
}

fn wait(waits: &WaitHistogram) -> WaitStatus {
    WaitStatus {
        flows: waits.count(),
        mean_ns: waits.mean_ns(),
        p50_ns: waits.quantile_ns(500),
        p99_ns: waits.quantile_ns(990),
    }
}
