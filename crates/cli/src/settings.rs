//! Files of settings: TOML in which whatever is wrong is named with its line and its key.

use crate::failure::Failure;
use std::io::ErrorKind;
use std::path::Path;
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

/// A value of a file, with the key that it has and the place where it stands.
#[derive(Debug)]
pub struct Setting<'a> {
    text: &'a str,
    position: usize,
    /// The keys of the tables around it, each with a dot behind it.
    tables: String,
    key: String,
    value: DeValue<'a>,
}

/// What `parse` makes of `file`; where none was named, of `machine`, the machine's, if there is one.
pub fn load<T: Default>(
    file: Option<&Path>,
    machine: &Path,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<T, Failure> {
    let path = file.unwrap_or(machine);
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&text).map_err(|reason| Failure::Usage(format!("{}: {reason}", path.display()))),
        Err(error) if file.is_none() && error.kind() == ErrorKind::NotFound => Ok(T::default()),
        Err(error) => Err(Failure::Usage(format!("{}: {error}", path.display()))),
    }
}

/// Reads the text of a file: its settings, in the order of their keys.
///
/// # Errors
/// If it is no TOML: `line N: reason`.
pub fn read(text: &str) -> Result<Vec<Setting<'_>>, String> {
    match DeTable::parse(text) {
        Ok(table) => Ok(members(text, "", table.into_inner())),
        Err(error) => {
            let line = line(text, error.span().map_or(0, |span| span.start));
            Err(format!("line {line}: {}", error.message()))
        }
    }
}

fn members<'a>(text: &'a str, tables: &str, table: DeTable<'a>) -> Vec<Setting<'a>> {
    let member = |(key, value): (Spanned<DeString<'a>>, Spanned<DeValue<'a>>)| Setting {
        text,
        position: key.span().start,
        tables: tables.to_owned(),
        key: key.into_inner().into_owned(),
        value: value.into_inner(),
    };
    table.into_iter().map(member).collect()
}

fn line(text: &str, position: usize) -> usize {
    1 + text.bytes().take(position).filter(|&byte| byte == b'\n').count()
}

impl<'a> Setting<'a> {
    /// The key.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// What is wrong with it: `line N: key: reason`.
    pub fn error(&self, reason: impl std::fmt::Display) -> String {
        format!("line {}: {}{}: {reason}", line(self.text, self.position), self.tables, self.key)
    }

    /// That there is no such key, but only `known`.
    pub fn unknown(&self, known: &[&str]) -> String {
        self.error(format!("there is no such setting; there are {}", known.join(", ")))
    }

    /// What `parse` makes of the value, a number or a text; a number is taken as it is written.
    pub fn parse<T, E: std::fmt::Display>(&self, parse: impl FnOnce(&str) -> Result<T, E>) -> Result<T, String> {
        let text = match &self.value {
            DeValue::String(text) => text.to_string(),
            DeValue::Integer(number) => number.to_string(),
            DeValue::Float(number) => number.to_string(),
            other => return Err(self.error(format!("this {} is neither a number nor a text", other.type_str()))),
        };
        parse(&text).map_err(|error| self.error(error))
    }

    /// The value, true or false.
    pub fn flag(&self) -> Result<bool, String> {
        match &self.value {
            DeValue::Boolean(value) => Ok(*value),
            other => Err(self.error(format!("this {} is neither true nor false", other.type_str()))),
        }
    }

    /// The value, a number or a text, as it is written.
    pub fn text(&self) -> Result<String, String> {
        self.parse(|text| Ok::<_, String>(text.to_owned()))
    }

    /// The values of an array, each of which stands under the array's key.
    pub fn items(self) -> Result<Vec<Setting<'a>>, String> {
        match self.value {
            DeValue::Array(items) => Ok(items
                .into_iter()
                .map(|item| Setting {
                    text: self.text,
                    position: item.span().start,
                    tables: self.tables.clone(),
                    key: self.key.clone(),
                    value: item.into_inner(),
                })
                .collect()),
            ref other => Err(self.error(format!("this {} is not an array", other.type_str()))),
        }
    }

    /// The settings of a table.
    pub fn members(self) -> Result<Vec<Setting<'a>>, String> {
        match self.value {
            DeValue::Table(table) => Ok(members(self.text, &format!("{}{}.", self.tables, self.key), table)),
            ref other => Err(self.error(format!("this {} is not a table", other.type_str()))),
        }
    }

    /// Whether the value is a table.
    pub fn is_table(&self) -> bool {
        self.value.is_table()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(setting: &Setting) -> Result<u64, String> {
        setting.parse(|text| text.parse::<u64>().map_err(|_| format!("'{text}' is not a number")))
    }

    #[test]
    fn numbers_and_texts_are_the_same() {
        for (text, expected) in [("a = 12", "12"), ("a = \"12\"", "12"), ("a = 1_000", "1000"), ("a = 2.5", "2.5")] {
            assert_eq!(read(text).unwrap()[0].text(), Ok(expected.to_owned()));
        }
        assert_eq!(read("a = 0o660").unwrap()[0].text(), Ok("0o660".to_owned()));
    }

    #[test]
    fn what_is_wrong_has_its_line_and_its_key() {
        let text = "# settings\n\na = \"x\"\nb = [\n  1,\n  \"y\",\n]\nc = { d = true }\n[e.f]\n\"g.h\" = -1\n";
        let mut settings = read(text).unwrap().into_iter();
        let [a, b, c, e] = std::array::from_fn(|_| settings.next().unwrap());
        assert_eq!(number(&a).unwrap_err(), "line 3: a: 'x' is not a number");
        let items = b.items().unwrap();
        assert_eq!(number(&items[0]), Ok(1));
        assert_eq!(number(&items[1]).unwrap_err(), "line 6: b: 'y' is not a number");
        let d = c.members().unwrap();
        assert_eq!(number(&d[0]).unwrap_err(), "line 8: c.d: this boolean is neither a number nor a text");
        let f = e.members().unwrap().remove(0).members().unwrap();
        assert_eq!(f[0].key(), "g.h");
        assert_eq!(number(&f[0]).unwrap_err(), "line 10: e.f.g.h: '-1' is not a number");
    }

    #[test]
    fn other_kinds_than_expected() {
        assert_eq!(read("\na = 1").unwrap().remove(0).items().unwrap_err(), "line 2: a: this integer is not an array");
        assert_eq!(read("a = []").unwrap().remove(0).members().unwrap_err(), "line 1: a: this array is not a table");
    }

    #[test]
    fn only_the_machine_may_have_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let (missing, there) = (directory.path().join("missing"), directory.path().join("there"));
        std::fs::write(&there, "a = 1\na = 2\n").unwrap();
        let parse = |text: &str| read(text).map(|settings| settings.len());
        assert_eq!(load(None, &missing, parse), Ok(0));
        assert!(
            matches!(load(Some(&missing), &there, parse), Err(Failure::Usage(reason)) if reason.contains("missing"))
        );
        let Err(Failure::Usage(reason)) = load(None, &there, parse) else { panic!("taken") };
        assert!(reason.contains("there: line 2: "), "{reason}");
    }

    #[test]
    fn what_is_no_toml_has_its_line() {
        for (text, line) in [("=", 1), ("a = 1\nb 2\n", 2), ("a = 1\n\na = 2", 3), ("a = 0660", 1), ("\na = \"", 2)] {
            let error = read(text).unwrap_err();
            assert!(error.starts_with(&format!("line {line}: ")) && !error.contains('\n'), "{text}: {error}");
        }
    }
}
