//! How a process becomes a client: accept, check, make its memory, hand it over, watch for its end.
//!
//! The socket is open to all by default and the check is here, against `SO_PEERCRED` (what a
//! process says of itself decides nothing): root, the daemon's own user, and who `[access]` names.
//! A refusal is answered with its reason. Afterwards the socket is silent; its hangup is the death
//! of the client, on which everything of it is let go.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use laxity_shm::layout::Geometry;
use laxity_shm::registration::{
    self, HELLO_FENCED, Hello, Peer, Reason, RegistrationError, accept, peer, peer_groups,
    receive_hello, send_reject,
};
use tokio::sync::{Semaphore, oneshot};
use tracing::{debug, info, warn};

use crate::clients::{Identity, Newcomer};
use crate::config::AccessConfig;
use crate::mailbox::Command;
use crate::service::Service;
use crate::watched::{Watched, watch};

/// A process that has connected must have greeted within this time.
const GREETING_MAX: Duration = Duration::from_secs(1);
/// Between two warnings of refusals of one user.
const WARN_EVERY: Duration = Duration::from_secs(60);
/// Users warned of within that time.
const WARNED_MAX: usize = 32;
/// Connections that have not greeted yet.
const GREETINGS_MAX: usize = 128;

/// Serves `listener` until the runtime ends.
pub async fn serve(listener: Watched, service: Arc<Service>) {
    let warned = Arc::new(Mutex::new(Warned::default()));
    let greetings = Arc::new(Semaphore::new(GREETINGS_MAX));
    loop {
        let Ok(greeting) = Arc::clone(&greetings).acquire_owned().await else {
            return;
        };
        let socket = match next(&listener).await {
            Ok(socket) => socket,
            Err(error) => {
                warn!(%error, "cannot accept a client");
                // Out of descriptors: the backlog waits, clients run unscheduled meanwhile.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (service, warned) = (Arc::clone(&service), Arc::clone(&warned));
        tokio::spawn(async move {
            match register(&socket, &service).await {
                Ok(newcomer) => {
                    drop(greeting);
                    attend(&socket, newcomer, &service).await;
                }
                Err(refusal) => {
                    service.refused();
                    let (Peer { pid, uid, .. }, why) = (refusal.peer, &refusal.why);
                    let loud = warned
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .is_due(uid, Instant::now());
                    if loud {
                        warn!(pid, uid, %why, "refused a client; it runs unscheduled");
                    } else {
                        debug!(pid, uid, %why, "refused a client; it runs unscheduled");
                    }
                    if let Some(reason) = refusal.reason {
                        let _ = send_reject(socket.get_ref().as_fd(), reason);
                    }
                }
            }
        });
    }
}

async fn next(listener: &Watched) -> Result<Watched, RegistrationError> {
    let system = |source| RegistrationError::System {
        call: "accept",
        source,
    };
    loop {
        let mut ready = listener.readable().await.map_err(system)?;
        match accept(listener.get_ref().as_fd())? {
            Some(socket) => {
                return watch(socket).map_err(system);
            }
            None => ready.clear_ready(),
        }
    }
}

/// Users that were warned of lately. A client that is refused asks again every few seconds, and all
/// processes of a job do: one line a user and [`WARN_EVERY`] says it. The counter has them all.
#[derive(Debug, Default)]
struct Warned(BTreeMap<u32, Instant>);

impl Warned {
    /// Whether a refusal of `uid` is to be said aloud.
    fn is_due(&mut self, uid: u32, now: Instant) -> bool {
        self.0
            .retain(|_, at| now.saturating_duration_since(*at) < WARN_EVERY);
        // With so many users at once the log is full enough.
        if self.0.len() >= WARNED_MAX || self.0.contains_key(&uid) {
            return false;
        }
        self.0.insert(uid, now);
        true
    }
}

/// Why a process is not served, and what it is told.
#[derive(Debug)]
struct Refusal {
    peer: Peer,
    why: String,
    /// `None` if it is gone already.
    reason: Option<Reason>,
}

/// Greets, checks, makes the memory. The welcome is sent only once the scheduler has the client.
async fn register(socket: &Watched, service: &Service) -> Result<Newcomer, Refusal> {
    let fd = socket.get_ref().as_fd();
    let nobody = Peer {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let from = peer(fd).map_err(|error| Refusal {
        peer: nobody,
        why: error.to_string(),
        reason: Some(Reason::Forbidden),
    })?;
    let refuse = |reason, why: String| Refusal {
        peer: from,
        why,
        reason,
    };
    let config = service.config();
    let groups = || peer_groups(fd).unwrap_or_default();
    if !may_attach(&config.access, from, groups) {
        let why = format!(
            "user {} is not admitted; name it in `uids` or a group of it in `gids` of [access] in the configuration, then `laxity reload`",
            from.uid
        );
        // Read, though it changes nothing: a socket that is closed on something unread breaks under the
        // client's hands, and it never sees the reason.
        let _ = tokio::time::timeout(GREETING_MAX, greeting(socket)).await;
        return Err(refuse(Some(Reason::Forbidden), why));
    }
    let hello = match tokio::time::timeout(GREETING_MAX, greeting(socket)).await {
        Ok(Ok(hello)) => hello,
        Ok(Err(error)) => {
            let reason = match &error {
                RegistrationError::Version(_) => Some(Reason::Version),
                RegistrationError::NoAnswer => None,
                _ => Some(Reason::Malformed),
            };
            return Err(refuse(reason, error.to_string()));
        }
        Err(_) => {
            let why = "it connected and did not greet".to_owned();
            return Err(refuse(Some(Reason::Malformed), why));
        }
    };
    let Some(id) = service.admit() else {
        let why = format!("{} clients are attached", config.scheduler.clients_max);
        return Err(refuse(Some(Reason::Full), why));
    };
    let identity = Identity {
        id,
        pid: if from.pid == 0 { hello.pid } else { from.pid },
        uid: from.uid,
        name: hello.name().into(),
        mode: hello.mode().unwrap_or_default().into(),
    };
    let geometry = Geometry {
        lanes: config.scheduler.lanes,
        slots: config.scheduler.slots,
        colour: (id.0 % u64::from(laxity_shm::layout::COLOURS)) as u8,
    };
    let fenced = hello.flags & HELLO_FENCED != 0;
    Newcomer::new(identity, geometry, fenced).map_err(|error| {
        service.departed(id);
        refuse(Some(Reason::Full), error.to_string())
    })
}

async fn greeting(socket: &Watched) -> Result<Hello, RegistrationError> {
    loop {
        let mut ready = socket
            .readable()
            .await
            .map_err(|source| RegistrationError::System {
                call: "epoll",
                source,
            })?;
        match receive_hello(socket.get_ref().as_fd())? {
            Some(hello) => return Ok(hello),
            None => ready.clear_ready(),
        }
    }
}

/// Root, the daemon's own user, and whom the configuration names, by user or by group. `groups`
/// gives those of the process besides its effective one.
fn may_attach(access: &AccessConfig, peer: Peer, groups: impl FnOnce() -> Vec<u32>) -> bool {
    access.anyone
        || peer.uid == 0
        || peer.uid == nix::unistd::geteuid().as_raw()
        || access.uids.contains(&peer.uid)
        || access.gids.contains(&peer.gid)
        || !access.gids.is_empty() && groups().iter().any(|gid| access.gids.contains(gid))
}

/// Serves a client until its socket hangs up.
async fn attend(socket: &Watched, newcomer: Newcomer, service: &Service) {
    let id = newcomer.identity.id;
    let geometry = newcomer.served.region().geometry();
    let region = Arc::clone(newcomer.served.region());
    let fd = socket.get_ref().as_fd();
    let eventfd = match newcomer.served.eventfd().try_clone_to_owned() {
        Ok(eventfd) => eventfd,
        Err(error) => {
            service.departed(id);
            warn!(%error, "out of descriptors; a client runs unscheduled");
            let _ = send_reject(fd, Reason::Full);
            return;
        }
    };
    service.keep_region(id, Arc::clone(&region));
    let (attached, ready) = oneshot::channel();
    if !service.send(Command::Attach {
        newcomer: Box::new(newcomer),
        attached,
    }) || ready.await.is_err()
    {
        let _ = send_reject(fd, Reason::Stopping);
        service.departed(id);
        return;
    }
    let sent = registration::send_welcome(fd, geometry, region.memfd(), eventfd.as_fd());
    drop(eventfd);
    drop(region);
    match sent {
        Ok(()) => hangup(socket).await,
        Err(error) => debug!(%error, "a client left before its welcome"),
    }
    let (leaving, left) = oneshot::channel();
    if service.send(Command::Detach {
        client: id,
        leaving,
    }) && let Ok(Some(leaving)) = left.await
    {
        let counters = leaving.counters;
        let identity = &leaving.identity;
        info!(
            client = %identity.name, id = id.0, pid = identity.pid,
            permitted_bytes = counters.permitted_bytes,
            cancelled_flows = counters.cancelled_flows,
            garbage_records = counters.garbage_records,
            "a client left"
        );
        // After this nobody else has the region. It is emptied and unmapped here, not on the
        // scheduler's thread; the client may keep the file.
        service.departed(id);
        leaving.served.region().discard();
        drop(leaving);
    } else {
        service.departed(id);
    }
}

/// Returns when the other side is gone. Whoever speaks after the welcome breaks the protocol and
/// is treated as gone.
async fn hangup(socket: &Watched) {
    loop {
        let Ok(mut ready) = socket.readable().await else {
            return;
        };
        match receive_hello(socket.get_ref().as_fd()) {
            Ok(None) => ready.clear_ready(),
            Ok(Some(_)) | Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_oneself_and_the_named_may_attach_and_nobody_else() {
        let own = nix::unistd::geteuid().as_raw();
        let mut access = AccessConfig::default();
        let stranger = Peer {
            pid: 1,
            uid: 54_321,
            gid: 54_321,
        };
        let may = |access: &AccessConfig, peer| may_attach(access, peer, || vec![11, 12]);
        assert!(may(&access, Peer { uid: 0, ..stranger }));
        assert!(may(
            &access,
            Peer {
                uid: own,
                ..stranger
            }
        ));
        assert!(!may(&access, stranger));
        access.uids = vec![54_321];
        assert!(may(&access, stranger));
        access.uids.clear();
        access.gids = vec![54_321];
        assert!(may(&access, stranger));
        access.gids = vec![12];
        assert!(may(&access, stranger), "a member, by a supplementary group");
        access.gids = vec![13];
        assert!(!may(&access, stranger));
        access.gids.clear();
        access.anyone = true;
        assert!(may(&access, stranger));
    }

    #[test]
    fn refusals_of_a_user_are_said_aloud_once_in_a_while() {
        let (mut warned, now) = (Warned::default(), Instant::now());
        assert!(warned.is_due(1, now) && warned.is_due(2, now));
        assert!(!warned.is_due(1, now + WARN_EVERY / 2));
        assert!(warned.is_due(1, now + WARN_EVERY));
        let loud = (100..10_000).filter(|uid| warned.is_due(*uid, now + WARN_EVERY));
        assert_eq!(loud.count(), WARNED_MAX - 1);
    }

    #[test]
    fn the_groups_of_a_peer_are_those_of_its_process() {
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let mut seen = peer_groups(ours.as_fd()).expect("Linux 4.13 or later");
        let mut own: Vec<u32> = nix::unistd::getgroups()
            .expect("own groups")
            .iter()
            .map(|gid| gid.as_raw())
            .collect();
        seen.sort_unstable();
        own.sort_unstable();
        assert_eq!(seen, own);
    }
}
