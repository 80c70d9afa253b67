//! Hostile clients of a fault campaign. Each does its worst to the daemon until it is killed. If
//! the campaign runs as root, they are another user's processes than the workers.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use laxity_client::{Client, Direction, Flow, Hint, Lane, Options, Stage, Ticket, peers};
use laxity_shm::layout::{LaneHeader, Mode};
use laxity_shm::permit::published;
use laxity_shm::region::Region;
use laxity_shm::registration::{self, Hello, RegistrationError, Welcome};
use laxity_shm::sleep::now_ns;
use nix::unistd::{Uid, geteuid, setresuid};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::task::Task;

const STRANGER: u32 = 54_321;
const LIFE: Duration = Duration::from_secs(3);
const ANSWER_MAX: Duration = Duration::from_millis(200);

/// Misbehaves in the way that the seed selects: writes garbage, takes memory, or lies.
pub(super) fn run(task: &Task) {
    if geteuid().is_root() {
        let user = Uid::from_raw(STRANGER);
        // Without it, the process is hostile to its own user, which is a case, too.
        let _ = setresuid(user, user, user);
        // The change of user has cleared it.
        let _ = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL);
    }
    let mut rng = ChaCha8Rng::seed_from_u64(task.seed);
    let start = Instant::now();
    match task.seed % 3 {
        0 => {
            while start.elapsed() < LIFE {
                // A daemon that is gone or refuses is tried again.
                if vandalise(&task.socket, &mut rng).is_err() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        1 => {
            let mut hoard = Hoard::default();
            while start.elapsed() < LIFE {
                hoard.step(|| attach(&task.socket));
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        _ => {
            let (_client, mut lane) = attach(&task.socket);
            while start.elapsed() < LIFE {
                lie_once(&mut lane, now_ns(), &mut rng);
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
}

/// Attaches once and writes garbage: noise everywhere, and records that look published.
fn vandalise(socket: &Path, rng: &mut ChaCha8Rng) -> Result<(), RegistrationError> {
    let socket = registration::connect(socket)?;
    registration::send_hello(socket.as_fd(), &Hello::new("vandal", Mode::Enforce, false))?;
    if !registration::wait_readable(socket.as_fd(), ANSWER_MAX) {
        return Err(RegistrationError::NoAnswer);
    }
    let Some(welcome) = registration::receive_reply(socket.as_fd())? else {
        return Err(RegistrationError::NoAnswer);
    };
    write_garbage(welcome, rng)
}

pub(super) fn write_garbage(
    welcome: Welcome,
    rng: &mut ChaCha8Rng,
) -> Result<(), RegistrationError> {
    let refused = |_| RegistrationError::NoAnswer;
    let file = File::from(welcome.memfd.try_clone().map_err(refused)?);
    let length = file.metadata().map_err(refused)?.len();
    let geometry = welcome.geometry;
    let region = Region::map(welcome.memfd, geometry).map_err(|_| RegistrationError::NoAnswer)?;
    let write = |at: u64, word: u64| drop(file.write_all_at(&word.to_le_bytes(), at));
    if rng.random_range(0..4) == 0 {
        let mut noise = vec![0; length as usize];
        rng.fill(&mut noise[..]);
        drop(file.write_all_at(&noise, 0));
    }
    for lane in 0..geometry.lanes.min(4) {
        region.header().set_claimed(lane, true);
        let slots = (geometry.lane_offset(lane) + size_of::<LaneHeader>()) as u64;
        for (slot, seq) in [(0, 1), (rng.random_range(0..8), 2), (rng.random_range(0..8), 3)] {
            for word in 0..7 {
                // Small numbers pass the first checks and reach the later ones.
                let value = match rng.random_range(0..3) {
                    0 => rng.random(),
                    1 => rng.random_range(0..32),
                    _ => rng.random_range(0..32) | rng.random_range(0..8_u64) << 16,
                };
                write(slots + slot * 64 + word * 8, value);
            }
            write(slots + slot * 64 + 56, published(seq));
        }
    }
    for _ in 0..64 {
        let word = match rng.random_range(0..4) {
            0 => 0,
            1 => u64::MAX,
            2 => published(rng.random_range(0..64)),
            _ => rng.random_range(0..256),
        };
        write(rng.random_range(0..length / 8) * 8, word);
        registration::wake(welcome.eventfd.as_fd());
    }
    Ok(())
}

fn attach(socket: &Path) -> (Client, Lane) {
    let client = Client::attach(Options {
        socket: socket.to_owned(),
        name: "hostile".to_owned(),
        reattach_every: Duration::from_millis(10),
        ..Options::default()
    });
    let lane = client.lane();
    (client, lane)
}

fn flow(stage: Stage, bytes: u64) -> Flow {
    Flow { stage, direction: Direction::Egress, bytes, batch: 1, request: 1, ..Flow::default() }
}

/// Eight clients that take every permit and complete nothing.
#[derive(Default)]
pub(super) struct Hoard(Vec<(Client, Lane, Vec<Ticket>)>);

impl Hoard {
    pub(super) fn step(&mut self, attach: impl FnOnce() -> (Client, Lane)) {
        if self.0.len() < 8 {
            let (client, mut lane) = attach();
            let whole = Flow { whole: true, ..flow(Stage::P2d, 64 << 10) };
            let collective = flow(Stage::Collective, 64 << 10);
            let flows = [whole, collective].into_iter().cycle().take(32).enumerate();
            // Where each peer has a bound of its own, a client that names many gets more.
            let named = |(at, flow): (usize, Flow)| Flow {
                peer: peers::number([at as u8 + 1; 16]),
                ..flow
            };
            let tickets = flows.map(|flow| lane.submit(&named(flow))).collect();
            self.0.push((client, lane, tickets));
        }
        for (_, lane, tickets) in &mut self.0 {
            for ticket in tickets {
                let _ = lane.poll(ticket);
            }
        }
    }
}

/// Sends false hints, flows of any size, and completions of bytes that were not sent.
pub(super) fn lie_once(lane: &mut Lane, now_ns: u64, rng: &mut ChaCha8Rng) {
    let batch = rng.random_range(1..64);
    lane.hint(Hint::BatchBegin { batch, layers: rng.random(), layer_time_ns: rng.random() });
    lane.hint(Hint::BatchQueued { batch, ahead: rng.random() });
    let tickets: Vec<Ticket> = (0..32)
        .map(|_| {
            let stage = [Stage::Collective, Stage::KvReuse, Stage::P2d][rng.random_range(0..3)];
            lane.submit(&Flow {
                batch,
                request: rng.random_range(0..64),
                layer: rng.random(),
                deadline_ns: now_ns + rng.random_range(0..1000),
                ..flow(stage, 1 << rng.random_range(3..30))
            })
        })
        .collect();
    for ticket in &tickets {
        lane.complete(ticket, rng.random::<u64>() >> rng.random_range(0..64));
    }
    lane.hint(Hint::BatchEnd { batch });
}
