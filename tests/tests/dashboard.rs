//! Asks a real Prometheus every query of the dashboard, about a real daemon and coordinator.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use laxity_client::{Client, Flow, Options, Stage};
use laxity_tests::{Need, skip};

use crate::process::{Daemon, Killed, PATIENCE, Said, binary, coordinator, eventually};
use crate::sources::text;

/// Returns an address of this machine that nothing listens on.
fn free() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("bound").to_string()
}

/// Starts Prometheus with the two jobs that the dashboard names.
fn prometheus(folder: &Path, daemon: &str, coordinator: &str, listen: &str) -> Killed {
    let file = folder.join("prometheus.yml");
    let job = |name, target| {
        format!("  - job_name: {name}\n    static_configs:\n      - targets: [\"{target}\"]\n")
    };
    let jobs = job("laxityd", daemon) + &job("laxity-coordinator", coordinator);
    let text = format!("global:\n  scrape_interval: 500ms\nscrape_configs:\n{jobs}");
    fs::write(&file, text).expect("written");
    let log = fs::File::create(folder.join("prometheus.log")).expect("a file");
    let child = Command::new("prometheus")
        .arg(format!("--config.file={}", file.display()))
        .arg(format!("--storage.tsdb.path={}", folder.join("data").display()))
        .arg(format!("--web.listen-address={listen}"))
        .stderr(log)
        .spawn()
        .expect("it was found");
    Killed(child)
}

/// Returns the series of a query, or why Prometheus refuses it.
fn ask(server: &str, query: &str) -> Result<Vec<serde_json::Value>, String> {
    let server = format!("http://{server}");
    let said = Said::of(
        Command::new("promtool").args(["query", "instant", "--format=json", &server, query]),
    );
    if !said.status.success() {
        return Err(said.all());
    }
    serde_json::from_str(&said.stdout).map_err(|error| format!("{error}: {}", said.stdout))
}

/// Returns the title and query of each target of the dashboard.
fn queries() -> Vec<(String, String)> {
    let dashboard: serde_json::Value =
        serde_json::from_str(&text("dist/grafana/laxity.json")).expect("JSON");
    let string = |value: &serde_json::Value| value.as_str().expect("a string").to_owned();
    let panels = dashboard["panels"].as_array().expect("panels");
    let targets = panels.iter().filter_map(|panel| Some((panel, panel["targets"].as_array()?)));
    let pairs = targets.flat_map(|(panel, targets)| {
        targets.iter().map(|target| (string(&panel["title"]), string(&target["expr"])))
    });
    pairs.collect()
}

fn send(socket: &Path, until: Instant) {
    let options = Options { socket: socket.into(), name: "job".into(), ..Options::default() };
    let client = Client::attach(options);
    let mut lane = client.lane();
    while Instant::now() < until {
        for stage in [Stage::KvReuse, Stage::Collective, Stage::P2d] {
            let mut ticket = lane.submit(&Flow { stage, bytes: 256 << 10, ..Flow::default() });
            while !ticket.is_done() {
                let permit = lane.wait(&mut ticket);
                lane.complete(&ticket, permit.bytes);
            }
        }
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn each_query_of_the_dashboard_has_an_answer_from_what_is_really_exported() {
    for tool in ["prometheus", "promtool"] {
        if Command::new(tool).arg("--version").output().is_err() {
            return skip(Need::Machine, format!("there is no {tool} (make setup-kubernetes)"));
        }
    }
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let [of_daemon, of_coordinator, server] = [(); 3].map(|()| free());
    let exporting = format!("metrics = \"{of_coordinator}\"\nlog = \"error\"\n");
    let (_coordinator, endpoint) = coordinator(folder, &exporting);
    let mut daemon = Daemon::configured(
        folder,
        &format!(
            "[coordinator]\nendpoint = \"http://{endpoint}\"\nhost = \"a\"\n\
             [[nic]]\nname = \"eth0\"\nrate = \"1Gbit\"\nchunk = \"64KiB\"\nwindow = \"256KiB\"\n"
        ),
    );
    let metrics = format!("metrics=\"{of_daemon}\"");
    daemon.launch_by(Command::new(binary("laxityd")).args(["--set", &metrics]));
    let _prometheus = prometheus(folder, &of_daemon, &of_coordinator, &server);
    send(&daemon.socket(), Instant::now() + Duration::from_secs(3));
    // Rates need two scrapes.
    let scrapes = |count: u32| {
        let query = format!("sum(count_over_time(up[1m]) >= {count} and up == 1)");
        ask(&server, &query).is_ok_and(|series| !series.is_empty())
    };
    eventually("both are scraped", || scrapes(4));

    let queries = queries();
    assert!(queries.len() > 35, "{}", queries.len());
    let begun = Instant::now();
    for (title, query) in queries {
        let filled = query
            .replace("$__rate_interval", "1m")
            .replace("$coordinator", "laxity-coordinator")
            .replace("$daemon", "laxityd")
            .replace("$host", ".*");
        assert!(!filled.contains('$'), "{title}: a variable that this test does not know: {query}");
        let series = ask(&server, &filled).unwrap_or_else(|why| panic!("{title}: {why}"));
        // Panels with these comparisons show errors, and there are none.
        let is_calm = filled.contains(" < ") || filled.contains(" == 0");
        assert_eq!(series.is_empty(), is_calm, "{title}: {filled}: {series:?}");
    }
    assert!(begun.elapsed() < PATIENCE);
}
