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
//! | 0–4 | index of the grouped receive: its number modulo [`DEPTH`] |
//! | 5–7 | index of the buffer in the grouped receive |
//! | 8 | the size is in the table of sizes, not here |
//! | 9–31 | size |

use core::sync::atomic::{AtomicU64, Ordering};

use crate::backend::GROUP_MAX;

/// Largest number of grouped receives that are posted at a time. NCCL has as many requests.
pub(super) const DEPTH: usize = 32;
pub(super) const WORDS: usize = 8;
pub(super) const ENTRY_BYTES: usize = WORDS * 8;
pub(super) const FIFO_BYTES: usize = DEPTH * GROUP_MAX * ENTRY_BYTES;
pub(super) const TABLE_BYTES: usize = DEPTH * GROUP_MAX * 8;

const SIZE_BITS: u32 = 23;
const IN_TABLE: u32 = 1 << 8;

const _: () = assert!(DEPTH <= 1 << 5 && GROUP_MAX <= 1 << 3);

/// A buffer that the sender may write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CtsEntry {
    pub(super) post: u64,
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// Remote key of the buffer's memory.
    pub(super) rkey: u32,
    /// Tag that selects the buffer in its group.
    pub(super) tag: i32,
    pub(super) buffers: u32,
    pub(super) index: u32,
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
        let words = [
            self.post,
            self.address,
            self.bytes,
            u64::from(self.rkey) << 32 | u64::from(self.tag as u32),
            u64::from(self.buffers) << 32 | u64::from(self.index),
            0,
            0,
        ];
        let mut all = [0; WORDS];
        all[..WORDS - 1].copy_from_slice(&words);
        all[WORDS - 1] = seal(&words);
        all.map(u64::to_le)
    }

    /// Decodes an entry. Returns `None` unless it is complete and belongs to this group and index.
    fn decode(words: [u64; WORDS], post: u64, index: usize) -> Option<Self> {
        let words = words.map(u64::from_le);
        let (body, last) = words.split_last_chunk::<1>()?;
        let body: &[u64; WORDS - 1] = body.try_into().ok()?;
        let entry = Self {
            post: body[0],
            address: body[1],
            bytes: body[2],
            rkey: (body[3] >> 32) as u32,
            tag: body[3] as u32 as i32,
            buffers: (body[4] >> 32) as u32,
            index: body[4] as u32,
        };
        let here = entry.post == post && entry.index as usize == index;
        let sane = (1..=GROUP_MAX as u32).contains(&entry.buffers) && entry.index < entry.buffers;
        (here && sane && last[0] == seal(body)).then_some(entry)
    }
}

/// Returns the index of a buffer's size in the tables, in words.
pub(super) fn size_place(entry: &CtsEntry) -> usize {
    entry.post as usize % DEPTH * GROUP_MAX + entry.index as usize
}

/// Returns the index of an entry in the memory, in words.
pub(super) fn place(post: u64, index: usize) -> usize {
    (post as usize % DEPTH * GROUP_MAX + index) * WORDS
}

fn read(memory: &[AtomicU64], post: u64, index: usize) -> Option<CtsEntry> {
    let at = place(post, index);
    let mut copy = [0; WORDS];
    // Acquire, last word first, so that no later access moves before it. The NIC has no atomics to
    // pair with. The checksum detects words that the NIC has not written yet.
    for (nth, word) in copy.iter_mut().enumerate().rev() {
        *word = memory.get(at + nth)?.load(Ordering::Acquire);
    }
    CtsEntry::decode(copy, post, index)
}

