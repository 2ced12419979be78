//! What goes to standard output and standard error. Nothing here panics where one of them is closed.

use crate::failure::Failure;
use std::io::{ErrorKind, Write};

/// Writes `text` to standard output. A reader that has gone away (`| head`) is no failure.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        result => result.map_err(|error| Failure::Failed(format!("standard output: {error}"))),
    }
}

/// Writes `message` as one line to standard error, with the command's name in front.
pub fn note(message: &str) {
    let line = format!("pagecrew: {}\n", printable(&message.replace('\n', "; ")));
    // There is nobody left to tell where this fails.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Writes `text`, which has several lines, to standard error.
pub fn block(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// `text` without control characters, which could play tricks on a terminal: names of processes and files may hold any.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// A table in the style of all of this command's tables.
pub fn table(headings: &[&str]) -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table.load_preset(comfy_table::presets::NOTHING).set_header(headings);
    table
}

/// The text of a table, without the blanks that pad its last column.
pub fn render(table: &comfy_table::Table) -> String {
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_replaced() {
        assert_eq!(printable("a\u{1b}[2Jb\tc é"), "a?[2Jb?c é");
    }

    #[test]
    fn tables_have_no_trailing_blanks() {
        let mut table = table(&["a", "b"]);
        table.add_row(["long name", "x"]);
        assert!(render(&table).lines().all(|line| line == line.trim_end()), "{}", render(&table));
    }
}
