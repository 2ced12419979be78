//! One pass: every huge page of every process that is meant is looked at once.

use super::noted::Whereabouts;
use super::session::{Earlier, Session};
use super::{Job, show};
use crate::failure::Failure;
use crate::output::print;
use crate::signals::SignalSet;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pagecrew::trim::{Kernel, Turn};
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A pass that is done by then shows no progress.
const SHORT: Duration = Duration::from_secs(1);
/// Turns between two looks at the clock and for signals: each is short.
const TURNS: usize = 16;

/// `pagecrew trim` without `--watch`. Interrupted, it says what was done until then.
pub fn run(job: Job) -> Result<ExitCode, Failure> {
    let signals = SignalSet::of(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP]);
    signals.block();
    let mut session = Session::new(job, Whereabouts::default(), Arc::default(), Earlier::nothing());
    session.job().selection.check_groups()?;
    if let Some(failure) = session.refresh().1 {
        return Err(failure);
    }
    session.check()?;
    let mut progress = Progress::new();
    let mut interrupted = false;
    'pass: while session.fleet.unsearched() > 0 || session.fleet.due() > 0 {
        for _ in 0..TURNS {
            let pause = match session.fleet.turn(&Kernel) {
                Turn::Worked => continue,
                Turn::Spent(pause) => pause,
                Turn::Idle(_) => break,
            };
            interrupted = signals.wait_for(pause).is_some();
            break;
        }
        interrupted |= signals.wait_for(Duration::ZERO).is_some();
        if interrupted {
            break 'pass;
        }
        progress.show(&session);
    }
    progress.bar.finish_and_clear();
    let report = session.report();
    print(&if session.job().json { format!("{:#}\n", show::json(&report)) } else { show::text(&report) })?;
    if interrupted {
        Err(Failure::Failed("interrupted before the pass was done".into()))
    } else {
        Ok(ExitCode::SUCCESS)
    }
}

struct Progress {
    bar: ProgressBar,
    begin: Instant,
}

impl Progress {
    fn new() -> Progress {
        let terminal = std::io::stderr().is_terminal();
        let target = if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(0), target);
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} huge pages, {elapsed}: {msg} gone") {
            bar.set_style(style);
        }
        Progress { bar, begin: Instant::now() }
    }

    fn show(&mut self, session: &Session) {
        if self.begin.elapsed() < SHORT || self.bar.is_hidden() {
            return;
        }
        let total = session.total();
        self.bar.set_message(pagecrew::units::Bytes(total.gone_bytes).to_string());
        self.bar.set_length(total.looked_at + session.fleet.due() as u64);
        self.bar.set_position(total.looked_at);
    }
}
