//! OpenMetrics text, read strictly: what is no exposition, or not a whole one, is none.

use std::collections::BTreeMap;

/// More samples than any service of ours has.
const SAMPLES_MOST: usize = 20_000;

/// One sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Read {
    /// With the `_total` of a counter.
    pub name: String,
    /// Names and values.
    pub labels: BTreeMap<String, String>,
    /// It is finite.
    pub value: f64,
}

/// All samples of an exposition, in its order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Exposition(Vec<Read>);

impl Exposition {
    /// Reads `text`.
    ///
    /// # Errors
    /// `line N: reason`.
    pub fn parse(text: &str) -> Result<Exposition, String> {
        let body = text.strip_suffix("# EOF\n").ok_or("it does not end with # EOF")?;
        if !body.is_empty() && !body.ends_with('\n') {
            return Err("the last line is not whole".into());
        }
        let mut samples = Vec::new();
        for (index, line) in body.lines().enumerate() {
            let wrong = |reason: &str| format!("line {}: {reason}", index + 1);
            if let Some(rest) = line.strip_prefix("# ") {
                about(rest).ok_or_else(|| wrong("neither HELP, TYPE nor UNIT of a metric"))?;
                continue;
            }
            if samples.len() == SAMPLES_MOST {
                return Err(wrong("too many samples"));
            }
            samples.push(sample(line).ok_or_else(|| wrong("no sample"))?);
        }
        Ok(Exposition(samples))
    }

    /// The samples with this name.
    pub fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Read> {
        self.0.iter().filter(move |sample| sample.name == name)
    }
}

/// `HELP name text`, `TYPE name kind` or `UNIT name unit`.
fn about(rest: &str) -> Option<()> {
    let (word, rest) = rest.split_once(' ')?;
    let (name, _) = rest.split_once(' ')?;
    (["HELP", "TYPE", "UNIT"].contains(&word) && is_name(name)).then_some(())
}

/// `name{label="value"} number`, without time stamps, which none of our services gives.
fn sample(line: &str) -> Option<Read> {
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = BTreeMap::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        while !rest.starts_with('}') {
            let (label, value) = rest.split_once("=\"")?;
            let (value, behind) = quoted(value)?;
            if !is_name(label) || labels.insert(label.to_owned(), value).is_some() {
                return None;
            }
            rest = match behind.strip_prefix(',') {
                Some(more) if !more.starts_with('}') => more,
                Some(_) => return None,
                None if behind.starts_with('}') => behind,
                None => return None,
            };
        }
        rest = &rest[1..];
    }
    let value = number(rest.strip_prefix(' ')?)?;
    is_name(name).then(|| Read { name: name.to_owned(), labels, value })
}

/// The text up to a quotation mark, without its escapes, and what stands behind the mark.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    loop {
        match characters.next()? {
            (place, '"') => return Some((value, &text[place + 1..])),
            (_, '\\') => value.push(match characters.next()?.1 {
                'n' => '\n',
                other @ ('"' | '\\') => other,
                _ => return None,
            }),
            (_, other) => value.push(other),
        }
    }
}

/// A finite number, as it is written in decimal.
fn number(text: &str) -> Option<f64> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
    text.parse::<f64>().ok().filter(|value| digits && value.is_finite())
}

fn is_name(text: &str) -> bool {
    let letter = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_' || byte == b':';
    text.bytes().enumerate().all(|(place, byte)| letter(byte) || (place > 0 && byte.is_ascii_digit()))
        && !text.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::text;
    use pagecrew::metrics;
    use pagecrew::stats::{Number, Part, Sample};
    use proptest::prelude::*;

    #[test]
    fn what_our_services_serve_is_read() {
        let metrics: Vec<_> = metrics::all().into_iter().filter(|metric| metric.name.is_some()).collect();
        let label = "a\"b\\c\nd,}{ = é".to_owned();
        let sample = |(index, metric): (usize, &&'static pagecrew::stats::Metric)| Sample {
            metric,
            labels: metric.labels.iter().map(|_| label.clone()).collect(),
            number: if index % 2 == 0 { Number::Whole(index as u64) } else { Number::Real(index as f64 + 0.5) },
        };
        let exposition = Exposition::parse(&text(metrics.iter().enumerate().map(sample).collect())).unwrap();
        assert_eq!(exposition.0.len(), metrics.len());
        let users: Vec<_> = exposition.named("pagecrew_pool_user_taken_bytes").collect();
        assert_eq!(users[0].labels["user"], label);
        assert_eq!(exposition.named("pagecrew_pool_takes_total").count(), 1);
        assert_eq!(exposition.named("pagecrew_pool_takes").count(), 0);
        assert!(metrics::of(Part::Run).all(|metric| metric.name.is_none()));
    }

    #[test]
    fn nothing_else_is_an_exposition() {
        for good in [
            "# EOF\n",
            "a 1\n# EOF\n",
            "a{b=\"c\",d=\"\"} -1.5e3\n# EOF\n",
            "a{} 1\n# EOF\n",
            "# TYPE a gauge\n# EOF\n",
        ] {
            assert!(Exposition::parse(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "# EOF",
            "a 1\n",
            "a 1# EOF\n",
            "a\n# EOF\n",
            "a  1\n# EOF\n",
            "a 1 2\n# EOF\n",
            "a nan\n# EOF\n",
            "a inf\n# EOF\n",
            "a 1e999\n# EOF\n",
            "1a 1\n# EOF\n",
            " 1\n# EOF\n",
            "\n# EOF\n",
            "# \n# EOF\n",
            "# HELP\n# EOF\n",
            "a{b=\"c\"1\n# EOF\n",
            "a{b=\"c} 1\n# EOF\n",
            "a{b=\"c\",} 1\n# EOF\n",
            "a{b=\"c\",b=\"d\"} 1\n# EOF\n",
            "a{b=\"\\x\"} 1\n# EOF\n",
            "a{b=\"c\"}1\n# EOF\n",
            "# EOF\n# EOF\n",
        ] {
            assert!(Exposition::parse(bad).is_err(), "{bad:?}");
        }
        let many = "a 1\n".repeat(SAMPLES_MOST + 1) + "# EOF\n";
        assert!(Exposition::parse(&many).unwrap_err().contains("too many"));
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic(text in "((# (HELP|TYPE) )?[a-z_]{0,3}(\\{[a-z]{0,2}=\"[a-zé\\\\\"]{0,4}\"?,?\\}?)? ?-?[0-9.e]{0,5}\n|[ -~]{0,12}\n?){0,8}") {
            let _ = Exposition::parse(&format!("{text}# EOF\n"));
            for line in text.lines() {
                let _ = sample(line);
            }
        }
    }
}
