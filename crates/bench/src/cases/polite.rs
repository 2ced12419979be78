//! What programs on the same CPUs lose while a large piece of memory is given back.

use super::Setting;
use crate::bystanders::{Bystanders, Sample};
use crate::contest::{against_the_first, alternate};
use crate::contestant::Contestant;
use crate::machine;
use crate::program::{Running, worker};
use crate::report::Report;
use crate::row::{Bar, Comparison};
use anyhow::Result;
use pagecrew::sys::clock::now_ns;
use pagecrew::units::Bytes;
use std::time::Duration;

const BENCH: &str = "polite";

/// For this long the bystanders have the machine to themselves, to learn what they can do.
const BEFORE: Duration = Duration::from_millis(1500);
/// Within this time a free happens that leaves nothing for later. What the machine's speed drifts by within it is taken for lost time,
/// so it is no longer than it has to be.
const AT_ONCE: Duration = Duration::from_millis(1500);
/// And within this time one that leaves something for later, and that.
const LATER: Duration = Duration::from_secs(4);

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    let bytes = machine::affordable(setting.size(8 << 30, 2 << 30), report);
    machine::warm(bytes, report)?;
    let ours = setting.ours.clone().with("PAGECREW_HUGE_PAGES", "off");
    // With the default decay of 10 s nothing would happen within the window, so retained memory decays after one second.
    let kinds = [
        ("given back at once", ours.clone().with("PAGECREW_RETAIN", "0"), AT_ONCE),
        ("kept for 1 s", ours.with("PAGECREW_DECAY", "1s"), LATER),
    ];
    for (kind, ours, during) in kinds {
        let contestants = [ours, Contestant::plain("munmap")];
        let what = format!("free of {}, {kind}", Bytes(bytes as u64));
        let results = alternate(report, &what, setting.repetitions(), &contestants, |contestant| {
            one_free(contestant, bytes, during)
        })?;
        let lost = |_: &Contestant| {
            let case = format!("{what}: bystanders' lost CPU time");
            Comparison::new(BENCH, case, "ms").resolution(10.0).bar(Bar::Ratio(1.0))
        };
        let own = |_: &Contestant| Comparison::new(BENCH, format!("{what}: the caller's time"), "ms");
        let rows = against_the_first(lost, &contestants, &results, 0);
        for row in rows.chain(against_the_first(own, &contestants, &results, 1)) {
            report.row(row)?;
        }
    }
    Ok(())
}

/// CPU milliseconds that the bystanders lose within the time `during` by one free, and the milliseconds that it takes its caller.
fn one_free(contestant: &Contestant, bytes: usize, during: Duration) -> Result<Vec<f64>> {
    let origin = if contestant.name == "munmap" { "map" } else { "malloc" };
    let mut program = Running::start(&mut worker(contestant, &["release-beside", origin, &bytes.to_string()]))?;
    program.figure()?;
    let bystanders = Bystanders::start()?;
    let first = bystanders.sample();
    std::thread::sleep(BEFORE);
    let second = bystanders.sample();
    program.go()?;
    let caller = program.figure()?;
    let spent = Duration::from_nanos(now_ns() - second.time_ns);
    std::thread::sleep(during.saturating_sub(spent));
    let third = bystanders.sample();
    drop(bystanders);
    program.wait()?;
    Ok(vec![lost_ms(&first, &second, &third), caller])
}

/// CPU time that is missing between `second` and `third`, by the rate of each bystander between `first` and `second`.
fn lost_ms(first: &Sample, second: &Sample, third: &Sample) -> f64 {
    let before_ms = (second.time_ns - first.time_ns) as f64 / 1e6;
    let during_ms = (third.time_ns - second.time_ns) as f64 / 1e6;
    let lost = |index: usize| {
        let rate = (second.work[index] - first.work[index]) as f64 / before_ms;
        during_ms - (third.work[index] - second.work[index]) as f64 / rate
    };
    (0..first.work.len()).map(lost).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_time_is_what_the_rate_before_promised() {
        let sample = |time_ms: u64, work: [u64; 2]| Sample { time_ns: time_ms * 1_000_000, work: work.to_vec() };
        // The first bystander does 10 a millisecond, the second 5; then they miss 100 ms and 200 ms.
        let (first, second) = (sample(0, [0, 0]), sample(1000, [10_000, 5000]));
        let third = sample(3000, [10_000 + 19_000, 5000 + 9000]);
        assert_eq!(lost_ms(&first, &second, &third), 300.0);
    }
}
