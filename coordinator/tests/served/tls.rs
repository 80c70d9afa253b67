//! Tests that a peer may do what its certificate allows.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use laxity_coordinator::config::Config;
use laxity_coordinator::tls::TlsConfig;
use laxity_trial::certs::{self, Subject};
use laxity_wire::v1::operator_client::OperatorClient;
use laxity_wire::v1::{GetPolicyRequest, ListHostsRequest, SetPolicyRequest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tonic::Code;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Error, Identity};

use crate::daemon::{Daemon, Served, arrived, hello};

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let subjects = [
        Subject::Coordinator(vec!["localhost".into(), "127.0.0.1".into()]),
        Subject::Daemon("a".into()),
        Subject::Viewer("v".into()),
        Subject::Operator("o".into()),
    ];
    certs::make(folder.path(), &subjects, 1).expect("made");
    folder
}

fn config(folder: &Path) -> Config {
    Config {
        tls: Some(TlsConfig {
            cert: folder.join("coordinator-localhost.crt"),
            key: folder.join("coordinator-localhost.key"),
            client_ca: folder.join("ca.crt"),
        }),
        ..Config::default()
    }
}

fn read(folder: &Path, name: &str) -> Vec<u8> {
    fs::read(folder.join(name)).expect("written")
}

/// Connects with the CA of one folder and a certificate of another.
async fn connect(
    served: &Served,
    trust: &Path,
    certificate: Option<(&Path, &str)>,
) -> Result<Channel, Error> {
    let mut tls = ClientTlsConfig::new()
        .domain_name("localhost")
        .ca_certificate(Certificate::from_pem(read(trust, "ca.crt")));
    if let Some((folder, stem)) = certificate {
        let crt = read(folder, &format!("{stem}.crt"));
        tls = tls.identity(Identity::from_pem(crt, read(folder, &format!("{stem}.key"))));
    }
    let endpoint = Endpoint::from_shared(format!("https://{}", served.address))?;
    endpoint.tls_config(tls)?.connect().await
}

/// Reports whether a connection answers requests. In TLS 1.3 a client learns only from the first
/// read that it was refused.
async fn works(served: &Served, trust: &Path, certificate: Option<(&Path, &str)>) -> bool {
    let Ok(channel) = connect(served, trust, certificate).await else { return false };
    let asked = OperatorClient::new(channel).list_hosts(ListHostsRequest {}).await;
    match asked {
        Ok(_) => true,
        Err(status) => status.code() == Code::PermissionDenied,
    }
}

#[tokio::test]
async fn a_role_may_what_it_is_for_and_nothing_else() {
    let folder = folder();
    let at = folder.path();
    let served = Served::start(config(at)).await;
    let by = async |stem| connect(&served, at, Some((at, stem))).await.expect("greeted");

    let mut daemon = Daemon::attend(by("daemon-a").await, hello("a")).await.expect("itself");
    daemon.snapshot(vec![arrived(1, 900)]).await;
    daemon.settled().await;
    for (stem, host) in [("daemon-a", "b"), ("operator-o", "a"), ("viewer-v", "a")] {
        let mut other = Daemon::attend(by(stem).await, hello(host)).await.expect("answered");
        let refused = other.next().await.expect_err("not its own host");
        assert_eq!(refused.code(), Code::PermissionDenied, "{stem} for {host}");
    }
    let set = SetPolicyRequest::default;
    for (stem, may_look, may_change) in
        [("daemon-a", false, false), ("viewer-v", true, false), ("operator-o", true, true)]
    {
        let mut client = OperatorClient::new(by(stem).await);
        let looked = client.list_hosts(ListHostsRequest {}).await;
        assert_eq!(looked.is_ok(), may_look, "{stem}");
        let changed = client.set_policy(set()).await;
        assert_eq!(changed.is_ok(), may_change, "{stem}");
        if let Err(status) = changed {
            assert_eq!(status.code(), Code::PermissionDenied, "{stem}");
        }
    }
    let mut client = OperatorClient::new(by("viewer-v").await);
    let told = client.get_policy(GetPolicyRequest { history: 0 }).await.expect("told");
    assert_eq!(told.into_inner().current.expect("one").author, "operator/o");
}

#[tokio::test]
async fn certificates_are_exchanged_while_it_runs_and_broken_ones_are_not_taken() {
    let (old, new) = (folder(), folder());
    let (old, new) = (old.path(), new.path());
    let served = Served::start(config(old)).await;
    let kept = connect(&served, old, Some((old, "operator-o"))).await.expect("greeted");
    let keys = served.handle.reload(config(new)).expect("taken");
    assert!(keys.iter().all(|key| *key == "listen"), "{keys:?}");
    assert!(works(&served, new, Some((new, "operator-o"))).await);
    assert!(!works(&served, new, Some((old, "operator-o"))).await);
    assert!(!works(&served, new, Some((new, "coordinator-localhost"))).await, "a server's");
    let asked = OperatorClient::new(kept).list_hosts(ListHostsRequest {}).await;
    assert!(asked.is_ok(), "an open connection goes on");
    fs::write(new.join("coordinator-localhost.key"), "nonsense").expect("written");
    let error = served.handle.reload(config(new)).expect_err("broken").to_string();
    assert!(
        error.contains("coordinator-localhost.key") && error.contains("laxity certs"),
        "{error}"
    );
    assert!(works(&served, new, Some((new, "operator-o"))).await, "the old ones hold");
    // A reload does not replace good certificates by ones that daemons would refuse.
    let mut clients = config(new);
    if let Some(tls) = &mut clients.tls {
        tls.cert = new.join("daemon-a.crt");
        tls.key = new.join("daemon-a.key");
    }
    let error = served.handle.reload(clients).expect_err("a daemon's");
    assert!(error.to_string().contains("lacks serverAuth"), "{error}");
    assert!(works(&served, new, Some((new, "operator-o"))).await);
}

#[tokio::test]
async fn a_peer_that_is_refused_after_it_has_spoken_can_still_read_why() {
    let folder = folder();
    let served = Served::start(config(folder.path())).await;
    let mut roots = RootCertStore::empty();
    let ca = CertificateDer::from_pem_file(folder.path().join("ca.crt")).expect("written");
    roots.add(ca).expect("a CA");
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(served.address).await.expect("accepted");
    let name = ServerName::try_from("localhost").expect("a name");
    let connector = TlsConnector::from(Arc::new(config));
    // In TLS 1.3 the client's handshake ends before the server has checked its certificate.
    let mut stream = connector.connect(name, stream).await.expect("greeted");
    for _ in 0..2 {
        stream.write_all(&[0; 4096]).await.expect("not reset");
        stream.flush().await.expect("not reset");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let error = stream.read(&mut [0; 16]).await.expect_err("refused");
    assert!(error.to_string().contains("CertificateRequired"), "{error}");
}
