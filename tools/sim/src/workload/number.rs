//! Numbers of a trace, and the sentence that says what is wrong with one.

/// Bounds of a count of tokens, as text.
const COUNT: &str = "2^32-1";

/// Latest time that is taken for one, seconds: 285 years, so that nanoseconds fit 63 bits. A time
/// in the wrong unit (nanoseconds since 1970) is beyond it.
const LATEST_S: f64 = 9e9;

/// What was found, short enough for a message.
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

/// The sentence for a field whose value cannot be used.
pub(super) fn unfit(field: &str, found: &str, expected: &str) -> String {
    format!("`{field}` is {}; expected {expected}", shown(found))
}

/// A count of tokens from `least` on. Some exporters write `472.0` for 472.
pub(super) fn count(field: &str, found: &str, least: u32) -> Result<u32, String> {
    let whole = found.parse::<u32>().ok().or_else(|| {
        let number = found.parse::<f64>().ok()?;
        let fits = number.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&number);
        fits.then_some(number as u32)
    });
    match whole {
        Some(count) if count >= least => Ok(count),
        _ => {
            let expected = format!("a whole number from {least} to {COUNT}");
            Err(unfit(field, found, &expected))
        }
    }
}

/// `number` units of `unit_s` seconds as nanoseconds, if that is a time.
pub(super) fn nanoseconds(number: f64, unit_s: f64) -> Option<i64> {
    let fits = (0.0..=LATEST_S).contains(&(number * unit_s));
    fits.then(|| (number * (unit_s * 1e9)).round() as i64)
}

/// What [`nanoseconds`] takes, for a message.
pub(super) fn times(unit_s: f64, unit: &str) -> String {
    format!("a number of {unit} from 0 to {:e}", LATEST_S / unit_s)
}
