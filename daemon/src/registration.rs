//! Registration: accepts connections, checks them, makes the memory and watches for hangups.
//!
//! By default the socket is open to all, and this module checks `SO_PEERCRED`. It admits root, the
//! daemon's own user, and the users and groups in `[access]`. A refusal is answered with its
//! reason. After registration the socket is silent. Its hangup means that the client ended.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use laxity_listen::{AcceptErrors, ConnectionSlot, ConnectionSlots, LineLimit};
use laxity_shm::layout::{Geometry, VERSION};
use laxity_shm::registration::{
    self, HELLO_FENCED, Hello, Peer, Reason, RegistrationError, Versions, accept, peer,
    peer_groups, receive_hello, send_reject,
};
use laxity_shm::served::ServeError;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tracing::{debug, info, warn};

use crate::clients::{ClientId, Identity, Leaving, PendingClient};
use crate::config::{AccessConfig, Config};
use crate::mailbox::SchedulerCommand;
use crate::owner::Owner;
use crate::pod;
use crate::service::Service;
use crate::sockets::plain;
use crate::watched::{Watched, watch};

const GREETING_MAX: Duration = Duration::from_secs(1);
/// Maximum number of admitted connections that have not greeted yet.
const GREETINGS_MAX: usize = 64;
/// Maximum number of connections without a greeting of one user other than root.
const GREETINGS_PER_UID_MAX: usize = 16;
/// Maximum number of refused connections that are kept until they have read the reason.
const FAREWELLS_MAX: usize = 32;
/// Maximum number of these refused connections of one user. Further ones are closed at once.
const FAREWELLS_PER_UID_MAX: usize = 16;
/// Connections that are accepted before other tasks of this thread run.
const ACCEPTS_MAX: usize = 16;
/// Maximum number of connections that are not attached clients.
pub const PENDING_MAX: usize = GREETINGS_MAX + FAREWELLS_MAX + ACCEPTS_MAX;
/// Maximum number of log lines in [`LINES_EVERY`] about arriving clients, or about departing ones.
const LINES_MAX: u32 = 32;
const LINES_EVERY: Duration = Duration::from_secs(10);

#[derive(Clone)]
struct RegistrationContext {
    service: Arc<Service>,
    greetings: ConnectionSlots<u32>,
    farewells: ConnectionSlots<u32>,
    /// The limits of log lines about clients that attach, and about those that leave.
    attached: Arc<Mutex<LineLimit>>,
    left: Arc<Mutex<LineLimit>>,
}

/// Returns the number of lines omitted before this one, or `None` if this line is to be omitted.
fn due(lines: &Mutex<LineLimit>) -> Option<u64> {
    lines.lock().take(Instant::now())
}

pub async fn serve(listener: Watched, service: Arc<Service>) {
    let lines = || Arc::new(Mutex::new(LineLimit::new(LINES_MAX, LINES_EVERY)));
    let door = RegistrationContext {
        service,
        greetings: ConnectionSlots::new(GREETINGS_MAX, GREETINGS_PER_UID_MAX),
        farewells: ConnectionSlots::new(FAREWELLS_MAX, FAREWELLS_PER_UID_MAX),
        attached: lines(),
        left: lines(),
    };
    let mut errors = AcceptErrors::new("the registration socket");
    loop {
        // Clients run unscheduled while there is an error.
        if let Err(error) = door.accept_some(&listener).await {
            errors.rest_after(&error).await;
        }
        // A connection that lost its slot closes before the next one is accepted.
        tokio::task::yield_now().await;
    }
}

impl RegistrationContext {
    /// Waits for connections and accepts up to [`ACCEPTS_MAX`] of them.
    async fn accept_some(&self, listener: &Watched) -> io::Result<()> {
        let mut ready = listener.readable().await?;
        for _ in 0..ACCEPTS_MAX {
            match accept(listener.get_ref().as_fd()).map_err(plain)? {
                Some(socket) => {
                    let from = peer(socket.as_fd()).map_err(plain)?;
                    self.admit(socket, from)?;
                }
                None => {
                    ready.clear_ready();
                    break;
                }
            }
        }
        Ok(())
    }

