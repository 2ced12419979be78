//! The keys that a terminal sends, out of bytes that may come in pieces.

/// A key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    /// A printable character of ASCII.
    Char(char),
    Up,
    Down,
    Left,
    Right,
    PageUp,
    PageDown,
    Home,
    End,
    Tab,
    BackTab,
    Escape,
    /// With Ctrl: the letter.
    Ctrl(char),
}

/// Longer sequences are nobody's.
const SEQUENCE_MOST: usize = 32;

/// What was read of a sequence that is not whole yet.
#[derive(Debug, Default)]
pub struct Keys(Vec<u8>);

impl Keys {
    /// The keys that are whole with `bytes`.
    pub fn take(&mut self, bytes: &[u8]) -> Vec<Key> {
        let mut keys = Vec::new();
        for &byte in bytes {
            self.0.push(byte);
            match self.0[..] {
                // Two in a row: the first one stands for itself.
                [0x1b, 0x1b] => {
                    self.0.pop();
                    keys.push(Key::Escape);
                }
                [0x1b] | [0x1b, b'[' | b'O'] => {}
                [0x1b, b'[', .., last] if !(0x40..=0x7e).contains(&last) && self.0.len() < SEQUENCE_MOST => {}
                [0x1b, b'[' | b'O', ref middle @ .., last] => {
                    keys.extend(of_sequence(middle, last));
                    self.0.clear();
                }
                // Alt with a key is that key.
                [0x1b, other] | [other] => {
                    keys.extend(of_byte(other));
                    self.0.clear();
                }
                _ => self.0.clear(),
            }
        }
        keys
    }

    /// Whether an Escape waits for what may follow.
    pub fn waits(&self) -> bool {
        !self.0.is_empty()
    }

    /// Nothing followed.
    pub fn give_up(&mut self) -> Option<Key> {
        let lone = self.0 == [0x1b];
        self.0.clear();
        lone.then_some(Key::Escape)
    }
}

fn of_byte(byte: u8) -> Option<Key> {
    match byte {
        b'\t' => Some(Key::Tab),
        1..=26 => Some(Key::Ctrl((b'a' + byte - 1) as char)),
        b' '..=b'~' => Some(Key::Char(byte as char)),
        _ => None,
    }
}

/// What stands between `ESC [` or `ESC O` and the last byte.
fn of_sequence(middle: &[u8], last: u8) -> Option<Key> {
    // Shift, Alt and Ctrl come behind a semicolon.
    let number = middle.split(|byte| *byte == b';').next().unwrap_or_default();
    match (last, number) {
        (b'A', _) => Some(Key::Up),
        (b'B', _) => Some(Key::Down),
        (b'C', _) => Some(Key::Right),
        (b'D', _) => Some(Key::Left),
        (b'H', _) | (b'~', b"1" | b"7") => Some(Key::Home),
        (b'F', _) | (b'~', b"4" | b"8") => Some(Key::End),
        (b'Z', _) => Some(Key::BackTab),
        (b'~', b"5") => Some(Key::PageUp),
        (b'~', b"6") => Some(Key::PageDown),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn keys(bytes: &[u8]) -> Vec<Key> {
        Keys::default().take(bytes)
    }

    #[test]
    fn keys_of_terminals() {
        assert_eq!(keys(b"1q?"), [Key::Char('1'), Key::Char('q'), Key::Char('?')]);
        assert_eq!(keys(b"\x1b[A\x1bOB\x1b[C\x1b[D"), [Key::Up, Key::Down, Key::Right, Key::Left]);
        assert_eq!(
            keys(b"\x1b[5~\x1b[6~\x1b[H\x1b[4~\x1bOF"),
            [Key::PageUp, Key::PageDown, Key::Home, Key::End, Key::End]
        );
        assert_eq!(
            keys(b"\t\x1b[Z\x03\x0c\x1a"),
            [Key::Tab, Key::BackTab, Key::Ctrl('c'), Key::Ctrl('l'), Key::Ctrl('z')]
        );
        // With Shift, or with Alt, or unknown ones.
        assert_eq!(keys(b"\x1b[1;2A\x1bq\x1b[99~\x1b[?1;2c\xc3\xa4x"), [Key::Up, Key::Char('q'), Key::Char('x')]);
    }

    #[test]
    fn sequences_come_in_pieces() {
        let mut keys = Keys::default();
        assert_eq!((keys.take(b"\x1b"), keys.waits()), (vec![], true));
        assert_eq!(keys.take(b"["), []);
        assert_eq!((keys.take(b"5~"), keys.waits()), (vec![Key::PageUp], false));
        // An Escape by itself, and a sequence that is never whole.
        keys.take(b"\x1b");
        assert_eq!((keys.give_up(), keys.give_up()), (Some(Key::Escape), None));
        keys.take(b"\x1b[");
        assert_eq!((keys.give_up(), keys.take(b"A")), (None, vec![Key::Char('A')]));
        assert_eq!(keys.take(b"\x1b\x1b[A"), [Key::Escape, Key::Up]);
        keys.take(&[b"\x1b[".as_slice(), &[b'1'; 100]].concat());
        assert!(!keys.waits() || keys.0.len() < SEQUENCE_MOST);
    }

    proptest! {
        #[test]
        fn any_bytes_are_some_keys(bytes in proptest::collection::vec(any::<u8>(), 0..200), end in "[qA~]") {
            let mut keys = Keys::default();
            keys.take(&bytes);
            keys.give_up();
            let last = end.chars().next().unwrap();
            prop_assert_eq!(keys.take(end.as_bytes()), vec![Key::Char(last)]);
        }
    }
}
