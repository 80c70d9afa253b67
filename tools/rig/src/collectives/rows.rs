//! Rows on their way: the form of a message of an exchange, and the check of what arrived.
//!
//! A message begins with four numbers (u64, little-endian): its direction, the exchange, the
//! position of its first byte among the rows, and the bytes of all rows. The rows follow. They are
//! a pattern that both hosts know, so the receiver checks every byte.

use laxity_nccl_host::STEP_BYTES;
use thiserror::Error;

const HEAD_BYTES: usize = 32;
const ROWS_BYTES_MAX: usize = STEP_BYTES - HEAD_BYTES;

/// Number of different positions in the pattern at which rows begin. A prime, so that neighbouring
/// exchanges differ.
const SHIFTS: u64 = 4093;

/// The direction of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// From the host whose layer waits, to the experts of another host.
    Dispatch = 0,
    /// Back from the experts.
    Combine = 1,
}

/// The rows of one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rows {
    pub(super) way: Way,
    /// Number of the exchange at the host whose layer waits.
    pub(super) exchange: u64,
    offset: u64,
    pub(super) total: u64,
}

/// What is wrong with a message.
#[derive(Debug, Error)]
pub(super) enum RowsError {
    #[error("a message of {0} bytes is shorter than its head, or its head is damaged")]
    Head(usize),
    #[error("exchange {exchange}: the rows from byte {offset} on are not those that were sent")]
    Damaged { exchange: u64, offset: u64 },
    #[error("exchange {exchange}: bytes from {came} on came, but those from {due} on were due")]
    Order { exchange: u64, came: u64, due: u64 },
}

/// Returns the bytes of rows as messages, heads included.
pub(super) fn wire_bytes(rows: u64) -> u64 {
    rows + rows.div_ceil(ROWS_BYTES_MAX as u64) * HEAD_BYTES as u64
}

/// Returns the messages of an exchange in one direction.
pub(super) fn messages(way: Way, exchange: u64, total: u64) -> impl Iterator<Item = Rows> {
    (0..total).step_by(ROWS_BYTES_MAX).map(move |offset| Rows { way, exchange, offset, total })
}

/// The bytes that rows are made of.
pub(super) struct Pattern(Vec<u8>);

impl Pattern {
    pub(super) fn new() -> Self {
        // Knuth's generator (MMIX). It only has to give different bytes.
        let mut state = 1_u64;
        let byte = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_be_bytes()[0]
        };
        Self((0..ROWS_BYTES_MAX + SHIFTS as usize).map(byte).collect())
    }

    fn of(&self, rows: &Rows) -> &[u8] {
        let number = 2 * rows.exchange + rows.way as u64 + rows.offset;
        let from = (number % SHIFTS) as usize;
        let left = (rows.total - rows.offset).min(ROWS_BYTES_MAX as u64) as usize;
        &self.0[from..from + left]
    }

    /// Writes a message into memory, and returns its length.
    pub(super) fn write(&self, rows: &Rows, into: &mut [u8]) -> usize {
        let head = [rows.way as u64, rows.exchange, rows.offset, rows.total];
        for (place, number) in into.chunks_exact_mut(8).zip(head) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        let bytes = self.of(rows);
        into[HEAD_BYTES..HEAD_BYTES + bytes.len()].copy_from_slice(bytes);
        HEAD_BYTES + bytes.len()
    }

    /// Returns the rows of a message. Fails if a byte differs from what was written.
    fn read(&self, message: &[u8]) -> Result<(Rows, u64), RowsError> {
        let damaged = || RowsError::Head(message.len());
        let (head, bytes) = message.split_at_checked(HEAD_BYTES).ok_or_else(damaged)?;
        let number = |at: usize| head[8 * at..8 * at + 8].iter().rev();
        let number = |at| number(at).fold(0, |n, byte| n << 8 | u64::from(*byte));
        let way = match number(0) {
            0 => Way::Dispatch,
            1 => Way::Combine,
            _ => return Err(damaged()),
        };
        let [exchange, offset, total] = [1, 2, 3].map(number);
        let rows = Rows { way, exchange, offset, total };
        if offset >= total || exchange >= u64::MAX / 4 || offset >= u64::MAX / 4 {
            return Err(damaged());
        }
        if self.of(&rows) != bytes {
            return Err(RowsError::Damaged { exchange, offset });
        }
        Ok((rows, bytes.len() as u64))
    }
}

