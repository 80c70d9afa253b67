//! The messages between host and guest while a job runs: frames over one virtio-serial port.
//!
//! A frame consists of a byte for its kind, the length of its content (4 bytes, little endian) and
//! the content. There is one port for all frames because a port can be opened only once, and
//! because frames then keep the order of standard output and standard error.

use std::io::{self, Read, Write};

pub const PORT: &str = "laxity";

/// Longest content of a frame, in bytes.
pub const CONTENT_BYTES_MAX: usize = 32 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// Guest: devices and network are up. The content is [`super::job::Facts`] as JSON.
    Ready = b'R',
    Stdout = b'1',
    Stderr = b'2',
    /// Guest: heartbeat without content.
    Alive = b'A',
    /// Host: standard input of the job. An empty frame is its end.
    Stdin = b'0',
}

impl FrameKind {
    fn of(byte: u8) -> io::Result<Self> {
        [Self::Ready, Self::Stdout, Self::Stderr, Self::Alive, Self::Stdin]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
            .ok_or_else(|| {
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("no frame is of kind {byte:#04x}"),
                )
            })
    }
}

/// Writes content as frames of one kind. Without content it writes one empty frame.
pub fn send(port: &mut impl Write, kind: FrameKind, content: &[u8]) -> io::Result<()> {
    let mut rest = content;
    loop {
        let (now, later) = rest.split_at(rest.len().min(CONTENT_BYTES_MAX));
        let mut frame = Vec::with_capacity(now.len() + 5);
        frame.push(kind as u8);
        frame.extend_from_slice(&(now.len() as u32).to_le_bytes());
        frame.extend_from_slice(now);
        port.write_all(&frame)?;
        rest = later;
        if rest.is_empty() {
            return port.flush();
        }
    }
}

pub fn receive(port: &mut impl Read) -> io::Result<(FrameKind, Vec<u8>)> {
    let mut head = [0; 5];
    port.read_exact(&mut head)?;
    let kind = FrameKind::of(head[0])?;
    let length = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
    if length > CONTENT_BYTES_MAX {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a frame of {length} bytes"),
        ));
    }
    let mut content = vec![0; length];
    port.read_exact(&mut content)?;
    Ok((kind, content))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_content_comes_in_several_frames_and_no_content_in_one() {
        let long = vec![3; CONTENT_BYTES_MAX + 5];
        let mut wire = Vec::new();
        send(&mut wire, FrameKind::Stdout, &long).expect("a Vec takes all");
        send(&mut wire, FrameKind::Stdin, &[]).expect("a Vec takes all");
        let mut wire = wire.as_slice();
        let mut got = Vec::new();
        for expected in [CONTENT_BYTES_MAX, 5] {
            let (kind, content) = receive(&mut wire).expect("a frame");
            assert_eq!((kind, content.len()), (FrameKind::Stdout, expected));
            got.extend(content);
        }
        assert_eq!(got, long);
        assert_eq!(receive(&mut wire).expect("a frame"), (FrameKind::Stdin, Vec::new()));
        assert!(receive(&mut wire).is_err(), "the end");
    }

    #[test]
    fn noise_is_refused() {
        assert!(receive(&mut b"x\0\0\0\0".as_slice()).is_err());
        assert!(receive(&mut b"1\xff\xff\xff\xff".as_slice()).is_err());
    }
}
