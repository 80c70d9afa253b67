//! The job that runs a program on a terminal of its own: a pseudo-terminal in the guest, whose
//! other side is the channel. The host's terminal is raw meanwhile.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::Command;

use anyhow::Context as _;
use nix::fcntl::OFlag;
use nix::pty::{grantpt, posix_openpt, ptsname_r, unlockpt};

use super::channel::{CONTENT_BYTES_MAX, Kind};
use super::exec;
use super::guest::Guest;
use super::job::{Exec, Shell};
use super::task::shell_code;

/// Runs the program; its exit code as a shell would give it.
///
/// # Errors
/// No terminal can be made, or there is no such program.
pub fn run(config: &Shell, guest: &mut Guest) -> anyhow::Result<i32> {
    let ours = posix_openpt(OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC)
        .context("making a terminal")?;
    grantpt(&ours)
        .and_then(|()| unlockpt(&ours))
        .context("making a terminal")?;
    let name = ptsname_r(&ours).context("making a terminal")?;
    let ours = File::from(OwnedFd::from(ours));
    let theirs = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&name)
        .with_context(|| format!("opening {name}"))?;
    let (rows, columns) = (config.rows.to_string(), config.columns.to_string());
    // Without a size it works too, only less nicely.
    let _ = Command::new("stty")
        .args(["rows", &rows, "columns", &columns])
        .stdin(theirs.try_clone()?)
        .status();
    // A process cannot take a terminal as its own before it runs, but this program does it first.
    let mut argv = vec!["setsid".to_owned(), "--ctty".into(), "--wait".into()];
    argv.extend(config.exec.argv.iter().cloned());
    let exec = Exec {
        argv,
        ..config.exec.clone()
    };
    let mut command = exec::command(&exec, guest)?;
    let mut child = command
        .stdin(theirs.try_clone()?)
        .stdout(theirs.try_clone()?)
        .stderr(theirs)
        .spawn()
        .context("starting setsid (of util-linux)")?;
    // It holds the terminal's other side open, whose end is the end of the output.
    drop(command);
    let mut keys = ours.try_clone()?;
    if let Some(pieces) = guest.take_stdin() {
        std::thread::spawn(move || {
            while let Ok(piece) = pieces.recv() {
                // End of transmission: what a terminal has for an end of input.
                let piece = if piece.is_empty() { vec![4] } else { piece };
                if keys.write_all(&piece).is_err() {
                    return;
                }
            }
        });
    }
    let output = guest.output();
    let pump = std::thread::spawn(move || {
        let mut ours = ours;
        let mut buffer = vec![0; CONTENT_BYTES_MAX];
        // EIO when nobody has the other side open any more.
        while let Ok(length @ 1..) = ours.read(&mut buffer) {
            if output.send(Kind::Stdout, &buffer[..length]).is_err() {
                return;
            }
        }
    });
    let status = child.wait().context("waiting for the shell")?;
    let give_up = std::time::Instant::now() + std::time::Duration::from_secs(1);
    while !pump.is_finished() && std::time::Instant::now() < give_up {
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    Ok(shell_code(status))
}
