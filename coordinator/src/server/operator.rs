//! The service `laxity.v1.Operator`, for people and tools.

use std::sync::Arc;

use laxity_policy::Time;
use laxity_wire::v1::operator_server::Operator;
use laxity_wire::v1::{
    DrainRequest, DrainResponse, ExplainRequest, ExplainResponse, ForgetRequest, ForgetResponse,
    GetPolicyRequest, GetPolicyResponse, ListBatchesRequest, ListBatchesResponse, ListHostsRequest,
    ListHostsResponse, SetPolicyRequest, SetPolicyResponse, WatchEvent, WatchKind, WatchRequest,
    watch_event::Event,
};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tracing::info;

use super::access::{ProvenPeer, Served};
use super::successor::{Successor, saved};
use crate::cluster::change::Change;
use crate::cluster::{Cluster, PolicyError};
use crate::election::SaveError;
use crate::shared::Shared;

/// Maximum number of streams of `Watch` at a time.
const WATCHERS_MAX: usize = 256;

pub(crate) struct OperatorService {
    pub(super) shared: Arc<Shared>,
}

impl OperatorService {
    /// Fails if this coordinator does not lead, since only the leader makes changes.
    fn must_lead(&self) -> Result<(), Status> {
        if self.shared.lead.holds() {
            return Ok(());
        }
        let leader = self.shared.lead.leader();
        Err(Status::failed_precondition(if leader.is_empty() {
            "this coordinator does not lead, and no leader is known; try again".to_owned()
        } else {
            format!("this coordinator does not lead; ask {leader}")
        }))
    }

    /// Returns the change that `plan` makes of the state in force, after its checks.
    fn planned(
        &self,
        plan: impl Fn(&Cluster, Time) -> Result<Change, Status>,
    ) -> Result<Change, Status> {
        let planned = plan(&self.shared.cluster(), self.shared.now());
        // Checked after `plan`, so that a refusal also comes from the leader only.
        self.must_lead()?;
        planned
    }

    /// Makes a change: checks it, saves it for the next leader, and applies it. Returns the result
    /// of [`Cluster::apply`] and what `read` finds after that.
    async fn change<T>(
        &self,
        plan: impl Fn(&Cluster, Time) -> Result<Change, Status> + Sync,
        read: impl Fn(&Cluster, Time) -> T + Sync,
    ) -> Result<(u32, T), Status> {
        let apply = |change| {
            let (mut cluster, now) = (self.shared.cluster(), self.shared.now());
            (cluster.apply(now, change), read(&cluster, now))
        };
        let Some(store) = &self.shared.store else { return Ok(apply(self.planned(&plan)?)) };
        let prepare = || {
            let change = self.planned(&plan)?;
            let state = saved(&self.shared.cluster(), self.shared.now(), Some(&change));
            Ok::<_, Status>((state, || apply(change)))
        };
        store.change(&Successor(Arc::clone(&self.shared)), prepare).await
    }
}

impl From<SaveError> for Status {
    fn from(error: SaveError) -> Self {
        Self::unavailable(format!(
            "it is unknown whether this was saved: {error}; ask the leader for what is in force \
             before you repeat it"
        ))
    }
}

type WatchEvents = ReceiverStream<Result<WatchEvent, Status>>;

#[tonic::async_trait]
impl Operator for OperatorService {
    type WatchStream = WatchEvents;

    async fn list_hosts(
        &self,
        request: Request<ListHostsRequest>,
    ) -> Result<Response<ListHostsResponse>, Status> {
        ProvenPeer::viewer(&request)?;
        Ok(Response::new(self.shared.list_hosts()))
    }

    async fn list_batches(
        &self,
        request: Request<ListBatchesRequest>,
    ) -> Result<Response<ListBatchesResponse>, Status> {
        ProvenPeer::viewer(&request)?;
        let now = self.shared.now();
        let listed = self.shared.cluster().list_batches(now, request.get_ref());
        Ok(Response::new(listed))
    }

    async fn explain(
        &self,
        request: Request<ExplainRequest>,
    ) -> Result<Response<ExplainResponse>, Status> {
        ProvenPeer::viewer(&request)?;
        let now = self.shared.now();
        let told = self.shared.cluster().explain(now, request.get_ref());
        told.map(Response::new).map_err(Status::not_found)
    }

    async fn get_policy(
        &self,
        request: Request<GetPolicyRequest>,
    ) -> Result<Response<GetPolicyResponse>, Status> {
        ProvenPeer::viewer(&request)?;
        let now = self.shared.now();
        let most = request.get_ref().history;
        let mut told = self.shared.cluster().policy_history(now, most);
        // Read after the history, so that the history of a former leader is not marked as current.
        told.leading = Some(self.shared.lead.holds());
        Ok(Response::new(told))
    }

