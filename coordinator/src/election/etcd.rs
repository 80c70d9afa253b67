//! A small client of etcd: the calls that an election needs. Each call tries the endpoints in turn.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use thiserror::Error;
use tokio_stream::once;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use super::config::EtcdConfig;
use pb::kv_client::KvClient;
use pb::lease_client::LeaseClient;

/// Generated message types of etcd.
#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    missing_docs,
    unreachable_pub,
    unused_lifetimes,
    reason = "generated from proto/etcd.proto"
)]
pub(super) mod pb {
    tonic::include_proto!("etcdserverpb");
}

/// Why etcd could not be used. The texts say what to do.
#[derive(Debug, Error)]
pub enum EtcdError {
    #[error("etcd.{key}: {problem}; fix the configuration")]
    Setup { key: &'static str, problem: String },
    #[error("{0}; fix the file, or name another one")]
    File(laxity_credentials::Unusable),
    #[error(
        "etcd at {endpoints}: {status}; is it running and reachable (etcdctl endpoint health)?"
    )]
    Call { endpoints: String, status: Status },
}

#[derive(Debug)]
pub(crate) struct Etcd {
    endpoints: Vec<String>,
    channels: Vec<Channel>,
    /// Index of the endpoint that answered last.
    preferred: AtomicUsize,
}

impl Etcd {
    /// Creates a client, which connects at its first call. `patience` bounds each call.
    pub(crate) fn new(config: &EtcdConfig, patience: Duration) -> Result<Self, EtcdError> {
        let setup = |key| {
            move |problem: &dyn std::fmt::Display| EtcdError::Setup {
                key,
                problem: problem.to_string(),
            }
        };
        let tls = config.tls().map_err(EtcdError::File)?;
        let channel = |endpoint: &String| {
            let mut made = Endpoint::from_shared(endpoint.clone())
                .map_err(|error| setup("endpoints")(&format!("{endpoint}: {error}")))?
                .connect_timeout(patience)
                .timeout(patience)
                // A connection that a partition broke would be retried at growing intervals of up
                // to two minutes, even after the network works again. Calls are frequent enough
                // that a ping is sent only when no answer comes. etcd closes connections with more
                // pings.
                .http2_keep_alive_interval(patience * 5 / 2)
                .keep_alive_timeout(patience)
                .keep_alive_while_idle(true);
            if endpoint.starts_with("https:") {
                made = made
                    .tls_config(tls.clone())
                    .map_err(|error| setup("ca")(&format!("{error:?}")))?;
            }
            Ok(made.connect_lazy())
        };
        let channels: Result<Vec<Channel>, EtcdError> =
            config.endpoints.iter().map(channel).collect();
        Ok(Self {
            endpoints: config.endpoints.clone(),
            channels: channels?,
            preferred: AtomicUsize::new(0),
        })
    }

    async fn call<T, F>(&self, act: impl Fn(Channel) -> F) -> Result<T, EtcdError>
    where
        F: Future<Output = Result<T, Status>> + Send,
    {
        let first = self.preferred.load(Ordering::Relaxed);
        let mut last = Status::unavailable("no endpoint");
        for step in 0..self.channels.len() {
            let index = (first + step) % self.channels.len();
            match act(self.channels[index].clone()).await {
                Ok(answer) => {
                    self.preferred.store(index, Ordering::Relaxed);
                    return Ok(answer);
                }
                Err(status) => last = status,
            }
        }
        Err(EtcdError::Call { endpoints: self.endpoints.join(", "), status: last })
    }

    /// Creates a lease of `ttl_s` seconds. Returns its id and its TTL in seconds.
    pub(super) async fn grant(&self, ttl_s: i64) -> Result<(i64, i64), EtcdError> {
        let asked = pb::LeaseGrantRequest { ttl: ttl_s, id: 0 };
        let act = |channel| async move { LeaseClient::new(channel).lease_grant(asked).await };
        let granted = self.call(act).await?.into_inner();
        Ok((granted.id, granted.ttl))
    }

    pub(super) async fn revoke(&self, id: i64) -> Result<(), EtcdError> {
        let asked = pb::LeaseRevokeRequest { id };
        let act = |channel| async move { LeaseClient::new(channel).lease_revoke(asked).await };
        self.call(act).await.map(|_| ())
    }

