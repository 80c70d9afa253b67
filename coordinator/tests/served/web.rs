//! Tests of the web page with a real coordinator, daemons and Chromium. Without Chromium they are
//! skipped.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use laxity_coordinator::config::Config;
use laxity_tests::browser::{browse, copied, part};
use laxity_wire::v1::event::Event as Kind;
use laxity_wire::v1::{
    BatchFinished, BatchProgress, BatchStarted, DrainRequest, HostSettings, Policy, PortLoad,
    RequestEnded, SetPolicyRequest,
};

use crate::support::{Fixture, Script, ask, batch, config};

fn ended(request: u64) -> Kind {
    Kind::RequestEnded(RequestEnded { request })
}

fn loaded(port: u32, permille: u32, levels_mib: &[u64], stages_mib: &[u64]) -> Kind {
    let bytes = |mib: &[u64]| mib.iter().map(|mib| mib << 20).collect::<Vec<u64>>();
    Kind::PortLoad(PortLoad {
        port,
        load_permille: permille,
        queued_bytes: levels_mib.iter().sum::<u64>() << 20,
        queued_level_bytes: bytes(levels_mib),
        queued_stage_bytes: bytes(stages_mib),
        completed_flows: 1000,
        missed_flows: 12,
        ..PortLoad::default()
    })
}

/// Returns a cluster with requests that ended in time and late, and a batch that will be late.
fn busy() -> Fixture {
    let mut prefill = vec![
        batch(101, &[(1, 60_000, 64), (2, 90_000, 512)]),
        batch(102, &[(3, 120_000, 2048), (4, 120_000, 64)]),
        batch(103, &[(5, -1000, 64), (6, 30_000, 9_000_000)]),
        Kind::BatchStarted(BatchStarted { batch: 101 }),
        Kind::BatchProgress(BatchProgress { batch: 101, layer: 37 }),
        loaded(0, 870, &[0, 12, 300, 40, 0, 0, 0, 0, 700], &[40, 12, 300, 700, 0]),
        loaded(1, 120, &[0, 3, 0, 0, 0, 0, 0, 0, 0], &[0, 3, 0, 0, 0]),
    ];
    for n in 0..30 {
        prefill.push(batch(200 + n, &[(1000 + n, 200_000 + 1000 * n as i64, 8)]));
    }
    let decode = vec![loaded(0, 30, &[0; 9], &[0; 5])];
    let fixture = Fixture::start(
        config(),
        vec![Script::new("prefill-0", prefill), Script::new("decode-0", decode)],
    );
    fixture.state(|state| state["totals"]["batches"] == 33 && state["runs"].as_u64() > Some(0));
    // Request 1 ends in time and request 5 late. All of batch 102 end in time.
    fixture.say(
        "prefill-0",
        vec![ended(1), ended(5), Kind::BatchFinished(BatchFinished { batch: 102 })],
    );
    fixture.state(|state| state["totals"]["batches"] == 32);
    fixture
}

/// Returns what a daemon says of its configuration, with a change.
fn settings(change: impl FnOnce(&mut HostSettings)) -> Kind {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock");
    let mut said = HostSettings {
        level_dscp: vec![46, 34, 26, 8],
        marking: "preserve".into(),
        mode: "enforce".into(),
        clock_ns: now.as_nanos() as u64,
        ..HostSettings::default()
    };
    change(&mut said);
    Kind::HostSettings(said)
}

/// Returns a cluster with each kind of trouble that its hosts can be in.
fn troubled() -> Fixture {
    let daemon = |host: &str, said| Script::new(host, vec![said]);
    let mut old = daemon("old-0", settings(|_| {}));
    old.software = "laxityd 0.0.9".into();
    let mut owner = daemon("prefill-0", settings(|_| {}));
    owner.events.push(batch(7, &[(1, 60_000, 1)]));
    let daemons = vec![
        owner,
        daemon("meddler-0", settings(|_| {})),
        daemon("prefill-1", settings(|_| {})),
        old,
        daemon("dscp-0", settings(|it| it.level_dscp[1] = 35)),
        daemon("watcher-0", settings(|it| it.mode = "observe".into())),
        daemon("open-0", settings(|it| it.bypass = true)),
        daemon("late-0", settings(|it| it.clock_ns -= 90_000_000_000)),
        daemon("gone-0", settings(|_| {})),
        daemon("away-0", settings(|_| {})),
    ];
    let count = daemons.len();
    let mut fixture = Fixture::start(config(), daemons);
    fixture.state(|state| state["totals"]["connected"] == count && state["totals"]["batches"] == 1);
    // The batch of another host has to be known before somebody meddles with it.
    fixture.say("meddler-0", vec![Kind::BatchStarted(BatchStarted { batch: 7 })]);
    fixture.leave("gone-0");
    fixture.operate(async |operator| {
        let asked =
            DrainRequest { host: "away-0".into(), drain: true, comment: "its NIC flaps".into() };
        operator.drain(asked).await.expect("drained");
    });
    fixture.state(|state| {
        let found = |id: &str| {
            state["findings"].as_array().expect("a list").iter().any(|it| it["id"] == id)
        };
        state["totals"]["connected"] == count - 1
            && found("refused")
            && found("connected")
            && found("drained")
    });
    fixture
}