/// Reads the buffers of a grouped receive into `into`. Reports whether all of them are there.
pub(super) fn read_group(memory: &[AtomicU64], post: u64, into: &mut Vec<CtsEntry>) -> bool {
    into.clear();
    let Some(first) = read(memory, post, 0) else {
        return false;
    };
    into.push(first);
    for index in 1..first.buffers as usize {
        match read(memory, post, index) {
            Some(entry) if entry.buffers == first.buffers => into.push(entry),
            _ => {
                into.clear();
                return false;
            }
        }
    }
    true
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arrival {
    /// Index of the grouped receive.
    pub(super) slot: usize,
    /// Index of the buffer in the grouped receive.
    pub(super) index: usize,
    /// The message's size in bytes. With `None` it is in the table.
    pub(super) bytes: Option<u64>,
}

impl Arrival {
    /// Returns the immediate data of a message into a buffer, and whether its size goes into the
    /// table.
    pub(super) fn encode(entry: &CtsEntry, bytes: u64) -> (u32, bool) {
        let at = (entry.post as usize % DEPTH) as u32 | entry.index << 5;
        if bytes < 1 << SIZE_BITS {
            (at | (bytes as u32) << 9, false)
        } else {
            (at | IN_TABLE, true)
        }
    }

    /// Decodes immediate data. All values are valid here, and the receiver checks them.
    pub(super) fn decode(immediate: u32) -> Self {
        let in_table = immediate & IN_TABLE != 0;
        Self {
            slot: (immediate & 0x1f) as usize,
            index: (immediate >> 5 & 7) as usize,
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
        let at = place(entry.post, entry.index as usize);
        for (nth, word) in entry.encode().into_iter().enumerate() {
            if words.contains(&nth) {
                memory[at + nth].store(word, Ordering::Relaxed);
            }
        }
    }

    fn entry(post: u64, index: u32, buffers: u32) -> CtsEntry {
        CtsEntry {
            post,
            address: 0x7f00_0000_1000 + u64::from(index),
            bytes: 1 << 20,
            rkey: 0xdead_beef,
            tag: -7,
            buffers,
            index,
        }
    }

    #[test]
    fn a_group_is_seen_when_all_of_it_is_written_in_whatever_order() {
        let memory = memory();
        let mut group = Vec::new();
        for index in [2, 0, 1] {
            assert!(!read_group(&memory, 33, &mut group));
            write(&memory, &entry(33, index, 3), 0..WORDS);
        }
        assert!(read_group(&memory, 33, &mut group));
        assert_eq!(group, [0, 1, 2].map(|index| entry(33, index, 3)));
        // An entry of the next round at the same index is not this one, and the reverse.
        assert!(!read_group(&memory, 65, &mut group) && group.is_empty());
    }

    #[test]
    fn an_untouched_fifo_holds_nothing_not_even_post_number_nought() {
        assert!(!read_group(&memory(), 0, &mut Vec::new()));
    }

    #[test]
    fn a_size_stands_in_the_immediate_data_or_in_the_table() {
        for (bytes, in_table) in
            [(0, false), (1, false), ((8 << 20) - 1, false), (8 << 20, true), (1 << 30, true)]
        {
            let entry = entry(37, 6, 8);
            let (immediate, table) = Arrival::encode(&entry, bytes);
            assert_eq!(table, in_table);
            let arrival = Arrival::decode(immediate);
            assert_eq!((arrival.slot, arrival.index), (5, 6));
            assert_eq!(arrival.bytes, (!table).then_some(bytes));
        }
    }

    proptest! {
        #[test]
        fn a_half_written_entry_is_not_believed(
            old in any::<u64>(), address in any::<u64>(), bytes in any::<u64>(), cut in 0..WORDS,
            low in any::<bool>(),
        ) {
            let memory = memory();
            let before = CtsEntry { address: old, ..entry(5, 0, 1) };
            write(&memory, &before, 0..WORDS);
            let after = CtsEntry { address, bytes, ..entry(5 + DEPTH as u64, 0, 1) };
            write(&memory, &after, if low { 0..cut } else { cut..WORDS });
            let mut group = Vec::new();
            let whole = if low { cut == WORDS } else { cut == 0 };
            prop_assert_eq!(read_group(&memory, after.post, &mut group), whole);
        }

        #[test]
        fn garbage_is_not_believed(
            words in prop::array::uniform8(any::<u64>()), post in any::<u64>(),
        ) {
            prop_assert_eq!(CtsEntry::decode(words, post, 0), None);
            prop_assert_eq!(CtsEntry::decode(words, words[0], 0), None);
        }

        #[test]
        fn any_immediate_data_name_a_place(immediate in any::<u32>()) {
            let arrival = Arrival::decode(immediate);
            prop_assert!(arrival.slot < DEPTH && arrival.index < GROUP_MAX);
        }
    }
}
