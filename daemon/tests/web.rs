//! Tests of the host's web page with a real daemon, clients and Chromium. Without Chromium they are
//! skipped. `LAXITY_SCREENSHOTS=FOLDER` keeps a picture.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::Duration;

use laxity_client::{Flow, Stage};
use laxity_tests::browser::{browse, copied, document_when_loaded, part};
use laxity_wire::explain::FlowQuery;
use nix::sys::signal::Signal;

use self::support::{Laxityd, SMALL, flow, send, take, until};

/// Starts a daemon with a page and other settings. Returns it and the page's address.
fn daemon(settings: &str) -> (Laxityd, String) {
    let page = "[web]\nlisten = \"127.0.0.1:0\"\nnames = [\"laxity.example\"]\n";
    let mut daemon = Laxityd::start(&format!("mode = \"enforce\"\n{SMALL}{page}{settings}"));
    let ready = daemon.await_log("laxityd is ready");
    let (_, rest) = ready.split_once("page=").expect("the page's address");
    let address = rest.split_whitespace().next().expect("an address").to_owned();
    (daemon, address)
}

fn get(address: &str, path: &str, host: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("the page listens");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
        .expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

#[test]
fn a_browser_shows_ports_clients_waits_and_what_is_wrong() {
    let (daemon, address) = daemon("");
    let evil = daemon.client("<img src=x>");
    let job = daemon.client("prefill");
    let mut lane = job.lane();
    send(&mut lane, &flow(Stage::P2d, 3 << 20));
    let behind = Flow { stage: Stage::P2d, bytes: 1 << 20, ..Flow::default() };
    let waiting = lane.submit(&behind);
    until("its second flow waits", || daemon.status().ports[0].waiting_flows == 1);
    let url = format!("http://{address}/");
    daemon.control().bypass(true).expect("an operator may");
    let Some(dom) = browse(&["--dump-dom".into()], &url) else { return };
    assert!(part(&dom, "headline").contains("policy laxity, enforce, bypassed"), "{dom}");
    let trouble = part(&dom, "trouble-title");
    assert!(trouble.contains("Bypass is on") && trouble.contains("laxity bypass off"), "{trouble}");
    for word in ["eth0 egress", "eth0 ingress", "119 MiB/s", "window 256 KiB", "prefill→decode"] {
        assert!(part(&dom, "ports-title").contains(word), "{word}: {dom}");
    }
    let changes = part(&dom, "changes-title");
    assert!(changes.contains("bypass is on: everything goes out unscheduled"), "{changes}");
    let clients = part(&dom, "clients-title");
    assert!(clients.contains("prefill") && clients.contains("&lt;img src=x&gt;"), "{clients}");
    assert!(!dom.contains("<img"), "names are text: {dom}");
    assert!(part(&dom, "history-title").contains("MiB were permitted"), "{dom}");
    assert!(part(&dom, "chart").contains("class=\"stage-2\""), "{dom}");
    assert!(part(&dom, "users-title").contains("?user="), "{dom}");
    if let Some(folder) = std::env::var_os("LAXITY_SCREENSHOTS").map(PathBuf::from) {
        let picture = format!("--screenshot={}", folder.join("host.png").display());
        let _ = browse(&[picture, "--window-size=1280,2600".into()], &url);
    }
    let own = nix::unistd::geteuid();
    for (view, hidden) in [("?find=prefill", 1), (&format!("?user={own}"), 0), ("?user=4294", 2)] {
        let dom = browse(&["--dump-dom".into()], &format!("{url}{view}")).expect("Chromium");
        let clients = part(&dom, "clients-title");
        let told = clients.contains(&format!("The filter hides {hidden} of the 2 here."));
        assert_eq!(told, hidden > 0, "{view}: {clients}");
    }
    drop((waiting, evil));
}

#[test]
fn a_browser_explains_the_flows_of_a_process() {
    let (daemon, address) = daemon("[tuning]\ncompletion_timeout = \"10min\"\n");
    let job = daemon.client("decode");
    let mut lane = job.lane();
    // The job completes nothing. On a busy machine the daemon can seem to hang, and then the bytes
    // go unscheduled.
    until("the daemon knows a flow", || {
        let mut ticket = lane.submit(&Flow { request: 7, ..flow(Stage::P2d, 1000) });
        take(&mut lane, &mut ticket, 1000);
        let own = FlowQuery { request: Some(7), ..FlowQuery::default() };
        daemon.control().explain(own).is_ok_and(|told| told.count > 0)
    });
    let dom = |view: &str| browse(&["--dump-dom".into()], &format!("http://{address}/{view}"));
    let pid = format!("#pid={}", std::process::id());
    let Some(of_process) = dom(&pid) else { return };
    assert!(part(&of_process, "clients").contains(&pid), "the process is a link: {of_process}");
    let told = part(&of_process, "explain-title");
    for words in ["of p2d on eth0 egress, request 7", "belongs to `decode`", "has all permits"] {
        assert!(told.contains(words), "{words}: {told}");
    }
    let gone = dom("#flow=999").expect("Chromium is here");
    assert!(part(&gone, "explain-title").contains("No such flow is under way"), "{gone}");
    let waits = dom("#waiting").expect("Chromium is here");
    assert!(part(&waits, "explain-title").contains("No flow waits"), "{waits}");
}

#[test]
fn a_daemon_that_hangs_is_said_to_give_no_answer() {
    let (daemon, address) = daemon("");
    // What a browser has loaded before the daemon hangs. The image fails after the page gave up.
    let get = |path: &str| {
        let answer = get(&address, path, "localhost");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        (head.to_owned(), body.to_owned())
    };
    let copy = copied(get, |path, body| match path {
        "/api/state" => None,
        _ => Some(body.replace("<main>", "<main><img src=\"none\">")),
    });
    daemon.signal(Signal::SIGSTOP);
    let mut stopped = TcpStream::connect(&address).expect("the kernel accepts");
    stopped.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    write!(stopped, "GET /api/state HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    assert!(stopped.read(&mut [0]).is_err(), "a stopped daemon is as silent as the copy");
    let told = document_when_loaded(&format!("http://{copy}/"));
    daemon.signal(Signal::SIGCONT);
    let Some(dom) = told else { return };
    let headline = part(&dom, "headline");
    assert!(headline.contains("No answer from laxityd (signal timed out)"), "{dom}");
}

#[test]
fn the_page_only_shows_and_only_to_those_who_ask_for_it_by_a_known_name() {
    let (daemon, address) = daemon("");
    let state = get(&address, "/api/state", "localhost");
    let (head, body) = state.split_once("\r\n\r\n").expect("a head and a body");
    assert!(head.starts_with("HTTP/1.1 200") && head.contains("default-src 'none'"), "{head}");
    let state: serde_json::Value = serde_json::from_str(body).expect("JSON");
    assert_eq!(state["status"]["pid"], daemon.child.id());
    assert!(get(&address, "/", "laxity.example").starts_with("HTTP/1.1 200"));
    assert!(get(&address, "/", "evil.example").starts_with("HTTP/1.1 421"));
    assert!(get(&address, "/api/bypass", "localhost").starts_with("HTTP/1.1 404"));
    assert!(get(&address, "/api/explain?flow=x", "localhost").starts_with("HTTP/1.1 400"));
}
