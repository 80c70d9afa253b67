//! Reads files that people write: configuration, certificates, plans, traces.
//!
//! A path in a configuration can name anything. Opening a FIFO can block, and `/dev/zero` never
//! ends, so a daemon that reads such a path stops answering or runs out of memory. [`open`]
//! therefore never waits and accepts only regular files, also through a link. [`read`] fails above
//! the caller's limit. A few kilobytes of gzip unpack to gigabytes, so [`limited`] bounds the
//! output of a decoder, and [`lines`] a single line.
//!
//! [`print`] writes to standard output.
#![forbid(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, ErrorKind, Read, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Limit for a configuration file, a certificate or a key, in bytes.
pub const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// The error of a file that could not be read. Its text names neither the file nor the reader's
/// purpose, so the caller puts the path before it.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The operating system returned an error.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The path names something that has no length, or no end.
    #[error("it is {kind}; a regular file is needed")]
    NotAFile {
        /// The kind of the thing that the path names, with its article.
        kind: &'static str,
    },
    /// The file is longer than the caller's limit.
    #[error("it is longer than {limit} bytes, the limit for such a file")]
    TooLong {
        /// The limit, in bytes.
        limit: u64,
    },
    /// The file is not UTF-8 text.
    #[error("it is not UTF-8 text: byte {at} is the first invalid one")]
    NotText {
        /// Offset of the first invalid byte from the file's start.
        at: usize,
    },
}

impl ReadError {
    /// Returns the kind of the operating system's error. A caller may accept a missing file.
    pub fn io_kind(&self) -> Option<ErrorKind> {
        match self {
            Self::Io(cause) => Some(cause.kind()),
            _ => None,
        }
    }
}

/// Opens a regular file for reading, without waiting for another process.
///
/// # Errors
/// [`ReadError::NotAFile`] if the path names a FIFO, a device, a socket or a folder;
/// [`ReadError::Io`] if it can't be opened.
pub fn open(path: &Path) -> Result<File, ReadError> {
    // Without O_NONBLOCK, opening a FIFO waits for a writer. It changes nothing for regular files.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(|cause| match cause.raw_os_error() {
            Some(libc::ENXIO) => ReadError::NotAFile { kind: "a socket" },
            _ => ReadError::Io(cause),
        })?;
    let kind = file.metadata()?.file_type();
    let other = if kind.is_file() {
        return Ok(file);
    } else if kind.is_dir() {
        "a folder"
    } else if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_char_device() || kind.is_block_device() {
        "a device"
    } else {
        "no file"
    };
    Err(ReadError::NotAFile { kind: other })
}

/// Reads a regular file of at most `limit` bytes.
///
/// # Errors
/// The errors of [`open`], and [`ReadError::TooLong`] beyond the limit, also if the file grows
/// meanwhile.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>, ReadError> {
    let mut bytes = Vec::new();
    open(path)?.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(ReadError::TooLong { limit });
    }
    Ok(bytes)
}

/// Reads a regular file of at most `limit` bytes of UTF-8 text.
///
/// # Errors
/// The errors of [`read`], and [`ReadError::NotText`] if the file is not UTF-8 text.
pub fn read_to_string(path: &Path, limit: u64) -> Result<String, ReadError> {
    String::from_utf8(read(path, limit)?)
        .map_err(|error| ReadError::NotText { at: error.utf8_error().valid_up_to() })
}

/// The operating system's error of a write to standard output.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output: {0}")]
pub struct PrintError(pub io::Error);

/// Writes to standard output. It is no error if the reader has closed the pipe.
pub fn print(text: impl AsRef<[u8]>) -> Result<(), PrintError> {
    let mut out = io::stdout();
    match out.write_all(text.as_ref()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(PrintError(error)),
        _ => Ok(()),
    }
}

/// Creates a reader that fails beyond `limit` bytes instead of ending there. It is for content
/// whose length the file does not show: unpacked data, or a file that is read in pieces.
///
/// The [`io::Error`] beyond the limit contains [`ReadError::TooLong`].
pub const fn limited<R: Read>(from: R, limit: u64) -> Limited<R> {
    Limited { from, limit, left: limit }
}

/// A reader that fails beyond a limit, see [`limited`].
#[derive(Debug)]
pub struct Limited<R> {
    from: R,
    limit: u64,
    left: u64,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.from.read(into)?;
        self.left = self
            .left
            .checked_sub(count as u64)
            .ok_or_else(|| io::Error::other(ReadError::TooLong { limit: self.limit }))?;
        Ok(count)
    }
}

/// Returns the lines of a text, without their ends. A line of more than `longest` bytes is an error
/// and the last item.
pub const fn lines<R: BufRead>(from: R, longest: u64) -> Lines<R> {
    Lines { from, longest, ended: false }
}

/// An iterator over the lines of a text, see [`lines`].
#[derive(Debug)]
pub struct Lines<R> {
    from: R,
    longest: u64,
    ended: bool,
}

