//! Read-only web pages for people: the coordinator's and the daemon's.
//!
//! * *Untrusted text.* Names come from clients and other hosts. They never become HTML: a page is
//!   fixed files, data is JSON, and the scripts set text only. A Content-Security-Policy without
//!   inline code and with Trusted Types is the second defence.
//! * *Readers* are all who reach the address, so it is loopback unless `insecure` is set. The
//!   `Host` of a request has to be an address, `localhost` or one of `names`. So a foreign site
//!   reads nothing by DNS rebinding.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{HOST, HeaderValue};
use hyper::http::uri::Authority;
use hyper::{Method, Request, Response, StatusCode, header};
use serde::{Deserialize, Serialize};

use crate::http::{Answer, HttpLimits};

const STYLE: &str = include_str!("page/page.css");
const KIT: &str = include_str!("page/kit.js");

/// Limits of browsers' connections. A browser whose connection is closed opens a new one.
pub const LIMITS: HttpLimits = HttpLimits {
    connections_max: 64,
    head_max: Duration::from_secs(10),
    connection_max: Duration::from_secs(120),
    keep_alive: true,
};

/// Forbids content from other sites, inline code, text as markup, frames and forms.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    connect-src 'self'; \
img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
require-trusted-types-for 'script'; trusted-types 'none'";

/// The section `[web]` of a configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WebConfig {
    /// Address of the web page. Empty for none.
    pub listen: String,
    /// Whether to serve other hosts. The page has neither TLS nor passwords, so everybody who
    /// reaches the address can read it.
    pub insecure: bool,
    /// Names by which browsers may ask for the page beside addresses and `localhost`, such as that
    /// of a proxy.
    pub names: Vec<String>,
}

impl WebConfig {
    /// Returns the address of the web page, if there is one.
    pub fn address(&self) -> Option<SocketAddr> {
        self.listen.parse().ok()
    }

    /// Checks the key `web.listen`, and proposes `example` as an address.
    pub fn check(&self, example: &str) -> Result<(), String> {
        match self.address() {
            None if self.listen.is_empty() => Ok(()),
            None => Err(format!("`{}` is no address; write {example}", self.listen)),
            Some(address) if !address.ip().is_loopback() && !self.insecure => Err(format!(
                "{address} is reachable from other hosts, and the page has neither TLS nor \
                 passwords; listen on 127.0.0.1 and reach it by ssh -L or a proxy, or set \
                 web.insecure = true if everybody there may look"
            )),
            Some(_) => Ok(()),
        }
    }
}

/// The fixed files of a page.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// The document, which loads `page.css`, `kit.js` and `page.js`.
    pub html: &'static str,
    /// `page.js`.
    pub script: &'static str,
}

impl Page {
    /// Returns the answer to a request, or `None` if the caller has to answer it with data: its
    /// path begins with `/api/`. Refuses all methods but `GET` and `HEAD`, and a `Host` that is
    /// neither an address nor `localhost` nor one of `names`.
    pub fn answer(&self, request: &Request<Incoming>, names: &[String]) -> Option<Answer> {
        let host = request.headers().get(HOST).and_then(|it| it.to_str().ok());
        if !host.is_some_and(|host| is_asked_for_by(host, names)) {
            return Some(plain(
                StatusCode::MISDIRECTED_REQUEST,
                "this name is not one of the page: ask for its address, or add the name to \
                 web.names",
            ));
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut refused = plain(StatusCode::METHOD_NOT_ALLOWED, "this page only shows");
            refused.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
            return Some(refused);
        }
        let (kind, text) = match request.uri().path() {
            "/" => ("text/html; charset=utf-8", self.html),
            "/page.css" => ("text/css; charset=utf-8", STYLE),
            "/kit.js" => ("text/javascript; charset=utf-8", KIT),
            "/page.js" => ("text/javascript; charset=utf-8", self.script),
            path if path.starts_with("/api/") => return None,
            _ => return Some(not_found()),
        };
        Some(answer(StatusCode::OK, kind, text))
    }
}

/// Answers a request for something that does not exist.
pub fn not_found() -> Answer {
    plain(StatusCode::NOT_FOUND, "there is nothing here; the page is at /")
}

/// Returns an answer with JSON.
pub fn json(status: StatusCode, body: impl Into<Bytes>) -> Answer {
    answer(status, "application/json", body)
}

/// Returns an answer with a line of text.
pub fn plain(status: StatusCode, text: &str) -> Answer {
    answer(status, "text/plain; charset=utf-8", format!("{text}\n"))
}

fn answer(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    for (name, value) in [
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    answer
}

/// Reports whether a `Host` header names an address, `localhost` or one of `names`.
fn is_asked_for_by(host: &str, names: &[String]) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host().trim_matches(['[', ']']);
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<IpAddr>().is_ok()
        || names.iter().any(|known| known.eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_not_known_reads_nothing() {
        let names = ["laxity.example".to_owned()];
        for known in [
            "127.0.0.1:7473", "[::1]:7473", "10.0.0.7", "localhost:1", "LOCALHOST",
            "laxity.example:443",
        ] {
            assert!(is_asked_for_by(known, &names), "{known}");
        }
        for foreign in
            ["evil.example:7473", "127.0.0.1.evil.example", "localhost.evil.example", "", "a b"]
        {
            assert!(!is_asked_for_by(foreign, &names), "{foreign}");
        }
    }

    #[test]
    fn other_hosts_are_shown_the_page_only_if_that_is_asked_for() {
        let check = |listen: &str, insecure| {
            let config = WebConfig { listen: listen.into(), insecure, names: Vec::new() };
            config.check("127.0.0.1:7473")
        };
        assert!(check("", false).is_ok());
        assert!(check("127.0.0.1:0", false).is_ok());
        assert!(check("0.0.0.0:80", true).is_ok());
        let error = check("0.0.0.0:80", false).expect_err("refused");
        assert!(error.contains("web.insecure = true"), "{error}");
        assert!(check("nonsense", false).is_err_and(|error| error.contains("127.0.0.1:7473")));
    }

    #[test]
    fn what_pages_share_sets_text_only_and_loads_nothing() {
        for forbidden in ["innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("] {
            assert!(!KIT.contains(forbidden), "{forbidden}");
        }
        assert!(!STYLE.contains("url(") && !STYLE.contains("@import"));
    }
}
