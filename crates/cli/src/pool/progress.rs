//! How far a pool is filled for the first time, at a terminal.

use crate::supervised;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pagecrew::pool::Server;
use std::io::IsTerminal;
use std::time::Duration;

/// How often it is shown.
const PAUSE: Duration = Duration::from_millis(200);

/// A bar that is seen where somebody may be looking.
pub fn bar() -> ProgressBar {
    // Others write to a supervised service's terminal as well.
    let looking = std::io::stderr().is_terminal() && supervised::name().is_none();
    let target = if looking { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(0), target);
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {binary_bytes} of {binary_total_bytes} ready {msg}") {
        bar.set_style(style);
    }
    bar
}

/// Shows how it stands. Returns when to do so again, if ever: once it is full, `pool status` tells.
pub fn show(bar: &ProgressBar, server: &Server) -> Option<Duration> {
    if bar.is_hidden() || bar.is_finished() {
        return None;
    }
    let progress = server.progress();
    if progress.ready >= progress.size {
        bar.finish_and_clear();
        return None;
    }
    bar.set_length(progress.size as u64);
    bar.set_position(progress.ready as u64);
    bar.set_message(progress.waiting.map_or(String::new(), |why| format!("({why})")));
    Some(PAUSE)
}
