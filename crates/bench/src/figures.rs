//! Figures: medians, ratios, and numbers as people read them.

/// The middle of `samples`, or the mean of the two in the middle.
///
/// # Panics
/// If there is none.
pub fn median(samples: &[f64]) -> f64 {
    assert!(!samples.is_empty(), "the median of nothing");
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len().is_multiple_of(2) { f64::midpoint(sorted[middle - 1], sorted[middle]) } else { sorted[middle] }
}

/// How many times smaller `ours` is than `theirs`. What can't be told from zero by this measurement counts as `resolution`.
pub fn times_less(ours: f64, theirs: f64, resolution: f64) -> f64 {
    theirs.max(resolution) / ours.max(resolution)
}

/// `value` rounded to four significant digits.
pub fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let scale = 10f64.powi(3 - value.abs().log10().floor() as i32);
    (value * scale).round() / scale
}

/// `value` with three significant digits and no exponent: `0.0123`, `1.23`, `12.3`, `1234`.
pub fn readable(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let decimals = (2 - value.abs().log10().floor() as i32).clamp(0, 6) as usize;
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_and_even_numbers_of_samples() {
        assert_eq!(median(&[3.0, 1.0, 100.0]), 3.0);
        assert_eq!(median(&[4.0, 1.0, 100.0, 2.0]), 3.0);
    }

    #[test]
    fn ratios_do_not_divide_by_noise() {
        assert_eq!(times_less(2.0, 6.0, 0.1), 3.0);
        assert_eq!(times_less(-5.0, 6.0, 1.0), 6.0);
        assert_eq!(times_less(0.0, 0.0, 1.0), 1.0);
    }

    #[test]
    fn numbers_for_programs_and_for_people() {
        assert_eq!(rounded(1234.56), 1235.0);
        assert_eq!(rounded(0.001_234_56), 0.001_235);
        assert_eq!(rounded(0.0), 0.0);
        assert_eq!(readable(1234.56), "1235");
        assert_eq!(readable(12.345), "12.3");
        assert_eq!(readable(1.234), "1.23");
        assert_eq!(readable(0.012_345), "0.0123");
        assert_eq!(readable(0.0), "0");
    }
}