impl<R: BufRead> Lines<R> {
    fn read(&mut self) -> io::Result<Option<String>> {
        let mut line = String::new();
        let most = self.longest.saturating_add(2);
        if (&mut self.from).take(most).read_line(&mut line)? == 0 {
            return Ok(None);
        }
        if line.ends_with('\n') {
            line.pop();
            if line.ends_with('\r') {
                line.pop();
            }
        }
        if line.len() as u64 > self.longest {
            let limit = self.longest;
            return Err(io::Error::other(format!("it is longer than {limit} bytes")));
        }
        Ok(Some(line))
    }
}

impl<R: BufRead> Iterator for Lines<R> {
    type Item = io::Result<String>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.read().transpose();
        self.ended = !matches!(next, Some(Ok(_)));
        next
    }
}

/// Blanks out keys of a configuration that only older releases knew, so that a file that was kept
/// over an upgrade still works. Returns the text, in which all else keeps its offset, and the keys
/// that were blanked out. A key is written `section.key`, and has its value on one line.
#[must_use]
pub fn without_retired(text: &str, retired: &[&str]) -> (String, Vec<String>) {
    let mut section = String::new();
    let mut found = Vec::new();
    let mut kept = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        let code = line.split('#').next().unwrap_or_default().trim();
        if let Some(name) = code.strip_prefix('[') {
            name.trim_end_matches(']').trim().clone_into(&mut section);
        }
        let key = code.split_once('=').map(|(key, _)| format!("{section}.{}", key.trim()));
        match key.filter(|key| retired.contains(&key.as_str())) {
            Some(key) => {
                found.push(key);
                kept.extend(line.bytes().map(|byte| if byte == b'\n' { '\n' } else { ' ' }));
            }
            None => kept.push_str(line),
        }
    }
    (kept, found)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nix::sys::stat::Mode;

    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_limit_and_not_beyond() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.toml");
        fs::write(&path, "1234").unwrap();
        assert_eq!(read_to_string(&path, 4).unwrap(), "1234");
        assert!(matches!(read(&path, 3), Err(ReadError::TooLong { limit: 3 })));
        fs::write(&path, b"12\xff4").unwrap();
        assert!(matches!(read_to_string(&path, 4), Err(ReadError::NotText { at: 2 })));
    }

    #[test]
    fn what_is_no_regular_file_is_refused_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        nix::unistd::mkfifo(&fifo, Mode::S_IRWXU).unwrap();
        let socket = folder.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for (path, kind) in [
            (fifo.as_path(), "a FIFO"),
            (socket.as_path(), "a socket"),
            (Path::new("/dev/zero"), "a device"),
            (folder.path(), "a folder"),
        ] {
            let error = read(path, 10).unwrap_err().to_string();
            assert!(error.contains(kind), "{}: {error}", path.display());
        }
    }

    #[test]
    fn what_is_unpacked_is_read_up_to_its_limit_and_a_line_up_to_its_own() {
        let mut text = String::new();
        limited(&b"1234"[..], 4).read_to_string(&mut text).unwrap();
        assert_eq!(text, "1234");
        let error = limited(io::repeat(0), 4).read_to_end(&mut Vec::new());
        assert!(error.unwrap_err().to_string().contains("4 bytes"));
        let read = |text: &'static str| -> Vec<Option<String>> {
            lines(text.as_bytes(), 4).map(Result::ok).collect()
        };
        let some = |line: &str| Some(line.to_owned());
        assert_eq!(read("a\n\n1234\r\nlast"), [some("a"), some(""), some("1234"), some("last")]);
        assert_eq!(read("a\n12345\nb"), [some("a"), None]);
        assert_eq!(read("12345"), [None]);
        let mut endless = lines(io::BufReader::new(io::repeat(b'x')), 4);
        assert!(endless.next().unwrap().is_err() && endless.next().is_none());
    }

    #[test]
    fn a_link_to_a_file_is_one_and_a_missing_file_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "x").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert_eq!(read(&link, 1).unwrap(), b"x");
        let missing = read(&folder.path().join("none"), 1).unwrap_err();
        assert_eq!(missing.io_kind(), Some(io::ErrorKind::NotFound));
    }

    #[test]
    fn keys_of_older_releases_are_blanked_out_and_all_else_keeps_its_place() {
        let text =
            "mlu = 1\n[tuning] # those\n mlu = \"per_flow\" # gone\nnew = 2\n[[nic]]\nmlu = 3\n";
        let (kept, found) = without_retired(text, &["tuning.mlu", "tuning.ties"]);
        assert_eq!(found, ["tuning.mlu"]);
        assert_eq!(kept.len(), text.len());
        assert_eq!(kept.find("new"), text.find("new"));
        assert_eq!(kept.lines().map(str::trim).nth(2), Some(""));
        assert_eq!(kept.matches("mlu").count(), 2);
    }
}
