//! Metrics of each job: the sums over its clients, with those that are gone ([`crate::jobs`]).

use std::fmt::Write;

use super::table::{escaped, metrics, table};
use crate::stats::{ClientCounters, ClientSnapshot, JobAccount, JobUser};

/// The sum over the clients of a job.
struct JobSum {
    counters: ClientCounters,
    waiting_flows: u64,
    clients: u64,
}

metrics! {
    JOB: JobSum {
        Counter laxity_job_permitted_bytes_total "Bytes permitted, by job"
            |job| job.counters.permitted_bytes;
        Counter laxity_job_completed_bytes_total "Bytes reported as completed, by job"
            |job| job.counters.completed_bytes;
        Counter laxity_job_bypassed_bytes_total "Bytes sent unscheduled, by job"
            |job| job.counters.bypassed_bytes;
        Counter laxity_job_deadline_misses_total "Flows completed late, by job"
            |job| job.counters.deadline_misses;
        Gauge laxity_job_waiting_flows "Flows that wait for a permit, by job"
            |job| job.waiting_flows;
        Gauge laxity_job_clients "Processes attached, by job" |job| job.clients;
    }
}

pub(super) fn rendered(jobs: &[JobAccount], clients: &[ClientSnapshot]) -> String {
    let gone = |job: &JobAccount| JobSum { counters: job.gone, waiting_flows: 0, clients: 0 };
    let mut sums: Vec<JobSum> = jobs.iter().map(gone).collect();
    for client in clients {
        let Some(sum) = sums.get_mut(client.job) else { continue };
        sum.counters.add(&client.counters);
        sum.waiting_flows += client.waiting_flows;
        sum.clients += 1;
    }
    let rows: Vec<_> = jobs.iter().map(labels).zip(sums).collect();
    table(JOB, &rows)
}

fn labels(job: &JobAccount) -> String {
    let mut labels = format!("job=\"{}\"", escaped(&job.name));
    let _ = match &job.user {
        JobUser::Several => Ok(()),
        JobUser::Uid(uid) => write!(labels, ",uid=\"{uid}\""),
        JobUser::Namespace(name) => write!(labels, ",namespace=\"{}\"", escaped(name)),
    };
    labels
}
