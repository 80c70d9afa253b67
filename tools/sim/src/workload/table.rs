//! Rows of a csv trace: its columns are found by the names in its first line, in whatever order and
//! however capitalised, so that a release with more columns is read too.

use std::io::BufRead;
use std::path::{Path, PathBuf};

use super::WorkloadError;
use super::input::{self, BYTE_ORDER_MARK};
use super::number::shown;

/// A csv file with `N` columns of interest.
pub(super) struct Table<const N: usize> {
    path: PathBuf,
    rows: csv::Reader<Box<dyn BufRead>>,
    columns: [&'static str; N],
    places: [usize; N],
    row: csv::ByteRecord,
    /// Rows that were read, the first line not among them.
    read: usize,
}

impl<const N: usize> Table<N> {
    pub(super) fn open(path: &Path, columns: [&'static str; N]) -> Result<Self, WorkloadError> {
        let mut table = Self {
            path: path.to_owned(),
            rows: csv::ReaderBuilder::new()
                .trim(csv::Trim::All)
                .from_reader(input::open(path)?),
            columns,
            places: [0; N],
            row: csv::ByteRecord::new(),
            read: 0,
        };
        let header = table.rows.byte_headers().cloned();
        let header = header.map_err(|error| table.unreadable(error))?;
        if header.is_empty() {
            return Err(WorkloadError::Empty {
                path: path.to_owned(),
            });
        }
        let names: Vec<String> = header.iter().map(name).collect();
        for (place, column) in table.places.iter_mut().zip(columns) {
            let found = names
                .iter()
                .position(|name| name.eq_ignore_ascii_case(column));
            *place = found.ok_or_else(|| WorkloadError::Line {
                path: path.to_owned(),
                line: 1,
                problem: format!(
                    "there is no column `{column}`; found {}",
                    shown(&names.join(", "))
                ),
            })?;
        }
        Ok(table)
    }

    /// The fields of interest of the next row, `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<[&str; N]>, WorkloadError> {
        self.read += 1;
        match self.rows.read_byte_record(&mut self.row) {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(error) => return Err(self.unreadable(error)),
        }
        for (place, column) in self.places.into_iter().zip(self.columns) {
            // A row is as long as the first line, or it would not have been read.
            if std::str::from_utf8(&self.row[place]).is_err() {
                let found = String::from_utf8_lossy(&self.row[place]).into_owned();
                return Err(self.wrong(format!("`{column}` is {}; expected text", shown(&found))));
            }
        }
        let field =
            |place: usize| std::str::from_utf8(&self.row[place]).expect("was checked above");
        Ok(Some(self.places.map(field)))
    }

    /// An error in the row that was read last.
    pub(super) fn wrong(&self, problem: String) -> WorkloadError {
        WorkloadError::Line {
            path: self.path.clone(),
            line: self.line(),
            problem,
        }
    }

    /// The line of the row that was read last. Counted anew: the reader's own count is one less
    /// after CRLF, and leaves out blank lines.
    fn line(&self) -> u64 {
        let Ok(file) = input::open(&self.path) else {
            return 1;
        };
        let lines = file.split(b'\n').map_while(Result::ok).zip(1..);
        let mut rows = lines.filter(|(line, _)| !matches!(line.as_slice(), [] | [b'\r']));
        rows.nth(self.read).map_or(1, |(_, number)| number)
    }

    fn unreadable(&self, error: csv::Error) -> WorkloadError {
        let text = error.to_string();
        match error.into_kind() {
            csv::ErrorKind::Io(cause) => WorkloadError::Read {
                path: self.path.clone(),
                cause: cause.into(),
            },
            csv::ErrorKind::UnequalLengths {
                expected_len, len, ..
            } => WorkloadError::Line {
                path: self.path.clone(),
                line: self.line(),
                problem: format!("has {len} fields; expected {expected_len} as in the first line"),
            },
            _ => WorkloadError::Line {
                path: self.path.clone(),
                line: 1,
                problem: format!("is not csv ({text})"),
            },
        }
    }
}

fn name(bytes: &[u8]) -> String {
    let bytes = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes);
    String::from_utf8_lossy(bytes).trim().to_owned()
}
