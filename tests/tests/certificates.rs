//! Tests of a cluster with TLS that consists of the real programs: `laxity certs`, a coordinator,
//! daemons and `laxity cluster`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use laxity_client::{Client, Hint, Options};
use nix::sys::signal::Signal;

use crate::process::{Daemon, PATIENCE, Said, binary, coordinator, eventually, signal, words};

/// Runs `laxity` without the caller's variables for another cluster.
fn laxity(arguments: &[&str]) -> Said {
    let mut laxity = Command::new(binary("laxity"));
    for name in ["CA", "CERT", "KEY", "COORDINATOR"] {
        laxity.env_remove(format!("LAXITY_{name}"));
    }
    Said::of(laxity.args(arguments))
}

/// A folder with certificates that `laxity certs` made.
struct Certs(PathBuf);

impl Certs {
    fn make(folder: &Path, arguments: &[&str]) -> Self {
        let out = folder.display().to_string();
        laxity(&[&["certs", "--out", &out], arguments].concat()).good();
        Self(folder.to_owned())
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    fn cluster(&self, endpoint: &str, stem: &str, arguments: &[&str]) -> Said {
        let file = |name: &str| self.file(name);
        let (ca, cert, key) =
            (file("ca.crt"), file(&format!("{stem}.crt")), file(&format!("{stem}.key")));
        let tls = format!("--endpoint {endpoint} --ca {ca} --cert {cert} --key {key}");
        laxity(&[&["cluster"], arguments, &words(&tls)].concat())
    }

    fn section(&self, endpoint: &str, host: &str, stem: &str) -> String {
        format!(
            "[coordinator]\nendpoint = {endpoint:?}\nhost = {host:?}\nca = {:?}\ncert = {:?}\nkey \
             = {:?}\nbackoff_min = \"10ms\"\nbackoff_max = \"100ms\"\n",
            self.file("ca.crt"),
            self.file(&format!("{stem}.crt")),
            self.file(&format!("{stem}.key")),
        )
    }
}

#[test]
fn a_cluster_runs_on_what_laxity_certs_made() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| {
        let path = folder.path().join(name);
        fs::create_dir_all(&path).expect("a folder");
        path
    };
    let roles =
        "--coordinator coord1.example,127.0.0.1 --daemon host1 --viewer alice --operator bob";
    let certs = Certs::make(&at("certs"), &words(roles));
    let tls = format!(
        "log = \"warn\"\n[tls]\ncert = {:?}\nkey = {:?}\nclient_ca = {:?}\n",
        certs.file("coordinator-coord1.example.crt"),
        certs.file("coordinator-coord1.example.key"),
        certs.file("ca.crt"),
    );
    let (_coordinator, address) = coordinator(folder.path(), &tls);
    let endpoint = &format!("https://{address}");

    let one = certs.section(endpoint, "host1", "daemon-host1");
    let one = Daemon::start(&at("one"), &one);
    let client = Client::attach(Options {
        socket: one.socket(),
        name: "engine".into(),
        attach_timeout: PATIENCE,
        ..Options::default()
    });
    client.lane().hint(Hint::BatchBegin { batch: 7, layers: 8, layer_time_ns: 1_000_000 });
    eventually("host1 follows the coordinator's order", || {
        let cluster = one.status().cluster.expect("configured");
        cluster.connected && cluster.order == "cluster"
    });
    // The CA signs a later certificate, and no program is restarted for it.
    let certs = Certs::make(&certs.0, &["--daemon", "host2"]);
    let two = certs.section(endpoint, "host2", "daemon-host2");
    let two = Daemon::start(&at("two"), &two);
    eventually("host2 is let in", || two.status().cluster.expect("configured").connected);
    // This host has the certificate of another host.
    let liar = certs.section(endpoint, "host3", "daemon-host2");
    let liar = Daemon::start(&at("liar"), &liar);
    eventually("it is refused and says why", || {
        let cluster = liar.status().cluster.expect("configured");
        cluster.problem.contains("yours is for daemon/host2") && cluster.order == "own"
    });
    let control = liar.control().display().to_string();
    let page = laxity(&["status", "--control", &control]).stdout;
    assert!(page.contains("needs a certificate for laxity://daemon/host3"), "{page}");

    let hosts = certs.cluster(endpoint, "viewer-alice", &["hosts"]);
    let page = hosts.all();
    assert!(hosts.status.success() && page.contains("host1") && page.contains("host2"), "{page}");
    assert!(!page.contains("host3"), "{page}");
    eventually("its batch is there", || {
        let batches = certs.cluster(endpoint, "viewer-alice", &["batches"]);
        batches.status.success() && batches.all().contains("host1")
    });
    let set = ["policy", "set", "drop_budget=5"];
    let refused = certs.cluster(endpoint, "viewer-alice", &set);
    assert_eq!(refused.status.code(), Some(1));
    let why = refused.all();
    assert!(why.contains("laxity://operator/NAME") && why.contains("viewer/alice"), "{why}");
    let done = certs.cluster(endpoint, "operator-bob", &set);
    assert!(done.status.success() && done.all().contains("operator/bob"), "{}", done.all());
    let daemon = certs.cluster(endpoint, "daemon-host1", &["hosts"]);
    assert_eq!(daemon.status.code(), Some(1), "{}", daemon.all());
}

