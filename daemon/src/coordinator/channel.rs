//! The connection to the coordinator, and its conditions. Only this module handles transports.
//!
//! The files of `[coordinator]` are read for each connection. So the next connection uses a renewed
//! certificate, and a broken one affects only the coordinator. This module decides for every URL
//! whether to connect, both the configured one and those from a coordinator. A connection in the
//! clear to another host needs the operator's consent and is never allowed after https.

use std::error::Error;
use std::time::Duration;

use laxity_credentials::explain::{self, SettingNames};
use tonic::Status;
use tonic::transport::{Channel, Endpoint, Uri};

use super::credentials;
use crate::config::CoordinatorConfig;

const CONNECT_MAX: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    Http,
    /// TLS with certificates on both sides.
    Https,
}

#[derive(Clone, Debug)]
pub struct EndpointAddress {
    pub scheme: Scheme,
    /// A name or an address, without brackets.
    pub host: String,
    /// Whether the URL leads to this machine.
    pub is_here: bool,
}

pub fn place(url: &str) -> Result<EndpointAddress, String> {
    let shape = "write https://HOST:PORT, or http://127.0.0.1:PORT for one on this host";
    let uri: Uri = url.parse().map_err(|error| format!("`{url}`: {error}; {shape}"))?;
    let scheme = match uri.scheme_str() {
        Some("http") => Scheme::Http,
        Some("https") => Scheme::Https,
        _ => return Err(format!("`{url}` is no endpoint; {shape}")),
    };
    let host = uri.host().unwrap_or_default();
    let host = host.trim_start_matches('[').trim_end_matches(']');
    if host.is_empty() {
        return Err(format!("`{url}` names no host; {shape}"));
    }
    let address = host.parse::<std::net::IpAddr>();
    Ok(EndpointAddress {
        scheme,
        host: host.to_owned(),
        is_here: host == "localhost" || address.is_ok_and(|address| address.is_loopback()),
    })
}

/// Checks that the configuration allows a connection to `url`.
pub fn allow(url: &str, config: &CoordinatorConfig) -> Result<EndpointAddress, String> {
    let place = place(url)?;
    match place.scheme {
        Scheme::Http if !place.is_here && !config.insecure => Err(format!(
            "{} is another host, and http:// is without TLS: write https:// with ca, cert and key, \
             or insecure = true if nobody hostile is in between",
            place.host
        )),
        Scheme::Https if config.ca.as_os_str().is_empty() => Err(
            "https:// needs coordinator.ca, the certificate of whoever signed the coordinator's, \
             and cert and key for this host"
                .into(),
        ),
        _ => Ok(place),
    }
}

/// Returns the URL that the coordinator at `from` redirects to: HOST:PORT with the same scheme, or
/// a URL.
///
/// Returns `None` for an unsafe redirection. A forged goodbye must not lead a daemon away from TLS,
/// or to another host in the clear.
pub fn redirection(from: &str, leader: &str, config: &CoordinatorConfig) -> Option<String> {
    let scheme = place(from).ok()?.scheme;
    let url = match (leader.contains("://"), scheme) {
        (true, _) => leader.to_owned(),
        (false, Scheme::Http) => format!("http://{leader}"),
        (false, Scheme::Https) => format!("https://{leader}"),
    };
    let leads = allow(&url, config).ok()?;
    (leads.scheme == scheme).then_some(url)
}

