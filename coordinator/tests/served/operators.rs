//! Tests of the service for people and tools.

use laxity_coordinator::config::Config;
use laxity_wire::v1::{
    DrainRequest, ExplainRequest, ForgetRequest, ListBatchesRequest, Policy, SetPolicyRequest,
    WatchKind, WatchRequest, from_coordinator::Message, watch_event,
};
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

use crate::daemon::{Served, arrived};

fn budget(drops: u32, expected_revision: u64, dry_run: bool) -> SetPolicyRequest {
    SetPolicyRequest {
        change: Some(Policy { drop_budget: Some(drops), ..Policy::default() }),
        comment: format!("{drops} drops"),
        expected_revision,
        dry_run,
    }
}

#[tokio::test]
async fn a_refusal_has_a_code_and_a_policy_that_is_only_tried_does_not_hold() {
    let served = Served::start(Config::default()).await;
    let mut operator = served.operator().await;
    operator.set_policy(budget(5, 1, true)).await.expect("would do");
    let set = operator.set_policy(budget(6, 1, false)).await.expect("set").into_inner();
    assert_eq!(set.current.expect("one").revision, 2);
    let stale = operator.set_policy(budget(7, 1, false)).await.expect_err("changed meanwhile");
    assert_eq!(stale.code(), Code::FailedPrecondition);
    let odd = operator.set_policy(SetPolicyRequest {
        change: Some(Policy { policy: Some("edf".into()), ..Policy::default() }),
        ..SetPolicyRequest::default()
    });
    assert_eq!(odd.await.expect_err("no such order").code(), Code::InvalidArgument);
    let unknown = operator.explain(ExplainRequest { batch: 77, tenant: String::new() }).await;
    assert_eq!(unknown.expect_err("unknown").code(), Code::NotFound);
}

#[tokio::test]
async fn a_drained_host_is_told_and_forgotten_and_asked_again_when_it_is_back() {
    let served = Served::start(Config::default()).await;
    let mut daemon = served.settled("a", vec![arrived(1, 900)]).await;
    let mut operator = served.operator().await;
    let drain = |drain| DrainRequest { host: "a".into(), drain, comment: "its NIC flaps".into() };
    let watch = WatchRequest { kinds: vec![WatchKind::Hosts as i32] };
    let mut events = operator.watch(watch).await.expect("watches").into_inner();
    let drained = operator.drain(drain(true)).await.expect("drained").into_inner();
    assert_eq!(drained.batches, 1);
    let standing = |message: &Message| match message {
        Message::Standing(standing) => Some(standing.drained),
        _ => None,
    };
    assert!(daemon.until(standing).await);
    let event = events.message().await.expect("goes on").expect("goes on");
    assert!(
        matches!(&event.event, Some(watch_event::Event::Host(it)) if it.connected && it.drained),
        "{event:?}"
    );
    let hosts = served.hosts().await;
    let note = hosts.hosts[0].drain.as_ref().expect("a reason");
    assert_eq!(note.comment, "its NIC flaps");
    assert!(note.author.starts_with("127.0.0.1:"), "{note:?}");
    let listed = operator.list_batches(ListBatchesRequest::default()).await.expect("lists");
    assert_eq!(listed.into_inner().total, 0);
    operator.drain(drain(false)).await.expect("back");
    let wanted = |message: &Message| matches!(message, Message::SnapshotWanted(_)).then_some(());
    daemon.until(wanted).await;
    daemon.snapshot(vec![arrived(1, 900)]).await;
    daemon.settled().await;
    assert_eq!(daemon.served(), [1]);
    let again = operator.drain(drain(false)).await.expect_err("is not drained");
    assert_eq!(again.code(), Code::FailedPrecondition);
}

#[tokio::test]
async fn a_daemon_that_stops_says_so_and_its_host_can_be_forgotten() {
    let served = Served::start(Config::default()).await;
    let daemon = served.settled("a", vec![arrived(1, 900)]).await;
    let mut operator = served.operator().await;
    let forget = || ForgetRequest { host: "a".into() };
    let refused = operator.forget(forget()).await.expect_err("it is there");
    assert_eq!(refused.code(), Code::FailedPrecondition);
    daemon.leave().await;
    let told = served.hosts().await;
    assert_eq!((told.hosts[0].connected, told.hosts[0].left), (false, true), "{told:?}");
    assert!(told.software.starts_with("laxity-coordinator "), "{told:?}");
    operator.forget(forget()).await.expect("it is gone");
    assert!(served.hosts().await.hosts.is_empty());
}

#[tokio::test]
async fn health_and_reflection_answer() {
    let served = Served::start(Config::default()).await;
    let service = "laxity.v1.Coordination".to_owned();
    let mut health = HealthClient::new(served.channel().await);
    let checked = health.check(HealthCheckRequest { service }).await;
    assert_eq!(checked.expect("answers").into_inner().status, 1);
    let asked = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let answer = ServerReflectionClient::new(served.channel().await)
        .server_reflection_info(tokio_stream::once(asked))
        .await
        .expect("answers")
        .into_inner()
        .message()
        .await
        .expect("answers")
        .and_then(|answer| answer.message_response);
    let Some(MessageResponse::ListServicesResponse(services)) = answer else {
        panic!("{answer:?}");
    };
    let names: Vec<&str> = services.service.iter().map(|one| one.name.as_str()).collect();
    assert!(
        names.contains(&"laxity.v1.Coordination") && names.contains(&"laxity.v1.Operator"),
        "{names:?}"
    );
}
