//! Workers of a fault campaign on the NCCL plugin, over TCP or verbs: a sender and a receiver,
//! driven as NCCL drives them. The receiver tells the oracle what came. The last message names how
//! many came before it, so a message that is lost at the end is found, too.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use laxity_nccl_host::{Attempt, Context, Handle, HostError, Plugin, Region, Request, Tested};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::frame::{Frame, content};
use super::task::{Outlet, Task};
use crate::error::LabError;

const MESSAGE_MAX: usize = 96 << 10;
/// Messages that are under way at once.
const DEPTH: usize = 4;
const POLL: Duration = Duration::from_micros(500);
/// The first word of the last message. No content begins with it.
const LAST: [u8; 8] = [0xff; 8];

/// Sends messages until `stop`, to the listener whose handle appears in the task's file.
pub(super) fn send(task: &Task, outlet: &Outlet, stop: &Arc<AtomicBool>) -> Result<(), LabError> {
    let (_plugin, context) = context(&task.programs.library)?;
    let handle = loop {
        if let Ok(bytes) = std::fs::read(&task.handle)
            && let Ok(handle) = Handle::try_from(bytes.as_slice())
        {
            break handle;
        }
        std::thread::sleep(POLL);
    };
    told(outlet, sending(&context, handle, task, outlet, stop))
}

/// Receives messages until the last one, and writes its handle to the task's file.
pub(super) fn receive(task: &Task, outlet: &Outlet) -> Result<(), LabError> {
    let (_plugin, context) = context(&task.programs.library)?;
    told(outlet, receiving(&context, task, outlet))
}

fn context(plugin: &Path) -> Result<(Plugin, Context), LabError> {
    let failed = |error: HostError| LabError::program("the NCCL plugin", error.to_string());
    let plugin = Plugin::load(plugin).map_err(failed)?;
    let context = plugin.init(1).map_err(failed)?;
    Ok((plugin, context))
}

/// Reports an error to the driver, which knows whether the peer died, so that an error was
/// expected.
fn told(outlet: &Outlet, result: Result<(), HostError>) -> Result<(), LabError> {
    if let Err(error) = result {
        eprintln!("nccl: {error}");
        outlet.put(&[Frame::Abandoned { queue: 0 }]);
    }
    Ok(())
}

fn sending(
    context: &Context,
    handle: Handle,
    task: &Task,
    outlet: &Outlet,
    stop: &AtomicBool,
) -> Result<(), HostError> {
    let mut rng = ChaCha8Rng::seed_from_u64(task.seed);
    let mut connecting = context.connect(task.device, handle);
    let comm = loop {
        match connecting.poll()? {
            Some(comm) => break comm,
            None => std::thread::sleep(POLL),
        }
    };
    let mut spare: Vec<Region> = Vec::new();
    let mut open: VecDeque<(u64, Request)> = VecDeque::new();
    let (mut number, mut last) = (0_u64, false);
    // A message that the plugin could not start yet, with its length.
    let mut ready: Option<(Region, usize)> = None;
    while !(last && open.is_empty() && ready.is_none()) {
        if ready.is_none() && open.len() < DEPTH && !last {
            let mut region = match spare.pop() {
                Some(region) => region,
                None => comm.register(vec![0; MESSAGE_MAX])?,
            };
            last = stop.load(Ordering::Relaxed);
            let message = if last {
                [LAST, number.to_le_bytes()].concat()
            } else {
                content(0, number, 0, 8 * rng.random_range(1..=MESSAGE_MAX as u64 / 8))
            };
            region[..message.len()].copy_from_slice(&message);
            ready = Some((region, message.len()));
            // The receiver's frames have the bytes.
            outlet.put(&[Frame::Submitted { queue: 0, number, bytes: 0, in_order: true }]);
            number += 1;
        }
        if let Some((region, length)) = ready.take() {
            match comm.send(region, length, 0)? {
                Attempt::Started(request) => open.push_back((number - 1, request)),
                Attempt::NotNow(region) => ready = Some((region, length)),
            }
        }
        while let Some((number, request)) = open.pop_front() {
            match request.test()? {
                Tested::Done(region, _) => {
                    spare.push(region);
                    outlet.put(&[Frame::Done { queue: 0, number }]);
                }
                Tested::Pending(request) => {
                    open.push_front((number, request));
                    break;
                }
            }
        }
        std::thread::sleep(POLL);
    }
    outlet.put(&[Frame::Ended { queue: 0, count: number }]);
    Ok(())
}

fn receiving(context: &Context, task: &Task, outlet: &Outlet) -> Result<(), HostError> {
    let (mut listener, handle) = context.listen(task.device)?;
    let next = task.handle.with_extension("next");
    // If the handle can't be written, the sender waits in vain, and the round says so.
    let _ = std::fs::write(&next, handle).and_then(|()| std::fs::rename(&next, &task.handle));
    let comm = loop {
        match listener.accept()? {
            Some(comm) => break comm,
            None => std::thread::sleep(POLL),
        }
    };
    let mut spare: Vec<Region> = Vec::new();
    let mut open: VecDeque<Request> = VecDeque::new();
    let mut number = 0;
    loop {
        while open.len() < DEPTH {
            let region = match spare.pop() {
                Some(region) => region,
                None => comm.register(vec![0; MESSAGE_MAX])?,
            };
            match comm.receive(region, MESSAGE_MAX, 0)? {
                Attempt::Started(request) => open.push_back(request),
                Attempt::NotNow(region) => {
                    spare.push(region);
                    break;
                }
            }
        }
        while let Some(request) = open.pop_front() {
            match request.test()? {
                Tested::Pending(request) => {
                    open.push_front(request);
                    break;
                }
                Tested::Done(region, length) => {
                    let payload = region[..length].to_vec();
                    spare.push(region);
                    if let Some(count) = payload.strip_prefix(&LAST) {
                        let count = count.iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte));
                        outlet.put(&[Frame::Ended { queue: 0, count }]);
                        return Ok(());
                    }
                    let bytes = payload.len() as u64;
                    outlet.put(&[
                        Frame::Submitted { queue: 0, number, bytes, in_order: true },
                        Frame::Bytes { queue: 0, number, offset: 0, payload },
                        Frame::Done { queue: 0, number },
                    ]);
                    number += 1;
                }
            }
        }
        std::thread::sleep(POLL);
    }
}
