//! Tests of daemons and coordinators with TLS: accepted and refused certificates, the reasons in
//! errors, and redirections that would leave TLS.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use laxity_client::Stage;
use laxity_coordinator::config::Config;
use laxity_coordinator::tls::TlsConfig;
use laxity_trial::certs::{self, Subject};
use laxity_wire::ClusterStatus;
use laxity_wire::v1::{Goodbye, GoodbyeReason, from_coordinator::Message};

use crate::fake::Fake;
use crate::real::Real;
use crate::support::{Laxityd, SMALL, flow, until};
use crate::{begin, cluster};

/// A folder with the certificates of a separate CA.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let subjects = [
            Subject::Coordinator(vec!["localhost".into(), "127.0.0.1".into()]),
            Subject::Daemon("host-a".into()),
            Subject::Daemon("host-b".into()),
        ];
        certs::make(folder.path(), &subjects, 1).unwrap();
        Self(folder)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Starts a real coordinator with TLS.
    fn serve(&self) -> Real {
        let config = Config {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            tls: Some(TlsConfig {
                cert: self.at("coordinator-localhost.crt"),
                key: self.at("coordinator-localhost.key"),
                client_ca: self.at("ca.crt"),
            }),
            ..Config::default()
        };
        Real::with(&config, 5)
    }
}

/// Returns lines of `[coordinator]` for a certificate of a folder.
fn shows(folder: &Folder, stem: &str) -> String {
    let file = |extension: &str| folder.at(&format!("{stem}.{extension}"));
    format!("cert = {:?}\nkey = {:?}", file("crt"), file("key"))
}

/// Starts the daemon of host-a, with more lines in `[coordinator]`.
fn daemon(endpoint: &str, ca: &Path, lines: &str) -> Laxityd {
    Laxityd::start(&format!(
        "[coordinator]\nendpoint = {endpoint:?}\nhost = \"host-a\"\nca = {ca:?}\n{lines}\n\
         backoff_min = \"10ms\"\nbackoff_max = \"50ms\"\n{SMALL}"
    ))
}

fn url(real: &Real) -> String {
    format!("https://{}", real.address)
}

/// Checks that the daemon schedules without a coordinator.
fn goes_on(daemon: &Laxityd) {
    assert_eq!(cluster(daemon).order, "own");
    let (_client, mut lane) = daemon.worker("worker");
    let mut ticket = lane.submit(&flow(Stage::P2d, 1000));
    let permit = lane.wait(&mut ticket);
    assert!(permit.last && !permit.bypassed, "{permit:?}");
}

/// Checks that the daemon was refused twice for this reason, logs it, and goes on by itself.
fn refused(daemon: &mut Laxityd, reason: &str) {
    let mut last = ClusterStatus::default();
    let begun = std::time::Instant::now();
    while !(last.failures >= 2 && last.problem.contains(reason)) {
        assert!(begun.elapsed() < crate::support::SOON, "`{reason}` is not why: {last:?}");
        assert!(!last.connected, "{last:?}");
        std::thread::sleep(std::time::Duration::from_millis(5));
        last = cluster(daemon);
    }
    assert_eq!(last.connects, 0, "{last:?}");
    let line = daemon.await_log(reason);
    assert!(line.contains("WARN"), "{line}");
    goes_on(daemon);
}

fn follows(daemon: &Laxityd) {
    let client = daemon.client("engine");
    begin(&client, 7, &[(70, 1000)]);
    until("the order is in force", || {
        let said = cluster(daemon);
        said.connected && said.order == "cluster" && said.term == Some(5)
    });
}

#[test]
fn a_daemon_with_its_certificate_attends_and_gets_an_order() {
    let folder = Folder::new();
    let real = folder.serve();
    let own = shows(&folder, "daemon-host-a");
    follows(&daemon(&url(&real), &folder.at("ca.crt"), &own));

    // The name in the certificate differs from the endpoint.
    let named = format!("server_name = \"localhost\"\n{own}");
    follows(&daemon(&url(&real), &folder.at("ca.crt"), &named));
    let named = format!("server_name = \"elsewhere\"\n{own}");
    let mut lost = daemon(&url(&real), &folder.at("ca.crt"), &named);
    refused(&mut lost, "coordinator.server_name");
}