pub async fn connect(url: &str, config: &CoordinatorConfig) -> Result<Channel, String> {
    let place = allow(url, config)?;
    let mut endpoint = Endpoint::from_shared(url.to_owned())
        .map_err(|error| format!("`{url}` is no endpoint: {error}"))?
        // Reports are small and urgent.
        .tcp_nodelay(true)
        .connect_timeout(CONNECT_MAX);
    if place.scheme == Scheme::Https {
        let (config, host) = (config.clone(), place.host);
        // A file system that hangs must not block registration, which runs on this thread.
        let reading = tokio::task::spawn_blocking(move || credentials::read(&config, &host));
        let tls = match tokio::time::timeout(CONNECT_MAX, reading).await {
            Ok(Ok(read)) => read.map_err(|wrong| wrong.to_string())?,
            _ => return Err("the certificates cannot be read: their file system hangs".into()),
        };
        endpoint = endpoint
            .tls_config(tls)
            .map_err(|error| format!("the certificates cannot be used: {}", cause(&error)))?;
    }
    match tokio::time::timeout(CONNECT_MAX, endpoint.connect()).await {
        Ok(Ok(channel)) => Ok(channel),
        Ok(Err(error)) => Err(format!("cannot connect to {url}: {}", cause(&error))),
        Err(_) => Err(format!("{url} does not answer within {CONNECT_MAX:?}")),
    }
}

/// Returns why a call failed. A refused certificate shows here, because in TLS 1.3 the client
/// finishes before the server has checked it.
pub fn refusal(status: &Status) -> String {
    match status.source() {
        Some(_) => cause(status),
        None => status.message().to_owned(),
    }
}

const SETTINGS: SettingNames = SettingNames {
    ca: "coordinator.ca",
    cert: "coordinator.cert",
    key: "coordinator.key",
    server_name: "coordinator.server_name",
    endpoint: "coordinator.endpoint",
};

fn cause(error: &dyn Error) -> String {
    explain::cause(error, &SETTINGS).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(insecure: bool, ca: &str) -> CoordinatorConfig {
        CoordinatorConfig { insecure, ca: ca.into(), ..CoordinatorConfig::default() }
    }

    #[test]
    fn in_the_clear_only_to_this_host_unless_that_is_asked_for() {
        for (url, plain, insecure, with_ca) in [
            ("http://127.0.0.1:7471", true, true, true),
            ("http://localhost:7471", true, true, true),
            ("http://[::1]:7471", true, true, true),
            ("http://10.0.0.1:7471", false, true, false),
            ("http://localhost.evil:7471", false, true, false),
            ("HTTPS://10.0.0.1:7471", false, false, true),
            ("https://10.0.0.1:7471", false, false, true),
            ("https://127.0.0.1:7471", false, false, true),
            ("ftp://10.0.0.1:7471", false, false, false),
            ("10.0.0.1:7471", false, false, false),
            ("", false, false, false),
        ] {
            let may = |insecure, ca| allow(url, &config(insecure, ca)).is_ok();
            let seen = (may(false, ""), may(true, ""), may(false, "/ca.crt"));
            assert_eq!(seen, (plain, insecure, with_ca), "{url}");
        }
    }

    #[test]
    fn a_goodbye_leads_nobody_out_of_tls_and_nobody_to_other_hosts_in_the_clear() {
        let tls = config(true, "/ca.crt");
        let from = "https://one:7471";
        let to = |leader: &str| redirection(from, leader, &tls);
        assert_eq!(to("two:7471").as_deref(), Some("https://two:7471"));
        assert_eq!(to("https://two:7471").as_deref(), Some("https://two:7471"));
        assert_eq!(to("http://two:7471"), None);
        assert_eq!(to("http://127.0.0.1:7471"), None);
        assert_eq!(to("HTTP://two:7471"), None);
        assert_eq!(to("unix:///two"), None);
        assert_eq!(to(""), None);

        let here = config(false, "");
        let to = |leader: &str| redirection("http://127.0.0.1:1", leader, &here);
        assert_eq!(to("127.0.0.1:2").as_deref(), Some("http://127.0.0.1:2"));
        assert_eq!(to("10.0.0.1:2"), None);
        assert_eq!(to("https://127.0.0.1:2"), None);
        let plain = config(true, "");
        let to = redirection("http://10.0.0.1:1", "10.0.0.2:1", &plain);
        assert_eq!(to.as_deref(), Some("http://10.0.0.2:1"));
    }
}
