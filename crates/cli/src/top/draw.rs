//! A view on a terminal: the names of the views, the view, and a line about keys.

use super::model::Model;
use super::screen::{Rows, Screen};
use super::text::{Row, Tone, ascii, piece, width};
use super::views::{Look, Page, View};
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use std::borrow::Cow;

/// What a terminal can show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ability {
    /// Colours.
    pub colour: bool,
    /// More than ASCII.
    pub unicode: bool,
}

/// Draws, and says how many rows there are to scroll.
pub fn draw(frame: &mut Frame, model: &Model, screen: &Screen, host: &str, ability: Ability) -> Rows {
    let area = frame.area();
    let [columns, lines] = [area.width, area.height].map(usize::from);
    let look = Look { width: columns, unicode: ability.unicode, sort: screen.sort };
    let page = if screen.help { help() } else { screen.view.page(model, &look) };
    // One line above, one below, as far as there is room for them.
    let room = lines.saturating_sub(2);
    let head = page.head.len().min(room);
    let rows = Rows { all: page.body.len(), room: room - head };
    let first = if screen.help { 0 } else { screen.first(rows) };
    let mut put = |line: usize, row: &Row| {
        if line < lines {
            let place = Rect::new(area.x, area.y + line as u16, area.width, 1);
            let all = line_of(row, ability);
            let cut = all.width() > columns;
            frame.render_widget(all, place);
            // What was cut is to be seen.
            if let Some(last) = frame.buffer_mut().cell_mut((place.right().saturating_sub(1), place.y)).filter(|_| cut)
            {
                last.set_symbol(if ability.unicode { "…" } else { ">" }).set_style(style(Tone::Dim, ability.colour));
            }
        }
    };
    put(0, &names(screen, host, columns));
    for (line, row) in page.head.iter().take(head).chain(page.body.iter().skip(first).take(rows.room)).enumerate() {
        put(line + 1, row);
    }
    if lines > 1 {
        put(lines - 1, &footer(screen, rows, first, columns));
    }
    rows
}

/// The names of all views, with brackets around the one that is shown; only the numbers of the others where there is no room.
fn names(screen: &Screen, host: &str, columns: usize) -> Row {
    let name = |long: bool| {
        let one = |(index, view): (usize, &View)| match (*view == screen.view, long) {
            (true, _) => piece(Tone::Strong, format!("[{} {}]", index + 1, view.name())),
            (false, true) => piece(Tone::Dim, format!(" {} {} ", index + 1, view.name())),
            (false, false) => piece(Tone::Dim, format!(" {} ", index + 1)),
        };
        Row(View::ALL.iter().enumerate().map(one).collect())
    };
    let mut row = Some(name(true)).filter(|row| width(&row.text()) <= columns).unwrap_or_else(|| name(false));
    let used: usize = row.0.iter().map(|piece| width(&piece.text)).sum();
    let host = if screen.held { "held (space goes on)" } else { host };
    if let Some(free) = columns.checked_sub(used + width(host) + 1).filter(|_| !host.is_empty()) {
        row.0.push(piece(if screen.held { Tone::Warn } else { Tone::Dim }, format!("{:free$} {host}", "")));
    }
    row
}

/// What keys do, and which rows are shown where there are more.
fn footer(screen: &Screen, rows: Rows, first: usize, columns: usize) -> Row {
    let sort = if screen.view == View::Programs { "  s sort  r reverse" } else { "" };
    let long = format!("1-7 Tab view  arrows PgUp PgDn{sort}  space hold  ? help  q quit");
    let middle = format!("1-7 view{sort}  ? help  q quit");
    let place = match rows.all > rows.room && !screen.help {
        true => format!("{}-{} of {}", first + 1, (first + rows.room).min(rows.all), rows.all),
        false => String::new(),
    };
    let texts = [long.as_str(), middle.as_str(), "1-7 view  ? help  q quit", "? q"];
    let fits = texts.into_iter().find(|text| width(text) + width(&place) + 2 <= columns).unwrap_or("");
    let free = columns.saturating_sub(width(fits) + width(&place));
    Row(vec![piece(Tone::Dim, fits), piece(Tone::Plain, format!("{:free$}{place}", ""))])
}

