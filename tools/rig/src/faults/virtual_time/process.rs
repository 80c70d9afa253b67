//! The processes of a virtual world: applications with a few queues, and hostile clients.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use laxity_client::{Client, Lane, Options};
use laxity_shm::layout::Mode;
use laxity_shm::registration::{self, Hello};
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

use super::clock;
use super::host::name_of;
use super::queue::{Style, VirtualQueue};
use crate::faults::hostile::{Hoard, lie_once, write_garbage};
use crate::faults::plant::{Plant, Reported};

pub(super) const QUEUES: usize = 2;

const WORK_REQUESTS: &str = "work_requests";

enum Hostility {
    /// It writes garbage, on a new connection each time.
    Vandal(Option<OwnedFd>),
    Hoard(Hoard),
    Lie(Box<Lane>),
}

pub(super) struct VirtualProcess {
    pub(super) number: u32,
    /// The number of the process at the oracle.
    pub(super) worker: usize,
    clock: usize,
    /// The attachment, or `None` once the process is dead.
    pub(super) client: Option<Client>,
    pub(super) queues: Vec<VirtualQueue>,
    /// The number of each queue's last plan to act. Older ones are void.
    pub(super) plans: Vec<u64>,
    pub(super) stopped: bool,
    /// Time in which the process did not run, apart from that of the whole host.
    pub(super) starved_ns: u64,
    pub(super) reported: Reported,
    hostility: Option<Hostility>,
    rng: ChaCha8Rng,
}

fn attach(number: u32, clock: usize, socket: &Path) -> Client {
    let options = Options {
        socket: socket.to_owned(),
        name: name_of(number),
        reattach_every: Duration::from_millis(20),
        attach_timeout: Duration::ZERO,
        ..Options::default()
    };
    Client::attach_by(clock::OF_PROCESSES[clock], options)
}

/// Returns the path of a process in reports: the half of the library that it uses.
pub(super) fn path_of(number: u32) -> &'static str {
    if number.is_multiple_of(2) { "client" } else { WORK_REQUESTS }
}

impl VirtualProcess {
    fn new(
        number: u32,
        worker: usize,
        seed: u64,
        plant: (Option<Plant>, &Arc<AtomicBool>),
    ) -> Self {
        Self {
            number,
            worker,
            clock: usize::from(number % 4 == 3),
            client: None,
            queues: Vec::new(),
            plans: Vec::new(),
            stopped: false,
            starved_ns: 0,
            reported: Reported::new(plant.0, plant.1),
            hostility: None,
            rng: ChaCha8Rng::seed_from_u64(seed ^ u64::from(number)),
        }
    }

    pub(super) fn application(
        number: u32,
        worker: usize,
        seed: u64,
        socket: &Path,
        plant: (Option<Plant>, &Arc<AtomicBool>),
    ) -> Self {
        let mut process = Self::new(number, worker, seed, plant);
        let client = attach(number, process.clock, socket);
        let whole = path_of(number) == WORK_REQUESTS;
        for queue in 0..QUEUES {
            let style = Style { in_order: queue == 0, whole };
            let seed = seed.wrapping_add(u64::from(number));
            process.queues.push(VirtualQueue::new(&client, (number, queue as u32), style, seed));
            process.plans.push(0);
        }
        process.client = Some(client);
        process
    }

    pub(super) fn hostile(number: u32, seed: u64, socket: &Path, choice: u64) -> Self {
        let mut process = Self::new(number, usize::MAX, seed, (None, &Arc::default()));
        process.hostility = Some(match choice % 3 {
            0 => Hostility::Vandal(None),
            1 => Hostility::Hoard(Hoard::default()),
            _ => Hostility::Lie(Box::new(attach(number, process.clock, socket).lane())),
        });
        process
    }

    pub(super) fn is_application(&self) -> bool {
        self.client.is_some()
    }

    /// Drops everything that the process has. The caller has closed its connection.
    pub(super) fn die(&mut self) {
        self.queues.clear();
        self.plans.clear();
        self.client = None;
        self.hostility = None;
    }

    /// Does the next hostile thing. Returns whether the process still lives.
    pub(super) fn harm(&mut self, socket: &Path) -> bool {
        let (number, clock) = (self.number, self.clock);
        match &mut self.hostility {
            None => return false,
            Some(Hostility::Hoard(hoard)) => hoard.step(|| {
                let client = attach(number, clock, socket);
                let lane = client.lane();
                (client, lane)
            }),
            Some(Hostility::Lie(lane)) => {
                lie_once(lane, clock::OF_PROCESSES[clock].now_ns(), &mut self.rng);
            }
            Some(Hostility::Vandal(connection)) => {
                *connection = match connection.take() {
                    None => greet(number, socket),
                    Some(socket) => match registration::receive_reply(socket.as_fd()) {
                        Ok(None) => Some(socket),
                        Ok(Some(welcome)) => {
                            // The memory may be of no use, and the next attempt finds out.
                            let _ = write_garbage(welcome, &mut self.rng);
                            None
                        }
                        Err(_) => None,
                    },
                };
            }
        }
        true
    }
}

fn greet(number: u32, socket: &Path) -> Option<OwnedFd> {
    let socket = registration::connect(socket).ok()?;
    let hello = Hello::new(&name_of(number), Mode::Enforce, false);
    registration::send_hello(socket.as_fd(), &hello).ok()?;
    Some(socket)
}
