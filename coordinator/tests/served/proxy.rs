//! A proxy between coordinators and etcd that delays saves of the state. A save goes on when its
//! caller has given up, as in a slow network.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::{Request, Response};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::time::sleep;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::server::NamedService;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};

/// Returns the delays of the next save: before etcd gets it, and before its answer goes back.
pub(crate) type Delays = Arc<Mutex<dyn FnMut() -> [Duration; 2] + Send>>;

/// Delays half of the saves by up to 1.5 s, on the way to etcd or back.
pub(crate) fn at_random(seed: u64) -> Delays {
    let mut random = SmallRng::seed_from_u64(seed);
    Arc::new(Mutex::new(move || {
        let late = Duration::from_millis(random.random_range(0..1500));
        let mut delays = [Duration::ZERO; 2];
        if let Some(delay) = delays.get_mut(random.random_range(0..4_usize)) {
            *delay = late;
        }
        delays
    }))
}

/// Serves etcd's leases, or its keys.
#[derive(Clone)]
struct Proxy<const LEASE: bool>(Channel, Delays);

impl<const LEASE: bool> NamedService for Proxy<LEASE> {
    const NAME: &'static str = if LEASE { "etcdserverpb.Lease" } else { "etcdserverpb.KV" };
}

impl<const LEASE: bool> Service<Request<Body>> for Proxy<LEASE> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let Self(mut etcd, delays) = self.clone();
        let forwarded = tokio::spawn(async move {
            let (head, body) = request.into_parts();
            let body = body.collect().await?.to_bytes();
            // Only the state has revisions.
            let is_save = body.windows(9).any(|word| word == b"revisions");
            let [before, after] =
                if is_save { delays.lock().expect("no panic")() } else { [Duration::ZERO; 2] };
            sleep(before).await;
            let lost = |error: tonic::transport::Error| Status::unavailable(error.to_string());
            core::future::poll_fn(|context| etcd.poll_ready(context)).await.map_err(lost)?;
            let answer = etcd.call(Request::from_parts(head, Body::new(Full::from(body)))).await;
            sleep(after).await;
            answer.map_err(lost)
        });
        Box::pin(
            async move { Ok(forwarded.await.expect("no panic").unwrap_or_else(Status::into_http)) },
        )
    }
}

/// Serves in front of the etcd at `etcd`. Returns the address.
pub(crate) fn start(host: &str, etcd: &str, delays: &Delays) -> String {
    let address = format!("{host}:0").parse().expect("an address");
    let incoming = TcpIncoming::bind(address).expect("a free port");
    let address = incoming.local_addr().expect("bound").to_string();
    let etcd = Endpoint::from_shared(format!("http://{etcd}")).expect("a URL").connect_lazy();
    let server = Server::builder()
        .add_service(Proxy::<false>(etcd.clone(), Arc::clone(delays)))
        .add_service(Proxy::<true>(etcd, Arc::clone(delays)));
    tokio::spawn(server.serve_with_incoming(incoming));
    address
}