    /// Admits a connection, or refuses it at once if the process may not attach.
    fn admit(&self, socket: OwnedFd, from: Peer) -> io::Result<()> {
        let config = self.service.config();
        let groups = || peer_groups(socket.as_fd()).unwrap_or_default();
        if !may_attach(&config.access, from, groups) {
            let why = format!(
                "user {} is not admitted; name it in `uids` or a group of it in `gids` of [access] \
                 in the configuration, then `laxity reload`",
                from.uid
            );
            self.refuse(&socket, &Refusal::new(from, why, Reason::Forbidden));
            if let Some(place) = self.farewells.take_free(from.uid) {
                tokio::spawn(farewell(watch(socket)?, place));
            }
            return Ok(());
        }
        let Some(place) = self.greetings.take(from.uid, from.uid == 0) else {
            let why = "root has every place of a connection that is about to attach".to_owned();
            self.refuse(&socket, &Refusal::new(from, why, Reason::Full));
            return Ok(());
        };
        let (door, socket) = (self.clone(), watch(socket)?);
        tokio::spawn(async move {
            match door.greet(&socket, from, place).await {
                Ok(newcomer) => door.attend(&socket, newcomer).await,
                // Another daemon checked whether a process listens here, as this one does at passed
                // sockets. That is no refusal.
                Err(Refusal { reason: None, why, .. })
                    if from.uid == nix::unistd::geteuid().as_raw() =>
                {
                    debug!(from.pid, from.uid, %why, "a connection ended before it attached");
                }
                Err(refusal) => door.refuse(socket.get_ref(), &refusal),
            }
        });
        Ok(())
    }

    /// Refuses a connection, counts the refusal and logs it at a limited rate.
    fn refuse(&self, socket: &OwnedFd, refusal: &Refusal) {
        let (Peer { pid, uid, .. }, why) = (refusal.peer, &refusal.why);
        if self.service.refusals().add(refusal.peer, why, refusal.reason) {
            warn!(pid, uid, %why, "refused a client; it runs unscheduled");
        } else {
            debug!(pid, uid, %why, "refused a client; it runs unscheduled");
        }
        if let Some(reason) = refusal.reason {
            let _ = send_reject(socket.as_fd(), reason);
        }
    }

    /// Awaits the greeting until it is late or the connection loses `place`.
    async fn greet(
        &self,
        socket: &Watched,
        from: Peer,
        mut place: ConnectionSlot<u32>,
    ) -> Result<PendingClient, Refusal> {
        let hello = tokio::select! {
            biased;
            hello = tokio::time::timeout(GREETING_MAX, greeting(socket)) => hello,
            () = place.lost() => {
                let why = "it had not greeted when newer connections of its user came".to_owned();
                return Err(Refusal::new(from, why, Reason::Full));
            }
        };
        match hello {
            Ok(Ok(hello)) => register(&hello, from, &self.service),
            Ok(Err(error)) => Err(Refusal {
                peer: from,
                why: error.to_string(),
                reason: match &error {
                    RegistrationError::Version(_) => Some(Reason::Version),
                    RegistrationError::NoAnswer => None,
                    _ => Some(Reason::Malformed),
                },
            }),
            Err(_) => {
                let why = "it connected and did not greet".to_owned();
                Err(Refusal::new(from, why, Reason::Malformed))
            }
        }
    }
}

/// Keeps a refused connection until its greeting has come. If a socket with unread data is closed,
/// the client gets an error instead of the reason.
async fn farewell(socket: Watched, place: ConnectionSlot<u32>) {
    let _ = tokio::time::timeout(GREETING_MAX, greeting(&socket)).await;
    drop((socket, place));
}

/// Why a process is refused, and the reason that it receives.
#[derive(Debug)]
struct Refusal {
    peer: Peer,
    why: String,
    /// `None` if the process is gone.
    reason: Option<Reason>,
}

impl Refusal {
    const fn new(peer: Peer, why: String, reason: Reason) -> Self {
        Self { peer, why, reason: Some(reason) }
    }
}

/// Takes a place and makes the memory. The welcome is sent only once the scheduler has the client.
fn register(hello: &Hello, from: Peer, service: &Service) -> Result<PendingClient, Refusal> {
    let full = |why: String| Refusal::new(from, why, Reason::Full);
    let config = service.config();
    let id = service.admit(from.uid).map_err(|error| full(error.to_string()))?;
    service.refusals().admitted(from.uid);
    newcomer(hello, from, id, &config).map_err(|error| {
        service.departed(id);
        full(error.to_string())
    })
}

pub fn newcomer(
    hello: &Hello,
    from: Peer,
    id: ClientId,
    config: &Config,
) -> Result<PendingClient, ServeError> {
    let identity = Identity {
        id,
        pid: if from.pid == 0 { hello.pid } else { from.pid },
        kernel_pid: from.pid,
        owner: Owner::of(from.uid, from.pid),
        pod: pod::of(from.pid).map(Arc::new),
        gid: from.gid,
        name: hello.name().into(),
        mode: hello.mode().unwrap_or_default(),
        version: hello.versions().common(Versions::OURS).unwrap_or(VERSION),
        release: hello.release,
    };
    let geometry = Geometry {
        lanes: config.scheduler.lanes,
        slots: config.scheduler.slots,
        colour: (id.0 % u64::from(laxity_shm::layout::COLOURS)) as u8,
    };
    PendingClient::new(identity, geometry, hello.flags & HELLO_FENCED != 0)
}

