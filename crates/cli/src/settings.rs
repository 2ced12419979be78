//! Files of settings: TOML in which whatever is wrong is named with its line and its key.

use crate::failure::Failure;
use crate::output::note;
use std::fmt::Display;
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

/// The file of a machine's settings.
pub const MACHINE: &str = "/etc/pagecrew/pagecrew.toml";

/// A key that a table of the file may have. All that is said about it anywhere comes from here, in the help of the command as well.
pub struct Key {
    /// Its name.
    pub name: &'static str,
    /// A value, as it is written in the file.
    pub example: &'static str,
    /// Values just outside of its bounds, and of another kind. Each is refused, with its line and the reason: tests see to that.
    #[cfg_attr(not(test), expect(dead_code))]
    pub wrong: &'static [&'static str],
    /// What counts where it is left out.
    pub default: &'static str,
    /// What it says, with what values it may have.
    pub help: &'static str,
    /// Whether a service that runs takes it over when it reads the file again (SIGHUP). Others take a new start.
    pub live: bool,
}

/// A table of the file.
pub struct Table {
    /// Its name.
    pub name: &'static str,
    /// Whom it is for.
    pub help: &'static str,
    /// What may stand in it.
    pub keys: &'static [Key],
    /// Reads it as the service does, for the tests of its keys.
    #[cfg_attr(not(test), expect(dead_code))]
    pub check: fn(Vec<Setting<'_>>) -> Result<(), String>,
}

impl Table {
    /// What the help of a command says of the option for a key, and `besides` of the option alone.
    ///
    /// # Panics
    /// If there is no such key.
    pub fn help(&self, key: &str, besides: &str) -> String {
        let found = self.keys.iter().find(|known| known.name == key);
        let key = found.unwrap_or_else(|| panic!("[{}] has no {key}", self.name));
        let mut text = key.help.trim_end_matches('.').to_owned();
        if !besides.is_empty() {
            text += &format!("; {besides}");
        }
        if !key.default.is_empty() {
            text += &format!(" [default: {}]", key.default);
        }
        text
    }

    /// The keys that take a new start, of those of which `differs` says that the file has another value now.
    pub fn fixed(&self, differs: impl Fn(&str) -> bool) -> Vec<&'static str> {
        self.keys.iter().filter(|key| !key.live && differs(key.name)).map(|key| key.name).collect()
    }
}

/// Says that these keys have another value now, which a service that runs does not take over.
pub fn note_fixed(names: &[&str]) {
    if !names.is_empty() {
        note(&format!("{} can't change while it runs: start it again for that", names.join(", ")));
    }
}

/// What the help says of options that may be given more than once.
pub const AGAIN: &str = "may be given more than once";

/// And of those that say where metrics are served.
pub const PROTOCOL: &str = "OpenMetrics, GET /metrics";

/// What `parse` makes of an option's text, if it was given.
///
/// # Errors
/// What is wrong with it, with the option's name.
pub fn option<T, E: Display>(
    name: &str,
    text: &Option<String>,
    parse: impl Fn(&str) -> Result<T, E>,
) -> Result<Option<T>, Failure> {
    text.as_deref().map(|text| parse(text).map_err(|reason| wrong(name, reason))).transpose()
}

/// What `parse` makes of each of the texts of an option.
///
/// # Errors
/// What is wrong with the first that is, with the option's name.
pub fn options<T, E: Display>(
    name: &str,
    texts: &[String],
    parse: impl Fn(&str) -> Result<T, E>,
) -> Result<Vec<T>, Failure> {
    texts.iter().map(|text| parse(text).map_err(|reason| wrong(name, reason))).collect()
}

/// That an option's text makes no sense.
pub fn wrong(name: &str, reason: impl Display) -> Failure {
    Failure::Usage(format!("{name}: {reason}"))
}

/// All that there are.
pub const TABLES: [&Table; 4] = [
    &crate::serve::config::TABLE,
    &crate::pool::config::TABLE,
    &crate::trim::config::TABLE,
    &crate::reclaim::config::TABLE,
];

/// Print a settings file in which everything is explained
///
/// All that stands in it is commented out. Its place is /etc/pagecrew/pagecrew.toml.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagecrew settings                     what there is to set, and what counts without
  mkdir -p /etc/pagecrew && pagecrew settings > /etc/pagecrew/pagecrew.toml")]
pub struct Arguments {}

/// `pagecrew settings`.
pub fn run(_: &Arguments) -> Result<(), Failure> {
    crate::output::print(&template())
}

/// A file that says nothing yet.
fn template() -> String {
    let mut text = format!(
        "# Settings of pagecrew's services: {MACHINE}. Options of a command go before them.\n\
         # What is marked with * is taken over when a service reads the file again (systemctl reload, SIGHUP).\n"
    );
    for table in TABLES {
        text += &format!("\n[{}]\n{}", table.name, comment(table.help));
        for key in table.keys {
            let star = if key.live { "* " } else { "" };
            let without = if key.default.is_empty() { String::new() } else { format!(" Without: {}.", key.default) };
            text +=
                &format!("\n{}# {} = {}\n", comment(&format!("{star}{}{without}", key.help)), key.name, key.example);
        }
    }
    text
}

