//! The job that runs one program, with its standard streams connected to the host's.

use std::io::{Read, Write as _};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use super::channel::{CONTENT_BYTES_MAX, FrameKind};
use super::guest::{Guest, Output, with_lab_variables};
use super::job::Exec;
use super::task::shell_code;
use crate::child::poll;
use crate::error::LabError;

/// Longest time that output may follow the program's end, from processes that it left running.
const DRAIN: Duration = Duration::from_secs(1);

/// Exit codes of a program that does not exist or cannot be run, as a shell has them.
const NOT_FOUND: i32 = 127;
const NOT_RUN: i32 = 126;

pub fn run(config: &Exec, guest: &mut Guest) -> Result<i32, LabError> {
    let (program, args) = config
        .argv
        .split_first()
        .ok_or_else(|| LabError::Plan("no program was named".to_owned()))?;
    let spawned = Command::new(program)
        .args(args)
        .env_clear()
        .envs(with_lab_variables(&config.env, guest.environment()))
        .current_dir(&config.cwd)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) => {
            let cwd = config.cwd.display();
            guest.say(&format!("laxity: cannot start `{program}` in {cwd}: {error}"))?;
            let missing = error.kind() == std::io::ErrorKind::NotFound;
            return Ok(if missing { NOT_FOUND } else { NOT_RUN });
        }
    };
    if let (Some(mut pipe), Some(pieces)) = (child.stdin.take(), guest.stdin.take()) {
        std::thread::spawn(move || {
            while let Ok(piece) = pieces.recv() {
                // A program need not read all of its input.
                if piece.is_empty() || pipe.write_all(&piece).is_err() {
                    return;
                }
            }
        });
    }
    let pumps = [
        pump(child.stdout.take(), FrameKind::Stdout, guest.output.clone()),
        pump(child.stderr.take(), FrameKind::Stderr, guest.output.clone()),
    ];
    let status = child.wait().map_err(LabError::system("waiting for the program"))?;
    let is_drained = || pumps.iter().all(JoinHandle::is_finished).then_some(());
    poll(DRAIN, Duration::from_millis(2), is_drained);
    Ok(shell_code(status))
}

fn pump(
    stream: Option<impl Read + Send + 'static>,
    kind: FrameKind,
    output: Output,
) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let Some(mut stream) = stream else { return };
        let mut buffer = vec![0; CONTENT_BYTES_MAX];
        while let Ok(length @ 1..) = stream.read(&mut buffer) {
            if output.send(kind, &buffer[..length]).is_err() {
                return;
            }
        }
    })
}