/// Checks the messages of one direction. The rows of an exchange are followed by those of the next.
#[derive(Debug, Default)]
pub(super) struct Arriving {
    /// The exchange and the bytes of it that came, while some are due.
    begun: Option<(u64, u64)>,
}

impl Arriving {
    /// Checks the next message. Returns whether its rows were the last of the exchange.
    fn next(&mut self, rows: &Rows, bytes: u64) -> Result<bool, RowsError> {
        let due = match self.begun {
            Some((exchange, due)) if exchange == rows.exchange => due,
            Some((exchange, due)) => {
                return Err(RowsError::Order { exchange, came: rows.offset, due });
            }
            None => 0,
        };
        if due != rows.offset {
            return Err(RowsError::Order { exchange: rows.exchange, came: rows.offset, due });
        }
        let came = due + bytes;
        self.begun = (came < rows.total).then_some((rows.exchange, came));
        Ok(self.begun.is_none())
    }
}

/// What one host receives from another.
#[derive(Debug, Default)]
pub(super) struct Inbound([Arriving; 2]);

impl Inbound {
    /// Checks the next message. Returns its rows if they complete the rows of their exchange.
    pub(super) fn take(
        &mut self,
        pattern: &Pattern,
        message: &[u8],
    ) -> Result<Option<Rows>, RowsError> {
        let (rows, bytes) = pattern.read(message)?;
        let whole = self.0[rows.way as usize].next(&rows, bytes)?;
        Ok(whole.then_some(rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(pattern: &Pattern, rows: &Rows) -> Vec<u8> {
        let mut message = vec![0; STEP_BYTES];
        let length = pattern.write(rows, &mut message);
        message.truncate(length);
        message
    }

    #[test]
    fn rows_are_whole_after_their_last_message_and_heads_are_counted() {
        let (pattern, mut inbound) = (Pattern::new(), Inbound::default());
        let total = 2 * ROWS_BYTES_MAX as u64 + 5;
        let messages: Vec<Rows> = messages(Way::Combine, 7, total).collect();
        let (mut wire, mut whole) = (0, Vec::new());
        for rows in &messages {
            let message = written(&pattern, rows);
            wire += message.len() as u64;
            whole.push(inbound.take(&pattern, &message).unwrap().map(|rows| rows.exchange));
        }
        assert_eq!(whole, [None, None, Some(7)]);
        assert_eq!(wire, wire_bytes(total));
    }

    #[test]
    fn a_damaged_missing_or_repeated_message_is_an_error() {
        let (pattern, mut inbound) = (Pattern::new(), Inbound::default());
        let total = 2 * ROWS_BYTES_MAX as u64;
        let messages: Vec<Rows> = messages(Way::Dispatch, 3, total).collect();
        let second = inbound.take(&pattern, &written(&pattern, &messages[1])).unwrap_err();
        assert!(matches!(second, RowsError::Order { due: 0, .. }), "{second}");
        for at in [0, 8, HEAD_BYTES, 4000] {
            let mut message = written(&pattern, &messages[0]);
            message[at] ^= 4;
            assert!(Inbound::default().take(&pattern, &message).is_err(), "byte {at}");
        }
        let first = written(&pattern, &messages[0]);
        assert_eq!(inbound.take(&pattern, &first).unwrap(), None);
        assert!(inbound.take(&pattern, &first).is_err(), "twice the same");
        assert!(inbound.take(&pattern, &first[..10]).is_err());
    }
}