fn dom(fixture: &Fixture, view: &str) -> Option<String> {
    let web = fixture.served.web.expect("a page");
    browse(&["--dump-dom".into()], &format!("http://{web}/{view}"))
}

#[test]
fn a_browser_shows_hosts_queues_order_attainment_and_policy() {
    let fixture = busy();
    let Some(dom) = dom(&fixture, "") else { return };
    assert!(part(&dom, "headline").contains("leading"), "{dom}");
    let hosts = part(&dom, "hosts");
    for word in [
        "prefill-0", "decode-0", "connected", "mlx5_0 egress 87 %", "P3 300 MiB",
        "KV reuse 40.0 MiB",
    ] {
        assert!(hosts.contains(word), "{word}: {hosts}");
    }
    let order = part(&dom, "order");
    for word in ["101", "layer 37 of 80", "in time", "prefill-0", "batch=101"] {
        assert!(order.contains(word), "{word}: {order}");
    }
    assert!(!order.contains("102"), "it has finished: {order}");
    let trouble = part(&dom, "trouble");
    assert!(trouble.contains("103") && trouble.contains("pruned"), "{trouble}");
    let attainment = part(&dom, "attainment");
    assert!(attainment.contains("75.0 % of 4 requests"), "{attainment}");
    // The requests are in the open bucket, or in an earlier one if the browser was slow.
    assert!(attainment.contains("3 of 4 in time, "), "{attainment}");
    let levels = part(&dom, "levels");
    assert!(levels.contains("scavenger") && levels.contains("700 MiB"), "{levels}");
    let stages = part(&dom, "stages");
    assert!(stages.contains("prefill→decode") && stages.contains("300 MiB"), "{stages}");
    assert!(part(&dom, "policy").contains("drop_budget = "), "{dom}");
    assert!(dom.contains("id=\"explain\" hidden"), "nothing was asked for");
}

/// Starts a coordinator with two tenants, and has an operator change its policy.
fn shared() -> Fixture {
    let text = "[web]\nlisten = \"127.0.0.1:0\"\n\
        [[tenant]]\nname = \"red\"\nhosts = [\"red-*\"]\ndrop_budget = 1\n\
        [[tenant]]\nname = \"blue\"\nhosts = [\"*\"]\n";
    let late = |id: u64| batch(id, &[(10 * id, -5, 1), (10 * id + 1, -5, 1), (10 * id + 2, 9, 1)]);
    let daemons =
        vec![Script::new("red-0", vec![late(9), late(10)]), Script::new("blue-0", vec![late(11)])];
    let fixture = Fixture::start(Config::parse(text, "test").expect("valid"), daemons);
    fixture.operate(async |operator| {
        let asked = SetPolicyRequest {
            change: Some(Policy { drop_budget: Some(8), ..Policy::default() }),
            comment: "too many <b>".into(),
            ..SetPolicyRequest::default()
        };
        operator.set_policy(asked).await.expect("set");
    });
    fixture.state(|state| {
        state["tenants"][0]["pruned"] == 1 && state["tenants"][1]["pruned"].as_u64() > Some(1)
    });
    fixture
}

