//! A program of the matrix: what is run, and what must come of it.

use std::time::Duration;

/// How the library gets into a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Through {
    /// `laxity run --profile … -- PROGRAM`.
    Run,
    /// `LD_PRELOAD` and `LAXITY_PROFILE`, set by hand.
    Preload,
}

/// What one side posts on queue pairs of any kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Posted {
    /// Known from its arguments.
    Exactly {
        /// Work requests.
        work_requests: u64,
        /// Their payload.
        bytes: u64,
    },
    /// It says so itself, in lines of JSON with `work_requests`, `bytes` and `passed`.
    Stated,
    /// Only the wire tells.
    Wire,
}

/// When a server can be connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ready {
    /// Something listens at this TCP port.
    Port(u16),
    /// Something listens for connections by rdma_cm.
    Management,
}

/// One process.
#[derive(Clone, Debug)]
pub(super) struct Side {
    pub(super) argv: Vec<String>,
    pub(super) env: Vec<(String, String)>,
    pub(super) posted: Posted,
}

/// One program of the matrix: a client, mostly with a server.
#[derive(Clone, Debug)]
pub(super) struct Program {
    pub(super) name: String,
    pub(super) profile: &'static str,
    pub(super) through: Through,
    pub(super) server: Option<(Side, Ready)>,
    pub(super) client: Side,
    /// Work requests must have waited.
    pub(super) must_defer: bool,
    /// DSCP of connected queue pairs; `None`: the program sets classes itself.
    pub(super) dscp: Option<u8>,
    /// DSCP of datagrams, which keep the program's own.
    pub(super) datagram_dscp: Option<u8>,
    /// Whether each work request is a message on the wire: not so where some are made to fail.
    pub(super) all_cross: bool,
    pub(super) limit: Duration,
}

impl Side {
    pub(super) fn new(line: &str, posted: Posted) -> Self {
        Self {
            argv: line.split_whitespace().map(str::to_owned).collect(),
            env: Vec::new(),
            posted,
        }
    }

    pub(super) fn with(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }
}
