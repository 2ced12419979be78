//! What trimming does to the speed of a program that looks things up in a large hash table.

use super::command::{self, Watch};
use super::mapped::Mapped;
use super::sparse::{RESOLUTION, percent_above};
use super::{BENCH, OURS, UNTOUCHED};
use crate::cases::Setting;
use crate::contestant::Contestant;
use crate::figures::{median, readable};
use crate::machine;
use crate::program::{Running, worker};
use crate::report::Report;
use crate::row::{Bar, Comparison};
use crate::worker::{TableKind, marked_pages};
use anyhow::{Result, ensure};
use pagecrew::sys::PAGE_SIZE;
use pagecrew::units::Bytes;

const SMALL: &str = "pages of 4 KiB";

/// Windows whose mean is one figure beside a watching trim: more than a second of them, so that what it does once a
/// second is in it.
const TOGETHER: usize = 48;

/// Windows of each of a set of programs.
const WINDOWS: usize = 60;

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    // Three programs run at a time.
    let bytes = machine::affordable(setting.size(6 << 30, 768 << 20), report) / 3;
    dense(setting, bytes, report)?;
    half(setting, bytes, report)
}

/// A program with a table, which is ready to look things up in it.
struct Program {
    running: Running,
    mapped: Mapped,
    before: usize,
}

impl Program {
    fn start(kind: &str, bytes: usize, pages: &str) -> Result<Running> {
        Running::start(&mut worker(&Contestant::plain(""), &["trim-table", kind, &bytes.to_string(), pages]))
    }

    /// Waits until it is.
    fn ready(mut running: Running, bytes: usize) -> Result<Program> {
        let mapped = Mapped { start: running.figure()? as usize, len: bytes, pid: running.pid() };
        let before = mapped.backing()?.resident;
        Ok(Program { running, mapped, before })
    }

    /// Nanoseconds of a look-up, in a window of them.
    fn window(&mut self) -> Result<f64> {
        self.running.go()?;
        self.running.figure()
    }

    fn resident_mib(&self) -> Result<f64> {
        Ok(self.mapped.backing()?.resident as f64 / f64::from(1 << 20))
    }

    /// How much of what was above the footprint in 4 KiB pages is still there, in %.
    fn left(&self) -> Result<f64> {
        let table = TableKind::Half.table(self.mapped.len);
        let footprint = table + marked_pages(self.mapped.len - table) * PAGE_SIZE;
        Ok(percent_above(footprint, self.before, self.mapped.backing()?.resident))
    }
}

/// Every huge page is in use: trim finds nothing, and must not be felt looking. It is stopped in every other window.
fn dense(setting: &Setting, bytes: usize, report: &mut Report) -> Result<()> {
    let pairs = setting.size(60, 20);
    let case = format!("dense table of {}", Bytes(bytes as u64));
    report.expect(pairs, &case);
    let mut program = Program::ready(Program::start("dense", bytes, "huge")?, bytes)?;
    let watch = Watch::start(["--pid", &program.mapped.pid.to_string()])?;
    let (mut beside, mut alone) = (Vec::new(), Vec::new());
    for _ in 0..pairs {
        let mut sums = [0.0; 2];
        for window in 0..TOGETHER {
            // Who comes first changes, so that a machine that becomes slower harms neither.
            for watched in [window.is_multiple_of(2), !window.is_multiple_of(2)] {
                if watched {
                    watch.resume()?;
                } else {
                    watch.pause()?;
                }
                sums[usize::from(watched)] += program.window()?;
            }
        }
        alone.push(sums[0] / TOGETHER as f64);
        beside.push(sums[1] / TOGETHER as f64);
        report.step();
    }
    watch.resume()?;
    let counts = watch.stop()?;
    ensure!(counts.huge_pages > 0, "trim --watch has found no huge page");
    ensure!(counts.split <= counts.huge_pages / 100, "{} dense huge pages were split", counts.split);
    program.running.wait()?;
    let comparison = Comparison::new(BENCH, format!("{case}: a look-up beside trim --watch"), "ns");
    report.row(comparison.bar(Bar::Ratio(0.995)).rounds(&beside, UNTOUCHED, &alone))
}

/// What the three programs of [`half`] are, in this order.
const SIDES: [(&str, &str); 3] = [(OURS, "huge"), (UNTOUCHED, "huge"), (SMALL, "small")];