#[test]
fn a_browser_filters_sorts_and_shows_tenants_and_who_changed_the_policy() {
    let fixture = shared();
    let Some(all) = dom(&fixture, "?order=Batch") else { return };
    let tenants = part(&all, "tenants");
    for word in ["?tenant=red#", "?tenant=blue#", "shared", "Drop budget"] {
        assert!(tenants.contains(word), "{word}: {tenants}");
    }
    let history = part(&all, "history");
    for word in
        ["drop_budget: 64 → 8", "127.0.0.1:", "too many &lt;b&gt;", "the configuration says"]
    {
        assert!(history.contains(word), "{word}: {history}");
    }
    assert!(part(&all, "hosts").contains("?find=red-0#"), "{all}");
    assert!(part(&all, "glossary-title").contains("robust effective deadline"), "{all}");
    let place = |dom: &str, batch: u64| {
        let order = part(dom, "order");
        order.find(&format!("batch={batch}&amp;")).unwrap_or_else(|| panic!("{batch}: {order}"))
    };
    assert!(place(&all, 9) < place(&all, 10) && place(&all, 10) < place(&all, 11), "by number");

    let red = dom(&fixture, "?tenant=red&order=-Batch").expect("Chromium is here");
    let (hosts, order) = (part(&red, "hosts"), part(&red, "order"));
    assert!(hosts.contains("red-0") && !hosts.contains("blue-0"), "{hosts}");
    assert!(order.contains("hides 1 of the 3") && !order.contains("batch=11&amp;"), "{order}");
    assert!(order.contains("aria-sort=\"descending\"") && place(&red, 10) < place(&red, 9));
    assert!(part(&red, "filtered").contains("Show all"), "{red}");
    let found = dom(&fixture, "?find=BLUE+11").expect("Chromium is here");
    assert!(part(&found, "order").contains("hides 2 of the 3"), "{found}");
}

#[test]
fn the_head_says_what_is_wrong_and_what_to_do_the_worst_first() {
    let fixture = troubled();
    let Some(dom) = dom(&fixture, "") else { return };
    let findings = part(&dom, "findings");
    let mut before = 0;
    for (word, remedy) in [
        ("class=\"bad\">not connected: gone-0 (for ", "<code>systemctl status laxityd</code>"),
        ("35, 26, 8] on dscp-0", "<code>[levels]</code>"),
        (
            "class=\"warn\">refused, some of it lately: 1 event of meddler-0",
            "<code>[limits]</code>",
        ),
        ("laxityd 0.0.9 on old-0", "finish the upgrade"),
        ("mode observe on watcher-0", "<code>laxity enforce on</code>"),
        ("late-0 by -90.", "<code>chronyc tracking</code>"),
        ("drained: away-0 (for ", "<code>laxity cluster drain HOST --undo</code>"),
    ] {
        let at = findings.find(word).unwrap_or_else(|| panic!("{word}: {findings}"));
        assert!(at > before, "{word} is too early: {findings}");
        assert!(findings[at..].contains(remedy), "{remedy}: {findings}");
        before = at;
    }
    assert!(findings.contains("bypassed on open-0"), "{findings}");
}

#[test]
fn the_head_of_a_calm_cluster_says_that_nothing_is_wrong() {
    let daemon = |host: &str| Script::new(host, vec![settings(|_| {})]);
    let fixture = Fixture::start(config(), vec![daemon("a"), daemon("b")]);
    let state = fixture.state(|state| {
        state["totals"]["connected"] == 2 && state["findings"].as_array().is_some_and(Vec::is_empty)
    });
    assert_eq!(state["leading"], true);
    let Some(dom) = dom(&fixture, "") else { return };
    assert!(part(&dom, "findings").contains("Nothing that the coordinator sees."), "{dom}");
    assert!(!part(&dom, "findings").contains("<li>"), "{dom}");
}

#[test]
fn a_standby_says_who_leads_and_links_to_the_leaders_page() {
    // Nobody answers at the port of etcd, so nobody is elected.
    let text = "[web]\nlisten = \"127.0.0.1:0\"\n[etcd]\n\
        endpoints = [\"http://127.0.0.1:9\"]\nadvertise = \"127.0.0.1:7471\"\n";
    let fixture = Fixture::start(Config::parse(text, "test").expect("valid"), Vec::new());
    let state = fixture.state(|state| state["findings"].as_array().is_some_and(|it| it.len() == 1));
    assert_eq!((&state["leading"], &state["findings"][0]["id"]), (&false.into(), &"leader".into()));
    let Some(alone) = dom(&fixture, "") else { return };
    assert!(part(&alone, "headline").contains("standing by"), "{alone}");
    assert!(part(&alone, "findings").contains("no coordinator leads"), "{alone}");
    assert!(!part(&alone, "findings").contains("<a "), "{alone}");
    for (leader, host) in [
        ("127.0.0.2:7471", Some("127.0.0.2")),
        // The leader is this host, so the link would lead to this page.
        ("127.0.0.1:7481", None),
        ("javascript:alert(1):7", Some("javascript:alert(1)")),
    ] {
        let change = |_: &str, body: String| {
            Some(body.replace("\"leader\":\"\"", &format!("\"leader\":\"{leader}\"")))
        };
        let copy = copied(|path| fixture.get(path), change);
        let dom = browse(&["--dump-dom".into()], &format!("http://{copy}/")).expect("Chromium");
        let findings = part(&dom, "findings");
        assert_eq!(findings.contains("href="), host.is_some(), "{leader}: {findings}");
        let link = format!("href=\"http://{}:{}/\"", host.unwrap_or_default(), copy.port());
        assert_eq!(findings.contains(&link), host.is_some(), "{leader}: {findings}");
    }
}

