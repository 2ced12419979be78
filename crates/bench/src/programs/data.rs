//! Generated inputs: the same ones every time.

use crate::noise::Noise;
use std::io::{BufWriter, Result, Write};

/// Writes `count` lines of 20 to 60 letters.
///
/// # Errors
/// If that fails.
pub fn lines(output: &mut impl Write, count: usize) -> Result<()> {
    let mut noise = Noise::new();
    let mut output = BufWriter::new(output);
    for _ in 0..count {
        let length = 20 + noise.number() % 40;
        line(&mut output, &mut noise, length)?;
    }
    output.flush()
}

fn line(output: &mut impl Write, noise: &mut Noise, length: u64) -> Result<()> {
    for _ in 0..length {
        output.write_all(&[b'a' + (noise.number() >> 40) as u8 % 26])?;
    }
    output.write_all(b"\n")
}

/// Files, lines of each, and versions of the history that git gets.
const FILES: usize = 30;
const LINES: usize = 400;
const VERSIONS: usize = 250;

/// Writes what `git fast-import` reads: a project of which every version changes a few lines of two files.
///
/// # Errors
/// If that fails.
pub fn history(output: &mut impl Write) -> Result<()> {
    let mut noise = Noise::new();
    let mut output = BufWriter::new(output);
    let fresh = |noise: &mut Noise| {
        let mut text = Vec::new();
        let length = 10 + noise.number() % 50;
        line(&mut text, noise, length).map(|()| text)
    };
    let mut files = Vec::new();
    for _ in 0..FILES {
        files.push((0..LINES).map(|_| fresh(&mut noise)).collect::<Result<Vec<_>>>()?);
    }
    for version in 0..VERSIONS {
        let changed = if version == 0 { (0..FILES).collect() } else { vec![version % FILES, version * 7 % FILES] };
        writeln!(output, "commit refs/heads/main")?;
        writeln!(output, "committer Nobody <nobody@example.org> {} +0000", 1_700_000_000 + version * 60)?;
        writeln!(output, "data 4\nnext")?;
        for file in changed {
            for _ in 0..5 {
                let place = noise.number() as usize % LINES;
                files[file][place] = fresh(&mut noise)?;
            }
            let text = files[file].concat();
            writeln!(output, "M 100644 inline file{file}\ndata {}", text.len())?;
            output.write_all(&text)?;
            writeln!(output)?;
        }
    }
    output.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_data_every_time() {
        let written = |write: &dyn Fn(&mut Vec<u8>) -> Result<()>| {
            let mut data = Vec::new();
            write(&mut data).unwrap();
            data
        };
        let text = written(&|data| lines(data, 100));
        assert_eq!(text.iter().filter(|&&byte| byte == b'\n').count(), 100);
        assert_eq!(text, written(&|data| lines(data, 100)));
        let history = written(&|data| super::history(data));
        assert!(history.len() > 5 << 20, "{}", history.len());
        assert_eq!(history, written(&|data| super::history(data)));
    }
}
