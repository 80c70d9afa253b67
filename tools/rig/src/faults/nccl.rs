//! Workers of a fault campaign on the NCCL plugin, over TCP or verbs: a sender and a receiver,
//! driven as NCCL drives them. The receiver tells the oracle what came. The last message names how
//! many came before it, so a message that is lost at the end is found, too.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use laxity_nccl_host::{Context, Handle, HostError, Plugin, ReceiveQueue, SendQueue};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::frame::{Frame, content};
use super::task::{Outlet, Task};
use crate::error::LabError;

const MESSAGE_MAX: u64 = 96 << 10;
/// Messages that are under way at once.
const DEPTH: u64 = 4;
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
    let mut queue = SendQueue::<Vec<u8>>::default();
    queue.connect(context.connect(task.device, handle));
    let (mut number, mut done, mut last) = (0, 0, false);
    while !last || queue.is_busy() {
        if queue.is_connected() && number - done < DEPTH && !last {
            last = stop.load(Ordering::Relaxed);
            queue.extend([if last {
                [LAST, number.to_le_bytes()].concat()
            } else {
                content(0, number, 0, 8 * rng.random_range(1..=MESSAGE_MAX / 8))
            }]);
            // The receiver's frames have the bytes.
            outlet.put(&[Frame::Submitted { queue: 0, number, bytes: 0, in_order: true }]);
            number += 1;
        }
        let sent = queue.turn(|message, region| {
            region[..message.len()].copy_from_slice(message);
            message.len()
        })?;
        for number in done..done + sent.done {
            outlet.put(&[Frame::Done { queue: 0, number }]);
        }
        done += sent.done;
        std::thread::sleep(POLL);
    }
    outlet.put(&[Frame::Ended { queue: 0, count: number }]);
    Ok(())
}

fn receiving(context: &Context, task: &Task, outlet: &Outlet) -> Result<(), HostError> {
    let (listener, handle) = context.listen(task.device)?;
    let next = task.handle.with_extension("next");
    // If the handle can't be written, the sender waits in vain, and the round says so.
    let _ = std::fs::write(&next, handle).and_then(|()| std::fs::rename(&next, &task.handle));
    let mut queue = ReceiveQueue::new(listener);
    while !queue.accept()? {
        std::thread::sleep(POLL);
    }
    let mut number = 0;
    loop {
        while let Some(payload) = queue.next(DEPTH as usize, |message| message.to_vec())? {
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
        std::thread::sleep(POLL);
    }
}