/// Lines of a comment, no longer than a terminal is wide.
fn comment(text: &str) -> String {
    let mut lines = vec![String::from("#")];
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.len() + word.len() < 100 => *line += &format!(" {word}"),
            _ => lines.push(format!("# {word}")),
        }
    }
    lines.join("\n") + "\n"
}

/// What `parse` makes of `table` of `file`; where none was named, of the machine's, if there is one.
pub fn load<T: Default>(
    file: Option<&Path>,
    table: &Table,
    parse: impl FnOnce(Vec<Setting<'_>>) -> Result<T, String>,
) -> Result<T, Failure> {
    load_text(file, |text| match members_of(text, table)? {
        Some(settings) => parse(settings),
        None => Ok(T::default()),
    })
}

/// What `parse` makes of the text of `file`; where none was named, of the machine's, if there is one.
pub fn load_text<T: Default>(file: Option<&Path>, parse: impl FnOnce(&str) -> Result<T, String>) -> Result<T, Failure> {
    load_from(file, Path::new(MACHINE), parse)
}

/// The settings of `table` in the text of a file; `None` if it has no such table.
pub fn members_of<'a>(text: &'a str, table: &Table) -> Result<Option<Vec<Setting<'a>>>, String> {
    let mut found = None;
    for setting in read(text)? {
        let known = TABLES.iter().map(|table| table.name);
        if setting.is_table() && setting.key() == table.name {
            found = Some(setting.members()?);
        } else if !(setting.is_table() && known.clone().any(|name| name == setting.key())) {
            let names: Vec<String> = known.map(|name| format!("[{name}]")).collect();
            return Err(setting.error(format!("this is none of the tables that there are: {}", names.join(", "))));
        }
    }
    Ok(found)
}

/// The settings of `table` in the text of a file, none of which has to make sense, if only their keys are known.
pub fn keys_of<'a>(text: &'a str, table: &Table) -> Result<Vec<Setting<'a>>, String> {
    let settings = members_of(text, table)?.unwrap_or_default();
    let is_known = |setting: &&Setting| table.keys.iter().any(|key| key.name == setting.key());
    match settings.iter().find(|setting| !is_known(setting)) {
        Some(unknown) => Err(unknown.unknown(table)),
        None => Ok(settings),
    }
}

