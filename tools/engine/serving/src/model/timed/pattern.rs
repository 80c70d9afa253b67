//! Patterns of bytes in place of a model's numbers. The first 64 bits are a seed, from which the
//! rest follows. A receiver reads the seed and checks the rest.

/// Mixes the bits of a number (SplitMix64).
pub const fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns word `at` of a pattern.
const fn word(seed: u64, at: u64) -> u64 {
    if at == 0 {
        seed
    } else {
        // One multiplication suffices to detect damage, because the seed was mixed before.
        (seed ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// Appends the first `words` words of 8 bytes of a pattern.
pub fn extend(bytes: &mut Vec<u8>, seed: u64, words: usize) {
    for at in 0..words as u64 {
        bytes.extend(word(seed, at).to_le_bytes());
    }
}

/// Returns the seed of bytes from [`extend`], or `None` if they are damaged.
pub fn seed_of(bytes: &[u8]) -> Option<u64> {
    let (words, rest) = bytes.as_chunks::<8>();
    let seed = u64::from_le_bytes(*words.first()?);
    let intact =
        |(at, bytes): (usize, &[u8; 8])| u64::from_le_bytes(*bytes) == word(seed, at as u64);
    (rest.is_empty() && words.iter().enumerate().all(intact)).then_some(seed)
}

pub fn row(seed: u64, hidden: usize) -> impl Iterator<Item = u32> {
    (0..hidden as u64).map(move |at| {
        let word = word(seed, at / 2);
        (if at % 2 == 0 { word } else { word >> 32 }) as u32
    })
}

/// Returns the seed of a row, or `None` if the row is damaged.
pub fn row_seed(numbers: &[u32]) -> Option<u64> {
    let [low, high, ..] = *numbers else { return None };
    let seed = u64::from(high) << 32 | u64::from(low);
    row(seed, numbers.len()).eq(numbers.iter().copied()).then_some(seed)
}
