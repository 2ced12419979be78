//! The comparisons as a picture: for each case, who was measured below one another, and what was measured of them side by side.

use crate::figures::readable;
use crate::row::Row;
use anyhow::{Context, Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::path::Path;

// All in pixels.
const WIDTH: i32 = 1000;
const MARGIN: i32 = 16;
const NAMES: i32 = 220;
const VALUES: i32 = 56;
const BAR: i32 = 18;
const TITLE: i32 = 34;
const LINE: i32 = 15;
const TEXT: i32 = 13;
/// A letter, on the average.
const LETTER: f64 = TEXT as f64 * 0.52;

/// So many figures stand side by side at most, and their names have so many lines.
const COLUMNS: usize = 6;
const LINES: usize = 3;
/// What columns have of the width.
const ROOM: i32 = WIDTH - 2 * MARGIN - NAMES;

const OURS: RGBColor = RGBColor(0x1f, 0x77, 0xb4);
const OTHERS: RGBColor = RGBColor(0xb8, 0xbc, 0xc2);

/// A case.
#[derive(Debug, Clone, PartialEq)]
struct Panel {
    title: String,
    /// Ours is the first.
    contestants: Vec<String>,
    figures: Vec<Figure>,
}

/// What was measured, of each contestant that it was measured of.
#[derive(Debug, Clone, PartialEq)]
struct Figure {
    name: String,
    values: Vec<Option<f64>>,
}

/// Of a row, the case and the name of the figure: `8 readers: time` is the time of the case of 8 readers. A name that needs more room than a
/// column has is the case's.
fn names(row: &Row) -> (String, String) {
    let unit = if row.unit.is_empty() { String::new() } else { format!(" ({})", row.unit) };
    if let Some((case, name)) = row.case.rsplit_once(": ") {
        let name = format!("{name}{unit}");
        if wrapped(&name, ROOM / COLUMNS as i32).len() <= LINES {
            return (format!("{}: {case}", row.bench), name);
        }
    }
    (format!("{}: {}{unit}", row.bench, row.case), String::new())
}

/// Ours of each row is measured in the same rounds, so of a figure there is one.
fn panels(rows: &[Row]) -> Vec<Panel> {
    let mut panels: Vec<Panel> = Vec::new();
    for row in rows {
        let (title, name) = names(row);
        let has = |panel: &Panel| panel.figures.iter().any(|figure| figure.name == name);
        let there =
            panels.iter().rposition(|panel| panel.title == title && (has(panel) || panel.figures.len() < COLUMNS));
        let index = there.unwrap_or_else(|| {
            panels.push(Panel { title, contestants: vec!["pagecrew".to_owned()], figures: Vec::new() });
            panels.len() - 1
        });
        panels[index].add(&name, row);
    }
    panels
}

impl Panel {
    fn add(&mut self, name: &str, row: &Row) {
        let contestant = self.contestants.iter().position(|contestant| *contestant == row.peer).unwrap_or_else(|| {
            self.contestants.push(row.peer.clone());
            self.contestants.len() - 1
        });
        let figure = self.figures.iter().position(|figure| figure.name == name).unwrap_or_else(|| {
            self.figures.push(Figure { name: name.to_owned(), values: vec![Some(row.ours)] });
            self.figures.len() - 1
        });
        let values = &mut self.figures[figure].values;
        values.resize(values.len().max(contestant + 1), None);
        values[contestant] = Some(row.theirs);
    }

    /// The width of a column.
    fn column(&self) -> i32 {
        ROOM / self.figures.len().max(1) as i32
    }

    /// The lines of the figures' names.
    fn lines(&self) -> usize {
        self.figures.iter().map(|figure| wrapped(&figure.name, self.column()).len()).max().unwrap_or(0)
    }

    fn height(&self) -> i32 {
        TITLE + LINE * self.lines() as i32 + BAR * self.contestants.len() as i32
    }
}

/// `text` in lines that have room in `width` pixels, as far as its words have.
fn wrapped(text: &str, width: i32) -> Vec<String> {
    let fits = |letters: usize| letters as f64 * LETTER <= f64::from(width - 8);
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if fits(line.len() + 1 + word.len()) => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// How long a bar is, of a longest one of `room` pixels for `most`.
fn length(value: f64, most: f64, room: i32) -> i32 {
    if most > 0.0 { (value / most * f64::from(room)).round().clamp(0.0, f64::from(room)) as i32 } else { 0 }
}

/// Draws all of `rows` into the file `path` (SVG).
///
/// # Errors
/// If there is nothing to draw, or the file can't be written.
pub fn draw(path: &Path, rows: &[Row]) -> Result<()> {
    let panels = panels(rows);
    anyhow::ensure!(!panels.is_empty(), "there are no comparisons to draw");
    let height: i32 = panels.iter().map(Panel::height).sum();
    let mut picture = String::new();
    paint(&mut picture, &panels, height + 2 * MARGIN).map_err(|error| anyhow!("the plot: {error}"))?;
    std::fs::write(path, picture).with_context(|| path.display().to_string())
}

fn paint(picture: &mut String, panels: &[Panel], height: i32) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::with_string(picture, (WIDTH as u32, height as u32)).into_drawing_area();
    area.fill(&WHITE)?;
    let text = |size: i32, horizontal| {
        TextStyle::from(("sans-serif", size).into_font()).color(&BLACK).pos(Pos::new(horizontal, VPos::Center))
    };
    let mut top = MARGIN;
    for panel in panels {
        let bars = top + TITLE + LINE * panel.lines() as i32;
        area.draw(&Text::new(panel.title.clone(), (MARGIN, top + TITLE / 2), text(TEXT + 1, HPos::Left)))?;
        for (index, contestant) in panel.contestants.iter().enumerate() {
            let at = (MARGIN + NAMES - 8, bars + BAR * index as i32 + BAR / 2);
            area.draw(&Text::new(contestant.clone(), at, text(TEXT, HPos::Right)))?;
        }
        for (column, figure) in panel.figures.iter().enumerate() {
            let begin = MARGIN + NAMES + panel.column() * column as i32;
            for (line, name) in wrapped(&figure.name, panel.column()).into_iter().enumerate() {
                let at = (begin, top + TITLE + LINE * line as i32 + LINE / 2);
                area.draw(&Text::new(name, at, text(TEXT - 1, HPos::Left)))?;
            }
            let most = figure.values.iter().flatten().copied().fold(0.0, f64::max);
            for (index, value) in figure.values.iter().enumerate() {
                let Some(value) = *value else { continue };
                let top = bars + BAR * index as i32;
                let end = begin + length(value, most, panel.column() - VALUES);
                let colour = if index == 0 { OURS } else { OTHERS };
                area.draw(&Rectangle::new([(begin, top + 2), (end.max(begin + 1), top + BAR - 2)], colour.filled()))?;
                area.draw(&Text::new(readable(value), (end + 6, top + BAR / 2), text(TEXT, HPos::Left)))?;
            }
        }
        top += panel.height();
    }
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::Comparison;

    fn rows() -> Vec<Row> {
        let stalls = Comparison::new("reclaim", "8 readers: direct reclaims", "");
        let time = Comparison::new("reclaim", "8 readers: <time>", "s");
        let size = Comparison::new("free", "16 GiB", "ms");
        vec![
            stalls.row(3.0, "stock", 2000.0),
            time.row(2.5, "stock", 3.5),
            stalls.row(3.0, "static 200", 30.0),
            size.row(1.0, "munmap", 700.0),
        ]
    }

    #[test]
    fn a_case_is_one_panel_with_its_figures_side_by_side_and_ours_first() {
        let panels = panels(&rows());
        let [readers, free] = &panels[..] else { panic!("{panels:?}") };
        assert_eq!(readers.title, "reclaim: 8 readers");
        assert_eq!(readers.contestants, ["pagecrew", "stock", "static 200"]);
        let values = |index: usize| (readers.figures[index].name.as_str(), readers.figures[index].values.as_slice());
        assert_eq!(values(0), ("direct reclaims", &[Some(3.0), Some(2000.0), Some(30.0)][..]));
        assert_eq!(values(1), ("<time> (s)", &[Some(2.5), Some(3.5)][..]));
        assert_eq!((free.title.as_str(), free.lines()), ("free: 16 GiB (ms)", 0));
    }

    #[test]
    fn what_has_no_room_beside_others_stands_by_itself() {
        let name =
            "a figure whose name takes more room than all the lines have that there are above a column of the picture";
        let long = Comparison::new("run", format!("cells: {name}"), "ns").row(1.0, "glibc", 2.0);
        let many = (0..COLUMNS + 1).map(|number| Comparison::new("run", format!("cells: {number}"), "ns"));
        let mut rows: Vec<Row> = many.map(|comparison| comparison.row(1.0, "glibc", 2.0)).collect();
        rows.push(long);
        let panels = panels(&rows);
        let counts: Vec<usize> = panels.iter().map(|panel| panel.figures.len()).collect();
        assert_eq!(counts, [COLUMNS, 1, 1]);
        assert!(panels[2].title.contains(name), "{}", panels[2].title);
        assert!(panels.iter().all(|panel| panel.lines() <= LINES));
    }

    #[test]
    fn a_bar_is_as_long_as_its_part_of_the_longest() {
        assert_eq!([0.0, 1.0, 2.0, 3.0].map(|value| length(value, 2.0, 100)), [0, 50, 100, 100]);
        assert_eq!(length(0.0, 0.0, 100), 0);
    }

    #[test]
    fn everybody_is_in_the_picture_and_what_is_text_is_no_markup() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("plot.svg");
        draw(&path, &rows()).unwrap();
        let picture = std::fs::read_to_string(&path).unwrap();
        for word in ["<svg", "pagecrew", "static 200", "2000", "&lt;time&gt;", "</svg>"] {
            assert!(picture.contains(word), "{word} in {picture}");
        }
        assert!(draw(&path, &[]).is_err());
        assert!(draw(Path::new("/nonexistent/plot.svg"), &rows()).is_err());
    }
}