#[test]
fn a_link_to_a_batch_explains_it_and_one_to_a_batch_that_is_gone_says_so() {
    let fixture = busy();
    let Some(told) = dom(&fixture, "#batch=103&tenant=default") else { return };
    let explain = part(&told, "explain");
    for word in [
        "Why is batch 103", "Place ", "pruned", "this one", "mlx5_0 egress of ", "?find=prefill-0#",
    ] {
        assert!(explain.contains(word), "{word}: {explain}");
    }
    let gone = dom(&fixture, "#batch=9").expect("Chromium is here");
    assert!(part(&gone, "explain").contains("no batch 9 is active"), "{gone}");
}

#[test]
fn names_from_daemons_are_text_whatever_they_hold() {
    let evil = "<img src=x onerror=\"document.title='owned'\">";
    let script = "</script><script>document.title='owned'</script>";
    let mut daemon = Script::new(evil, vec![batch(7, &[(1, -5, 1), (2, 1000, 900_000)])]);
    daemon.software = script.into();
    // A right-to-left override would show the following text backwards.
    daemon.nic = format!("eth\u{202e}0<b>{}", &script[..30]);
    let fixture = Fixture::start(config(), vec![daemon]);
    let state =
        fixture.state(|state| state["totals"]["batches"] == 1 && state["runs"].as_u64() > Some(0));
    assert_eq!(state["hosts"][0]["host"], evil, "unchanged, in JSON");
    for hash in ["", "#batch=7", "#batch=%3Cimg%20src=x%20onerror=alert(1)%3E"] {
        let Some(dom) = dom(&fixture, hash) else { return };
        assert!(dom.contains("<title>Laxity coordinator</title>"), "{dom}");
        assert!(!dom.contains("<img") && !dom.contains("<b>"), "{dom}");
        assert_eq!(dom.matches("<script").count(), 2, "{dom}");
        assert!(part(&dom, "hosts").contains("&lt;img src=x onerror="), "{dom}");
        assert!(part(&dom, "findings").contains("&lt;img src=x onerror="), "{dom}");
        assert!(dom.contains("\\u{202e}") && !dom.contains('\u{202e}'), "{dom}");
    }
}

#[test]
fn what_the_server_sends_forbids_what_the_page_does_not_need() {
    let fixture = Fixture::start(config(), Vec::new());
    for (path, kind) in [
        ("/", "text/html"),
        ("/page.js", "text/javascript"),
        ("/kit.js", "text/javascript"),
        ("/page.css", "text/css"),
        ("/api/state", "application/json"),
        ("/api/explain?batch=1", "application/json"),
        ("/nowhere", "text/plain"),
    ] {
        let (head, _) = fixture.get(path);
        let head = head.to_ascii_lowercase();
        for header in [
            &format!("content-type: {kind}"),
            "content-security-policy: default-src 'none'; script-src 'self';",
            "require-trusted-types-for 'script'",
            "x-content-type-options: nosniff",
            "x-frame-options: deny",
            "cache-control: no-store",
            "referrer-policy: no-referrer",
        ] {
            assert!(head.contains(header), "{path}: {header} is not in {head}");
        }
        assert!(!head.contains("access-control-allow"), "{head}");
        assert!(!head.contains("unsafe-"), "{head}");
    }
    let status = |method: &str, path: &str, name: &str| {
        let answer = ask(fixture.served.web.expect("a page"), &format!("{method} {path}"), name);
        answer.split(' ').nth(1).map(str::to_owned)
    };
    assert_eq!(status("GET", "/nowhere", "localhost").as_deref(), Some("404"));
    assert_eq!(status("GET", "/api/explain", "localhost").as_deref(), Some("400"));
    assert_eq!(status("GET", "/api/explain?batch=1", "[::1]:80").as_deref(), Some("404"));
    assert_eq!(status("POST", "/api/state", "localhost").as_deref(), Some("405"));
    assert_eq!(status("DELETE", "/", "localhost").as_deref(), Some("405"));
    // A foreign page whose name resolves to this address.
    assert_eq!(status("GET", "/api/state", "evil.example").as_deref(), Some("421"));
}

#[test]
fn a_coordinator_stops_though_somebody_looks() {
    let fixture = Fixture::start(config(), Vec::new());
    let _held =
        std::net::TcpStream::connect(fixture.served.web.expect("a page")).expect("it listens");
    fixture.get("/api/state");
    let begun = Instant::now();
    drop(fixture);
    assert!(begun.elapsed() < crate::daemon::PATIENCE);
}
