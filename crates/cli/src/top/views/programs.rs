//! The programs under `pagecrew run`.

use super::super::model::Model;
use super::super::programs::{AT_A_TIME, Key};
use super::super::text::{Row, Table, Tone, byte_rate, bytes, piece};
use super::{Look, Page};

pub fn page(model: &Model, look: &Look) -> Page {
    let mut programs = model.programs.clone();
    if programs.is_empty() {
        let body = vec![
            Row::of(Tone::Dim, "no program that this user may see has large memory under pagecrew"),
            Row::of(Tone::Dim, "(pagecrew run -- PROGRAM)"),
        ];
        return Page { head: vec![summary(model)], body };
    }
    look.sort.apply(&mut programs);
    let mark = match (look.sort.reversed, look.unicode) {
        (false, true) => '▾',
        (true, true) => '▴',
        (false, false) => 'v',
        (true, false) => '^',
    };
    let heading = |key: Key, right: &str, text: &str| {
        let mark = if key == look.sort.key { format!(" {mark}") } else { String::new() };
        format!("{right}{text}{mark}")
    };
    let headings = [
        heading(Key::Pid, ">", "pid"),
        heading(Key::Name, "", "name"),
        heading(Key::InUse, ">", "in use"),
        ">dirty".into(),
        heading(Key::Retained, ">", "zeroed"),
        heading(Key::Reused, ">", "reused"),
        heading(Key::Background, ">", "backgr."),
        heading(Key::Rate, ">", "now"),
    ];
    let mut table = Table::new(&headings.each_ref().map(String::as_str));
    for program in &programs {
        let now = program.snapshot.bytes();
        let reused = program.snapshot.counter("reused_bytes");
        let sizes = [now.in_use, now.retained_dirty, now.retained_zeroed, reused, program.background()];
        let sizes = sizes.map(|size| piece(Tone::Plain, bytes(Some(size))));
        let names = [piece(Tone::Plain, program.pid.to_string()), piece(Tone::Plain, program.name.clone())];
        let rate = [piece(Tone::Plain, byte_rate(program.background_rate))];
        table.add(names.into_iter().chain(sizes).chain(rate));
    }
    let (heading, body) = table.rows(look.width);
    Page { head: vec![summary(model), Row::default(), heading], body }
}

/// All of them in a line.
pub fn summary(model: &Model) -> Row {
    if model.programs.is_empty() {
        return Row::about("programs", [piece(Tone::Dim, "none under pagecrew run")]);
    }
    let (mut in_use, mut retained, mut rate) = (0_u64, 0_u64, 0.0);
    for program in &model.programs {
        in_use = in_use.saturating_add(program.snapshot.bytes().in_use);
        retained = retained.saturating_add(program.retained());
        rate += program.background_rate.unwrap_or(0.0);
    }
    let count = model.programs.len();
    let turns = if count > AT_A_TIME { format!(" ({AT_A_TIME} are looked at each time)") } else { String::new() };
    let text = format!(
        "{count}{turns}: {} in use, {} retained; {} in the background",
        bytes(Some(in_use)),
        bytes(Some(retained)),
        byte_rate(Some(rate))
    );
    Row::about("programs", [piece(Tone::Plain, text)])
}

#[cfg(test)]
mod tests {
    use super::super::super::model::made_up::model;
    use super::super::super::programs::{Key, Sort};
    use super::super::tests::{LOOK, text};
    use super::super::{Look, View};

    #[test]
    fn a_thousand_programs_the_largest_first() {
        let model = model(1, 1000);
        let shown = text(View::Programs, &model, &LOOK);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines.len(), 1003);
        assert!(lines[0].contains("1000 (100 are looked at each time)"), "{}", lines[0]);
        assert_eq!(lines[2], " pid  name       in use ▾     dirty    zeroed    reused   backgr.      now");
        assert_eq!(lines[3], "1000  a program  1000 MiB   125 MiB   250 MiB   500 MiB  1000 MiB  1 KiB/s");
        let look = Look { sort: Sort { key: Key::Pid, reversed: true }, unicode: false, ..LOOK };
        let shown = text(View::Programs, &model, &look);
        assert!(shown.lines().nth(2).unwrap().contains("pid ^") && shown.lines().nth(3).unwrap().starts_with(" 1000"));
        // What does not fit is left out as a whole.
        let narrow = text(View::Programs, &model, &Look { width: 40, ..LOOK });
        assert_eq!(narrow.lines().nth(3), Some("1000  a program  1000 MiB   125 MiB"));
    }

    #[test]
    fn no_program_at_all() {
        assert!(text(View::Programs, &model(1, 0), &LOOK).contains("pagecrew run -- PROGRAM"));
    }
}
