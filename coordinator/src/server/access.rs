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

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// May report for this host.
    Daemon(String),
    /// May read.
    Viewer(String),
    /// May read and change.
    Operator(String),
}

impl Role {
    fn parse(uri: &str) -> Option<Self> {
        let (role, name) = uri.strip_prefix("laxity://")?.split_once('/')?;
        let plain = |name: &str| {
            !name.is_empty()
                && name.len() <= NAME_BYTES_MAX
                && !name.contains(|c: char| c.is_control() || c == '/')
        };
        let name = Some(name).filter(|name| plain(name))?.to_owned();
        match role {
            "daemon" => Some(Self::Daemon(name)),
            "viewer" => Some(Self::Viewer(name)),
            "operator" => Some(Self::Operator(name)),
            _ => None,
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Daemon(name) => format!("daemon/{name}"),
            Self::Viewer(name) => format!("viewer/{name}"),
            Self::Operator(name) => format!("operator/{name}"),
        }
    }
}

/// Returns the roles that a client's certificate names. The handshake has verified it.
pub(crate) fn roles(certificate_der: &[u8]) -> Vec<Role> {
    let uris = laxity_credentials::uris(certificate_der);
    uris.iter().filter_map(|uri| Role::parse(uri)).collect()
}

#[derive(Clone, Debug)]
pub(crate) struct ConnectInfo {
    pub(crate) peer: ProvenPeer,
    /// Counts the streams that are served on the connection.
    served: Served,
}

impl ConnectInfo {
    pub(crate) fn new(peer: ProvenPeer) -> Self {
        Self { peer, served: Served::default() }
    }

    /// Reports whether a stream is served on the connection.
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

/// A peer, by what it has proved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ProvenPeer {
    /// A peer without TLS, which is not authenticated.
    Anyone(SocketAddr),
    /// A peer with the roles that its certificate names.
    Known(Arc<[Role]>),
}

impl ProvenPeer {
    /// Returns the peer of a request.
    pub(crate) fn of<T>(request: &Request<T>) -> Self {
        let info = request.extensions().get::<ConnectInfo>();
        // Every connection has this information. Without it, nothing is allowed.
        info.map_or_else(|| Self::Known([].into()), |info| info.peer.clone())
    }

    /// Returns the peer if it may read.
    pub(crate) fn viewer<T>(request: &Request<T>) -> Result<Self, Status> {
        let looks = |role: &Role| matches!(role, Role::Viewer(_) | Role::Operator(_));
        Self::of(request).with(looks, "laxity://viewer/NAME or laxity://operator/NAME")
    }

    /// Returns the peer if it may change things.
    pub(crate) fn operator<T>(request: &Request<T>) -> Result<Self, Status> {
        let operates = |role: &Role| matches!(role, Role::Operator(_));
        Self::of(request).with(operates, "laxity://operator/NAME")
    }

    /// Checks that the peer may report for this host.
    pub(crate) fn may_report(self, host: &str) -> Result<(), Status> {
        let own = |role: &Role| matches!(role, Role::Daemon(name) if name == host);
        self.with(own, &format!("laxity://daemon/{host}")).map(|_| ())
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
                let names: Vec<String> = roles.iter().map(Role::text).collect();
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
        assert_eq!(Role::parse("laxity://daemon/h1"), Some(Role::Daemon("h1".into())));
        for uri in [
            "laxity://daemon/", "laxity://daemon", "laxity://daemon/a/b", "laxity://admin/a",
            "https://daemon/a", "laxity://daemon/a\nb",
        ] {
            assert_eq!(Role::parse(uri), None, "{uri}");
        }
    }

    #[test]
    fn each_role_may_what_it_is_for_and_nothing_else() {
        let known = |role: Role| {
            let mut request = Request::new(());
            request
                .extensions_mut()
                .insert(super::ConnectInfo::new(ProvenPeer::Known([role].into())));
            request
        };
        let daemon = known(Role::Daemon("a".into()));
        let viewer = known(Role::Viewer("v".into()));
        let operator = known(Role::Operator("o".into()));
        assert!(ProvenPeer::of(&daemon).may_report("a").is_ok());
        assert!(ProvenPeer::of(&daemon).may_report("b").is_err());
        assert!(ProvenPeer::of(&operator).may_report("a").is_err());
        let looks = [&daemon, &viewer, &operator].map(|r| ProvenPeer::viewer(r).is_ok());
        let operates = [&daemon, &viewer, &operator].map(|r| ProvenPeer::operator(r).is_ok());
        assert_eq!(looks, [false, true, true]);
        assert_eq!(operates, [false, false, true]);
    }
}
