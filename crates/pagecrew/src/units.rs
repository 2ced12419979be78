//! Sizes and durations as people write them: `64M`, `8GiB`, `250ms`, `10s`.
//!
//! A size without a unit is in bytes; `K`, `KB` and `KiB` all mean 1024 bytes, as they do for `ulimit`, `dd` and cgroup files.
//! A duration without a unit is in seconds.

use std::fmt;
use std::time::Duration;

/// Why a size or a duration could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseError {
    text: String,
    expected: &'static str,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}' is not {}", self.text, self.expected)
    }
}

impl std::error::Error for ParseError {}

const SIZE_FORM: &str = "a size such as 65536, 64K, 64M or 8GiB";
const DURATION_FORM: &str = "a duration such as 10s, 250ms or 2m";

/// Splits `text` into its number and its unit; the number may have a fraction.
fn number_and_unit(text: &str) -> Option<(f64, String)> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..digits].parse().ok()?;
    Some((number, text[digits..].trim_start().to_ascii_lowercase()))
}

/// Reads a size in bytes.
///
/// # Errors
/// If `text` is not a number with an optional unit (`K`, `M`, `G`, `T`, with `B` or `iB` behind it if wanted), or if the
/// size does not fit 63 bits.
pub fn parse_size(text: &str) -> Result<usize, ParseError> {
    let error = || ParseError { text: text.to_owned(), expected: SIZE_FORM };
    let (number, unit) = number_and_unit(text).ok_or_else(error)?;
    let shift = match unit.as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(error()),
    };
    // A plain number of bytes is read exactly; only a fraction goes through floating point.
    if let Ok(whole) = text.trim().parse::<usize>() {
        return if whole <= isize::MAX as usize { Ok(whole) } else { Err(error()) };
    }
    let bytes = number * (1u64 << shift) as f64;
    if bytes.is_finite() && bytes < isize::MAX as f64 { Ok(bytes as usize) } else { Err(error()) }
}

/// Reads a duration.
///
/// # Errors
/// If `text` is not a number with an optional unit (`us`, `ms`, `s`, `m`, `h`).
pub fn parse_duration(text: &str) -> Result<Duration, ParseError> {
    let error = || ParseError { text: text.to_owned(), expected: DURATION_FORM };
    let (number, unit) = number_and_unit(text).ok_or_else(error)?;
    let seconds = match unit.as_str() {
        "us" => number / 1e6,
        "ms" => number / 1e3,
        "" | "s" => number,
        "m" | "min" => number * 60.0,
        "h" => number * 3600.0,
        _ => return Err(error()),
    };
    Duration::try_from_secs_f64(seconds).map_err(|_| error())
}

/// A size in bytes, written with the largest binary unit that keeps it readable: `1.5 GiB`, `64 MiB`, `12 KiB`, `17 B`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shift, unit) = match self.0 {
            n if n >= 1 << 40 => (40, "TiB"),
            n if n >= 1 << 30 => (30, "GiB"),
            n if n >= 1 << 20 => (20, "MiB"),
            n if n >= 1 << 10 => (10, "KiB"),
            _ => (0, "B"),
        };
        let value = self.0 as f64 / (1u64 << shift) as f64;
        let text = if value >= 100.0 || value.fract() < 0.05 {
            format!("{value:.0} {unit}")
        } else {
            format!("{value:.1} {unit}")
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_in_every_unit() {
        assert_eq!(parse_size("0"), Ok(0));
        assert_eq!(parse_size("65536"), Ok(65536));
        assert_eq!(parse_size("64K"), Ok(64 << 10));
        assert_eq!(parse_size("64 MB"), Ok(64 << 20));
        assert_eq!(parse_size("8GiB"), Ok(8 << 30));
        assert_eq!(parse_size("1.5g"), Ok(3 << 29));
        assert_eq!(parse_size("9007199254740993"), Ok(9_007_199_254_740_993));
    }

    #[test]
    fn nonsense_is_refused_with_the_text_that_was_given() {
        for text in ["", "M", "12Q", "-1", "1e3", "ten", "9999999999999T", "1..2M", "18446744073709551615"] {
            let error = parse_size(text).unwrap_err();
            assert!(error.to_string().contains(text), "{error}");
        }
        assert!(parse_duration("soon").is_err());
        assert!(parse_duration("-3s").is_err());
    }

    #[test]
    fn durations_in_every_unit() {
        assert_eq!(parse_duration("10"), Ok(Duration::from_secs(10)));
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(parse_duration("0"), Ok(Duration::ZERO));
    }

    #[test]
    fn bytes_are_readable() {
        assert_eq!(Bytes(17).to_string(), "17 B");
        assert_eq!(Bytes(3 << 29).to_string(), "1.5 GiB");
        assert_eq!(Bytes(64 << 20).to_string(), "64 MiB");
        assert_eq!(format!("{:>8}", Bytes(1 << 10)), "   1 KiB");
    }
}
