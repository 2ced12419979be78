//! Contestants taking turns: what disturbs a machine for a while then disturbs all of them.

use crate::contestant::Contestant;
use crate::report::Report;
use crate::row::{Comparison, Row};
use anyhow::{Context, Result, ensure};

/// What one contestant measured: the figures of each round.
pub type Rounds = Vec<Vec<f64>>;

/// Runs `measure` for each of `contestants` in turn, `repetitions` times over, and returns each one's rounds. Each round begins with another one,
/// since whoever ran before leaves the machine in another state.
///
/// # Errors
/// If a run fails, or if one of them returns another number of figures than the first.
pub fn alternate(
    report: &Report,
    what: &str,
    repetitions: usize,
    contestants: &[Contestant],
    mut measure: impl FnMut(&Contestant) -> Result<Vec<f64>>,
) -> Result<Vec<Rounds>> {
    report.expect(repetitions * contestants.len(), what);
    let mut samples: Vec<Rounds> = vec![Vec::new(); contestants.len()];
    for round in 0..repetitions {
        for turn in 0..contestants.len() {
            let index = (round + turn) % contestants.len();
            let (contestant, samples) = (&contestants[index], &mut samples[index]);
            let figures = measure(contestant).with_context(|| format!("{what}, {}", contestant.name))?;
            let expected = samples.first().map_or(figures.len(), Vec::len);
            ensure!(!figures.is_empty() && figures.len() == expected, "{what}, {}: {figures:?}", contestant.name);
            samples.push(figures);
            report.step();
        }
    }
    Ok(samples)
}

/// The figures number `index` of all rounds.
pub fn column(rounds: &Rounds, index: usize) -> Vec<f64> {
    rounds.iter().map(|figures| figures[index]).collect()
}

/// The comparisons of the first contestant's figure number `index` with each other one's, round by round.
pub fn against_the_first<'c>(
    comparison: impl Fn(&Contestant) -> Comparison + 'c,
    contestants: &'c [Contestant],
    results: &'c [Rounds],
    index: usize,
) -> impl Iterator<Item = Row> + 'c {
    let ours = column(&results[0], index);
    contestants
        .iter()
        .zip(results)
        .skip(1)
        .map(move |(peer, rounds)| comparison(peer).rounds(&ours, &peer.name, &column(rounds, index)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::Bar;

    #[test]
    fn turns_are_taken_and_medians_compared() {
        let contestants = [Contestant::plain("ours"), Contestant::plain("a"), Contestant::plain("b")];
        let mut order = Vec::new();
        let report = Report::new(true);
        let results = alternate(&report, "test", 3, &contestants, |contestant| {
            order.push(contestant.name.clone());
            let turn = order.len() as f64;
            Ok(vec![if contestant.name == "ours" { 1.0 } else { turn }, 2.0])
        })
        .unwrap();
        assert_eq!(order, ["ours", "a", "b", "a", "b", "ours", "b", "ours", "a"]);
        let first = |rounds| column(rounds, 0);
        assert_eq!(results.iter().map(first).collect::<Vec<_>>(), [[1.0, 1.0, 1.0], [2.0, 4.0, 9.0], [3.0, 5.0, 7.0]]);
        let comparison = |_: &Contestant| Comparison::new("alloc", "test", "ms").bar(Bar::Ratio(4.5));
        let rows: Vec<_> = against_the_first(comparison, &contestants, &results, 0).collect();
        assert_eq!(rows.iter().map(|row| row.ratio).collect::<Vec<_>>(), [4.0, 5.0]);
        assert_eq!(rows.iter().map(|row| row.met).collect::<Vec<_>>(), [Some(false), Some(true)]);
    }

    #[test]
    fn figures_that_come_and_go_are_an_error() {
        let mut turn = 0;
        let result = alternate(&Report::new(true), "test", 2, &[Contestant::plain("x")], |_| {
            turn += 1;
            Ok(vec![0.0; turn])
        });
        assert!(result.is_err());
    }
}