    async fn set_policy(
        &self,
        request: Request<SetPolicyRequest>,
    ) -> Result<Response<SetPolicyResponse>, Status> {
        let peer = ProvenPeer::operator(&request)?;
        let author = peer.name();
        let asked = request.get_ref();
        let plan = |cluster: &Cluster, now: Time| {
            cluster.plan_policy(now, asked, &author).map_err(|error| match error {
                PolicyError::Invalid { .. } => Status::invalid_argument(error.to_string()),
                PolicyError::Stale { .. } => Status::failed_precondition(error.to_string()),
            })
        };
        let read = |cluster: &Cluster, now: Time| cluster.policy_history(now, 0).current;
        if asked.dry_run {
            let current = read(&self.shared.cluster(), self.shared.now());
            self.planned(plan)?;
            return Ok(Response::new(SetPolicyResponse { current }));
        }
        let (_, current) = self.change(plan, read).await?;
        if let Some(current) = &current {
            info!(%author, revision = current.revision, "the policy was changed");
            self.shared.tell_watchers(Event::Policy(current.clone()));
        }
        self.shared.stir();
        Ok(Response::new(SetPolicyResponse { current }))
    }

    async fn drain(
        &self,
        request: Request<DrainRequest>,
    ) -> Result<Response<DrainResponse>, Status> {
        let peer = ProvenPeer::operator(&request)?;
        let author = peer.name();
        let asked = request.get_ref();
        let plan = |cluster: &Cluster, now: Time| {
            cluster.plan_drain(now, asked, &author).map_err(Status::failed_precondition)
        };
        let read = |cluster: &Cluster, _: Time| cluster.host_changed(&asked.host);
        let (batches, changed) = self.change(plan, read).await?;
        info!(%author, host = %asked.host, drain = asked.drain, comment = ?asked.comment, "a host \
            was drained or put back");
        self.shared.stir();
        self.shared.tell_watchers(Event::Host(changed));
        Ok(Response::new(DrainResponse { batches }))
    }

    async fn forget(
        &self,
        request: Request<ForgetRequest>,
    ) -> Result<Response<ForgetResponse>, Status> {
        let author = ProvenPeer::operator(&request)?.name();
        let host = &request.get_ref().host;
        self.must_lead()?;
        // The next leader does not know of hosts that are gone, so nothing is saved for it.
        let changed = {
            let mut cluster = self.shared.cluster();
            cluster.forget(self.shared.now(), host).map_err(Status::failed_precondition)?;
            cluster.host_changed(host)
        };
        info!(%author, %host, "a host that is gone was forgotten");
        self.shared.stir();
        self.shared.tell_watchers(Event::Host(changed));
        Ok(Response::new(ForgetResponse {}))
    }

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<WatchEvents>, Status> {
        ProvenPeer::viewer(&request)?;
        if self.shared.watchers.receiver_count() >= WATCHERS_MAX {
            return Err(Status::resource_exhausted(format!(
                "{WATCHERS_MAX} watch already; end one"
            )));
        }
        let wanted: Vec<WatchKind> = request.get_ref().kinds().collect();
        let mut events = self.shared.watchers.subscribe();
        let mut stopping = self.shared.stopping.clone();
        let (sender, receiver) = mpsc::channel(16);
        let serving = Served::of(&request).begin();
        tokio::spawn(async move {
            let _serving = serving;
            loop {
                let event = tokio::select! {
                    event = events.recv() => event,
                    () = sender.closed() => return,
                    _ = stopping.wait_for(|stop| *stop) => return,
                };
                let event = match event {
                    Ok(event) if is_wanted(&wanted, &event) => event,
                    Ok(_) => continue,
                    Err(RecvError::Lagged(missed)) => {
                        WatchEvent { event: Some(Event::Missed(missed)) }
                    }
                    Err(RecvError::Closed) => return,
                };
                // A watcher that does not read must not delay the stop.
                let sent = tokio::select! {
                    sent = sender.send(Ok(event)) => sent.is_ok(),
                    _ = stopping.wait_for(|stop| *stop) => false,
                };
                if !sent {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

fn is_wanted(wanted: &[WatchKind], event: &WatchEvent) -> bool {
    let kind = match &event.event {
        Some(Event::Host(_)) => WatchKind::Hosts,
        Some(Event::Run(_)) => WatchKind::Runs,
        Some(Event::Policy(_)) => WatchKind::Policy,
        Some(Event::Missed(_)) | None => return true,
    };
    wanted.is_empty() || wanted.contains(&kind)
}