#[test]
fn certificates_are_listed_private_and_never_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("new").display().to_string();
    let certs = |arguments: &[&str]| laxity(&[&["certs", "--out", &out], arguments].concat());
    let made = certs(&["--daemon", "a,b", "--days", "7", "--json"]);
    let json = made.good().json();
    let made = json["made"].as_array().expect("a list");
    let roles: Vec<_> = made.iter().map(|one| one["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["ca", "daemon", "daemon"]);
    assert_eq!(made[2]["names"][0], "b");
    for one in made {
        let key = one["key"].as_str().expect("a path");
        let mode = fs::metadata(key).expect("written").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{key}");
        assert!(Path::new(one["certificate"].as_str().unwrap()).exists());
    }
    let life = made[0]["valid_until_s"].as_i64() > made[1]["valid_until_s"].as_i64();
    assert!(life, "the CA outlives its certificates: {json}");

    let key = fs::read(Path::new(&out).join("daemon-a.key")).unwrap();
    let again = certs(&["--daemon", "c", "--daemon", "a"]);
    assert_eq!(again.status.code(), Some(1));
    assert!(again.all().contains("daemon-a.crt is there already"), "{}", again.all());
    assert_eq!(fs::read(Path::new(&out).join("daemon-a.key")).unwrap(), key);
    assert!(!Path::new(&out).join("daemon-c.crt").exists());

    let page = certs(&words("--coordinator c1 --daemon c --viewer v")).all();
    for word in
        ["[tls]", "client_ca", "[coordinator]", "https://c1:7471", "laxity cluster hosts", "ca.key"]
    {
        assert!(page.contains(word), "{word}: {page}");
    }
    for wrong in [&[][..], &["--daemon", "a", "--days", "0"]] {
        assert_eq!(certs(wrong).status.code(), Some(2), "{wrong:?}");
    }
    let odd = certs(&["--daemon", "a/b"]);
    assert!(odd.status.code() == Some(1) && odd.all().contains("`a/b`"), "{}", odd.all());
}

#[test]
fn a_load_gets_orders_from_its_coordinator() {
    let load = words("cluster load --daemons 3 --batches 6 --rate 50 --duration 1s --json -");
    let json = laxity(&load).good().json();
    assert!(json["answered"].as_u64() > Some(0), "{json}");
}

/// Starts a load, and returns it with the number of its coordinator once daemons are connected.
/// What it says goes to a file: a coordinator that outlived it would keep a pipe open.
fn load(folder: &Path) -> (Child, u32) {
    let said = fs::File::create(folder.join("said")).expect("a file");
    let mut load = Command::new(binary("laxity-lab"));
    load.args(words("cluster-load --daemons 4 --batches 20 --duration 60s"));
    load.env("TMPDIR", folder.join("tmp")).stdin(Stdio::null()).stdout(Stdio::null());
    let load = load.stderr(said).spawn().expect("laxity-lab runs");
    let children = format!("/proc/{0}/task/{0}/children", load.id());
    let mut coordinator = None;
    eventually("it starts a coordinator with a socket for each daemon", || {
        let text = fs::read_to_string(&children).unwrap_or_default();
        coordinator = text.split_whitespace().next().and_then(|pid| pid.parse::<u32>().ok());
        let files = coordinator.and_then(|pid| fs::read_dir(format!("/proc/{pid}/fd")).ok());
        let links =
            files.into_iter().flatten().flatten().filter_map(|f| fs::read_link(f.path()).ok());
        links.filter(|link| link.to_string_lossy().starts_with("socket:")).count() >= 5
    });
    (load, coordinator.expect("it has one"))
}

#[test]
fn a_load_and_its_coordinator_end_together() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("tmp")).expect("a folder");
    let (mut killed, coordinator) = load(folder.path());
    signal(killed.id(), Signal::SIGKILL);
    killed.wait().expect("ours");
    eventually("the coordinator ends, or is a zombie of whoever took it over", || {
        let stat = fs::read_to_string(format!("/proc/{coordinator}/stat"));
        stat.map_or(true, |stat| stat.contains(") Z "))
    });
    let left = fs::read_dir(folder.path().join("tmp")).expect("a folder").count();
    assert_eq!(left, 0, "files are left");

    let (mut bereft, coordinator) = load(folder.path());
    signal(coordinator, Signal::SIGKILL);
    assert_eq!(bereft.wait().expect("ours").code(), Some(1));
    let said = fs::read_to_string(folder.path().join("said")).expect("written");
    assert!(said.contains("was killed by SIGKILL") && !said.contains("h2"), "{said}");
}