fn help() -> Page {
    let key = |keys: &str, what: &str| Row(vec![piece(Tone::Strong, format!("{keys:22}")), piece(Tone::Plain, what)]);
    let body = vec![
        Row::of(Tone::Strong, "pagecrew top: a machine's memory as pagecrew sees it"),
        Row::default(),
        key("1 to 7", "a view by its number"),
        key("Tab, Right / Left", "the next view, the one before"),
        key("Down, Up, j, k", "a row further, a row back"),
        key("PgDn, PgUp, Home, End", "a page further or back, to the beginning, to the end"),
        key("s, r", "programs: by the next column; the other way round"),
        key("space", "hold what is shown; once more to go on"),
        key("Ctrl-L, Ctrl-Z", "draw everything anew; stop, until fg"),
        key("q, Ctrl-C", "quit"),
        Row::default(),
        Row::plain("Figures are rates since the look before, unless something else is said."),
        Row::plain("Red and \"below min\" mean that somebody waits now. Colours say nothing that"),
        Row::plain("the text does not say. Nothing is changed by looking."),
        Row::default(),
        Row::of(Tone::Dim, "Any key goes back. For scripts: pagecrew top --once, --json"),
    ];
    Page { head: Vec::new(), body }
}

fn line_of(row: &Row, ability: Ability) -> Line<'_> {
    let text = |text| if ability.unicode { Cow::Borrowed(text) } else { ascii(text) };
    row.0.iter().map(|piece| Span::styled(text(piece.text.as_str()), style(piece.tone, ability.colour))).collect()
}

fn style(tone: Tone, colour: bool) -> Style {
    let plain = Style::new();
    match tone {
        Tone::Plain => plain,
        Tone::Strong => plain.add_modifier(Modifier::BOLD),
        Tone::Dim if colour => plain.fg(Color::Cyan),
        Tone::Good if colour => plain.fg(Color::Green),
        Tone::Warn if colour => plain.fg(Color::Yellow).add_modifier(Modifier::BOLD),
        Tone::Bad if colour => plain.fg(Color::Red).add_modifier(Modifier::BOLD),
        Tone::Dim | Tone::Good => plain,
        Tone::Warn | Tone::Bad => plain.add_modifier(Modifier::BOLD),
    }
}

#[cfg(test)]
mod tests {
    use super::super::keys::Key;
    use super::super::model::made_up::model;
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::buffer::Buffer;

    const PLAIN: Ability = Ability { colour: false, unicode: true };

    fn drawn(model: &Model, screen: &Screen, columns: u16, lines: u16, ability: Ability) -> (Buffer, Rows) {
        let mut terminal = Terminal::new(TestBackend::new(columns, lines)).unwrap();
        let mut rows = Rows::default();
        terminal.draw(|frame| rows = draw(frame, model, screen, "host", ability)).unwrap();
        (terminal.backend().buffer().clone(), rows)
    }

