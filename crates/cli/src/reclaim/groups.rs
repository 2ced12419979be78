//! What is said of control groups: a line when one is reclaimed ahead of and when that is over, and sums where there are many.

use crate::failure::Failure;
use crate::figures::{counted, object, seconds};
use crate::output::{note, print, printable};
use pagecrew::control::budget::Bucket;
use pagecrew::reclaim::groups::Listener;
use pagecrew::reclaim::{GroupEvent, GroupStanding, Pause};
use pagecrew::sys::clock::now_ns;
use pagecrew::units::Bytes;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// So many lines are said in a second over some time, and what that saves up.
const LINES: f64 = 1.0;
const SAVED: Duration = Duration::from_secs(20);

/// Says what happens to groups, whichever thread it hears it from.
#[derive(Clone)]
pub struct GroupReporter {
    json: bool,
    lines: Arc<Mutex<Lines>>,
}

struct Lines {
    bucket: Bucket,
    left_out: u64,
}

impl Lines {
    /// Whether one more line may be said, and how many were left out before it.
    fn next(&mut self, now_ns: u64) -> Option<u64> {
        if !self.bucket.wait(now_ns).is_zero() {
            self.left_out += 1;
            return None;
        }
        self.bucket.charge(1.0, now_ns);
        Some(std::mem::take(&mut self.left_out))
    }
}

impl GroupReporter {
    pub fn new(json: bool) -> GroupReporter {
        let lines = Lines { bucket: Bucket::new(LINES, SAVED, now_ns()), left_out: 0 };
        GroupReporter { json, lines: Arc::new(Mutex::new(lines)) }
    }

    /// What is called when something happens.
    pub fn listener(&self) -> Listener {
        let reporter = self.clone();
        Box::new(move |event| reporter.say(&event))
    }

    fn say(&self, event: &GroupEvent) {
        let next = self.lines.lock().unwrap_or_else(PoisonError::into_inner).next(now_ns());
        let Some(left_out) = next else { return };
        if self.json {
            let mut line = json(event);
            line["left_out"] = left_out.into();
            let _ = print(&format!("{line}\n"));
            return;
        }
        if left_out > 0 {
            note(&format!("{left_out} lines about control groups were left out"));
        }
        note(&text(event));
    }

    /// The sums, in the end.
    pub fn end(&self, standing: GroupStanding) -> Result<(), Failure> {
        if self.json {
            return print(&format!("{}\n", json!({ "event": "groups-end", "groups": object(standing.figures()) })));
        }
        let GroupStanding { reclaimed_bytes, episodes, stalls, .. } = standing;
        if episodes > 0 {
            note(&format!(
                "control groups: {} reclaimed ahead in {} of demand, {stalls} times their tasks had to",
                Bytes(reclaimed_bytes),
                counted(episodes, "span")
            ));
        }
        Ok(())
    }
}

fn text(event: &GroupEvent) -> String {
    match event {
        GroupEvent::Begun { group, demand, ahead } => format!(
            "{}: {} a second are taken at its limit: {} is kept free below it",
            printable(&group.to_string_lossy()),
            Bytes(*demand),
            Bytes(*ahead)
        ),
        GroupEvent::Ended { group, lasted, reclaimed, stalls, pause } => {
            let why = match pause {
                None => "",
                Some(Pause::Hurts) => "; it is left alone for half a minute, since what was reclaimed came back",
                Some(Pause::Nothing) => "; it is left alone for a while, since what is left is in use",
                Some(Pause::Throttled | Pause::Doze) => "; it has used up its CPU quota",
            };
            format!(
                "{}: over after {}: {} reclaimed ahead, {stalls} times its tasks had to{why}",
                printable(&group.to_string_lossy()),
                seconds(*lasted),
                Bytes(*reclaimed)
            )
        }
        GroupEvent::Held { group, share } => format!(
            "{}: most of what is taken is taken by it: it is held to the {} that it has, so that others keep theirs",
            printable(&group.to_string_lossy()),
            Bytes(*share)
        ),
        GroupEvent::LetGo { group } => {
            format!("{}: it may have more again", printable(&group.to_string_lossy()))
        }
        GroupEvent::TooMany => {
            "there are more control groups with limits than are served; name those that matter (setting groups)"
                .to_owned()
        }
        GroupEvent::Unwatched(errno) => {
            format!(
                "control groups that come from now on are not seen until the kernel tells of them again: {errno} (fs.inotify.max_user_instances); it is tried again every minute"
            )
        }
        GroupEvent::Uninterruptible(errno) => {
            format!(
                "control groups of version 1 are not served: the tracepoint that cuts reclaim short is refused: {errno}"
            )
        }
    }
}

