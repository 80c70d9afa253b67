//! Fuzzes the HTTP listeners of the daemon and the coordinator: the web page and the metrics.
//!
//! hyper parses HTTP. What is Laxity's own is the choice of the answer by host, method and path. So
//! the bytes go through a real connection to the real listener. Each answer has to be one that the
//! listeners give, and a request for any name other than the page's gets no content.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::Duration;

use hyper::header::HOST;
use laxity_listen::http::{HttpListener, rendered};
use laxity_listen::page::{self, LIMITS, Page};

use crate::input::{Input, connect};

const PAGE: Page = Page { html: "<p>the page", script: "the script" };
const NAME: &str = "laxity.example";
const METRICS: &str = "laxity_up 1\n";
/// Largest sum of answers: those to as many pipelined requests as fit in the input.
const ANSWERS_BYTES_MAX: u64 = 4 << 20;
const PATIENCE: Duration = Duration::from_secs(5);

/// A request that the page was asked, as hyper parsed it.
struct AskedPage {
    host: Option<String>,
    method: String,
    path: String,
    status: u16,
}

struct Listeners {
    page: SocketAddr,
    metrics: SocketAddr,
    asked: Arc<Mutex<Vec<AskedPage>>>,
}

fn listeners() -> &'static Listeners {
    static LISTENERS: OnceLock<Listeners> = OnceLock::new();
    LISTENERS.get_or_init(|| {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (say, told) = mpsc::channel();
        let log = Arc::clone(&asked);
        std::thread::spawn(move || serve(&say, log));
        let [page, metrics] = told.recv().expect("two listeners");
        Listeners { page, metrics, asked }
    })
}

fn serve(say: &mpsc::Sender<[SocketAddr; 2]>, log: Arc<Mutex<Vec<AskedPage>>>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("threads").block_on(async {
        let bind = || HttpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
        let (page, metrics) = (bind(), bind());
        let at = [&page, &metrics].map(|listener| listener.local_addr().expect("bound"));
        say.send(at).expect("it waits");
        let names = [NAME.to_owned()];
        let answer = move |request: &hyper::Request<_>| {
            let answer = PAGE.answer(request, &names).unwrap_or_else(page::not_found);
            let host = request.headers().get(HOST);
            log.lock().expect("no panic").push(AskedPage {
                host: host.map(|host| String::from_utf8_lossy(host.as_bytes()).into_owned()),
                method: request.method().to_string(),
                path: request.uri().path().to_owned(),
                status: answer.status().as_u16(),
            });
            std::future::ready(answer)
        };
        tokio::join!(
            page.serve("the page", LIMITS, answer),
            metrics.serve("the metrics", LIMITS, rendered(|| METRICS.to_owned())),
        );
    });
}

/// Sends `bytes`, and returns all that is answered until the connection ends.
fn converse(to: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = connect(to);
    stream.set_read_timeout(Some(PATIENCE)).expect("it is open");
    // The listener may close the connection meanwhile.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answers = Vec::new();
    match (&mut stream).take(ANSWERS_BYTES_MAX).read_to_end(&mut answers) {
        Ok(_) => {}
        // The listener closed the connection without reading all bytes.
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(error) => panic!("the listener neither answers nor closes: {error}"),
    }
    assert!((answers.len() as u64) < ANSWERS_BYTES_MAX, "without a bound");
    answers
}

/// Returns whether a browser that sends this `Host` may see the page: by its name (RFC 3986, §3.2),
/// whatever the port.
fn is_own(host: &str) -> bool {
    let host = host.rsplit('@').next().unwrap_or_default();
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next(),
        None => host.split(':').next().filter(|_| host.matches(':').count() < 2),
    };
    let is = |known: &str| name.is_some_and(|name| name.eq_ignore_ascii_case(known));
    is("localhost") || is(NAME) || name.is_some_and(|name| name.parse::<IpAddr>().is_ok())
}

fn check_page(asked: &AskedPage) {
    let AskedPage { host, method, path, status } = asked;
    let host = host.as_deref().unwrap_or_default();
    let is_read = method == "GET" || method == "HEAD";
    let is_there = ["/", "/page.css", "/kit.js", "/page.js"].contains(&path.as_str());
    let expected = match (is_read, is_there) {
        _ if *status == 421 => {
            let known = ["localhost", "localhost:7476", "127.0.0.1", "[::1]:7476", NAME];
            assert!(!known.contains(&host), "{host} is one of the page");
            421
        }
        (false, _) => 405,
        (true, false) => 404,
        (true, true) => 200,
    };
    assert_eq!(*status, expected, "{method} {path} of {host}");
    assert!(*status == 421 || is_own(host), "{method} {path} is shown to {host}");
}

/// Checks the head of the first answer. Later ones begin at a place that only an HTTP client finds.
fn check_head(answers: &[u8], is_page: bool) {
    let text = String::from_utf8_lossy(answers);
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        assert!(answers.is_empty(), "an answer has a head: {text}");
        return;
    };
    let head = head.to_ascii_lowercase();
    let status = head.split(' ').nth(1).and_then(|code| code.parse::<u16>().ok());
    assert!(head.starts_with("http/1."), "{head}");
    match (status.expect("a code"), is_page) {
        // These are hyper's own, and have no body.
        (400 | 408 | 414 | 431, _) if !head.contains("content-type") => {
            assert!(head.contains("content-length: 0"), "{head}");
        }
        // hyper asks for the body that an `Expect: 100-continue` announces.
        (100, _) => {}
        (200 | 404 | 405 | 421, true) => {
            for header in ["content-security-policy: default-src 'none'", "nosniff", "no-store"] {
                assert!(head.contains(header), "{header} is missing in {head}");
            }
        }
        (200 | 405, false) => {
            assert!(head.contains("content-type: text/plain"), "{head}");
            assert!(["", METRICS, "OK", "use GET\n"].iter().any(|it| body.starts_with(it)));
        }
        other => panic!("{other:?} is no answer: {head}"),
    }
}

pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let listeners = listeners();
    let is_page = !input.byte().is_multiple_of(4);
    let to = if is_page { listeners.page } else { listeners.metrics };
    let answers = converse(to, input.take(usize::MAX));
    check_head(&answers, is_page);
    let asked = std::mem::take(&mut *listeners.asked.lock().expect("no panic"));
    assert!(is_page || asked.is_empty());
    asked.iter().for_each(check_page);
}

pub fn seeds() -> Vec<Vec<u8>> {
    let with = |kind: u8, text: &str| [&[kind], text.as_bytes()].concat();
    let to = |line: &str, host: &str| format!("{line} HTTP/1.1\r\nHost: {host}\r\n\r\n");
    let get = |path: &str| to(&format!("GET {path}"), "localhost:7476");
    vec![
        with(1, &get("/")),
        with(1, &[get("/page.css"), get("/kit.js"), get("/page.js")].concat()),
        with(1, &to("HEAD /", "[::1]:7476")),
        with(1, &to("GET /", "laxity.example")),
        with(1, &to("GET /", "evil.example")),
        with(1, &get("/api/explain?pid=12&batch=3")),
        with(1, "POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 3\r\n\r\nabc"),
        with(1, "GET / HTTP/1.0\r\nHost: 10.0.0.7\r\nConnection: keep-alive\r\n\r\n"),
        with(1, "GET http://localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        with(
            1,
            "POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\
             \r\n\r\n",
        ),
        with(0, &get("/metrics")),
        with(0, &get("/health")),
        with(0, &to("DELETE /metrics", "a")),
    ]
}
