//! Date and time of a trace, as nanoseconds since 1970-01-01 UTC.

/// The instant of `2023-11-16 18:17:03.9799600` (taken as UTC) or `2024-05-10
/// 00:00:00.009930+00:00`; a `T` may stand between date and time, and `Z` for the zone. Digits
/// beyond the nanosecond are cut.
pub(super) fn instant_ns(text: &str) -> Option<i64> {
    let (date, rest) = text.trim().split_once([' ', 'T'])?;
    let days = days(date)?;
    let (time, zone_s) = match rest.find(['Z', '+', '-']) {
        Some(at) => (&rest[..at], zone_s(&rest[at..])?),
        None => (rest, 0),
    };
    let (time, fraction) = time
        .trim_end()
        .split_once('.')
        .unwrap_or((time.trim_end(), "0"));
    let mut parts = time.split(':');
    let hour = number(parts.next()?, 2, 0..=23)?;
    let minute = number(parts.next()?, 2, 0..=59)?;
    // A leap second counts into the next minute.
    let second = number(parts.next()?, 2, 0..=60)?;
    if parts.next().is_some() || !all_digits(fraction) {
        return None;
    }
    let fraction: i64 = format!("{fraction:0<9}")[..9].parse().ok()?;
    let seconds = days * 86_400 + hour * 3600 + minute * 60 + second - zone_s;
    seconds.checked_mul(1_000_000_000)?.checked_add(fraction)
}

/// Seconds that `Z`, `+02`, `+0200` or `-02:00` is ahead of UTC.
fn zone_s(zone: &str) -> Option<i64> {
    if zone == "Z" {
        return Some(0);
    }
    let (sign, digits) = (if zone.starts_with('-') { -1 } else { 1 }, &zone[1..]);
    let (hours, minutes) = match digits.split_once(':') {
        Some(parts) => parts,
        None => digits.split_at_checked(2)?,
    };
    let minutes = if minutes.is_empty() { "00" } else { minutes };
    Some(sign * (number(hours, 2, 0..=23)? * 3600 + number(minutes, 2, 0..=59)? * 60))
}

/// Days of `2023-11-16` since 1970-01-01 (H. Hinnant's algorithm: years begin in March).
fn days(date: &str) -> Option<i64> {
    let mut parts = date.split('-');
    let year = number(parts.next()?, 4, 1970..=2200)?;
    let month = number(parts.next()?, 2, 1..=12)?;
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let longest = match month {
        2 => 28 + i64::from(leap),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    };
    let day = number(parts.next()?, 2, 1..=longest)?;
    if parts.next().is_some() {
        return None;
    }
    let (year, month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let of_era = year % 400;
    let day_of_year = (153 * month + 2) / 5 + day - 1;
    Some(year / 400 * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + day_of_year - 719_468)
}

fn number(text: &str, digits: usize, allowed: std::ops::RangeInclusive<i64>) -> Option<i64> {
    let number = (text.len() == digits && all_digits(text)).then(|| text.parse().ok())??;
    allowed.contains(&number).then_some(number)
}

fn all_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::instant_ns;

    #[test]
    fn days_are_counted_as_the_calendar_does() {
        let seconds = |text| instant_ns(text).map(|ns| ns / 1_000_000_000);
        assert_eq!(seconds("1970-01-01 00:00:00"), Some(0));
        assert_eq!(seconds("2000-03-01T00:00:00Z"), Some(951_868_800));
        assert_eq!(seconds("2024-02-29 12:00:00"), Some(1_709_208_000));
        assert_eq!(
            seconds("2023-12-31 23:59:60"),
            seconds("2024-01-01 00:00:00")
        );
    }

    #[test]
    fn fractions_and_zones_are_read() {
        assert_eq!(
            instant_ns("1970-01-01 00:00:03.9799600"),
            Some(3_979_960_000)
        );
        assert_eq!(instant_ns("1970-01-01 00:00:00.0000000019"), Some(1));
        for zoned in [
            "1970-01-01 02:00:00.009930+02:00",
            "1970-01-01 02:00:00.009930+0200",
            "1970-01-01T02:00:00.009930+02",
            "1969-12-31 22:00:00.009930-02:00",
        ] {
            let expected = (!zoned.starts_with("1969")).then_some(9_930_000);
            assert_eq!(instant_ns(zoned), expected, "{zoned}");
        }
        assert_eq!(
            instant_ns("1970-01-01 22:00:00-02:00"),
            instant_ns("1970-01-02 00:00:00Z")
        );
    }

    #[test]
    fn what_is_no_time_is_none() {
        for text in [
            "",
            "yesterday",
            "2023-11-16",
            "2023-11-16 18:17",
            "2023-02-29 00:00:00",
            "2023-13-01 00:00:00",
            "2023-11-16 24:00:00",
            "2023-11-16 18:17:03.",
            "2023-11-16 18:17:03.1x",
            "2023-11-16 18:17:03+2",
            "2023-11-16 18:17:03+ä",
            "2023-11-16 18:17:03.ä",
            "23-11-16 18:17:03",
            "2023-11-16 18:17:03:04",
            "2023-11-16-01 18:17:03",
        ] {
            assert_eq!(instant_ns(text), None, "{text}");
        }
    }
}