fn json(event: &GroupEvent) -> Value {
    match event {
        GroupEvent::Begun { group, demand, ahead } => {
            json!({ "event": "group-begun", "group": group.to_string_lossy(), "demand_bytes": demand, "ahead_bytes": ahead })
        }
        GroupEvent::Ended { group, lasted, reclaimed, stalls, pause } => {
            let pause = pause.map(|pause| match pause {
                Pause::Hurts => "hurts",
                Pause::Nothing => "nothing",
                Pause::Throttled => "throttled",
                Pause::Doze => "doze",
            });
            json!({
                "event": "group-ended", "group": group.to_string_lossy(), "lasted_seconds": lasted.as_secs_f64(),
                "reclaimed_bytes": reclaimed, "stalls": stalls, "pause": pause,
            })
        }
        GroupEvent::Held { group, share } => {
            json!({ "event": "group-held", "group": group.to_string_lossy(), "share_bytes": share })
        }
        GroupEvent::LetGo { group } => json!({ "event": "group-let-go", "group": group.to_string_lossy() }),
        GroupEvent::TooMany => json!({ "event": "groups-too-many" }),
        GroupEvent::Unwatched(errno) => json!({ "event": "groups-unwatched", "error": errno.to_string() }),
        GroupEvent::Uninterruptible(errno) => {
            json!({ "event": "groups-uninterruptible", "error": errno.to_string() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_lines_some_are_said() {
        let mut lines = Lines { bucket: Bucket::new(LINES, SAVED, 0), left_out: 0 };
        let said = (0..500).filter(|_| lines.next(0).is_some()).count();
        assert!((20..25).contains(&said), "{said}");
        assert_eq!(lines.next(10_000_000_000), Some(500 - said as u64));
        assert_eq!(lines.next(10_000_000_000), Some(0));
    }

    #[test]
    fn what_is_said() {
        let ended = |pause| GroupEvent::Ended {
            group: "/sys/fs/cgroup/a\u{1b}b".into(),
            lasted: Duration::from_secs(42),
            reclaimed: 3 << 30,
            stalls: 7,
            pause,
        };
        assert_eq!(
            text(&ended(None)),
            "/sys/fs/cgroup/a?b: over after 42.00 s: 3 GiB reclaimed ahead, 7 times its tasks had to"
        );
        assert!(
            text(&ended(Some(Pause::Hurts)))
                .ends_with("; it is left alone for half a minute, since what was reclaimed came back")
        );
        assert_eq!(json(&ended(Some(Pause::Nothing)))["pause"], "nothing");
        let begun = GroupEvent::Begun { group: "/x".into(), demand: 1 << 30, ahead: 6 << 20 };
        let held = GroupEvent::Held { group: "/x".into(), share: 5 << 30 };
        assert!(text(&held).starts_with("/x: most") && text(&held).contains("5 GiB"), "{}", text(&held));
        assert_eq!(json(&held)["share_bytes"], 5u64 << 30);
        assert_eq!(text(&begun), "/x: 1 GiB a second are taken at its limit: 6 MiB is kept free below it");
    }
}
