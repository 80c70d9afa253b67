//! Authentication of peers and their permissions.
//!
//! With TLS, the URIs among the subject alternative names of a peer's certificate name its roles:
//!
//! ```text
//! laxity://daemon/HOST       may report for that host, and for no other
//! laxity://viewer/NAME       may read
//! laxity://operator/NAME     may read and change
//! ```
//!
//! Without TLS every peer may do everything, so the server listens on loopback by default. Every
//! method passes one of the checks below.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tonic::{Request, Status};

/// Longest name in a certificate's URI that is accepted, in bytes.
const NAME_BYTES_MAX: usize = 253;

/// A role as its URI names it, without `laxity://`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Role(String);

impl Role {
    fn parse(uri: &str) -> Option<Self> {
        let role = uri.strip_prefix("laxity://")?;
        let (kind, name) = role.split_once('/')?;
        let is_plain = (1..=NAME_BYTES_MAX).contains(&name.len())
            && !name.contains(|c: char| c.is_control() || c == '/');
        let is_role = is_plain && ["daemon", "viewer", "operator"].contains(&kind);
        is_role.then(|| Self(role.to_owned()))
    }
}

/// Returns the roles that a client's certificate names. The handshake has verified it.
pub(crate) fn roles(certificate_der: &[u8]) -> Vec<Role> {
    let uris = laxity_credentials::uris(certificate_der);
    uris.iter().filter_map(|uri| Role::parse(uri)).collect()
}

/// The verified peer of a connection, which each request on it can read.
#[derive(Clone, Debug)]
pub(crate) struct ConnectInfo {
    pub(crate) peer: ProvenPeer,
    /// Counts the streams that are served on the connection.
    pub(super) served: Served,
}

impl ConnectInfo {
    pub(crate) fn is_served(&self) -> bool {
        self.served.0.load(Ordering::Relaxed) > 0
    }
}

/// Counts the streams that are served on a connection. With at least one, it is not a visitor.
#[derive(Clone, Debug, Default)]
pub(crate) struct Served(Arc<AtomicUsize>);

impl Served {
    pub(crate) fn of<T>(request: &tonic::Request<T>) -> Self {
        let info = request.extensions().get::<ConnectInfo>();
        info.map(|info| info.served.clone()).unwrap_or_default()
    }

    /// Counts one more stream until the result is dropped.
    pub(crate) fn begin(&self) -> Serving {
        // The counter publishes no other data, so relaxed ordering is enough.
        self.0.fetch_add(1, Ordering::Relaxed);
        Serving(self.clone())
    }
}

/// A stream that is served until this value is dropped.
#[derive(Debug)]
pub(crate) struct Serving(Served);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A peer, with the roles that it has proved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ProvenPeer {
    /// A peer without TLS, which is not authenticated.
    Anyone(SocketAddr),
    Known(Arc<[Role]>),
}

impl ProvenPeer {
    pub(crate) fn of<T>(request: &Request<T>) -> Self {
        let info = request.extensions().get::<ConnectInfo>();
        // Every connection has this information. Without it, nothing is allowed.
        info.map_or_else(|| Self::Known([].into()), |info| info.peer.clone())
    }

    pub(crate) fn viewer<T>(request: &Request<T>) -> Result<Self, Status> {
        let looks = |role: &Role| ["viewer/", "operator/"].iter().any(|it| role.0.starts_with(it));
        Self::of(request).with(looks, "laxity://viewer/NAME or laxity://operator/NAME")
    }

    pub(crate) fn operator<T>(request: &Request<T>) -> Result<Self, Status> {
        let operates = |role: &Role| role.0.starts_with("operator/");
        Self::of(request).with(operates, "laxity://operator/NAME")
    }

    pub(crate) fn may_report(self, host: &str) -> Result<(), Status> {
        let own = format!("daemon/{host}");
        self.with(|role| role.0 == own, &format!("laxity://{own}")).map(|_| ())
    }

    fn with(self, fits: impl Fn(&Role) -> bool, wanted: &str) -> Result<Self, Status> {
        match &self {
            Self::Anyone(_) => Ok(self),
            Self::Known(roles) if roles.iter().any(fits) => Ok(self),
            Self::Known(_) => Err(Status::permission_denied(format!(
                "this needs a certificate for {wanted}; yours is for {}",
                self.name()
            ))),
        }
    }

    /// Returns the peer's name for logs and histories.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Anyone(address) => address.to_string(),
            Self::Known(roles) if roles.is_empty() => "nothing of Laxity".into(),
            Self::Known(roles) => {
                let names: Vec<&str> = roles.iter().map(|role| role.0.as_str()).collect();
                names.join(", ")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uri_names_a_role_only_if_it_is_exactly_one() {
        assert_eq!(Role::parse("laxity://daemon/h1"), Some(Role("daemon/h1".into())));
        for uri in [
            "laxity://daemon/", "laxity://daemon", "laxity://daemon/a/b", "laxity://admin/a",
            "https://daemon/a", "laxity://daemon/a\nb",
        ] {
            assert_eq!(Role::parse(uri), None, "{uri}");
        }
    }
}
