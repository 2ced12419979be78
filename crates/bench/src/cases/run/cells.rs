//! The table of cells: blocks from 64 KiB to 64 MiB, beside glibc and the other mallocs.

use super::super::Setting;
use super::cell::{Cell, Crowd, Sizes};
use super::everyone;
use super::judge::{self, Tally};
use crate::contest::alternate;
use crate::contestant::Contestant;
use crate::figures::readable;
use crate::machine;
use crate::report::Report;
use crate::row::Row;
use crate::worker::Touch;
use anyhow::Result;

const TOUCHES: [Touch; 2] = [Touch::Whole, Touch::TwoBytes];
const THREADS: [usize; 4] = [0, 1, 2, 8];
const SLOTS: [usize; 2] = [16, 32];

/// No cell has more memory in use at once: filling more takes too long for so many runs.
const ROOM: usize = 9 << 29;

/// How many of those that miss something are named at the end.
const WORST: usize = 20;

pub fn run(setting: &Setting, report: &mut Report) -> Result<()> {
    let wanted: Vec<Cell> = all(setting.quick).into_iter().filter(|cell| setting.only.wants(&cell.name())).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let cells = fitted(wanted, machine::affordable(ROOM, report), report);
    let contestants = everyone(setting);
    let mut tally = Tally::default();
    for (index, cell) in cells.iter().enumerate() {
        one(setting, report, cell, &contestants, &mut tally)?;
        if cells.get(index + 1).is_none_or(|next| next.sizes != cell.sizes) {
            print(report, &contestants)?;
        }
    }
    summarize(report, &tally)
}

/// Every cell, or for a first impression every combination of touch, threads and slots with one size each, every size twice.
fn all(quick: bool) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (size, sizes) in Sizes::ALL.into_iter().enumerate() {
        let mut combination = 0;
        for touch in TOUCHES {
            for threads in THREADS {
                for slots in SLOTS {
                    if !quick || (combination * 5 + combination / 8) % Sizes::ALL.len() == size {
                        cells.push(Cell { sizes, touch, threads, slots });
                    }
                    combination += 1;
                }
            }
        }
    }
    cells
}

/// The cells with as many slots as the machine has room for, each of them once.
fn fitted(cells: Vec<Cell>, room: usize, report: &Report) -> Vec<Cell> {
    let mut fitted: Vec<Cell> = Vec::new();
    for cell in cells {
        let smaller = cell.fitted(room);
        if smaller == cell {
            fitted.push(cell);
        } else if smaller.live() > room || fitted.contains(&smaller) {
            report.note(&format!("{}: there is not enough room for it; it is left out", cell.name()));
        } else {
            report.note(&format!("{}: there is room for {} slots", cell.name(), smaller.slots));
            fitted.push(smaller);
        }
    }
    fitted
}

fn one(
    setting: &Setting,
    report: &mut Report,
    cell: &Cell,
    contestants: &[Contestant],
    tally: &mut Tally,
) -> Result<()> {
    let rounds = cell.rounds(&contestants[1])?;
    let results = alternate(report, &cell.name(), setting.repetitions(), contestants, |contestant| {
        cell.measure(contestant, rounds, Crowd::default())
    })?;
    for (requirement, row) in judge::cell(cell, contestants, &results) {
        if let Some(requirement) = requirement {
            tally.add(requirement, row.clone());
        }
        report.row(row)?;
    }
    Ok(())
}

/// The cells since the last table, a line each.
fn print(report: &mut Report, contestants: &[Contestant]) -> Result<()> {
    let rows = report.take_rows();
    let mut headings = vec!["cell", "pagecrew"];
    headings.extend(contestants[1..].iter().map(|contestant| contestant.name.as_str()));
    headings.extend(["peak", "at most 1.1x of"]);
    // A cell has a row for each other contestant, and one for the peak.
    let lines: Vec<_> = rows.chunks(contestants.len()).map(line).collect();
    report.print("", &headings, lines.into_iter())
}

/// One cell: our time, each other one's with how many times as long it is, and the memory.
fn line(rows: &[Row]) -> Vec<String> {
    let Some((peak, times)) = rows.split_last() else { return Vec::new() };
    let missed = |row: &Row| if row.met == Some(false) { " MISSED" } else { "" };
    let case = times.first().map_or("", |row| row.case.trim_start_matches("cells: "));
    let mut cells = vec![case.to_owned(), format!("{} ns", readable(times.first().map_or(0.0, |row| row.ours)))];
    cells.extend(times.iter().map(|row| format!("{} {}x{}", readable(row.theirs), readable(row.ratio), missed(row))));
    cells.push(format!("{} MiB{}", readable(peak.ours), missed(peak)));
    cells.push(format!("{} ({})", readable(peak.theirs), peak.peer));
    cells
}

/// How many cells miss what, and which miss it by most.
fn summarize(report: &mut Report, tally: &Tally) -> Result<()> {
    tally.rows().into_iter().try_for_each(|row| report.row(row))?;
    report.table("cells")?;
    let worst = tally.worst();
    if worst.is_empty() {
        return Ok(());
    }
    report.print("the worst", &Row::HEADINGS, worst.iter().take(WORST).map(|row| row.cells().to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_whole_and_its_sample_touches_everything() {
        let whole = all(false);
        assert_eq!(whole.len(), 128);
        let mut names: Vec<_> = whole.iter().map(Cell::name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 128);
        let sample = all(true);
        assert_eq!(sample.len(), 16);
        for sizes in Sizes::ALL {
            assert_eq!(sample.iter().filter(|cell| cell.sizes == sizes).count(), 2);
        }
    }

    #[test]
    fn what_does_not_fit_is_run_once_with_fewer_slots() {
        let large: Vec<_> = all(false).into_iter().filter(|cell| cell.live() > 1 << 30).collect();
        let report = Report::new(true);
        let fitted = fitted(large.clone(), 1 << 30, &report);
        assert!(fitted.len() < large.len() && fitted.iter().all(|cell| cell.live() <= 1 << 30));
        assert!(fitted.iter().enumerate().all(|(index, cell)| !fitted[index + 1..].contains(cell)));
    }
}
