//! The comparisons as a picture: for each case, a bar for everybody who was measured.

use crate::figures::readable;
use crate::row::Row;
use anyhow::{Context, Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::path::Path;

// All in pixels.
const WIDTH: u32 = 760;
const MARGIN: i32 = 16;
const NAMES: i32 = 260;
const VALUES: i32 = 110;
const BAR: i32 = 18;
const TITLE: i32 = 34;
const TEXT: i32 = 13;

const OURS: RGBColor = RGBColor(0x1f, 0x77, 0xb4);
const OTHERS: RGBColor = RGBColor(0xb8, 0xbc, 0xc2);

/// A case: its bars are all in one unit.
#[derive(Debug, Clone, PartialEq)]
struct Panel {
    title: String,
    /// Ours is the first.
    bars: Vec<(String, f64)>,
}

/// Ours of each row is measured in the same rounds, so of a case there is one.
fn panels(rows: &[Row]) -> Vec<Panel> {
    let mut panels: Vec<Panel> = Vec::new();
    for row in rows {
        let unit = if row.unit.is_empty() { String::new() } else { format!(" ({})", row.unit) };
        let title = format!("{}: {}{unit}", row.bench, row.case);
        let peer = (row.peer.clone(), row.theirs);
        match panels.iter_mut().find(|panel| panel.title == title) {
            Some(panel) => panel.bars.push(peer),
            None => panels.push(Panel { title, bars: vec![("pagecrew".to_owned(), row.ours), peer] }),
        }
    }
    panels
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
    let height: i32 = panels.iter().map(|panel| TITLE + BAR * panel.bars.len() as i32).sum();
    let mut picture = String::new();
    paint(&mut picture, &panels, (height + 2 * MARGIN) as u32).map_err(|error| anyhow!("the plot: {error}"))?;
    std::fs::write(path, picture).with_context(|| path.display().to_string())
}

fn paint(picture: &mut String, panels: &[Panel], height: u32) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::with_string(picture, (WIDTH, height)).into_drawing_area();
    area.fill(&WHITE)?;
    let text = |size: i32, horizontal| {
        TextStyle::from(("sans-serif", size).into_font()).color(&BLACK).pos(Pos::new(horizontal, VPos::Center))
    };
    let room = WIDTH as i32 - 2 * MARGIN - NAMES - VALUES;
    let mut top = MARGIN;
    for panel in panels {
        area.draw(&Text::new(panel.title.clone(), (MARGIN, top + TITLE / 2), text(TEXT + 1, HPos::Left)))?;
        top += TITLE;
        let most = panel.bars.iter().map(|&(_, value)| value).fold(0.0, f64::max);
        let begin = MARGIN + NAMES;
        for (index, (name, value)) in panel.bars.iter().enumerate() {
            let (middle, end) = (top + BAR / 2, begin + length(*value, most, room));
            let colour = if index == 0 { OURS } else { OTHERS };
            area.draw(&Text::new(name.clone(), (begin - 8, middle), text(TEXT, HPos::Right)))?;
            area.draw(&Rectangle::new([(begin, top + 2), (end.max(begin + 1), top + BAR - 2)], colour.filled()))?;
            area.draw(&Text::new(readable(*value), (end + 6, middle), text(TEXT, HPos::Left)))?;
            top += BAR;
        }
    }
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::Comparison;

    fn rows() -> Vec<Row> {
        let stalls = Comparison::new("reclaim", "8 readers", "");
        let time = Comparison::new("reclaim", "8 readers: <time>", "s");
        vec![stalls.row(3.0, "stock", 2000.0), time.row(2.5, "stock", 3.5), stalls.row(3.0, "static 200", 30.0)]
    }

    #[test]
    fn a_case_is_one_panel_with_ours_first() {
        let panels = panels(&rows());
        let names = |panel: &Panel| panel.bars.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        assert_eq!(
            panels.iter().map(names).collect::<Vec<_>>(),
            [vec!["pagecrew", "stock", "static 200"], vec!["pagecrew", "stock"]]
        );
        assert_eq!(panels[1].title, "reclaim: 8 readers: <time> (s)");
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
