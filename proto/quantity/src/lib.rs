//! Sizes, rates and durations as people write them: `"1MiB"`, `"100Gbit"`, `"20ms"`.
//!
//! A bare integer is in the base unit, bytes or bytes per second. A duration must name its unit,
//! because no base unit would be obvious. Rates name bits (`Gbit`) or bytes (`GB/s`), because the
//! two are easily confused.
//!
//! The daemon's configuration, job profiles and the command line use this one parser, so that
//! `500ms` means the same in all of them.
#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::ser::{Serialize, Serializer};
use thiserror::Error;

/// The error for text that is no quantity of the wanted kind.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{text}` is not {wanted}")]
pub struct NotAQuantity {
    text: String,
    wanted: &'static str,
}

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

/// Bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate(pub u64);

/// A duration in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Nanos(pub u64);

impl From<Nanos> for Duration {
    fn from(nanos: Nanos) -> Self {
        Self::from_nanos(nanos.0)
    }
}

impl From<Duration> for Nanos {
    /// Converts a duration. Durations beyond `u64` nanoseconds (584 years) become the maximum.
    fn from(duration: Duration) -> Self {
        Self(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
    }
}

const BYTES_WANTED: &str = "a size; write bytes, or a number with B, KiB, MiB, GiB, KB, MB or GB";
const RATE_WANTED: &str = "a rate; write bytes per second, or a number with bit, Kbit, Mbit, Gbit \
    (per second) or B/s, KB/s, MB/s, GB/s, KiB/s, MiB/s, GiB/s";
const NANOS_WANTED: &str = "a duration; write a number with ns, us, ms, s or min";

/// Units of each kind as (name, numerator, denominator) in base units. The names that `Display`
/// uses come before their synonyms.
const BYTES_UNITS: &[(&str, u64, u64)] = &[
    ("B", 1, 1),
    ("KiB", 1 << 10, 1),
    ("MiB", 1 << 20, 1),
    ("GiB", 1 << 30, 1),
    ("KB", 1_000, 1),
    ("MB", 1_000_000, 1),
    ("GB", 1_000_000_000, 1),
];
const RATE_UNITS: &[(&str, u64, u64)] = &[
    ("B/s", 1, 1),
    ("bit", 1, 8),
    ("Kbit", 1_000, 8),
    ("Mbit", 1_000_000, 8),
    ("Gbit", 1_000_000_000, 8),
    ("KB/s", 1_000, 1),
    ("MB/s", 1_000_000, 1),
    ("GB/s", 1_000_000_000, 1),
    ("KiB/s", 1 << 10, 1),
    ("MiB/s", 1 << 20, 1),
    ("GiB/s", 1 << 30, 1),
];
const NANOS_UNITS: &[(&str, u64, u64)] = &[
    ("ns", 1, 1),
    ("us", 1_000, 1),
    ("ms", 1_000_000, 1),
    ("s", 1_000_000_000, 1),
    ("min", 60_000_000_000, 1),
    ("µs", 1_000, 1),
];

/// Parses `text` into base units. Decimal fractions are exact, because the arithmetic is integer.
fn parse(text: &str, units: &[(&str, u64, u64)]) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_'))?;
    let (number, unit) = (text[..split].replace('_', ""), text[split..].trim());
    let (_, numerator, denominator) =
        units.iter().find(|(name, ..)| name.eq_ignore_ascii_case(unit))?;
    let (whole, fraction) = number.split_once('.').unwrap_or((&number, ""));
    if whole.is_empty() || fraction.len() > 9 || fraction.contains('.') {
        return None;
    }
    let scale = 10_u128.pow(fraction.len() as u32);
    let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
    let value = digits.checked_mul(u128::from(*numerator))? / (scale * u128::from(*denominator));
    u64::try_from(value).ok()
}

/// Writes `value` in the largest of `units` that leaves a whole number.
fn show(f: &mut fmt::Formatter<'_>, value: u64, units: &[(&str, u64, u64)]) -> fmt::Result {
    let mut best = (u128::from(value), units[0].0);
    for &(name, numerator, denominator) in units {
        let scaled = u128::from(value) * u128::from(denominator);
        if value > 0 && scaled % u128::from(numerator) == 0 {
            let count = scaled / u128::from(numerator);
            if count < best.0 {
                best = (count, name);
            }
        }
    }
    write!(f, "{}{}", best.0, best.1)
}

macro_rules! quantity {
    ($type:ident, $units:ident, $wanted:ident, bare: $bare:literal) => {
        impl FromStr for $type {
            type Err = NotAQuantity;
            fn from_str(text: &str) -> Result<Self, NotAQuantity> {
                let bare = if $bare { text.trim().parse().ok() } else { None };
                bare.or_else(|| parse(text, $units))
                    .map(Self)
                    .ok_or_else(|| NotAQuantity { text: text.to_owned(), wanted: $wanted })
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                show(f, self.0, $units)
            }
        }

        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Human;
                impl Visitor<'_> for Human {
                    type Value = $type;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($wanted)
                    }
                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$type, E> {
                        text.parse().map_err(E::custom)
                    }
                    fn visit_i64<E: de::Error>(self, value: i64) -> Result<$type, E> {
                        value.to_string().parse().map_err(E::custom)
                    }
                    fn visit_u64<E: de::Error>(self, value: u64) -> Result<$type, E> {
                        value.to_string().parse().map_err(E::custom)
                    }
                }
                deserializer.deserialize_any(Human)
            }
        }
    };
}