#[test]
fn no_certificate_or_one_of_another_ca_is_refused_on_either_side_and_says_why() {
    let (ours, theirs) = (Folder::new(), Folder::new());
    let real = ours.serve();
    let mut without = daemon(&url(&real), &ours.at("ca.crt"), "");
    refused(&mut without, "set coordinator.cert and coordinator.key");
    let foreign = shows(&theirs, "daemon-host-a");
    let mut foreign = daemon(&url(&real), &ours.at("ca.crt"), &foreign);
    refused(&mut foreign, "does not know the CA that signed");
    let own = shows(&ours, "daemon-host-a");
    let mut wary = daemon(&url(&real), &theirs.at("ca.crt"), &own);
    refused(&mut wary, "coordinator.ca is not who signed");
    // One side uses TLS and the other does not.
    let mut plain = crate::attending(&format!("http://{}", real.address), "host-a", 60_000);
    until("it has tried", || cluster(&plain).failures >= 2);
    plain.await_log("no coordinator");
    goes_on(&plain);
    let fake = Fake::start();
    let mut sealed = daemon(&format!("https://{}", fake.address), &ours.at("ca.crt"), &own);
    refused(&mut sealed, "does not speak TLS there");
    assert!(fake.is_alone());
}

#[test]
fn files_that_change_are_used_by_the_next_connection() {
    let folder = Folder::new();
    let real = folder.serve();
    let (crt, key) = (folder.at("mine.crt"), folder.at("mine.key"));
    let put = |stem: &str| {
        fs::copy(folder.at(&format!("{stem}.crt")), &crt).unwrap();
        fs::copy(folder.at(&format!("{stem}.key")), &key).unwrap();
    };
    let mine = format!("cert = {crt:?}\nkey = {key:?}");
    // The certificate does not exist yet, and the daemon still starts.
    let mut daemon = daemon(&url(&real), &folder.at("ca.crt"), &mine);
    refused(&mut daemon, "mine.crt: cannot be read");
    put("daemon-host-b");
    refused(&mut daemon, "yours is for daemon/host-b");
    put("daemon-host-a");
    follows(&daemon);

    // If the certificate is replaced, the open connection stays, and the next connection uses the
    // new certificate.
    put("daemon-host-b");
    assert!(cluster(&daemon).connected);
    let connects = cluster(&daemon).connects;
    fs::write(&key, "nonsense").unwrap();
    real.handle.stop();
    drop(real);
    daemon.await_log("holds no private key in PEM");
    let said = cluster(&daemon);
    assert!(!said.connected && said.connects == connects, "{said:?}");
}

#[test]
fn a_goodbye_leads_to_the_leader_with_the_same_certificates_and_never_out_of_tls() {
    let folder = Folder::new();
    let (first, leader, plain) =
        (Fake::start_tls(folder.0.path()), Fake::start_tls(folder.0.path()), Fake::start());
    let own = shows(&folder, "daemon-host-a");
    // `insecure` must not allow a way out of TLS, even if the operator has set it.
    let lines = format!("insecure = true\n{own}");
    let endpoint = format!("https://{}", first.address);
    let daemon = daemon(&endpoint, &folder.at("ca.crt"), &lines);
    let send = |to: String| {
        let peer = first.peer();
        peer.say(Message::Goodbye(Goodbye {
            reason: GoodbyeReason::NotLeader as i32,
            leader: to,
            ..Goodbye::default()
        }));
        peer
    };
    for to in [
        format!("http://{}", plain.address),
        format!("HTTP://{}", plain.address),
        format!("https://{}", plain.address),
        plain.address.to_string(),
    ] {
        // After each redirection, the daemon comes back here.
        drop(send(to));
    }
    let told = send(leader.address.to_string());
    assert_eq!(leader.peer().hello.host, "host-a");
    drop(told);
    drop(send(format!("https://{}", leader.address)));
    leader.welcomed(5);
    assert!(plain.is_alone(), "it went where there is no TLS");
    assert!(cluster(&daemon).connected);
}
