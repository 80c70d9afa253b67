//! The host's terminal while a shell runs in the guest. It is raw, so that the guest gets every
//! key, and is restored afterwards.

use std::io;
use std::process::{Command, Stdio};

use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};

/// A raw terminal on standard input. Dropping this restores the terminal.
#[derive(Debug)]
pub struct Raw {
    before: Termios,
}

impl Raw {
    pub fn enter() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(io::stdin(), SetArg::TCSADRAIN, &raw)?;
        Ok(Self { before })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = tcsetattr(io::stdin(), SetArg::TCSADRAIN, &self.before);
    }
}

/// Returns the rows and columns of the terminal on standard input, as `stty` reports them.
pub fn size() -> (u16, u16) {
    let output =
        Command::new("stty").arg("size").stdin(Stdio::inherit()).stderr(Stdio::null()).output();
    output
        .ok()
        .and_then(|output| parse_size(&String::from_utf8_lossy(&output.stdout)))
        .unwrap_or((24, 80))
}

fn parse_size(text: &str) -> Option<(u16, u16)> {
    let (rows, columns) = text.trim().split_once(' ')?;
    let size = (rows.parse().ok()?, columns.parse().ok()?);
    (size.0 > 0 && size.1 > 0).then_some(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_without_size_has_none() {
        assert_eq!(parse_size("50 132\n"), Some((50, 132)));
        assert_eq!(parse_size("0 0\n"), None);
        assert_eq!(parse_size(""), None);
    }
}
