//! `laxity doctor --cluster`: asks the coordinator, and has its hosts compared.

use laxity_wire::compare::compared;
use laxity_wire::v1::{GetPolicyRequest, ListHostsRequest};

use super::finding::Finding;
use crate::cluster::client::CoordinatorArgs;
use crate::cluster::error::ClusterError;

/// Asks the coordinator, and compares its hosts with each other and with those in `expect`.
pub(super) fn examine(
    coordinator: &CoordinatorArgs,
    expect: &[String],
) -> Result<Vec<Finding>, ClusterError> {
    let (told, policy) = coordinator.ask(async |operator| {
        let told = operator.list_hosts(ListHostsRequest {}).await?;
        let policy = operator.get_policy(GetPolicyRequest::default()).await?.into_inner();
        Ok(told.map(|told| (told, policy)))
    })?;
    let budget = policy.current.and_then(|current| current.policy?.drop_budget);
    Ok(compared(&told, budget, expect))
}