quantity!(Bytes, BYTES_UNITS, BYTES_WANTED, bare: true);
quantity!(Rate, RATE_UNITS, RATE_WANTED, bare: true);
quantity!(Nanos, NANOS_UNITS, NANOS_WANTED, bare: false);

/// Formats `value` with three significant digits, in the first unit in which it is below 999.5.
/// Each unit is `step` times the one before it. The last unit has no such bound.
fn about(value: f64, step: f64, units: &[&str]) -> String {
    let mut value = value;
    let mut units = units.iter();
    let mut unit = units.next().copied().unwrap_or("");
    // A value that would be shown as 1000 is shown as 1 of the next unit.
    for next in units {
        if value < 999.5 {
            break;
        }
        value /= step;
        unit = next;
    }
    match value {
        whole if whole.fract() == 0.0 => format!("{whole:.0} {unit}"),
        small if small < 9.995 => format!("{small:.2} {unit}"),
        middle if middle < 99.95 => format!("{middle:.1} {unit}"),
        large => format!("{large:.0} {unit}"),
    }
}

impl Bytes {
    /// Formats the size for people, rounded, as `11.6 GiB`. The result is not for parsing.
    #[must_use]
    pub fn about(self) -> String {
        about(self.0 as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"])
    }
}

impl Rate {
    /// Formats the rate for people, rounded, as `100 Gbit/s`. The result is not for parsing.
    #[must_use]
    pub fn about(self) -> String {
        let bits = self.0 as f64 * 8.0;
        about(bits, 1000.0, &["bit/s", "Kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"])
    }
}

impl Nanos {
    /// Formats the duration for people, rounded, as `1.24 s`. The result is not for parsing.
    #[must_use]
    pub fn about(self) -> String {
        let minutes = self.0 as f64 / 6e10;
        if minutes >= 2.0 {
            return about(minutes, f64::INFINITY, &["min"]);
        }
        about(self.0 as f64, 1000.0, &["ns", "µs", "ms", "s"])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_read_as_people_write_them() {
        assert_eq!("1MiB".parse(), Ok(Bytes(1 << 20)));
        assert_eq!("1.5 KiB".parse(), Ok(Bytes(1536)));
        assert_eq!("4096".parse(), Ok(Bytes(4096)));
        assert_eq!("100Gbit".parse(), Ok(Rate(12_500_000_000)));
        assert_eq!("100gbit".parse(), Ok(Rate(12_500_000_000)));
        assert_eq!("12.5GB/s".parse(), Ok(Rate(12_500_000_000)));
        assert_eq!("20ms".parse(), Ok(Nanos(20_000_000)));
        assert_eq!("0.5us".parse(), Ok(Nanos(500)));
    }

    #[test]
    fn what_is_shown_reads_back_as_the_same_value() {
        for n in [0, 1, 7, 1000, 1024, 1536, 1 << 20, 12_500_000_000, 1_000_000_007, u64::MAX] {
            assert_eq!(Bytes(n).to_string().parse(), Ok(Bytes(n)));
            assert_eq!(Rate(n).to_string().parse(), Ok(Rate(n)), "{}", Rate(n));
            assert_eq!(Nanos(n).to_string().parse(), Ok(Nanos(n)));
        }
        assert_eq!(Rate(12_500_000_000).to_string(), "100Gbit");
        assert_eq!(Bytes(1 << 20).to_string(), "1MiB");
        assert_eq!(Nanos(20_000_000).to_string(), "20ms");
    }

    #[test]
    fn what_is_shown_to_people_has_three_digits_and_a_unit_that_suits() {
        assert_eq!(Bytes(0).about(), "0 B");
        assert_eq!(Bytes(999).about(), "999 B");
        assert_eq!(Bytes(12_500_000_000).about(), "11.6 GiB");
        assert_eq!(Bytes(1_048_575).about(), "1.00 MiB");
        assert_eq!(Bytes(u64::MAX).about(), "16384 PiB");
        assert_eq!(Rate(12_500_000_000).about(), "100 Gbit/s");
        assert_eq!(Nanos(1_234_567).about(), "1.23 ms");
        assert_eq!(Nanos(1_240_000_000).about(), "1.24 s");
        assert_eq!(Nanos(600_000_000_000).about(), "10 min");
    }

    proptest::proptest! {
        #[test]
        fn every_value_that_is_shown_reads_back_as_itself(n: u64) {
            proptest::prop_assert_eq!(Bytes(n).to_string().parse(), Ok(Bytes(n)));
            proptest::prop_assert_eq!(Rate(n).to_string().parse(), Ok(Rate(n)));
            proptest::prop_assert_eq!(Nanos(n).to_string().parse(), Ok(Nanos(n)));
        }

        #[test]
        fn thousandths_of_a_unit_are_taken_exactly(
            whole in 0_u64..1_000_000, thousandth in 0_u64..1000,
        ) {
            let text = format!("{whole}.{thousandth:03}ms");
            let exact = Nanos(whole * 1_000_000 + thousandth * 1000);
            proptest::prop_assert_eq!(text.parse(), Ok(exact));
        }

        #[test]
        fn no_text_is_worse_than_an_error(text in "[0-9._ a-zµ٣/-]{0,40}") {
            let _ = (text.parse::<Bytes>(), text.parse::<Rate>(), text.parse::<Nanos>());
        }
    }

    #[test]
    fn what_is_no_quantity_is_told_what_would_be_one() {
        for text in ["", "fast", "1 parsec", "1.2.3MiB", "-1KiB", "99999999999GiB", ".5ms"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
        let error = "20".parse::<Nanos>().unwrap_err().to_string();
        assert!(error.contains("`20`") && error.contains("ms"), "{error}");
    }
}