/// What they measured.
#[derive(Default)]
struct Half {
    /// Nanoseconds of a look-up.
    look_up: [Vec<f64>; 3],
    /// Resident memory in MiB.
    resident: [Vec<f64>; 3],
    /// What is left above the footprint, in %, in the first two, and in ours when all windows were over.
    left: [Vec<f64>; 2],
    left_late: Vec<f64>,
}

/// Half of the huge pages are in use all the time, and nearly nothing of the others.
fn half(setting: &Setting, bytes: usize, report: &mut Report) -> Result<()> {
    let sets = setting.size(6, 2);
    let case = format!("table of {0} and {0} sparse", Bytes(bytes as u64 / 2));
    report.expect(sets, &case);
    let mut half = Half::default();
    for set in 0..sets {
        half.measure(set, bytes)?;
        report.step();
    }
    for (peer, bar) in [(1, Bar::Ratio(0.98)), (2, Bar::None)] {
        let comparison = Comparison::new(BENCH, format!("{case}: a look-up"), "ns").bar(bar);
        report.row(comparison.rounds(&half.look_up[0], SIDES[peer].0, &half.look_up[peer]))?;
    }
    let left = format!("{case}: memory above the 4 KiB-page footprint left");
    let comparison = Comparison::new(BENCH, &left, "%").resolution(RESOLUTION).bar(Bar::Ours(5.0));
    report.row(comparison.rounds(&half.left[0], UNTOUCHED, &half.left[1]))?;
    let comparison = Comparison::new(BENCH, format!("{left} after the look-ups"), "%").resolution(RESOLUTION);
    report.row(comparison.rounds(&half.left_late, UNTOUCHED, &half.left[1]))?;
    for peer in [1, 2] {
        let comparison = Comparison::new(BENCH, format!("{case}: memory"), "MiB");
        report.row(comparison.rounds(&half.resident[0], SIDES[peer].0, &half.resident[peer]))?;
    }
    half.print(&case, report)
}

impl Half {
    /// One set of programs. Who starts first changes from set to set: what memory a program gets may be faster or
    /// slower.
    fn measure(&mut self, set: usize, bytes: usize) -> Result<()> {
        let mut programs: [Option<Program>; 3] = [const { None }; 3];
        for turn in 0..SIDES.len() {
            let side = (set + turn) % SIDES.len();
            programs[side] = Some(Program::ready(Program::start("half", bytes, SIDES[side].1)?, bytes)?);
        }
        let [Some(ours), Some(untouched), Some(small)] = programs else { unreachable!("each of them was started") };
        command::pass(ours.mapped.pid)?;
        self.left[0].push(ours.left()?);
        self.left[1].push(untouched.left()?);
        let mut programs = [ours, untouched, small];
        for (program, resident) in programs.iter_mut().zip(&mut self.resident) {
            resident.push(program.resident_mib()?);
            program.window()?;
        }
        for window in 0..WINDOWS {
            let order = if (set + window).is_multiple_of(2) { [0, 1, 2] } else { [1, 0, 2] };
            for side in order {
                self.look_up[side].push(programs[side].window()?);
            }
        }
        self.left_late.push(programs[0].left()?);
        programs.into_iter().try_for_each(|program| program.running.wait().map(drop))
    }

    /// Speed and memory side by side, over a program that has switched huge pages off, as in the table that the
    /// kernel's own shrinker was proposed with.
    fn print(&self, case: &str, report: &Report) -> Result<()> {
        let row = |what: &str, unit: &str, of: &[Vec<f64>; 3], better: fn(f64, f64) -> f64| {
            let [ours, untouched, small] = [0, 1, 2].map(|side| median(&of[side]));
            let over =
                |figure| format!("{} {unit} ({:+.1} %)", readable(figure), (better(figure, small) - 1.0) * 100.0);
            vec![what.to_owned(), format!("{} {unit}", readable(small)), over(untouched), over(ours)]
        };
        let rows = [
            row("a look-up", "ns", &self.look_up, |figure, base| base / figure),
            row("memory", "MiB", &self.resident, |figure, base| figure / base),
        ];
        let headings = ["", "huge pages off", "huge pages", "huge pages + trim"];
        report.print(&format!("{case} (speed and memory over huge pages off)"), &headings, rows.into_iter())
    }
}
