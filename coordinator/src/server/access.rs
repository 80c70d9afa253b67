//! Who a peer is and what it may do.
//!
//! Without TLS every peer is everybody, which is why the server listens on loopback unless it is told
//! otherwise. With it, the certificate's identity takes the place of [`Peer::Anyone`], and the checks below, which every
//! method passes through, become real.

use tonic::{Request, Status};

/// A peer, by what it has proved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// Nothing, and nothing was asked for.
    Anyone,
}

impl Peer {
    /// For logs and histories.
    pub(crate) fn name<T>(&self, request: &Request<T>) -> String {
        let address = request.remote_addr();
        address.map_or_else(|| "local".into(), |address| address.to_string())
    }

    /// May it report for this host?
    pub(crate) fn may_report(&self, host: &str) -> Result<(), Status> {
        match self {
            Self::Anyone => {
                let _ = host;
                Ok(())
            }
        }
    }
}

/// How peers are recognised.
#[derive(Clone, Debug)]
pub(crate) struct Access(());

impl Access {
    /// Not at all.
    pub(crate) const fn open() -> Self {
        Self(())
    }

    /// Whose request this is.
    pub(crate) fn peer<T>(&self, _request: &Request<T>) -> Result<Peer, Status> {
        Ok(Peer::Anyone)
    }

    /// A peer that may look.
    pub(crate) fn viewer<T>(&self, request: &Request<T>) -> Result<Peer, Status> {
        self.peer(request)
    }

    /// A peer that may change things.
    pub(crate) fn operator<T>(&self, request: &Request<T>) -> Result<Peer, Status> {
        self.peer(request)
    }
}
