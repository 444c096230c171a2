//! Dates in UTC as text.

/// Formats seconds since 1970 as `2026-12-31T00:00:00Z`.
pub fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

/// Parses `2026-12-31`, `2026-12-31T18:00Z` or `2026-12-31T18:00:00Z`: seconds since 1970.
pub fn parse(text: &str) -> Option<u64> {
    let (date, time) = match text.split_once('T') {
        Some((date, time)) => (date, time.strip_suffix('Z')?),
        None => (text, "00:00"),
    };
    let [year, month, day] = numbers(date, '-', &[4, 2, 2])?[..] else { return None };
    let clock = numbers(time, ':', &[2, 2]).or_else(|| numbers(time, ':', &[2, 2, 2]))?;
    let (hour, minute, second) = (clock[0], clock[1], clock.get(2).copied().unwrap_or(0));
    (hour < 24 && minute < 60 && second < 60 && year >= 1970).then_some(())?;
    // The day before the year has as many days before it as all years since 1970, leap days included.
    let leap_days = |year: u64| year / 4 - year / 100 + year / 400;
    let first = (year - 1970) * 365 + leap_days(year - 1) - leap_days(1969);
    let days = (first..first + 366).find(|&days| civil(days) == (year, month, day))?;
    Some(days * 86_400 + hour * 3600 + minute * 60 + second)
}

/// Numbers with exactly these many digits, separated by `mark`.
fn numbers(text: &str, mark: char, digits: &[usize]) -> Option<Vec<u64>> {
    let parts: Vec<&str> = text.split(mark).collect();
    let is_sound = |(part, len): (&&str, &usize)| part.len() == *len && part.bytes().all(|byte| byte.is_ascii_digit());
    (parts.len() == digits.len() && parts.iter().zip(digits).all(is_sound)).then_some(())?;
    parts.into_iter().map(|part| part.parse().ok()).collect()
}

/// Returns the Gregorian date `days` after 1970-01-01. Computed in years that begin in March, so
/// that the leap day comes last.
fn civil(days: u64) -> (u64, u64, u64) {
    let since_0000 = days + 719_468;
    let (era, in_era) = (since_0000 / 146_097, since_0000 % 146_097);
    let year = (in_era - in_era / 1460 + in_era / 36_524 - in_era / 146_096) / 365;
    let in_year = in_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * in_year + 2) / 153;
    let day = in_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_utc_dates_in_both_directions() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(seconds), text);
            assert_eq!(parse(text), Some(seconds), "{text}");
        }
        assert_eq!((parse("2026-12-31"), parse("2026-12-31T18:30Z")), (Some(1_798_675_200), Some(1_798_741_800)));
        for bad in ["2026-02-29", "2026-13-01", "2026-00-01", "2026-1-01", "2026-12-31T24:00Z", "2026-12-31T18:00", ""]
        {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
