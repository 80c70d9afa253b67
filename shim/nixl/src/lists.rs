//! Prepared lists of descriptors: how many bytes some of them have, and where the first is.
//!
//! An engine prepares millions of descriptors once, for the blocks of its whole cache, and chooses
//! some by index for each transfer. Most have the length of their predecessor and follow it at a
//! fixed distance. A list therefore keeps runs of such descriptors, as rows.

use core::ffi::c_int;

use crate::abi::{DescRow, NixlDescriptor};

/// Address and length of the descriptors of a prepared list.
#[derive(Debug, Default)]
pub(crate) struct PreparedList {
    rows: Vec<DescRow>,
    /// Index of the first descriptor behind each row.
    ends: Vec<u64>,
    /// The length of every descriptor, if they are equal.
    each: Option<u64>,
    /// Whether the list describes no memory, but blocks, objects or files.
    pub(crate) is_storage: bool,
}

impl PreparedList {
    /// Makes a list of blocks, objects or files. Their transfers don't wait for permits.
    pub(crate) fn storage() -> Self {
        Self { is_storage: true, ..Self::default() }
    }

    pub(crate) fn of<D: NixlDescriptor>(descriptors: &[D]) -> Self {
        let mut list = Self::default();
        for row in descriptors.iter().map(NixlDescriptor::row).filter(|row| row.count > 0) {
            match list.rows.last_mut() {
                Some(last) if continues(last, &row) => {
                    last.stride = row.address.wrapping_sub(last.address);
                    last.stride /= last.count;
                    last.count += 1;
                }
                _ => list.rows.push(row),
            }
        }
        let mut end = 0_u64;
        list.ends.extend(list.rows.iter().map(|row| {
            end = end.saturating_add(row.count);
            end
        }));
        let first = list.rows.first().map(|row| row.bytes);
        list.each = first.filter(|bytes| list.rows.iter().all(|row| row.bytes == *bytes));
        list
    }

    /// Returns the bytes of the descriptors with these indices, and the address of the first.
    pub(crate) fn chosen(&self, indices: &[c_int]) -> (u64, u64) {
        let Some((row, within)) = indices.first().and_then(|index| self.find(*index)) else {
            return (0, 0);
        };
        let address = row.address.wrapping_add(row.stride.wrapping_mul(within));
        let bytes = match self.each {
            Some(each) => each.saturating_mul(indices.len() as u64),
            None => {
                let bytes = |index: &c_int| self.find(*index).map_or(0, |(row, _)| row.bytes);
                indices.iter().map(bytes).fold(0, u64::saturating_add)
            }
        };
        (bytes, address)
    }

    /// Returns the row of a descriptor, and its index in the row.
    fn find(&self, index: c_int) -> Option<(&DescRow, u64)> {
        let index = u64::try_from(index).ok()?;
        let at = self.ends.partition_point(|end| *end <= index);
        let row = self.rows.get(at)?;
        Some((row, index - (self.ends[at] - row.count)))
    }
}

/// Reports whether a single descriptor continues a row.
fn continues(row: &DescRow, next: &DescRow) -> bool {
    let distance = next.address.wrapping_sub(row.address);
    next.count == 1
        && next.bytes == row.bytes
        && if row.count == 1 {
            next.address > row.address
        } else {
            row.stride.checked_mul(row.count) == Some(distance)
        }
}

/// Returns the bytes of a list, and the address of its first descriptor.
pub(crate) fn whole<D: NixlDescriptor>(descriptors: &[D]) -> (u64, u64) {
    let bytes = descriptors
        .iter()
        .map(NixlDescriptor::row)
        .fold(0, |sum: u64, row| sum.saturating_add(row.bytes.saturating_mul(row.count)));
    (bytes, descriptors.first().map_or(0, |first| first.row().address))
}

#[cfg(test)]
mod tests {
    use super::*;

    impl NixlDescriptor for (u64, u64) {
        fn row(&self) -> DescRow {
            DescRow { address: self.0, bytes: self.1, stride: self.1, count: 1 }
        }
    }

    impl NixlDescriptor for DescRow {
        fn row(&self) -> DescRow {
            *self
        }
    }

    #[test]
    fn runs_have_the_addresses_and_lengths_of_their_descriptors() {
        let lists: [&[(u64, u64)]; 5] = [
            &[(100, 10), (110, 10), (120, 10), (500, 10), (700, 10), (900, 10), (50, 10)],
            &[(100, 10), (110, 20), (130, 20), (150, 5)],
            &[(100, 10), (100, 10), (90, 10), (80, 10)],
            &[(7, 0), (9, 3)],
            &[(1, 1)],
        ];
        for given in lists {
            let list = PreparedList::of(given);
            for (index, (address, bytes)) in given.iter().enumerate() {
                assert_eq!(list.chosen(&[index as c_int]), (*bytes, *address), "{given:?} {index}");
            }
            let all: Vec<_> = (0..given.len() as c_int).collect();
            assert_eq!(list.chosen(&all), whole(given), "{given:?}");
            assert_eq!(list.chosen(&[given.len() as c_int]), (0, 0));
            assert_eq!(list.chosen(&[-1]), (0, 0));
        }
    }

    #[test]
    fn a_cache_of_equal_blocks_is_a_row_for_each_layer() {
        let blocks =
            (0..4_u64).flat_map(|layer| (0..1000).map(move |b| ((layer << 32) + b * 64, 64)));
        let list = PreparedList::of(&blocks.collect::<Vec<_>>());
        assert_eq!(list.rows.len(), 4);
        assert_eq!(list.chosen(&[2001, 7]), (128, (2 << 32) + 64));
    }

    #[test]
    fn strided_rows_count_as_all_of_their_descriptors() {
        let row = |address, count| DescRow { address, bytes: 8, stride: 100, count };
        let rows = [row(1000, 3), row(5000, 2), row(9, 0)];
        let list = PreparedList::of(&rows);
        assert_eq!(list.chosen(&[2]), (8, 1200));
        assert_eq!(list.chosen(&[4, 0]), (16, 5100));
        assert_eq!(list.chosen(&[5]), (0, 0));
        assert_eq!(whole(&rows), (40, 1000));
    }
}
