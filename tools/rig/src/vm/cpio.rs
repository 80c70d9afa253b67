//! An initramfs: the kernel's `newc` cpio format (`Documentation/driver-api/early-userspace/
//! buffer-format.rst`). Not compressed, since decompressing is what an emulated processor is bad
//! at.

use std::fmt::Write as _;

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;

/// An archive being written. Folders come before what is in them.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    /// Adds a folder.
    pub fn folder(&mut self, path: &str) {
        self.entry(path, DIRECTORY, &[]);
    }

    /// Adds a file that may be executed.
    pub fn file(&mut self, path: &str, content: &[u8]) {
        self.entry(path, PROGRAM, content);
    }

    /// The archive, whole.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let name_bytes = path.len() as u32 + 1;
        // Magic, then inode, mode, uid, gid, links, mtime, size, device and special device
        // (major, minor), length of the name, checksum (not used).
        let size = content.len() as u32;
        let fields = [
            self.entries,
            mode,
            0,
            0,
            1,
            0,
            size,
            0,
            0,
            0,
            0,
            name_bytes,
            0,
        ];
        let mut header = String::from("070701");
        for field in fields {
            write!(header, "{field:08X}").expect("a String takes all");
        }
        self.bytes.extend_from_slice(header.as_bytes());
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(content);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_names_and_contents_are_aligned_to_four() {
        let mut archive = Archive::default();
        archive.folder("bin");
        archive.file("init", b"#!/x\n");
        let bytes = archive.finish();
        assert!(bytes.len().is_multiple_of(4));
        let starts: Vec<usize> = bytes
            .windows(6)
            .enumerate()
            .filter(|(_, w)| w == b"070701")
            .map(|(at, _)| at)
            .collect();
        // 110 bytes of header, `bin\0`: 114, so 116; then `init\0`: 231, so 232, 5 more bytes.
        assert_eq!(starts, [0, 116, 240]);
        assert_eq!(&bytes[232..240], b"#!/x\n\0\0\0");
    }
}
