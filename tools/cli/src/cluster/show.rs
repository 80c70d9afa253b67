//! `laxity cluster hosts`, `batches`, `explain`, `drain` and `forget`: one request and one answer
//! each.

use laxity_wire::v1::{
    DrainRequest, ExplainRequest, ForgetRequest, ListBatchesRequest, ListHostsRequest,
};
use serde::Serialize;

use super::error::ClusterError;
use super::{BatchesArgs, DrainArgs, ExplainArgs, ForgetArgs, HostsArgs, tables};

pub(super) fn hosts(args: &HostsArgs) -> Result<(), ClusterError> {
    let mut told =
        args.coordinator.ask(async |operator| operator.list_hosts(ListHostsRequest {}).await)?;
    for wanted in &args.hosts {
        if !told.hosts.iter().any(|host| host.host == *wanted) {
            return Err(ClusterError::NoHost(wanted.clone()));
        }
    }
    if !args.hosts.is_empty() {
        told.hosts.retain(|host| args.hosts.contains(&host.host));
    }
    args.coordinator.tell(&told, || {
        if args.hosts.is_empty() {
            return tables::hosts(&told);
        }
        let all: Vec<String> = told.hosts.iter().map(tables::host).collect();
        all.join("\n\n")
    })
}

pub(super) fn batches(args: &BatchesArgs) -> Result<(), ClusterError> {
    let wanted = ListBatchesRequest {
        host: args.host.clone().unwrap_or_default(),
        tenant: args.tenant.clone().unwrap_or_default(),
        in_trouble: args.in_trouble,
        limit: args.limit,
    };
    let told = args.coordinator.ask(async |operator| operator.list_batches(wanted).await)?;
    let filtered = args.in_trouble || args.host.is_some() || args.tenant.is_some();
    args.coordinator.tell(&told, || tables::batches(&told.batches, told.total, filtered))
}

pub(super) fn explain(args: &ExplainArgs) -> Result<(), ClusterError> {
    let wanted =
        ExplainRequest { batch: args.batch, tenant: args.tenant.clone().unwrap_or_default() };
    let told = args.coordinator.ask(async |operator| operator.explain(wanted).await);
    let told = told.map_err(|error| match error {
        ClusterError::Refused(said) => ClusterError::NotExplained(said),
        other => other,
    })?;
    args.coordinator.tell(&told, || tables::explanation(&told))
}

#[derive(Serialize)]
struct Drained<'a> {
    host: &'a str,
    drained: bool,
    batches: u32,
}

pub(super) fn drain(args: &DrainArgs) -> Result<(), ClusterError> {
    let wanted = DrainRequest {
        host: args.host.clone(),
        drain: !args.undo,
        comment: args.comment.clone().unwrap_or_default(),
    };
    let (told, known) = args.coordinator.run(async |client| {
        let mut operator = client.operator.clone();
        let told = client.answer(operator.drain(wanted)).await?;
        let hosts = client.answer(operator.list_hosts(ListHostsRequest {})).await?.hosts;
        Ok((told, hosts.iter().any(|host| host.host == args.host && host.connected)))
    })?;
    let drained = Drained { host: &args.host, drained: !args.undo, batches: told.batches };
    let host = tables::clean(&args.host);
    let mut text = if args.undo {
        format!("{host} is back in the cluster's order.")
    } else {
        format!(
            "{host} is drained: {} batches that it takes part in are not ranked for it any more, \
             and its daemon orders by itself. Back in with `laxity cluster drain {host} --undo`.",
            told.batches
        )
    };
    if !known {
        text.push_str(" No such host is connected now: check the name.");
    }
    args.coordinator.tell(&drained, || text)
}

#[derive(Serialize)]
struct Forgotten<'a> {
    host: &'a str,
    forgotten: bool,
}

pub(super) fn forget(args: &ForgetArgs) -> Result<(), ClusterError> {
    let host = args.host.clone();
    args.coordinator.ask(async |operator| operator.forget(ForgetRequest { host }).await)?;
    args.coordinator.tell(&Forgotten { host: &args.host, forgotten: true }, || {
        let host = tables::clean(&args.host);
        format!("{host} is off the list. It is back as soon as its daemon comes again.")
    })
}