/// What `parse` makes of the text of `file`; where none was named, of `machine`, if that is there.
fn load_from<T: Default>(
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
    pub fn error(&self, reason: impl Display) -> String {
        format!("line {}: {}{}: {reason}", line(self.text, self.position), self.tables, self.key)
    }

    /// That there is no such key, but only those of `table`.
    pub fn unknown(&self, table: &Table) -> String {
        let known: Vec<&str> = table.keys.iter().map(|key| key.name).collect();
        self.error(format!("there is no such setting; there are {}", known.join(", ")))
    }

    /// Whether it asks for anything: it is neither false nor empty.
    pub fn asks(&self) -> bool {
        match &self.value {
            DeValue::Boolean(value) => *value,
            DeValue::Array(items) => !items.is_empty(),
            DeValue::Table(members) => !members.is_empty(),
            _ => true,
        }
    }

    /// What `parse` makes of the value, a number or a text; a number is taken as it is written.
    pub fn parse<T, E: Display>(&self, parse: impl FnOnce(&str) -> Result<T, E>) -> Result<T, String> {
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
    fn what_asks_for_nothing() {
        let settings = read("a = false\nb = []\nc = {}\nd = true\ne = [1]\nf = { g = 1 }\nh = 0\n").unwrap();
        assert_eq!(
            settings.iter().map(Setting::asks).collect::<Vec<_>>(),
            [false, false, false, true, true, true, true]
        );
        let [_, pool, _, _] = TABLES;
        assert_eq!(keys_of("[pool]\nfloor = \"12Q\"\n[trim]\nx = 1", pool).unwrap().len(), 1);
        assert!(keys_of("[pool]\nflor = 1", pool).unwrap_err().starts_with("line 2: pool.flor: there is no such"));
    }

    #[test]
    fn only_the_machine_may_have_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let (missing, there) = (directory.path().join("missing"), directory.path().join("there"));
        std::fs::write(&there, "a = 1\na = 2\n").unwrap();
        let parse = |text: &str| read(text).map(|settings| settings.len());
        assert_eq!(load_from(None, &missing, parse), Ok(0));
        assert!(
            matches!(load_from(Some(&missing), &there, parse), Err(Failure::Usage(reason)) if reason.contains("missing"))
        );
        let Err(Failure::Usage(reason)) = load_from(None, &there, parse) else { panic!("taken") };
        assert!(reason.contains("there: line 2: "), "{reason}");
    }

    /// Compares a file of the repository with what it should be; writes it where PAGECREW_WRITE_DOCS is set.
    fn check(path: &str, expected: &str) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().join(path);
        if std::env::var_os("PAGECREW_WRITE_DOCS").is_some() {
            std::fs::write(&path, expected).unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            text == expected,
            "{} is out of date: PAGECREW_WRITE_DOCS=1 cargo test -p pagecrew-cli",
            path.display()
        );
    }

    #[test]
    fn the_file_that_is_installed_explains_every_key() {
        check("contrib/pagecrew.toml", &template());
        // As it is, it says nothing; with its comments taken away, it makes sense.
        for table in TABLES {
            assert!(members_of(&template(), table).unwrap().unwrap().is_empty());
        }
        let is_key = |line: &str| {
            TABLES.iter().flat_map(|table| table.keys).any(|key| line.starts_with(&format!("{} = ", key.name)))
        };
        let template = template();
        let lines =
            template.lines().map(|line| line.strip_prefix("# ").filter(|line| is_key(line)).unwrap_or(line).to_owned());
        let text: String = lines.collect::<Vec<_>>().join("\n");
        for table in TABLES {
            assert_eq!(members_of(&text, table).unwrap().unwrap().len(), table.keys.len());
        }
    }

    #[test]
    fn what_is_outside_the_bounds_of_a_key_is_refused_with_its_line() {
        for table in TABLES {
            for key in table.keys {
                assert!(!key.wrong.is_empty(), "{}.{}", table.name, key.name);
                for value in key.wrong {
                    let text = format!("[{}]\n\n{} = {value}\n", table.name, key.name);
                    let settings = members_of(&text, table).unwrap().unwrap();
                    let error = (table.check)(settings).err().unwrap_or_else(|| panic!("{text} was taken"));
                    assert!(error.starts_with(&format!("line 3: {}.{}", table.name, key.name)), "{text}: {error}");
                }
            }
        }
    }

    #[test]
    fn the_examples_hold() {
        for table in TABLES {
            // What excludes others stands by itself.
            for key in table.keys {
                // Whoever may not exist here is root.
                let example = ["kvm", "alice", "postgres"]
                    .into_iter()
                    .fold(key.example.to_owned(), |text, name| text.replace(name, "root"));
                let text = format!("{} = {example}\n", key.name);
                assert_eq!((table.check)(read(&text).unwrap()), Ok(()), "{}: {text}", table.name);
            }
        }
    }

    #[test]
    fn options_say_what_the_keys_say() {
        let [_, pool, trim, _] = TABLES;
        assert_eq!(
            pool.help("cpu", ""),
            "CPU time that filling may take, in percent of one CPU, up to 100 [default: 25]"
        );
        assert_eq!(trim.help("all", "now"), "Every process; now [default: false]");
    }

    #[test]
    fn the_page_about_settings_has_every_key() {
        let mut text = String::from(
            "# Settings\n\nServices read `/etc/pagecrew/pagecrew.toml` (`--config FILE` for another one); `pagecrew settings` prints one in which all of\n\
             this is explained. Options of a command go before it, and have the same names; where there may be several, each is an option of its own in the singular (`names` is `--name`, `groups` of trim `--cgroup`), and `hold = false` is `--no-hold`. What is wrong is told with its line and the reason, and\n\
             a service that runs goes on as before. What is marked * is taken over when a service reads the file again (`systemctl reload`, SIGHUP);\n\
             the rest takes a new start.\n",
        );
        for table in TABLES {
            text += &format!(
                "\n## `[{}]`\n\n{}\n\n| key | value, for example | without | meaning |\n|---|---|---|---|\n",
                table.name, table.help
            );
            for key in table.keys {
                let star = if key.live { " *" } else { "" };
                text += &format!("| `{}`{star} | `{}` | {} | {} |\n", key.name, key.example, key.default, key.help);
            }
        }
        check("docs/settings.md", &text);
    }

    #[test]
    fn each_service_reads_its_own_table() {
        let of = |text: &'static str, table| {
            members_of(text, table)
                .map(|found| found.map(|settings| settings.iter().map(|s| s.key().to_owned()).collect::<Vec<_>>()))
        };
        let [_, pool, trim, _] = TABLES;
        let text = "[pool]\nsize = 1\n[trim]\nall = true\ncpu = 2\n";
        assert_eq!(of(text, pool), Ok(Some(vec!["size".into()])));
        assert_eq!(of(text, trim), Ok(Some(vec!["all".into(), "cpu".into()])));
        assert_eq!((of("[pool]\n", trim), of("", pool)), (Ok(None), Ok(None)));
        for text in ["size = 1\n", "[pol]\n", "pool = 3\n"] {
            let error = of(text, pool).unwrap_err();
            assert!(
                error.starts_with("line 1: ")
                    && error.ends_with("none of the tables that there are: [serve], [pool], [trim], [reclaim]"),
                "{error}"
            );
        }
    }

    #[test]
    fn what_is_no_toml_has_its_line() {
        for (text, line) in [("=", 1), ("a = 1\nb 2\n", 2), ("a = 1\n\na = 2", 3), ("a = 0660", 1), ("\na = \"", 2)] {
            let error = read(text).unwrap_err();
            assert!(error.starts_with(&format!("line {line}: ")) && !error.contains('\n'), "{text}: {error}");
        }
    }
}
