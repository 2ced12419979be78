//! Rows of text with a tone, tables, bars and histories: what a view is made of, whether it is drawn or printed.

use pagecrew::units::Bytes;
use ratatui::text::Line;
use std::borrow::Cow;

/// How a piece of text is meant. Nothing is said by the tone alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tone {
    /// As it is.
    #[default]
    Plain,
    /// Of little weight.
    Dim,
    /// A heading.
    Strong,
    /// As it should be.
    Good,
    /// Worth a look.
    Warn,
    /// Something suffers.
    Bad,
}

/// A piece of a row.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Piece {
    /// Without control characters.
    pub text: String,
    /// How it is meant.
    pub tone: Tone,
}

/// A piece of text.
pub fn piece(tone: Tone, text: impl Into<String>) -> Piece {
    Piece { text: text.into(), tone }
}

/// A line of a view.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Row(pub Vec<Piece>);

impl Row {
    /// One piece without a tone.
    pub fn plain(text: impl Into<String>) -> Row {
        Row(vec![piece(Tone::Plain, text)])
    }

    /// One piece.
    pub fn of(tone: Tone, text: impl Into<String>) -> Row {
        Row(vec![piece(tone, text)])
    }

    /// What a row is about, and the pieces behind that.
    pub fn about(label: &str, pieces: impl IntoIterator<Item = Piece>) -> Row {
        Row(std::iter::once(piece(Tone::Dim, format!("{label:LABEL$}"))).chain(pieces).collect())
    }

    /// The text without tones, and without blanks at its end.
    pub fn text(&self) -> String {
        let text: String = self.0.iter().map(|piece| piece.text.as_str()).collect();
        text.trim_end().to_owned()
    }
}

/// `text` for a terminal that shows ASCII alone.
pub fn ascii(text: &str) -> Cow<'_, str> {
    if text.is_ascii() {
        return Cow::Borrowed(text);
    }
    text.chars().map(|c| if c.is_ascii() { c } else { '?' }).collect()
}

/// Columns that labels take.
pub const LABEL: usize = 11;

/// Columns that a text takes on a terminal.
pub fn width(text: &str) -> usize {
    Line::raw(text).width()
}

/// A table; what does not fit the width goes column by column, the last one first.
#[derive(Debug, Default)]
pub struct Table {
    /// The headings, and whether a column is of numbers, which are aligned on the right.
    pub columns: Vec<(String, bool)>,
    /// The cells, row by row.
    pub rows: Vec<Vec<Piece>>,
}

/// Blanks between two columns.
const BETWEEN: usize = 2;

impl Table {
    /// A table with these headings; those of numbers begin with `>`.
    pub fn new(headings: &[&str]) -> Table {
        let column = |heading: &&str| match heading.strip_prefix('>') {
            Some(heading) => (heading.to_owned(), true),
            None => ((*heading).to_owned(), false),
        };
        Table { columns: headings.iter().map(column).collect(), rows: Vec::new() }
    }