async fn greeting(socket: &Watched) -> Result<Hello, RegistrationError> {
    // A client that waited for this daemon to start has greeted already. It must not lose its place
    // to those that waited behind it.
    if let Some(hello) = receive_hello(socket.get_ref().as_fd())? {
        return Ok(hello);
    }
    loop {
        let mut ready = socket
            .readable()
            .await
            .map_err(|source| RegistrationError::System { call: "epoll", source })?;
        match receive_hello(socket.get_ref().as_fd())? {
            Some(hello) => return Ok(hello),
            None => ready.clear_ready(),
        }
    }
}

/// Reports whether the process may attach: root, the daemon's user, or a user or group of
/// `[access]`. `groups` returns the supplementary groups of the process.
fn may_attach(access: &AccessConfig, peer: Peer, groups: impl FnOnce() -> Vec<u32>) -> bool {
    access.anyone
        || peer.uid == 0
        || peer.uid == nix::unistd::geteuid().as_raw()
        || access.uids.contains(&peer.uid)
        || access.gids.contains(&peer.gid)
        || !access.gids.is_empty() && groups().iter().any(|gid| access.gids.contains(gid))
}

impl RegistrationContext {
    async fn attend(&self, socket: &Watched, newcomer: PendingClient) {
        let service = &self.service;
        let identity = newcomer.identity.clone();
        let id = identity.id;
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
        if !service.send(SchedulerCommand::Attach { newcomer: Box::new(newcomer), attached })
            || ready.await.is_err()
        {
            let _ = send_reject(fd, Reason::Stopping);
            service.departed(id);
            return;
        }
        self.say_attached(&identity);
        let sent = registration::send_welcome(
            fd,
            identity.version,
            geometry,
            region.memfd(),
            eventfd.as_fd(),
        );
        drop(eventfd);
        drop(region);
        match sent {
            Ok(()) => hangup(socket).await,
            Err(error) => debug!(%error, "a client left before its welcome"),
        }
        let (leaving, left) = oneshot::channel();
        if service.send(SchedulerCommand::Detach { client: id, leaving })
            && let Ok(Some(leaving)) = left.await
        {
            self.say_left(&leaving);
            // Now only this task has the region. It unmaps the region to save the scheduler thread
            // the time. The client may keep the file, so its pages are discarded first.
            service.departed(id);
            leaving.served.region().discard();
            drop(leaving);
        } else {
            service.departed(id);
        }
    }

    fn say_attached(&self, identity: &Identity) {
        let Some(left_out) = due(&self.attached) else { return };
        let mode = self.service.config().mode.min(identity.mode);
        info!(
            client = %identity.name, id = identity.id.0, pid = identity.pid,
            uid = identity.owner.uid,
            mode = mode.name(), lines_left_out = left_out, "a client attached"
        );
    }

    fn say_left(&self, leaving: &Leaving) {
        let Some(left_out) = due(&self.left) else { return };
        let (identity, counters) = (&leaving.identity, leaving.counters);
        info!(
            client = %identity.name, id = identity.id.0, pid = identity.pid,
            uid = identity.owner.uid,
            permitted_bytes = counters.permitted_bytes,
            cancelled_flows = counters.cancelled_flows,
            unknown_nic_flows = counters.unknown_nic_flows,
            garbage_records = counters.garbage_records,
            lines_left_out = left_out, "a client left"
        );
    }
}

/// Returns when the other side is gone. A message after the welcome breaks the protocol, and the
/// client counts as gone.
async fn hangup(socket: &Watched) {
    loop {
        let Ok(mut ready) = socket.readable().await else { return };
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
        let stranger = Peer { pid: 1, uid: 54_321, gid: 54_321 };
        let may = |access: &AccessConfig, peer| may_attach(access, peer, || vec![11, 12]);
        assert!(may(&access, Peer { uid: 0, ..stranger }));
        assert!(may(&access, Peer { uid: own, ..stranger }));
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
    fn the_groups_of_a_peer_are_those_of_its_process() {
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let mut seen = peer_groups(ours.as_fd()).expect("Linux 4.13 or later");
        let mut own: Vec<u32> =
            nix::unistd::getgroups().expect("own groups").iter().map(|gid| gid.as_raw()).collect();
        seen.sort_unstable();
        own.sort_unstable();
        assert_eq!(seen, own);
    }
}
