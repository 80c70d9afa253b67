//! Lines of a trace file, plain or gzip. The format is detected by the first two bytes rather than
//! by the file's name.

use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use super::WorkloadError;

/// Longest line that is read, in bytes. The longest of a real trace has about 60 kB.
const LONGEST_LINE: u64 = 64 << 20;

/// Longest unpacked trace that is read, in bytes.
const BYTES_MAX: u64 = 8 << 30;

const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Opens a file and unpacks gzip of one or more members on the fly.
fn open(path: &Path) -> Result<Box<dyn BufRead>, WorkloadError> {
    let failed = |cause| WorkloadError::Read { path: path.to_owned(), cause };
    let mut raw = BufReader::new(laxity_files::open(path).map_err(failed)?);
    let packed = raw.fill_buf().map_err(|cause| failed(cause.into()))?;
    let plain: Box<dyn Read> = if packed.starts_with(&GZIP) {
        Box::new(Unpacked(flate2::bufread::MultiGzDecoder::new(raw)))
    } else {
        Box::new(raw)
    };
    let limited = laxity_files::limited(plain, BYTES_MAX);
    Ok(Box::new(BufReader::with_capacity(64 << 10, limited)))
}

/// Marks errors as gzip's. A plain "unexpected end of file" would suggest a missing line.
struct Unpacked<R>(flate2::bufread::MultiGzDecoder<R>);

impl<R: BufRead> Read for Unpacked<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into).map_err(|error| {
            let text = match error.kind() {
                io::ErrorKind::Interrupted => return error,
                io::ErrorKind::UnexpectedEof => {
                    "its gzip data ends early; was it copied whole?".into()
                }
                _ => format!("its gzip data is damaged ({error})"),
            };
            io::Error::new(error.kind(), text)
        })
    }
}

pub(super) struct Lines {
    path: PathBuf,
    from: Box<dyn BufRead>,
    number: u64,
    bytes: Vec<u8>,
}

impl Lines {
    pub(super) fn open(path: &Path) -> Result<Self, WorkloadError> {
        Ok(Self { path: path.to_owned(), from: open(path)?, number: 0, bytes: Vec::new() })
    }

    /// Returns the next line that is not blank, without its end, or `None` at the end of the file.
    pub(super) fn next(&mut self) -> Result<Option<&str>, WorkloadError> {
        loop {
            self.bytes.clear();
            let read =
                (&mut self.from).take(LONGEST_LINE).read_until(b'\n', &mut self.bytes).map_err(
                    |cause| WorkloadError::Read { path: self.path.clone(), cause: cause.into() },
                )?;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            if read as u64 == LONGEST_LINE {
                return Err(self.wrong(format!("is longer than {LONGEST_LINE} bytes")));
            }
            if self.number == 1 && self.bytes.starts_with(BYTE_ORDER_MARK) {
                self.bytes.drain(..BYTE_ORDER_MARK.len());
            }
            if !self.bytes.trim_ascii().is_empty() {
                break;
            }
        }
        let text = std::str::from_utf8(&self.bytes).map_err(|error| {
            let problem = format!("is not UTF-8 text from byte {} on", error.valid_up_to() + 1);
            self.wrong(problem)
        })?;
        Ok(Some(text.trim()))
    }

    pub(super) fn wrong(&self, problem: String) -> WorkloadError {
        WorkloadError::Line { path: self.path.clone(), line: self.number, problem }
    }
}

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