    /// One more row.
    pub fn add(&mut self, cells: impl IntoIterator<Item = Piece>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// The heading, and the rows, none wider than `room`. The first column is always there.
    pub fn rows(&self, room: usize) -> (Row, Vec<Row>) {
        let widths = self.columns.iter().enumerate().map(|(column, (heading, _))| {
            let cells = self.rows.iter().filter_map(|row| row.get(column)).map(|cell| width(&cell.text));
            cells.max().unwrap_or(0).max(width(heading))
        });
        let mut used = 0;
        let fits = |(column, width): (usize, usize)| {
            used += width + if column == 0 { 0 } else { BETWEEN };
            (column == 0 || used <= room).then_some(width)
        };
        let widths: Vec<usize> = widths.enumerate().map_while(fits).collect();
        let row = |cells: &[Piece]| {
            let mut pieces = Vec::new();
            for (column, (&room, cell)) in widths.iter().zip(cells).enumerate() {
                let blanks = " ".repeat(room.saturating_sub(width(&cell.text)));
                let between = if column == 0 { String::new() } else { " ".repeat(BETWEEN) };
                let text = match self.columns[column].1 {
                    true => format!("{between}{blanks}{}", cell.text),
                    false => format!("{between}{}{blanks}", cell.text),
                };
                pieces.push(Piece { text, tone: cell.tone });
            }
            Row(pieces)
        };
        let headings: Vec<Piece> =
            self.columns.iter().map(|(heading, _)| piece(Tone::Strong, heading.clone())).collect();
        (row(&headings), self.rows.iter().map(|cells| row(cells)).collect())
    }
}

/// A number of bytes; `-` where it is not known.
pub fn bytes(number: Option<u64>) -> String {
    number.map_or("-".into(), |number| Bytes(number).to_string())
}

/// Bytes in a second.
pub fn byte_rate(rate: Option<f64>) -> String {
    rate.map_or("-".into(), |rate| format!("{}/s", Bytes(rate.max(0.0) as u64)))
}

/// Events in a second.
pub fn rate(rate: Option<f64>) -> String {
    match rate {
        None => "-".into(),
        Some(0.0) => "0/s".into(),
        Some(rate) if rate < 10.0 => format!("{rate:.1}/s"),
        Some(rate) => format!("{rate:.0}/s"),
    }
}

/// A share as percent.
pub fn percent(share: Option<f64>) -> String {
    share.map_or("-".into(), |share| format!("{:.1} %", share * 100.0))
}

/// The last values as small columns, the newest on the right, at most `width`; the highest of them has full height. `None` is a gap.
pub fn history(values: impl DoubleEndedIterator<Item = Option<f64>>, width: usize, unicode: bool) -> String {
    const HEIGHTS: [[char; 9]; 2] =
        [[' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'], ['_', '.', ',', '-', '~', '=', '+', '*', '#']];
    let heights = &HEIGHTS[usize::from(!unicode)];
    let mut last: Vec<Option<f64>> = values.rev().take(width).collect();
    last.reverse();
    let most = last.iter().flatten().copied().fold(0.0, f64::max);
    let column = |value: Option<f64>| match value {
        None => ' ',
        Some(value) if value > 0.0 && most > 0.0 => heights[((value / most * 8.0).ceil() as usize).clamp(1, 8)],
        Some(_) => {
            if unicode {
                heights[1]
            } else {
                heights[0]
            }
        }
    };
    last.into_iter().map(column).collect()
}

/// Where `free` stands between the watermarks: a bar from 0 to twice the high watermark, with `m`, `l` and `h` at the watermarks. What is free
/// beyond the end is shown by a `>` there.
pub fn marks(free: u64, [min, low, high]: [u64; 3], width: usize) -> String {
    let end = (high as f64 * 2.0).max(1.0);
    let inner = width.saturating_sub(2).max(4);
    let place = |bytes: u64| ((bytes as f64 / end * inner as f64) as usize).min(inner - 1);
    let filled = if free as f64 >= end { inner } else { (free as f64 / end * inner as f64) as usize };
    let mut bar: Vec<char> = (0..inner).map(|index| if index < filled { '=' } else { '.' }).collect();
    if free as f64 >= end {
        bar[inner - 1] = '>';
    }
    // Where two would fall on one place, both are to be seen.
    let mut least = 0;
    for (index, (mark, bytes)) in [('m', min), ('l', low), ('h', high)].into_iter().enumerate() {
        let at = place(bytes).max(least).min(inner - 4 + index);
        bar[at] = mark;
        least = at + 1;
    }
    format!("[{}]", bar.into_iter().collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn tables_lose_their_last_columns_where_there_is_no_room() {
        let mut table = Table::new(&["name", ">size", ">rate"]);
        table.add([piece(Tone::Plain, "a"), piece(Tone::Bad, "1 GiB"), piece(Tone::Plain, "10/s")]);
        table.add([piece(Tone::Plain, "日本"), piece(Tone::Plain, "2 B"), piece(Tone::Plain, "-")]);
        let texts = |room| {
            let (head, rows) = table.rows(room);
            std::iter::once(head).chain(rows).map(|row| row.text()).collect::<Vec<_>>()
        };
        assert_eq!(texts(80), ["name   size  rate", "a     1 GiB  10/s", "日本    2 B     -"]);
        assert_eq!(texts(16), ["name   size", "a     1 GiB", "日本    2 B"]);
        assert_eq!(texts(0), ["name", "a", "日本"]);
        assert_eq!(table.rows(80).1[0].0[1].tone, Tone::Bad);
        assert_eq!(Table::new(&["only"]).rows(9).1, []);
    }

    #[test]
    fn where_there_is_only_ascii() {
        assert_eq!((ascii("a b"), ascii("é日▾")), ("a b".into(), Cow::<str>::Owned("???".into())));
    }

    #[test]
    fn numbers_and_what_is_not_known() {
        assert_eq!([rate(None), rate(Some(0.0)), rate(Some(0.34)), rate(Some(12.6))], ["-", "0/s", "0.3/s", "13/s"]);
        assert_eq!([byte_rate(Some(1048576.0)), byte_rate(Some(-1.0)), byte_rate(None)], ["1 MiB/s", "0 B/s", "-"]);
        assert_eq!([percent(Some(0.1234)), percent(None), bytes(None)], ["12.3 %", "-", "-"]);
    }

    #[test]
    fn histories_are_as_high_as_their_highest() {
        let values = [Some(9.0), Some(0.0), None, Some(1.0), Some(4.0), Some(8.0)];
        assert_eq!(history(values.into_iter(), 5, true), "▁ ▁▄█");
        assert_eq!(history(values.into_iter(), 5, false), "_ .~#");
        assert_eq!(history([Some(0.0); 3].into_iter(), 9, true), "▁▁▁");
        assert_eq!(history(std::iter::empty(), 9, true), "");
    }

    #[test]
    fn marks_at_the_watermarks() {
        let watermarks = [10, 15, 20];
        assert_eq!(marks(0, watermarks, 42), "[..........m....l....h...................]");
        assert_eq!(marks(12, watermarks, 42), "[==========m=...l....h...................]");
        assert_eq!(marks(30, watermarks, 42), "[==========m====l====h=========..........]");
        assert_eq!(marks(1000, watermarks, 42), "[==========m====l====h==================>]");
        // Nothing is known, and hardly any room.
        assert_eq!(marks(0, [0; 3], 6), "[mlh.]");
        assert_eq!(marks(5, [1, 1, 1], 0), "[mlh>]");
    }

    proptest! {
        #[test]
        fn bars_are_as_wide_as_asked(free: u64, marks_ in any::<[u64; 3]>(), width in 6usize..200) {
            let bar = marks(free, marks_, width);
            prop_assert_eq!(bar.chars().count(), width);
            for mark in ['m', 'l', 'h'] {
                prop_assert_eq!(bar.matches(mark).count(), 1, "{}", bar);
            }
        }

        #[test]
        fn histories_take_any_number(values in proptest::collection::vec(any::<f64>(), 0..9)) {
            let count = values.len();
            prop_assert_eq!(history(values.into_iter().map(Some), 20, true).chars().count(), count);
        }
    }
}
