//! Tests of the host's web page with a real daemon, clients and Chromium. Without Chromium they are
//! skipped. `LAXITY_SCREENSHOTS=FOLDER` keeps a picture.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;

use laxity_client::{Flow, Stage};
use laxity_tests::browser::{browse, part};

use self::support::{Laxityd, SMALL, flow, send, until};

/// Starts a daemon with a page. Returns it and the page's address.
fn daemon() -> (Laxityd, String) {
    let page = "[web]\nlisten = \"127.0.0.1:0\"\nnames = [\"laxity.example\"]\n";
    let mut daemon = Laxityd::start(&format!("mode = \"enforce\"\n{SMALL}{page}"));
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
    let (daemon, address) = daemon();
    let evil = daemon.client("<img src=x>");
    let job = daemon.client("prefill");
    let mut lane = job.lane();
    send(&mut lane, &flow(Stage::P2d, 3 << 20));
    let behind = Flow { stage: Stage::P2d, bytes: 1 << 20, ..Flow::default() };
    let waiting = lane.submit(&behind);
    until("its second flow waits", || daemon.status().ports[0].waiting_flows == 1);
    daemon.control().bypass(true).expect("an operator may");
    let url = format!("http://{address}/");
    let Some(dom) = browse(&["--dump-dom".into()], &url) else { return };
    assert!(part(&dom, "headline").contains("policy laxity, enforce, bypassed"), "{dom}");
    let trouble = part(&dom, "trouble-title");
    assert!(trouble.contains("Bypass is on") && trouble.contains("laxity bypass off"), "{trouble}");
    for word in ["eth0 egress", "eth0 ingress", "119 MiB/s", "of 256 KiB", "prefill→decode"] {
        assert!(part(&dom, "ports-title").contains(word), "{word}: {dom}");
    }
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
    let only = browse(&["--dump-dom".into()], &format!("{url}?find=prefill")).expect("Chromium");
    assert!(part(&only, "clients-title").contains("The filter hides 1 of the 2 here."), "{only}");
    drop((waiting, evil));
}

#[test]
fn the_page_only_shows_and_only_to_those_who_ask_for_it_by_a_known_name() {
    let (daemon, address) = daemon();
    let state = get(&address, "/api/state", "localhost");
    let (head, body) = state.split_once("\r\n\r\n").expect("a head and a body");
    assert!(head.starts_with("HTTP/1.1 200") && head.contains("default-src 'none'"), "{head}");
    let state: serde_json::Value = serde_json::from_str(body).expect("JSON");
    assert_eq!(state["status"]["pid"], daemon.child.id());
    assert!(get(&address, "/", "laxity.example").starts_with("HTTP/1.1 200"));
    assert!(get(&address, "/", "evil.example").starts_with("HTTP/1.1 421"));
    assert!(get(&address, "/api/bypass", "localhost").starts_with("HTTP/1.1 404"));
}