    /// Renews a lease. Returns its TTL in seconds, or `None` if it no longer exists.
    pub(super) async fn keep_alive(&self, id: i64) -> Result<Option<i64>, EtcdError> {
        let act = |channel| async move {
            let asked = once(pb::LeaseKeepAliveRequest { id });
            let mut answers = LeaseClient::new(channel).lease_keep_alive(asked).await?.into_inner();
            let answer = answers.message().await?;
            answer.ok_or_else(|| Status::unavailable("the stream ended without an answer"))
        };
        let answer = self.call(act).await;
        match answer {
            Ok(answer) => Ok(Some(answer.ttl).filter(|&ttl| ttl > 0)),
            Err(EtcdError::Call { status, .. }) if status.code() == Code::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn get(&self, key: &str) -> Result<Option<pb::KeyValue>, EtcdError> {
        let asked = pb::RangeRequest { key: key.into(), ..pb::RangeRequest::default() };
        let act = |channel| {
            let asked = asked.clone();
            async move { KvClient::new(channel).range(asked).await }
        };
        Ok(self.call(act).await?.into_inner().kvs.into_iter().next())
    }

    /// Runs a transaction. A call that ran out of time may be executed later, and it is sent to the
    /// next endpoint. So `asked` has to compare what its own success changes.
    pub(super) async fn txn(&self, asked: pb::TxnRequest) -> Result<pb::TxnResponse, EtcdError> {
        let act = |channel| {
            let asked = asked.clone();
            async move { KvClient::new(channel).txn(asked).await }
        };
        Ok(self.call(act).await?.into_inner())
    }
}

fn equal(key: String, union: pb::compare::TargetUnion) -> pb::Compare {
    let target = match union {
        pb::compare::TargetUnion::CreateRevision(_) => pb::compare::CompareTarget::Create,
        _ => pb::compare::CompareTarget::Mod,
    };
    pb::Compare {
        result: pb::compare::CompareResult::Equal as i32,
        target: target as i32,
        key: key.into(),
        target_union: Some(union),
    }
}

/// Demands that a key was created at `revision`; 0 means that it does not exist.
pub(super) fn created_at(key: String, revision: i64) -> pb::Compare {
    equal(key, pb::compare::TargetUnion::CreateRevision(revision))
}

/// Demands that a key was written last at `revision`; 0 means that it does not exist.
pub(super) fn written_at(key: String, revision: i64) -> pb::Compare {
    equal(key, pb::compare::TargetUnion::ModRevision(revision))
}

pub(super) fn put(key: String, value: Vec<u8>, lease: i64) -> pb::RequestOp {
    let put = pb::PutRequest { key: key.into(), value, lease };
    pb::RequestOp { request: Some(pb::request_op::Request::RequestPut(put)) }
}

pub(super) fn read(key: String) -> pb::RequestOp {
    let range = pb::RangeRequest { key: key.into(), ..pb::RangeRequest::default() };
    pb::RequestOp { request: Some(pb::request_op::Request::RequestRange(range)) }
}

/// Returns what the `nth` operation of a transaction read.
pub(super) fn key_of(answer: &pb::TxnResponse, nth: usize) -> Option<&pb::KeyValue> {
    match answer.responses.get(nth)?.response.as_ref()? {
        pb::response_op::Response::ResponseRange(range) => range.kvs.first(),
        pb::response_op::Response::ResponsePut(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use laxity_quantity::Nanos;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_connection_on_which_nothing_comes_back_is_replaced() {
        let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = silent.local_addr().expect("bound");
        let config = EtcdConfig {
            ttl: Nanos(2_000_000_000),
            ..EtcdConfig::test(&format!("http://{address}"))
        };
        let etcd = Etcd::new(&config, config.patience()).expect("it makes sense");
        let asking = async {
            loop {
                let answer = etcd.get("/p/leader").await;
                assert!(matches!(answer, Err(EtcdError::Call { .. })), "{answer:?}");
            }
        };
        let connections = async {
            let first = silent.accept().await.expect("a connection");
            let second = silent.accept().await.expect("and another");
            drop((first, second));
        };
        let replaced = async {
            tokio::select! {
                () = asking => {}
                () = connections => {}
            }
        };
        let replaced = tokio::time::timeout(Duration::from_secs(30), replaced).await;
        assert!(replaced.is_ok(), "the first one is used to the end");
    }
}
