//! What the user looks at: the view, how far it is scrolled, the order of programs; and what keys do to that.

use super::keys::Key;
use super::programs::Sort;
use super::views::View;

/// What follows from a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Nothing.
    Nothing,
    /// The screen has changed.
    Draw,
    /// Everything is to be drawn anew.
    Redraw,
    /// It is to stop until it is continued.
    Suspend,
    /// It is over.
    Quit,
}

/// The rows of a view: as many as there are, and as many as there is room for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rows {
    /// Of what can be scrolled.
    pub all: usize,
    /// On the screen.
    pub room: usize,
}

impl Rows {
    /// The last row that the screen can begin with.
    fn last(self) -> usize {
        self.all.saturating_sub(self.room)
    }
}

/// What the user looks at.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Screen {
    /// The view.
    pub view: View,
    /// Whether the help is shown instead.
    pub help: bool,
    /// The order of programs.
    pub sort: Sort,
    /// The first row of each view.
    pub first: [usize; View::ALL.len()],
    /// Whether it is stopped: no new figures are shown.
    pub held: bool,
}

impl Screen {
    /// The first row to show, with rows as they are now.
    pub fn first(&self, rows: Rows) -> usize {
        self.first[self.view as usize].min(rows.last())
    }

    /// Does what `key` is for.
    pub fn press(&mut self, key: Key, rows: Rows) -> Action {
        if self.help {
            // Any key ends the help; these do what they are for besides.
            self.help = false;
            if !matches!(key, Key::Char('q' | '1'..='7') | Key::Ctrl(_)) {
                return Action::Draw;
            }
        }
        let place = View::ALL.iter().position(|view| *view == self.view).unwrap_or(0);
        let go = |by: usize| View::ALL[(place + by) % View::ALL.len()];
        let first = self.first(rows);
        let page = rows.room.saturating_sub(1).max(1);
        match key {
            Key::Char('q' | 'Q') | Key::Ctrl('c') => return Action::Quit,
            Key::Ctrl('z') => return Action::Suspend,
            Key::Ctrl('l') => return Action::Redraw,
            Key::Char('?' | 'h') => self.help = true,
            Key::Char(digit @ '1'..='7') => self.view = View::ALL[digit as usize - '1' as usize],
            Key::Tab | Key::Right => self.view = go(1),
            Key::BackTab | Key::Left => self.view = go(View::ALL.len() - 1),
            Key::Up | Key::Char('k') => self.scroll(first.saturating_sub(1), rows),
            Key::Down | Key::Char('j') => self.scroll(first + 1, rows),
            Key::PageUp | Key::Ctrl('b') => self.scroll(first.saturating_sub(page), rows),
            Key::PageDown | Key::Ctrl('f') => self.scroll(first + page, rows),
            Key::Home | Key::Char('g') => self.scroll(0, rows),
            Key::End | Key::Char('G') => self.scroll(usize::MAX, rows),
            Key::Char('s') if self.view == View::Programs => self.sort = self.sort.next(),
            Key::Char('r') if self.view == View::Programs => self.sort.reversed = !self.sort.reversed,
            Key::Char(' ') => self.held = !self.held,
            _ => return Action::Nothing,
        }
        Action::Draw
    }

    fn scroll(&mut self, first: usize, rows: Rows) {
        self.first[self.view as usize] = first.min(rows.last());
    }
}

#[cfg(test)]
mod tests {
    use super::super::programs;
    use super::*;

    const ROWS: Rows = Rows { all: 100, room: 20 };

    fn press(screen: &mut Screen, keys: &[Key]) {
        for key in keys {
            assert_eq!(screen.press(*key, ROWS), Action::Draw, "{key:?}");
        }
    }

    #[test]
    fn views_by_their_keys() {
        let mut screen = Screen::default();
        for (index, view) in View::ALL.into_iter().enumerate() {
            press(&mut screen, &[Key::Char(char::from(b'1' + index as u8))]);
            assert_eq!((screen.view, view as usize), (view, index));
        }
        press(&mut screen, &[Key::Tab]);
        assert_eq!(screen.view, View::Overview);
        press(&mut screen, &[Key::BackTab, Key::Left, Key::Right]);
        assert_eq!(screen.view, View::Reclaim);
        for key in [Key::Char('x'), Key::Char('8'), Key::Char('s'), Key::Char('r'), Key::Escape, Key::Ctrl('x')] {
            assert_eq!(screen.press(key, ROWS), Action::Nothing, "{key:?}");
        }
        assert_eq!(screen.press(Key::Char('q'), ROWS), Action::Quit);
        assert_eq!(screen.press(Key::Ctrl('c'), ROWS), Action::Quit);
        assert_eq!(screen.press(Key::Ctrl('z'), ROWS), Action::Suspend);
        assert_eq!(screen.press(Key::Ctrl('l'), ROWS), Action::Redraw);
    }

    #[test]
    fn scrolling_stays_within_the_rows_and_each_view_keeps_its_own() {
        let mut screen = Screen { view: View::Programs, ..Screen::default() };
        press(&mut screen, &[Key::Up]);
        assert_eq!(screen.first(ROWS), 0);
        press(&mut screen, &[Key::PageDown, Key::Down]);
        assert_eq!(screen.first(ROWS), 20);
        press(&mut screen, &[Key::End]);
        assert_eq!(screen.first(ROWS), 80);
        press(&mut screen, &[Key::Down, Key::PageDown, Key::PageUp]);
        assert_eq!(screen.first(ROWS), 61);
        // Fewer rows than before, more room, and none of either.
        assert_eq!(screen.first(Rows { all: 30, room: 20 }), 10);
        assert_eq!(screen.first(Rows { all: 3, room: 20 }), 0);
        assert_eq!(screen.first(Rows::default()), 0);
        press(&mut screen, &[Key::Char('5')]);
        assert_eq!(screen.first(ROWS), 0);
        press(&mut screen, &[Key::Char('4')]);
        assert_eq!(screen.first(ROWS), 61);
        press(&mut screen, &[Key::Home]);
        assert_eq!(screen.first(ROWS), 0);
        assert_eq!(screen.press(Key::PageDown, Rows { all: 3, room: 0 }), Action::Draw);
    }

    #[test]
    fn programs_are_sorted_by_keys() {
        let mut screen = Screen { view: View::Programs, ..Screen::default() };
        press(&mut screen, &[Key::Char('s'), Key::Char('r')]);
        assert_eq!(screen.sort, Sort { key: programs::Key::Retained, reversed: true });
        press(&mut screen, &[Key::Char(' ')]);
        assert!(screen.held);
    }

    #[test]
    fn any_key_ends_the_help() {
        let mut screen = Screen::default();
        press(&mut screen, &[Key::Char('?')]);
        assert!(screen.help);
        press(&mut screen, &[Key::Down]);
        assert_eq!(screen, Screen::default());
        press(&mut screen, &[Key::Char('h'), Key::Char('3')]);
        assert_eq!((screen.help, screen.view), (false, View::Stalls));
        press(&mut screen, &[Key::Char('h')]);
        assert_eq!(screen.press(Key::Char('q'), ROWS), Action::Quit);
    }
}
