//! What a supervisor says: sentences for people, or one JSON object a line.

use super::member::Member;
use crate::failure::Failure;
use crate::output::{note, print};
use pagecrew::control::supervision::{End, Phase};
use pagecrew::sys::clock::now_ns;
use serde_json::{Map, Value};

/// See the module.
pub struct Reporter {
    pub json: bool,
}

impl Reporter {
    /// A member is elsewhere in its life than `before`.
    pub fn phase(&self, member: &Member, before: Phase, phase: Phase) -> Result<(), Failure> {
        let (part, how) = (member.part, member.how_it_ended());
        if self.json {
            let mut object = object(name(phase));
            object.insert("service".into(), part.name().into());
            object.insert("pid".into(), member.pid().into());
            if matches!(phase, Phase::Waiting | Phase::GivenUp) {
                let (key, value) = ending(member.life.last());
                object.insert(key.into(), value);
            }
            return line(object);
        }
        match phase {
            Phase::Waiting => {
                let pause = member.life.next_ns().map_or(0, |next| next.saturating_sub(now_ns())) as f64 / 1e9;
                note(&format!("{part} is started again in {pause:.1} s: {how}"));
            }
            Phase::GivenUp => {
                note(&format!("{part} is not started again before the settings are read again (SIGHUP): {how}"));
            }
            Phase::Ending if member.life.wanted() => note(&format!("{part} is ended: {how}")),
            Phase::Killed => note(&format!("{part} does not end, and is killed")),
            // It has read its settings again, and was served all the time.
            Phase::Ready if before == Phase::Reloading => {}
            Phase::Ready if member.life.standing().restarts > 0 => note(&format!("{part} is served again")),
            Phase::Off | Phase::Starting | Phase::Ready | Phase::Reloading | Phase::Ending => {}
        }
        Ok(())
    }

    /// Something that is about all of them, with what a person is told.
    pub fn all(&self, event: &str, sentence: &str) -> Result<(), Failure> {
        if self.json {
            let mut object = object(event);
            object.insert("text".into(), sentence.into());
            return line(object);
        }
        note(sentence);
        Ok(())
    }
}

fn name(phase: Phase) -> &'static str {
    match phase {
        Phase::Off => "off",
        Phase::Starting => "starting",
        Phase::Ready => "ready",
        Phase::Reloading => "reloading",
        Phase::Ending => "ending",
        Phase::Killed => "killed",
        Phase::Waiting => "waiting",
        Phase::GivenUp => "given_up",
    }
}

fn ending(last: Option<End>) -> (&'static str, Value) {
    match last {
        Some(End::Status(status)) => ("status", status.into()),
        Some(End::Signal(signal)) => ("signal", signal.into()),
        Some(End::NotStarted) => ("not_started", true.into()),
        Some(End::Late) => ("late", true.into()),
        None => ("status", Value::Null),
    }
}

fn object(event: &str) -> Map<String, Value> {
    Map::from_iter([("event".to_owned(), event.into())])
}

fn line(object: Map<String, Value>) -> Result<(), Failure> {
    print(&format!("{}\n", Value::Object(object)))
}
