//! Clear to send: the entry that the receiver writes into the sender's memory for each posted
//! buffer, and the sender's announcement with the last bytes of a message.
//!
//! The peer's NIC may write an entry of 64 bytes at any moment. The sender therefore reads it word
//! by word, atomically. Its last word is a checksum, so that entries that are half written or of an
//! earlier round are ignored. The sender checks the peer's numbers before it uses them. Only the
//! NIC uses the peer's addresses and keys, and the peer's NIC verifies them. Wrong ones break the
//! connection and nothing else.
//!
//! The 32 bits that come with a message's last bytes ("immediate data"):
//!
//! | bits | |
//! |---|---|
//! | 0–7 | index of the buffer: its number modulo [`DEPTH`] |
//! | 8 | the size is in the table of sizes, not here |
//! | 9–31 | size |

use core::sync::atomic::{AtomicU64, Ordering};

/// Largest number of buffers that are posted at a time. NCCL has as many requests.
pub(super) const DEPTH: usize = 32;
/// Distance of two buffers in the memories, in entries. Only the first entry of each is used. The
/// others would be for grouped receives of several buffers.
pub(super) const STRIDE: usize = 8;
pub(super) const WORDS: usize = 8;
pub(super) const ENTRY_BYTES: usize = WORDS * 8;
pub(super) const FIFO_BYTES: usize = DEPTH * STRIDE * ENTRY_BYTES;
pub(super) const TABLE_BYTES: usize = DEPTH * STRIDE * 8;

const SIZE_BITS: u32 = 23;
const IN_TABLE: u32 = 1 << 8;

/// The word of an entry with the index of the buffer and their number: index 0 of 1.
const ALONE: u64 = 1 << 32;

const _: () = assert!(DEPTH <= 1 << 8);

/// A buffer that the sender may write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CtsEntry {
    pub(super) post: u64,
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// Remote key of the buffer's memory.
    pub(super) rkey: u32,
}

/// Returns a checksum of words (the finalizer of splitmix64). It detects accidents, not attacks.
fn seal(words: &[u64; WORDS - 1]) -> u64 {
    words.iter().fold(0x4c41_5849_5459_4e54, |sum, word| {
        let mut z = (sum ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

impl CtsEntry {
    /// Returns the entry's words on the wire.
    pub(super) fn encode(&self) -> [u64; WORDS] {
        let words = [self.post, self.address, self.bytes, u64::from(self.rkey) << 32, ALONE, 0, 0];
        let mut all = [0; WORDS];
        all[..WORDS - 1].copy_from_slice(&words);
        all[WORDS - 1] = seal(&words);
        all.map(u64::to_le)
    }

    /// Decodes an entry. Returns `None` unless it is complete and belongs to this buffer.
    fn decode(words: [u64; WORDS], post: u64) -> Option<Self> {
        let words = words.map(u64::from_le);
        let (body, last) = words.split_last_chunk::<1>()?;
        let body: &[u64; WORDS - 1] = body.try_into().ok()?;
        let rkey = (body[3] >> 32) as u32;
        let entry = Self { post: body[0], address: body[1], bytes: body[2], rkey };
        let is_here = entry.post == post && body[4] == ALONE;
        (is_here && last[0] == seal(body)).then_some(entry)
    }
}

/// Returns the index of a buffer's size in the tables, in words.
pub(super) fn size_place(post: u64) -> usize {
    post as usize % DEPTH * STRIDE
}

/// Returns the index of an entry in the memory, in words.
pub(super) fn place(post: u64) -> usize {
    post as usize % DEPTH * STRIDE * WORDS
}

/// Reads the entry of a buffer, if it is there.
pub(super) fn read(memory: &[AtomicU64], post: u64) -> Option<CtsEntry> {
    let at = place(post);
    let mut copy = [0; WORDS];
    // Acquire, last word first, so that no later access moves before it. The NIC has no atomics to
    // pair with. The checksum detects words that the NIC has not written yet.
    for (nth, word) in copy.iter_mut().enumerate().rev() {
        *word = memory.get(at + nth)?.load(Ordering::Acquire);
    }
    CtsEntry::decode(copy, post)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arrival {
    /// Index of the buffer, which may be too large.
    pub(super) slot: usize,
    /// The message's size in bytes. With `None` it is in the table.
    pub(super) bytes: Option<u64>,
}

impl Arrival {
    /// Returns the immediate data of a message into a buffer, and whether its size goes into the
    /// table.
    pub(super) fn encode(post: u64, bytes: u64) -> (u32, bool) {
        let at = (post as usize % DEPTH) as u32;
        if bytes < 1 << SIZE_BITS {
            (at | (bytes as u32) << 9, false)
        } else {
            (at | IN_TABLE, true)
        }
    }

    /// Decodes immediate data. The receiver checks the values.
    pub(super) fn decode(immediate: u32) -> Self {
        let in_table = immediate & IN_TABLE != 0;
        Self {
            slot: (immediate & 0xff) as usize,
            bytes: (!in_table).then_some(u64::from(immediate >> 9)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn memory() -> Vec<AtomicU64> {
        (0..FIFO_BYTES / 8).map(|_| AtomicU64::new(0)).collect()
    }

    fn write(memory: &[AtomicU64], entry: &CtsEntry, words: core::ops::Range<usize>) {
        for (nth, word) in entry.encode().into_iter().enumerate() {
            if words.contains(&nth) {
                memory[place(entry.post) + nth].store(word, Ordering::Relaxed);
            }
        }
    }

    fn entry(post: u64) -> CtsEntry {
        CtsEntry { post, address: 0x7f00_0000_1000, bytes: 1 << 20, rkey: 0xdead_beef }
    }

    #[test]
    fn an_entry_is_seen_in_its_own_round_only() {
        let memory = memory();
        assert_eq!(read(&memory, 0), None, "an untouched fifo holds not even number nought");
        write(&memory, &entry(33), 0..WORDS);
        assert_eq!(read(&memory, 33), Some(entry(33)));
        // An entry of the next round at the same index is not this one, and the reverse.
        assert_eq!(read(&memory, 65), None);
        assert_eq!(read(&memory, 1), None);
    }

    #[test]
    fn a_size_stands_in_the_immediate_data_or_in_the_table() {
        for (bytes, in_table) in
            [(0, false), (1, false), ((8 << 20) - 1, false), (8 << 20, true), (1 << 30, true)]
        {
            let (immediate, table) = Arrival::encode(37, bytes);
            assert_eq!(table, in_table);
            let arrival = Arrival::decode(immediate);
            assert_eq!(arrival, Arrival { slot: 5, bytes: (!table).then_some(bytes) });
        }
    }

    proptest! {
        #[test]
        fn a_half_written_entry_is_not_believed(
            old in any::<u64>(), address in any::<u64>(), bytes in any::<u64>(), cut in 0..WORDS,
            low in any::<bool>(),
        ) {
            let memory = memory();
            let before = CtsEntry { address: old, ..entry(5) };
            write(&memory, &before, 0..WORDS);
            let after = CtsEntry { address, bytes, ..entry(5 + DEPTH as u64) };
            write(&memory, &after, if low { 0..cut } else { cut..WORDS });
            let whole = if low { cut == WORDS } else { cut == 0 };
            prop_assert_eq!(read(&memory, after.post), whole.then_some(after));
        }

        #[test]
        fn garbage_is_not_believed(
            words in prop::array::uniform8(any::<u64>()), post in any::<u64>(),
        ) {
            prop_assert_eq!(CtsEntry::decode(words, post), None);
            prop_assert_eq!(CtsEntry::decode(words, words[0]), None);
        }
    }
}
