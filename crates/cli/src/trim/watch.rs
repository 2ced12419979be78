//! Trimming for as long as it is wanted.

use super::hold::Waiter;
use super::metrics::Board;
use super::session::Session;
use super::{Job, show};
use crate::failure::Failure;
use crate::output::{note, print};
use crate::signals::SignalSet;
use pagecrew::sys::clock::now_ns;
use pagecrew::trim::{Kernel, Turn};
use pagecrew::units::Bytes;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

/// Looking for processes may take this share of the budget.
const REFRESH: f64 = 0.1;
/// Turns between two looks at the clock and for signals.
const TURNS: usize = 16;

/// `pagecrew trim --watch`. Ends with status 0 when it is told to, and when the processes that it was told by number have ended.
pub fn run(job: Job, hold: bool) -> Result<ExitCode, Failure> {
    let signals = SignalSet::of(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP]);
    signals.block();
    let mut session = Session::new(job);
    let interval = session.job().options.interval;
    let share = session.job().options.cpu.unwrap_or(1.0);
    let refresh = |session: &mut Session| -> Result<u64, Failure> {
        let cost = session.refresh()?;
        Ok(now_ns() + interval.max(cost.div_f64(REFRESH * share)).as_nanos() as u64)
    };
    let mut next_refresh = refresh(&mut session)?;
    session.check()?;
    let mut waiter = Waiter::new(session.job(), hold)?;
    let mut board = Board::new(&session)?;
    let mut next_report = now_ns() + interval.as_nanos() as u64;
    let mut gone_before = 0;
    loop {
        let mut pause = Duration::ZERO;
        for _ in 0..TURNS {
            match session.fleet.turn(&Kernel) {
                Turn::Worked => {}
                Turn::Spent(wait) | Turn::Idle(wait) => {
                    pause = wait;
                    break;
                }
            }
        }
        let next_renewal = board.as_mut().map_or(u64::MAX, |board| board.renew(&mut session, &waiter));
        let left = Duration::from_nanos(next_refresh.min(next_report).min(next_renewal).saturating_sub(now_ns()));
        let told_to_end = waiter.wait(pause.min(left), &mut session, &signals);
        let now = now_ns();
        if now >= next_refresh {
            next_refresh = refresh(&mut session)?;
        }
        let over = told_to_end || (session.job().selection.only_numbers() && session.fleet.members().next().is_none());
        if over || now >= next_report {
            next_report = now + interval.as_nanos() as u64;
            report(&session, &mut gone_before, over)?;
        }
        if over {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// Says how it stands: to programs each time, to people the table at a terminal and at the end, and otherwise what went.
fn report(session: &Session, gone_before: &mut u64, last: bool) -> Result<(), Failure> {
    if session.job().json {
        return print(&format!("{}\n", show::json(session)));
    }
    if std::io::stdout().is_terminal() {
        return print(&format!("\x1b[H\x1b[2J{}", show::text(session)));
    }
    let gone = session.total().gone_bytes;
    if last {
        print(&show::text(session))?;
    } else if gone > *gone_before {
        note(&format!("{} gone, {} in all", Bytes(gone - *gone_before), Bytes(gone)));
    }
    *gone_before = gone;
    Ok(())
}
