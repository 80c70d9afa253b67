//! Tables for terminals, and the format of numbers in them.

use std::ops::Range;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

/// Returns an empty table with this header.
#[must_use]
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.iter().copied());
    table
}

/// Aligns the columns to the right, starting with column `from`.
pub fn align_numbers(table: &mut Table, from: usize) {
    for column in table.column_iter_mut().skip(from) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

/// Returns a table without rules, for a small screen. `numbers` are aligned to the right.
#[must_use]
pub fn without_rules(mut table: Table, numbers: Range<usize>) -> String {
    table.load_style(presets::NOTHING);
    for (at, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if numbers.contains(&at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}

/// Returns a number of bytes with a binary unit and three significant digits.
#[must_use]
pub fn bytes(count: u64) -> String {
    laxity_quantity::Bytes(count).about()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_counts_keep_three_digits_and_a_unit() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(1536), "1.50 KiB");
        assert_eq!(bytes(64 << 10), "64 KiB");
        assert_eq!(bytes(12_500_000_000), "11.6 GiB");
    }
}
