//! A C++ program: fastText learns word vectors. Its matrix of 800 MB is one allocation, read and written all over.

use super::{Metric, Program};
use crate::contestant::Contestant;
use crate::machine;
use crate::noise::Noise;
use crate::program::{self, on_path};
use crate::report::Report;
use anyhow::{Context, Result, bail, ensure};
use std::hash::{DefaultHasher, Hasher};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const LINES: usize = 1500;
const WORDS_PER_LINE: usize = 100;
/// Different words; as in a language, few of them make up most of a text.
const WORDS: usize = 50_000;
/// The program needs this much memory: its model, and the files of the model.
const NEEDED: usize = 2 << 30;

pub fn prepare(report: &Report) -> Result<Option<Program>> {
    if !on_path("fasttext") {
        report.note("fasttext is not installed (package fasttext); it is left out");
        return Ok(None);
    }
    if machine::affordable(NEEDED, report) < NEEDED {
        report.note("there is not enough memory for fasttext; it is left out");
        return Ok(None);
    }
    let metrics = [Metric::new("time", "s")].into_iter().chain(Metric::faults_and_peak()).collect();
    let mut expected = None::<u64>;
    let run = move |contestant: &Contestant, _pause: Duration| {
        // In memory where that can be, so that the speed of a disk does not count.
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())?;
        let (input, output) = (directory.path().join("text"), directory.path().join("model"));
        std::fs::write(&input, text())?;
        let mut command = Command::new("fasttext");
        // One thread: with more of them the result depends on their timing.
        command.args(["skipgram", "-thread", "1", "-epoch", "1", "-minCount", "1", "-verbose", "0"]);
        command.arg("-input").arg(&input).arg("-output").arg(&output);
        contestant.prepare(&mut command);
        let usage = program::run(&mut command)?.usage;
        let found = hash(&output.with_extension("vec"))?;
        let expected = *expected.get_or_insert(found);
        ensure!(expected == found, "the word vectors differ");
        Ok((vec![usage.seconds, usage.faults as f64, usage.peak_mib], None))
    };
    Ok(Some(Program { name: "fastText", metrics, run: Box::new(run) }))
}

/// A text of made-up words.
fn text() -> String {
    let mut noise = Noise::new();
    let mut text = String::new();
    for _ in 0..LINES {
        for _ in 0..WORDS_PER_LINE {
            let rank = (WORDS as f64).powf(noise.fraction()) as usize;
            text.push_str(&word(rank));
            text.push(' ');
        }
        text.push('\n');
    }
    text
}

/// Word number `rank`, of letters that depend on all of it.
fn word(rank: usize) -> String {
    let mut number = (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut word = String::new();
    for _ in 0..8 {
        word.push(char::from(b'a' + (number >> 59) as u8 % 26));
        number = number.wrapping_mul(31);
    }
    word
}

fn hash(path: &Path) -> Result<u64> {
    let bytes = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    if bytes.is_empty() {
        bail!("{} is empty", path.display());
    }
    let mut hasher = DefaultHasher::new();
    hasher.write(&bytes);
    Ok(hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn the_text_has_common_and_rare_words() {
        let text = text();
        let mut counts = HashMap::new();
        for word in text.split_whitespace() {
            *counts.entry(word).or_insert(0) += 1;
        }
        assert_eq!(text.split_whitespace().count(), LINES * WORDS_PER_LINE);
        assert!(counts.len() > 10_000, "{}", counts.len());
        assert!(counts.values().max() > Some(&5000));
    }
}