    fn lines(buffer: &Buffer) -> Vec<String> {
        let area = buffer.area;
        let line = |y| (0..area.width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        (0..area.height).map(line).collect()
    }

    fn shown(model: &Model, screen: &Screen, columns: u16, height: u16) -> Vec<String> {
        lines(&drawn(model, screen, columns, height, PLAIN).0)
    }

    fn of(view: View) -> Screen {
        Screen { view, ..Screen::default() }
    }

    #[test]
    fn the_overview_at_80_by_24() {
        let lines = shown(&model(2, 3), &Screen::default(), 80, 24);
        assert_eq!(lines[0], "[1 Overview] 2 Nodes  3 Stalls  4 Programs  5 Trim  6 Pool  7 Reclaim       host");
        assert!(lines[1].starts_with("memory     20 GiB available"), "{lines:?}");
        assert!(lines[2].ends_with("below min: tasks reclaim") && lines[3].starts_with("node 1"), "{lines:?}");
        assert!(lines.iter().any(|line| line.starts_with("pool       12 GiB of 16 GiB ready")), "{lines:?}");
        assert!(lines.iter().any(|line| line.starts_with("reclaim ")), "{lines:?}");
        assert_eq!(lines[23], "1-7 Tab view  arrows PgUp PgDn  space hold  ? help  q quit");
    }

    #[test]
    fn every_view_at_every_size_with_any_model() {
        for (nodes, programs) in [(0, 0), (1, 1), (8, 1000)] {
            let mut all = View::ALL.map(of).to_vec();
            all.push(Screen { help: true, ..Screen::default() });
            for model in [model(nodes, programs), Model::default()] {
                for screen in &all {
                    for (columns, height) in [(80, 24), (40, 10), (200, 60), (20, 3), (1, 1), (0, 0), (80, 2)] {
                        for ability in [PLAIN, Ability { colour: true, unicode: false }] {
                            let (buffer, rows) = drawn(&model, screen, columns, height, ability);
                            let lines = lines(&buffer);
                            assert_eq!(lines.len(), usize::from(height));
                            assert!(rows.room <= usize::from(height));
                            if height >= 10 {
                                assert!(lines[0].contains(screen.view.name()), "{lines:?}");
                                assert!(lines.last().unwrap().contains("q quit"), "{lines:?}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn small_terminals_have_the_numbers_of_the_other_views() {
        let lines = shown(&model(8, 1000), &of(View::Programs), 40, 10);
        assert_eq!(lines[0], " 1  2  3 [4 Programs] 5  6  7       host");
        assert_eq!(lines[3], " pid  name       in use ▾     dirty");
        assert!(lines[4].starts_with("1000  a program  1000 MiB"), "{lines:?}");
        assert!(lines[9].ends_with("1-5 of 1000") && lines[9].starts_with("1-7 view"), "{lines:?}");
    }

    #[test]
    fn a_large_terminal_has_every_column() {
        let lines = shown(&model(8, 0), &of(View::Nodes), 200, 60);
        assert!(lines[5].contains("shared") && lines.iter().any(|line| line.starts_with("node 7")), "{lines:?}");
    }

    #[test]
    fn a_row_that_is_cut_says_so() {
        let lines = |unicode, columns| {
            let ability = Ability { colour: false, unicode };
            lines(&drawn(&model(1, 0), &of(View::Trim), columns, 24, ability).0)
        };
        assert!(lines(true, 60)[3].ends_with('…') && lines(false, 60)[3].ends_with('>'), "{:?}", lines(true, 60));
        assert!(lines(true, 200).iter().all(|line| !line.contains('…')));
        assert_eq!(lines(true, 60)[3].chars().count(), 60);
    }

    #[test]
    fn headings_stay_where_the_rest_is_scrolled() {
        let model = model(1, 1000);
        let mut screen = of(View::Programs);
        let (_, rows) = drawn(&model, &screen, 80, 24, PLAIN);
        assert_eq!(rows, Rows { all: 1000, room: 19 });
        screen.press(Key::End, rows);
        let lines = shown(&model, &screen, 80, 24);
        assert!(lines[3].contains("in use") && lines[22].trim_start().starts_with("1 "), "{lines:?}");
        assert!(lines[23].ends_with("982-1000 of 1000"), "{lines:?}");
    }

    #[test]
    fn without_colours_there_are_none_and_with_them_the_text_is_the_same() {
        let model = model(2, 3);
        let colours = |ability| {
            let (buffer, _) = drawn(&model, &Screen::default(), 80, 24, ability);
            let coloured =
                buffer.content.iter().filter(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset).count();
            (coloured, lines(&buffer))
        };
        let (none, plain) = colours(PLAIN);
        let (some, coloured) = colours(Ability { colour: true, unicode: true });
        assert_eq!((none, some > 100, plain), (0, true, coloured));
        let mut foreign = model;
        foreign.programs[0].name = "日本é".into();
        for view in View::ALL {
            let (buffer, _) = drawn(&foreign, &of(view), 80, 24, Ability { colour: false, unicode: false });
            assert!(lines(&buffer).concat().is_ascii(), "{view:?}");
        }
    }

    #[test]
    fn held_and_helped() {
        let screen = Screen { held: true, ..Screen::default() };
        assert!(shown(&model(1, 0), &screen, 120, 24)[0].ends_with("held (space goes on)"));
        let screen = Screen { help: true, ..Screen::default() };
        let lines = shown(&model(1, 0), &screen, 80, 24);
        assert!(
            lines.iter().any(|line| line.contains("Ctrl-Z")) && lines.iter().all(|line| !line.contains("MiB")),
            "{lines:?}"
        );
    }
}
