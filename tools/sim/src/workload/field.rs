//! Numbers of a trace, and messages about invalid ones.

/// Latest valid time in seconds: 285 years, so that nanoseconds fit 63 bits. Times in a wrong unit
/// (nanoseconds since 1970) exceed it.
const LATEST_S: f64 = 9e9;

pub(super) fn shown(found: &str) -> String {
    const MOST: usize = 40;
    if found.is_empty() {
        return "empty".into();
    }
    match found.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &found[..end]),
        None => found.into(),
    }
}

pub(super) fn unfit(field: &str, found: &str, expected: &str) -> String {
    format!("`{field}` is {}; expected {expected}", shown(found))
}

/// Parses a count of tokens of at least `least`. Some exporters write `472.0` for 472.
pub(super) fn count(field: &str, found: &str, least: u32) -> Result<u32, String> {
    let number = found.parse::<f64>().ok();
    number
        .filter(|n| n.fract() == 0.0 && (f64::from(least)..=f64::from(u32::MAX)).contains(n))
        .map(|n| n as u32)
        .ok_or_else(|| {
            let expected = format!("a whole number from {least} to 2^32-1");
            unfit(field, found, &expected)
        })
}

/// Converts `found`, in units of `unit_s` seconds, to nanoseconds.
pub(super) fn nanoseconds(field: &str, found: &str, unit_s: f64) -> Result<i64, String> {
    let number = found.parse::<f64>().ok();
    number
        .filter(|number| (0.0..=LATEST_S).contains(&(number * unit_s)))
        .map(|number| (number * (unit_s * 1e9)).round() as i64)
        .ok_or_else(|| {
            let unit = if unit_s < 1.0 { "milliseconds" } else { "seconds" };
            let expected = format!("a number of {unit} from 0 to {:e}", LATEST_S / unit_s);
            unfit(field, found, &expected)
        })
}
