//! Tests of `laxity cluster` against a real coordinator with daemons.

#[path = "../../../coordinator/tests/support/mod.rs"]
#[expect(dead_code, reason = "the page's tests use the rest")]
mod support;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use laxity_coordinator::tls::TlsConfig;
use laxity_trial::certs::{self, Subject};
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, Issuer, KeyPair, date_time_ymd};

use self::support::{Fixture, PATIENCE, Script, batch, config};

fn laxity(endpoint: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_laxity"));
    command
        .arg("cluster")
        .args(arguments)
        .env("LAXITY_COORDINATOR", endpoint)
        .env_remove("LAXITY_CA")
        .env_remove("LAXITY_CERT")
        .env_remove("LAXITY_KEY");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

struct Cluster {
    _running: Fixture,
    endpoint: String,
}

impl Cluster {
    fn start() -> Self {
        let prefill = vec![
            batch(101, &[(1, 60_000, 64), (2, 90_000, 512)]),
            batch(u64::MAX, &[(3, 120_000, 2048)]),
            batch(103, &[(6, 20_000, 9_000_000)]),
        ];
        let mut evil = Script::new("decode-0\u{202e}", Vec::new());
        evil.software = "\u{1b}]0;owned\u{7}".into();
        evil.nic = "eth\u{1b}[2J0".into();
        let fixture = Fixture::start(config(), vec![Script::new("prefill-0", prefill), evil]);
        fixture.state(|state| {
            state["totals"]["connected"] == 2
                && state["trouble"].as_array().is_some_and(|all| !all.is_empty())
        });
        let endpoint = format!("http://{}", fixture.served.address);
        Self { _running: fixture, endpoint }
    }

    fn run(&self, arguments: &[&str]) -> Output {
        laxity(&self.endpoint, arguments).output().expect("laxity runs")
    }

    fn says(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        let said = text(&output.stdout);
        let wild = said.chars().find(|&c| (c.is_control() && c != '\n') || c == '\u{202e}');
        assert_eq!(wild, None, "{arguments:?}: {said:?}");
        said
    }

    fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let mut arguments = arguments.to_vec();
        arguments.push("--json");
        let output = self.run(&arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    fn fails(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        text(&output.stderr)
    }
}

#[test]
fn hosts_and_batches_are_listed_and_a_batch_is_explained() {
    let cluster = Cluster::start();
    let hosts = cluster.says(&["hosts"]);
    assert!(hosts.starts_with("2 of 2 hosts connected; term 7"), "{hosts}");
    assert!(hosts.contains("prefill-0") && hosts.contains("decode-0\\u{202e}"), "{hosts}");
    let one = cluster.says(&["hosts", "prefill-0"]);
    assert!(one.contains("mlx5_0 egress") && one.contains("46.6 GiB/s"), "{one}");
    assert!(!one.contains("decode-0"), "{one}");
    let json = cluster.json(&["hosts"]);
    assert_eq!(json["hosts"][1]["host"], "prefill-0");
    assert_eq!(json["hosts"][1]["ports"][0]["direction"], "egress");
    assert!(cluster.fails(&["hosts", "nobody"]).contains("knows no host nobody"));

    let batches = cluster.says(&["batches"]);
    for word in ["3 active batches", "101", "18446744073709551615", "prefill-0"] {
        assert!(batches.contains(word), "{word}: {batches}");
    }
    let trouble = cluster.says(&["batches", "--in-trouble"]);
    assert!(trouble.starts_with("1 of 3 active batches") && trouble.contains("103"), "{trouble}");
    let head = cluster.says(&["batches", "--limit", "1"]);
    assert!(head.starts_with("The first 1 of 3"), "{head}");
    let of_decode = cluster.says(&["batches", "--host", "decode-0"]);
    assert!(of_decode.starts_with("None of the 3"), "{of_decode}");
    let json = cluster.json(&["batches"]);
    assert_eq!(json["total"], 3);
    let ids: Vec<&str> = json["batches"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|it| it["batch"].as_str())
        .collect();
    assert!(ids.contains(&"18446744073709551615"), "{json}");

    let told = cluster.says(&["explain", "101"]);
    for word in ["Batch 101 of prefill-0", "Place ", "Around it in the order", "<- this one"] {
        assert!(told.contains(word), "{word}: {told}");
    }
    let json = cluster.json(&["explain", "103"]);
    assert_eq!(json["status"]["batch"], "103");
    assert_eq!(json["pruned"][0]["request"], "6");
    let unknown = cluster.fails(&["explain", "9"]);
    assert!(
        unknown.contains("no batch 9 is active") && unknown.contains("cluster batches"),
        "{unknown}"
    );
}

#[test]
fn the_policy_is_shown_changed_refused_and_remembered() {
    let cluster = Cluster::start();
    let policy = cluster.says(&["policy", "get"]);
    assert!(
        policy.contains("revision 1 by configuration") && policy.contains("debounce = 3ms"),
        "{policy}"
    );
    let tried = cluster.says(&["policy", "set", "drop_budget=5", "--dry-run"]);
    assert!(tried.contains("revision 1 holds unchanged"), "{tried}");
    let set = cluster.says(&[
        "policy", "set", "drop_budget=5", "debounce=4ms", "--comment", "less\u{1b}[1m", "--expect",
        "1",
    ]);
    assert!(set.contains("revision 2") && set.contains("drop_budget = 5"), "{set}");
    let stale = cluster.fails(&["policy", "set", "drop_budget=6", "--expect", "1"]);
    assert!(stale.contains("revision 2, not 1"), "{stale}");
    let wrong = cluster.fails(&["policy", "set", "correction_permille=1001"]);
    assert!(wrong.contains("correction_permille: 1001 exceeds 1000"), "{wrong}");
    let key = cluster.fails(&["policy", "set", "colour=red"]);
    assert!(key.contains("the keys are"), "{key}");
    let history = cluster.says(&["policy", "history"]);
    assert!(
        history.contains("debounce: 3ms -> 4ms") && history.contains("less\\u{1b}[1m"),
        "{history}"
    );
    let json = cluster.json(&["policy", "history"]);
    assert_eq!(json["current"]["revision"], 2);
    assert_eq!(json["history"][0]["policy"]["debounce_ns"], 3_000_000);
}

#[test]
fn only_a_host_that_is_gone_is_forgotten() {
    let cluster = Cluster::start();
    let there = cluster.fails(&["forget", "prefill-0"]);
    assert!(there.contains("prefill-0 is connected; stop its daemon first"), "{there}");
    let unknown = cluster.fails(&["forget", "prefil-0"]);
    assert!(unknown.contains("no host prefil-0 is known"), "{unknown}");
}

#[test]
fn a_host_is_drained_and_taken_back() {
    let cluster = Cluster::start();
    let drained = cluster.says(&["drain", "prefill-0", "--comment", "new NIC"]);
    assert!(drained.contains("prefill-0 is drained: 3 batches"), "{drained}");
    assert!(cluster.says(&["hosts"]).contains("drained"));
    assert!(cluster.says(&["drain", "prefill-0", "--undo"]).contains("back in"));
    let again = cluster.fails(&["drain", "prefill-0", "--undo"]);
    assert!(again.contains("is not drained"), "{again}");
    let unknown = cluster.says(&["drain", "prefil-0"]);
    assert!(unknown.contains("check the name"), "{unknown}");
    assert_eq!(cluster.json(&["drain", "prefil-0", "--undo"])["drained"], false);
}

#[test]
fn watch_writes_a_line_per_event_and_ends_when_nobody_reads() {
    let cluster = Cluster::start();
    let mut child = laxity(&cluster.endpoint, &["watch", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("laxity runs");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let mut next = |wanted: &str| loop {
        let line = lines.next().expect("it goes on").expect("text");
        let event: serde_json::Value = serde_json::from_str(&line).expect("an object per line");
        if event["event"] == wanted {
            break event;
        }
    };
    // After the first event the watch is subscribed.
    assert_eq!(next("run")["batches"], 3);
    cluster.says(&["policy", "set", "drop_budget=7"]);
    assert_eq!(next("policy")["policy"]["drop_budget"], 7);
    cluster.says(&["drain", "prefill-0"]);
    let host = next("host");
    assert_eq!((&host["host"], &host["drained"]), (&"prefill-0".into(), &true.into()));
    drop(lines);
    let begun = Instant::now();
    while child.try_wait().expect("ours").is_none() {
        assert!(begun.elapsed() < PATIENCE, "it writes to nobody");
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut told = laxity(&cluster.endpoint, &["watch", "--kinds", "policy,hosts"])
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("laxity runs");
    std::thread::sleep(Duration::from_millis(500));
    drop(cluster);
    let status = told.wait().expect("it ends");
    assert_eq!(status.code(), Some(1), "the coordinator stopped");
    let _ = told.stderr.take();
}

#[test]
fn a_coordinator_that_is_not_there_or_says_nothing_is_an_error_with_a_next_step() {
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = nobody.local_addr().expect("its address");
    // The kernel accepts the connection, and nothing answers.
    let silent = laxity(&format!("http://{address}"), &["hosts", "--timeout-ms", "300"])
        .output()
        .expect("laxity runs");
    assert_eq!(silent.status.code(), Some(1));
    let said = text(&silent.stderr);
    assert!(said.contains("300ms") && said.contains("--timeout-ms"), "{said}");
    drop(nobody);
    let gone = laxity(&format!("http://{address}"), &["hosts"]).output().expect("laxity runs");
    let said = text(&gone.stderr);
    assert_eq!(gone.status.code(), Some(1));
    assert!(
        said.contains("refused") && said.contains("systemctl status laxity-coordinator"),
        "{said}"
    );
    for (endpoint, arguments, word) in [
        ("127.0.0.1:7471", vec!["hosts"], "write http://HOST:PORT"),
        ("ftp://x", vec!["hosts"], "write http://HOST:PORT"),
        ("https://x:1", vec!["hosts"], "--ca FILE"),
        ("http://x:1", vec!["hosts", "--ca", "/dev/null"], "write https://"),
        (
            "https://x:1",
            vec!["hosts", "--ca", "/nonexistent"],
            "--ca: /nonexistent: cannot be read: No such file",
        ),
        ("https://x:1", vec!["hosts", "--ca", "/dev/zero"], "it is a device"),
    ] {
        let output = laxity(endpoint, &arguments).output().expect("laxity runs");
        assert_eq!(output.status.code(), Some(1), "{endpoint}");
        let said = text(&output.stderr);
        assert!(said.contains(word), "{endpoint}: {said}");
    }
}

#[test]
fn help_has_examples_for_every_command_family() {
    for arguments in [vec!["--help"], vec!["policy", "set", "--help"]] {
        let output = laxity("", &arguments).output().expect("laxity runs");
        assert!(text(&output.stdout).contains("Examples:"), "{arguments:?}");
    }
}

fn authority() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let subjects = [
        Subject::Coordinator(vec!["localhost".into(), "127.0.0.1".into()]),
        Subject::Viewer("v".into()),
    ];
    certs::make(folder.path(), &subjects, 1).expect("made");
    folder
}

/// Writes a certificate that has expired, signed by the CA of the folder.
fn sign_expired(folder: &Path, stem: &str, parameters: CertificateParams) {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).expect("written");
    let key = KeyPair::from_pem(&read("ca.key")).expect("a key");
    let issuer = Issuer::from_ca_cert_pem(&read("ca.crt"), key).expect("a CA");
    let mut parameters = parameters;
    parameters.not_before = date_time_ymd(2020, 1, 1);
    parameters.not_after = date_time_ymd(2021, 1, 1);
    let key = KeyPair::generate().expect("a key");
    let signed = parameters.signed_by(&key, &issuer).expect("signed");
    std::fs::write(folder.join(format!("{stem}.crt")), signed.pem()).expect("written");
    std::fs::write(folder.join(format!("{stem}.key")), key.serialize_pem()).expect("written");
}

fn sealed(folder: &Path, stem: &str) -> Fixture {
    let mut config = config();
    config.tls = Some(TlsConfig {
        cert: folder.join(format!("{stem}.crt")),
        key: folder.join(format!("{stem}.key")),
        client_ca: folder.join("ca.crt"),
    });
    Fixture::start(config, Vec::new())
}

fn refusal(endpoint: &str, ca: &Path, identity: Option<(&Path, &str)>, more: &[&str]) -> String {
    let mut command = laxity(endpoint, &["hosts"]);
    command.args(more).arg("--ca").arg(ca.join("ca.crt"));
    if let Some((folder, stem)) = identity {
        command
            .arg("--cert")
            .arg(folder.join(format!("{stem}.crt")))
            .arg("--key")
            .arg(folder.join(format!("{stem}.key")));
    }
    let output = command.output().expect("laxity runs");
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for empty in ["transport error", "h2 protocol error", "its log has more"] {
        assert!(!said.contains(empty), "{said}");
    }
    said
}

#[test]
fn what_tls_does_not_like_is_said_with_what_to_do() {
    let (ours, theirs) = (authority(), authority());
    let (ours, theirs) = (ours.path(), theirs.path());
    let mut client = CertificateParams::new(Vec::new()).expect("no names");
    client.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    sign_expired(ours, "old-viewer", client);
    let names = vec!["localhost".into(), "127.0.0.1".into()];
    let server = CertificateParams::new(names).expect("names");
    sign_expired(ours, "old-coordinator", server);

    let serving = sealed(ours, "coordinator-localhost");
    let url = format!("https://{}", serving.served.address);
    let viewer = Some((ours, "viewer-v"));
    let looks = laxity(&url, &["hosts", "--ca"])
        .arg(ours.join("ca.crt"))
        .arg("--cert")
        .arg(ours.join("viewer-v.crt"))
        .arg("--key")
        .arg(ours.join("viewer-v.key"))
        .output()
        .expect("laxity runs");
    assert!(looks.status.success(), "{}", text(&looks.stderr));

    let said = refusal(&url, ours, None, &[]);
    assert!(said.contains("set --cert and --key"), "{said}");
    let said = refusal(&url, ours, Some((theirs, "viewer-v")), &[]);
    assert!(said.contains("does not know the CA that signed --cert"), "{said}");
    let said = refusal(&url, ours, Some((ours, "old-viewer")), &[]);
    assert!(said.contains("--cert has expired"), "{said}");
    let said = refusal(&url, theirs, viewer, &[]);
    assert!(said.contains("--ca is not who signed"), "{said}");
    let said = refusal(&url, ours, viewer, &["--server-name", "elsewhere"]);
    assert!(said.contains("set --server-name"), "{said}");
    let said = refusal(&url, ours, Some((ours, "coordinator-localhost")), &[]);
    assert!(said.contains("the coordinator refuses --cert"), "{said}");

    let expired = sealed(ours, "old-coordinator");
    let said = refusal(&format!("https://{}", expired.served.address), ours, viewer, &[]);
    assert!(said.contains("has expired: renew it there"), "{said}");

    // Connect without TLS to a coordinator with TLS, and the reverse.
    let output = laxity(&format!("http://{}", serving.served.address), &["hosts"])
        .output()
        .expect("laxity runs");
    let said = text(&output.stderr);
    assert!(said.contains("https://"), "{said}");
    let plain = Fixture::start(config(), Vec::new());
    let said = refusal(&format!("https://{}", plain.served.address), ours, viewer, &[]);
    assert!(said.contains("does not speak TLS there"), "{said}");
}
