//! The first steps of a worker process.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use nix::sys::signal::Signal;

use super::task::{Outlet, Role, Task, obey};
use super::{client, engine, hostile, nccl};
use crate::error::LabError;

pub(super) fn run(task: &str) -> Result<(), LabError> {
    // A driver that is killed takes its workers with it, even those that are stopped.
    let _ = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL);
    let task: Task = serde_json::from_str(task)?;
    let outlet = Outlet::stdout()?;
    let stop = Arc::new(AtomicBool::new(false));
    match task.role {
        Role::Hostile => hostile::run(&task),
        Role::NcclSender => {
            let stopped = Arc::clone(&stop);
            std::thread::spawn(move || obey(&stopped, |_| {}));
            nccl::send(&task, &outlet, &stop)?;
        }
        Role::NcclReceiver => {
            std::thread::spawn(move || obey(&stop, |_| {}));
            nccl::receive(&task, &outlet)?;
        }
        Role::Client => client::run(&task, &outlet, &stop)?,
        Role::Engine => engine::run(task, &outlet, &stop)?,
        _ => return Err(LabError::Inside("this worker is another program".to_owned())),
    }
    Ok(())
}
