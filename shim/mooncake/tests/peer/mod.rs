//! The process at the other end of a transfer, which is `mover` of the stand-in's folder.

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

/// Serves its memory, and prints its checksum on request. It is killed when dropped.
pub(crate) struct Peer {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    pub(crate) port: String,
    /// The address of its memory.
    #[allow(dead_code, reason = "the stand-in counts from the first byte")]
    pub(crate) base: String,
}

impl Peer {
    pub(crate) fn start(folder: &Path, bytes: u64) -> Self {
        let mut child = Command::new(folder.join("mover"))
            .args(["serve", &bytes.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the peer starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut next = |name: &str| {
            let line = lines.next().expect("a line").expect("text");
            line.strip_prefix(name).expect(name).to_owned()
        };
        let (port, base) = (next("port "), next("ready "));
        Self { child, lines, port, base }
    }

    pub(crate) fn checksum(&mut self) -> String {
        let stdin = self.child.stdin.as_mut().expect("piped");
        stdin.write_all(b"?\n").expect("it listens");
        self.lines.next().expect("a line").expect("text")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
