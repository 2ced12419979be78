//! What filling the pool costs programs that keep every CPU busy.

use super::BENCH;
use super::server::Server;
use crate::bystanders::{Bystanders, Sample};
use crate::cases::Setting;
use crate::figures::median;
use crate::machine;
use crate::report::Report;
use crate::row::{Bar, Comparison};
use anyhow::Result;
use pagecrew::units::Bytes;
use std::time::Duration;

const WINDOW: Duration = Duration::from_secs(2);
/// Pairs of windows: one differs from the next by several percent on a machine that others share, and what is to be seen is less.
const PAIRS: usize = 24;

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    let size = machine::affordable(setting.size(8 << 30, 1 << 30), report);
    // With the filler's usual share of a CPU, and not with that of the other cases.
    let server = Server::start(size, &[])?.serving()?;
    // What the host has to find first, the filler would wait for instead of working.
    machine::warm_for_a_run(size)?;
    let pairs = setting.size(PAIRS, 5);
    let case = format!("refill of {} beside a program on each CPU", Bytes(size as u64));
    report.expect(pairs, &case);
    let bystanders = Bystanders::start()?;
    let (mut beside, mut alone, mut filled) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 0..pairs {
        // Who comes first changes, so that a machine that becomes slower harms neither.
        for refill in [pair % 2 == 0, pair % 2 != 0] {
            server.empty()?;
            if refill {
                let first = bystanders.sample();
                server.start_to_fill()?;
                beside.push(window(&bystanders, &first));
                filled.push(server.backed()? as f64);
            } else {
                alone.push(window(&bystanders, &bystanders.sample()));
            }
        }
        report.step();
    }
    drop(bystanders);
    server.stop()?;
    let over = filled.iter().filter(|&&filled| filled >= size as f64).count();
    let beside_them = Bytes((median(&filled) / WINDOW.as_secs_f64()) as u64);
    report.note(&format!("{case}: {beside_them} a second; it was over before the end of {over} of {pairs} windows"));
    let comparison = Comparison::new(BENCH, format!("{case}: its time per work"), "us");
    report.row(comparison.bar(Bar::Ratio(0.98)).rounds(&beside, "no refill", &alone))
}

/// Microseconds that a bystander takes for a unit of its work, in a window that begins with `first`.
fn window(bystanders: &Bystanders, first: &Sample) -> f64 {
    std::thread::sleep(WINDOW);
    time_per_work(first, &bystanders.sample())
}

fn time_per_work(first: &Sample, second: &Sample) -> f64 {
    let work: u64 = second.work.iter().zip(&first.work).map(|(second, first)| second - first).sum();
    (second.time_ns - first.time_ns) as f64 / 1e3 * first.work.len() as f64 / work as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_per_work_is_that_of_all_programs_together() {
        let sample = |time_us: u64, work: [u64; 2]| Sample { time_ns: time_us * 1000, work: work.to_vec() };
        // 100 and 60 units in 800 us, by two programs: one unit takes a program 10 us.
        assert_eq!(time_per_work(&sample(100, [5, 5]), &sample(900, [105, 65])), 10.0);
    }
}
