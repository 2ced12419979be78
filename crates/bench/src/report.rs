//! Where results go: tables or JSON lines on the standard output, and progress on the standard error output.

use crate::row::Row;
use anyhow::Result;
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::time::Duration;

/// Prints progress and results.
pub struct Report {
    json: bool,
    progress: ProgressBar,
    rows: Vec<Row>,
    /// All rows, for a plot.
    all: Vec<Row>,
}

impl Report {
    /// A report for programs if `json`, else for people. A progress bar is shown if somebody may be looking.
    pub fn new(json: bool) -> Report {
        let target =
            if std::io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let progress = ProgressBar::with_draw_target(Some(0), target);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {pos}/{len} runs, {elapsed}: {msg}") {
            progress.set_style(style);
        }
        progress.enable_steady_tick(Duration::from_millis(200));
        Report { json, progress, rows: Vec::new(), all: Vec::new() }
    }

    /// Announces `runs` more runs of `what`.
    pub fn expect(&self, runs: usize, what: &str) {
        self.progress.inc_length(runs as u64);
        self.progress.set_message(what.to_owned());
    }

    /// One run is done.
    pub fn step(&self) {
        self.progress.inc(1);
    }

    /// Tells people something that is not a result.
    pub fn note(&self, text: &str) {
        self.progress.suspend(|| eprintln!("pagecrew: {text}"));
    }

    /// Prints one object on one line, if this report is for programs.
    pub fn line(&self, object: &impl Serialize) -> Result<()> {
        if self.json {
            let line = serde_json::to_string(object)?;
            self.progress.suspend(|| writeln!(std::io::stdout(), "{line}"))?;
        }
        Ok(())
    }

    /// Adds a comparison: a line at once, or a row of the next table.
    pub fn row(&mut self, row: Row) -> Result<()> {
        self.line(&row)?;
        self.all.push(row.clone());
        self.rows.push(row);
        Ok(())
    }

    /// All rows so far.
    pub fn all(&self) -> &[Row] {
        &self.all
    }

    /// Prints the table of the rows since the last one, if there are any.
    pub fn table(&mut self, title: &str) -> Result<()> {
        let rows = self.take_rows();
        if rows.is_empty() {
            return Ok(());
        }
        self.print(title, &Row::HEADINGS, rows.iter().map(|row| row.cells().to_vec()))
    }

    /// The rows since the last table, for a table of another form.
    pub fn take_rows(&mut self) -> Vec<Row> {
        std::mem::take(&mut self.rows)
    }

    /// Prints a table under `title`, if this report is for people. The first column is text, the others are figures.
    pub fn print(&self, title: &str, headings: &[&str], rows: impl Iterator<Item = Vec<String>>) -> Result<()> {
        if self.json {
            return Ok(());
        }
        let mut table = Table::new();
        if std::io::stdout().is_terminal() {
            table.load_preset(presets::UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic);
        } else {
            table.load_preset(presets::ASCII_MARKDOWN);
        }
        table.set_header(headings).add_rows(rows);
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let title = if title.is_empty() { String::new() } else { format!("{title}\n") };
        self.progress.suspend(|| writeln!(std::io::stdout(), "{title}{table}\n"))?;
        Ok(())
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        self.progress.finish_and_clear();
    }
}
