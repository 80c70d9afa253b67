//! Tests of two daemons with the real coordinator.

use std::net::SocketAddr;

use laxity_coordinator::config::Config;
use laxity_coordinator::server::{Coordinator, CoordinatorHandle};
use laxity_wire::v1::operator_client::OperatorClient;
use laxity_wire::v1::{HostStatus, ListHostsRequest};
use nix::sys::signal::Signal;
use tonic::transport::Endpoint;

use crate::support::{eventually, until};
use crate::{attending, begin, cluster};

pub(crate) struct Real {
    pub(crate) address: SocketAddr,
    pub(crate) handle: CoordinatorHandle,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Real {
    fn start(listen: SocketAddr, term: u64) -> Self {
        let config = Config { listen, ..Config::default() };
        Self::with(&config, term)
    }

    pub(crate) fn with(config: &Config, term: u64) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let coordinator = eventually("the address is free", || {
            runtime.block_on(Coordinator::bind(config.clone(), term)).ok()
        });
        let (address, handle) = (coordinator.address().unwrap(), coordinator.handle());
        runtime.spawn(coordinator.run());
        Self { address, handle, runtime: Some(runtime) }
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[test]
fn a_daemon_that_is_stopped_leaves_in_order_and_one_that_is_killed_is_missed() {
    let real = Real::start(SocketAddr::from(([127, 0, 0, 1], 0)), 5);
    let endpoint = format!("http://{}", real.address);
    let (mut one, mut two) = (attending(&endpoint, "one", 1500), attending(&endpoint, "two", 1500));
    until("both attend", || cluster(&one).connected && cluster(&two).connected);
    one.signal(Signal::SIGTERM);
    let stopping = std::time::Instant::now();
    assert!(one.end().success());
    assert!(stopping.elapsed() < std::time::Duration::from_secs(2), "it does not wait for long");
    two.signal(Signal::SIGKILL);
    let _ = two.end();
    let hosts = || {
        let told = real.runtime.as_ref().unwrap().block_on(async {
            let channel = Endpoint::new(endpoint.clone()).unwrap().connect().await.unwrap();
            OperatorClient::new(channel).list_hosts(ListHostsRequest {}).await.unwrap()
        });
        let state = |host: HostStatus| (host.host, host.connected, host.left);
        told.into_inner().hosts.into_iter().map(state).collect::<Vec<_>>()
    };
    let expected = [("one".to_owned(), false, true), ("two".to_owned(), false, false)];
    until("the coordinator has noticed both", || hosts() == expected);

    // Without a stream there is nobody to tell, so a restart is not delayed.
    let mut alone = attending("http://127.0.0.1:9", "alone", 1500);
    alone.signal(Signal::SIGTERM);
    let stopping = std::time::Instant::now();
    assert!(alone.end().success());
    assert!(stopping.elapsed() < std::time::Duration::from_millis(500));
}

#[test]
fn what_one_host_cannot_make_in_time_the_other_learns_from_the_coordinator() {
    let real = Real::start(SocketAddr::from(([127, 0, 0, 1], 0)), 5);
    let endpoint = format!("http://{}", real.address);
    let (one, two) = (attending(&endpoint, "one", 1500), attending(&endpoint, "two", 1500));
    let engines = [one.client("engine"), two.client("engine")];
    // 3 s at 1 Gbit/s carry 375 MB, so request 70 can't meet its deadline. Only the host with these
    // bytes can compute that.
    let heavy = 2_000_000_000;
    begin(&engines[0], 7, &[(70, heavy), (71, 1000)]);
    let pruned = |daemon: &crate::support::Laxityd| daemon.status().totals.pruned_requests;
    until("the first host has an order", || {
        let said = cluster(&one);
        said.order == "cluster" && said.orders > 1 && pruned(&one) == 1
    });
    begin(&engines[1], 7, &[(71, 1000), (70, 0)]);
    until("the second host knows", || cluster(&two).order == "cluster" && pruned(&two) == 1);

    // Whether the coordinator stops or is killed, each daemon goes on with its own order.
    real.handle.stop();
    let address = real.address;
    drop(real);
    until("both are on their own", || {
        let own = |daemon| cluster(daemon).order == "own";
        own(&one) && own(&two) && pruned(&two) == 0
    });
    let again = Real::start(address, 6);
    until("both follow the new one", || {
        let said = [cluster(&one), cluster(&two)];
        let follows = said.iter().all(|said| said.order == "cluster" && said.term == Some(6));
        follows && pruned(&two) == 1
    });
    drop(again);
}
