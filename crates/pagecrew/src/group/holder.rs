//! A control group that is held at its limit: what [`held`](super::held) decides, done with a [`Hold`].

use super::held::{Numbers, Standing, Steps, high_below, standing};
use super::hold::{Hold, HoldError, Reclaimable};
use super::{Group, Version};
use crate::stats::figures;
use crate::sys::Errno;
use crate::sys::clock::now_ns;
use std::os::fd::RawFd;
use std::time::Duration;

figures! {
    /// What came of holding control groups.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct Holds: Trim, "pagecrew_trim_", [], none {
        holding: u64, Gauge Count, "Control groups that are held at their limits, not left to the kernel.";
        held: u64, Counter Count, "Times that tasks of a group were found waiting at its limit, and its memory was searched.";
        let_go: u64, Counter Count, "Times that a group was left to the kernel because nothing could be given back.";
    }
}

/// A group whose tasks wait at its limit, until memory of it was given back or it is let go. Dropping it undoes what it has done.
#[derive(Debug)]
pub struct Holder {
    hold: Hold,
    /// Not let go.
    holding: bool,
    /// Of the last look that asked for it.
    times_over_high: u64,
    steps: Steps,
}

impl Holder {
    /// Holds `group`.
    ///
    /// # Errors
    /// See [`HoldError`].
    pub fn new(group: &Group) -> Result<Holder, HoldError> {
        let hold = group.hold()?;
        let (times_over_high, steps) = (hold.times_over_high(), Steps::default());
        let mut holder = Holder { hold, holding: false, times_over_high, steps };
        holder.again().map_err(|errno| HoldError::Refused(group.path().to_owned(), errno))?;
        Ok(holder)
    }

    /// See [`Hold::descriptors`].
    pub fn descriptors(&self) -> impl Iterator<Item = (RawFd, libc::c_short)> + '_ {
        self.hold.descriptors()
    }

    /// See [`Hold::guard_descriptor`].
    pub fn guard_descriptor(&self) -> Option<RawFd> {
        self.hold.guard_descriptor()
    }

    /// See [`Hold::found_one_left`].
    pub fn found_one_left(&self) -> bool {
        self.hold.found_one_left()
    }

    /// Whether the group has gone.
    pub fn gone(&self) -> bool {
        self.hold.usage().is_none()
    }

    /// Whether the guard lives, where there has to be one.
    pub fn guarded(&self) -> bool {
        self.hold.guarded()
    }

    /// How the group stands. While it is held, `memory.high` (version 2) follows `memory.max`.
    ///
    /// Costs a few microseconds; tens where the group is nearly full and `memory.stat` has to tell of what.
    pub fn look(&mut self) -> Standing {
        self.hold.heard();
        let standing = standing(&mut Look { holder: self, reclaimable: None });
        if self.holding && self.follow(standing).is_err() {
            // The group has gone, or is about to.
            return Standing::Quiet;
        }
        standing
    }

    /// Moves `memory.high` (version 2) to where it belongs.
    fn follow(&mut self, standing: Standing) -> Result<(), Errno> {
        if self.hold.group().version() == Version::V1 {
            return Ok(());
        }
        // Without a limit there is nothing to hold the group at.
        let Some(max) = self.hold.most() else { return self.hold.let_go() };
        // A limit that was raised has left somebody's own value below it, which counts, as it would have from the beginning.
        if self.hold.before().is_some_and(|before| before < max) {
            return self.hold.give_up();
        }
        let high = self.hold.high().unwrap_or(u64::MAX);
        if high <= high_below(max) {
            self.hold.take(high_below(max))
        } else if standing != Standing::Held || high >= max {
            self.step_down(high, max)
        } else {
            // There is nothing to reclaim, and tasks would only be slowed down more.
            Ok(())
        }
    }

    /// Lowers `memory.high` by a step, since the kernel reclaims at once what is above it.
    fn step_down(&mut self, high: u64, max: u64) -> Result<(), Errno> {
        let Some(usage) = self.hold.usage() else { return Ok(()) };
        let begin_ns = now_ns();
        let taken = self.hold.take(self.steps.next_high(high, usage, max));
        self.steps.took(Duration::from_nanos(now_ns() - begin_ns));
        taken
    }

    /// Whether the group is held, not let go.
    pub fn holding(&self) -> bool {
        self.holding
    }

    /// Whether holding changes the group. It doesn't if the group was set up like that before, or has a `memory.high` of its own
    /// below its `memory.max`; nor once somebody else has changed `memory.high`.
    pub fn may_change(&self) -> bool {
        self.hold.may_change()
    }

    /// Lets the group go: the kernel kills at its limit as it would without a hold.
    ///
    /// # Errors
    /// `ENODEV` if the group has gone.
    pub fn let_go(&mut self) -> Result<(), Errno> {
        self.holding = false;
        self.hold.let_go()
    }

    /// Holds the group again after [`let_go`](Holder::let_go).
    ///
    /// # Errors
    /// `ENODEV` if the group has gone.
    pub fn again(&mut self) -> Result<(), Errno> {
        self.holding = true;
        match self.hold.group().version() {
            Version::V1 => self.hold.take(0),
            Version::V2 => match self.hold.most() {
                Some(max) => self.step_down(self.hold.high().unwrap_or(u64::MAX), max),
                None => Ok(()),
            },
        }
    }
}

/// One look at a group.
struct Look<'h> {
    holder: &'h mut Holder,
    /// What `memory.stat` has told.
    reclaimable: Option<Reclaimable>,
}

impl Look<'_> {
    fn reclaimable(&mut self) -> Reclaimable {
        *self.reclaimable.get_or_insert_with(|| self.holder.hold.reclaimable())
    }
}

impl Numbers for Look<'_> {
    fn sleeping(&mut self) -> Option<bool> {
        self.holder.hold.sleeping()
    }

    fn line(&mut self) -> Option<u64> {
        let hold = &self.holder.hold;
        match (hold.most(), hold.high()) {
            (most, _) if hold.group().version() == Version::V1 => most,
            // Also while `memory.high` is on its way there, or the group is let go.
            (most, _) if hold.may_change() => most.map(high_below),
            (most, high) => most.into_iter().chain(high).min(),
        }
    }

    fn usage(&mut self) -> Option<u64> {
        self.holder.hold.usage()
    }

    fn cache(&mut self) -> u64 {
        self.reclaimable().cache
    }

    fn swappable(&mut self) -> u64 {
        self.reclaimable().swappable.min(self.holder.hold.free_swap())
    }

    fn reclaims(&mut self) -> bool {
        let times = self.holder.hold.times_over_high();
        times != std::mem::replace(&mut self.holder.times_over_high, times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU32, Ordering};

    const MIB: u64 = 1 << 20;

    /// A look, of whose last one nobody says that it took long: this machine may have other things to do.
    fn look(holder: &mut Holder) -> Standing {
        holder.steps = Steps::default();
        holder.look()
    }

    /// A directory of plain files like those of a group of version 2.
    struct MadeUp(PathBuf);

    impl MadeUp {
        fn new(max: u64) -> MadeUp {
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let name = format!("pagecrew-test-hold-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
            let group = MadeUp(std::env::temp_dir().join(name));
            fs::create_dir(&group.0).unwrap();
            group.write("cgroup.procs", "");
            group.write("memory.high", "max\n");
            group.write("memory.swap.max", "0\n");
            group.write("memory.swap.current", "0\n");
            group.over_high(0);
            group.number("memory.max", max);
            group.memory(0, 0);
            group
        }

        fn write(&self, file: &str, text: &str) {
            fs::write(self.0.join(file), text).unwrap();
        }

        fn number(&self, file: &str, bytes: u64) {
            self.write(file, &format!("{bytes}\n"));
        }

        fn over_high(&self, times: u32) {
            self.write("memory.events", &format!("low 0\nhigh {times}\nmax 0\n"));
        }

        /// So much anonymous memory and page cache, in MiB.
        fn memory(&self, anonymous: u64, cache: u64) {
            self.number("memory.current", (anonymous + cache) * MIB);
            let [active, inactive] = [cache * MIB / 4, cache * MIB / 4 * 3];
            let anonymous = anonymous * MIB;
            self.write(
                "memory.stat",
                &format!("anon {anonymous}\ninactive_anon {anonymous}\nactive_anon 0\ninactive_file {inactive}\nactive_file {active}\n"),
            );
        }

        /// `memory.high` in MiB, as far as it has a number.
        fn high(&self) -> Option<u64> {
            let text = fs::read_to_string(self.0.join("memory.high")).unwrap();
            text.lines().next().unwrap().parse().ok().map(|bytes: u64| bytes / MIB)
        }

        fn holder(&self) -> Holder {
            Holder::new(&Group::find(self.0.to_str().unwrap()).unwrap()).unwrap()
        }
    }

    impl Drop for MadeUp {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn anonymous_memory_is_held_and_page_cache_is_not() {
        let files = MadeUp::new(64 * MIB);
        let mut holder = files.holder();
        assert_eq!((files.high(), look(&mut holder)), (Some(56), Standing::Quiet));
        for (anonymous, cache, expected) in [
            (0, 56, Standing::Quiet),
            (48, 12, Standing::Quiet),
            (50, 6, Standing::Near),
            (50, 0, Standing::Near),
            (56, 0, Standing::Held),
            (58, 4, Standing::Held),
        ] {
            files.memory(anonymous, cache);
            assert_eq!(look(&mut holder), expected, "{anonymous} {cache}");
        }
        // Tasks that have to reclaim, with little left to reclaim.
        files.memory(53, 3);
        assert_eq!(look(&mut holder), Standing::Near);
        files.over_high(5);
        assert_eq!([look(&mut holder), look(&mut holder)], [Standing::Held, Standing::Near]);
        // A kernel that doesn't tell what it could take.
        files.memory(0, 56);
        fs::remove_file(files.0.join("memory.stat")).unwrap();
        drop(holder);
        assert_eq!(files.holder().look(), Standing::Held);
    }

    #[test]
    fn memory_high_is_lowered_in_steps_and_not_below_what_is_held() {
        let files = MadeUp::new(1024 * MIB);
        files.memory(100, 924);
        let mut holder = files.holder();
        assert_eq!(files.high(), Some(1008));
        files.memory(100, 908);
        assert_eq!((look(&mut holder), files.high()), (Standing::Quiet, Some(992)));
        files.memory(100, 500);
        assert_eq!((look(&mut holder), files.high()), (Standing::Quiet, Some(896)));
        holder.let_go().unwrap();
        assert_eq!((holder.holding(), look(&mut holder), files.high()), (false, Standing::Quiet, None));
        files.memory(960, 0);
        assert_eq!((look(&mut holder), files.high()), (Standing::Held, None));
        holder.again().unwrap();
        assert_eq!((look(&mut holder), files.high()), (Standing::Held, Some(944)));
        files.memory(960, 30);
        assert_eq!((look(&mut holder), files.high()), (Standing::Held, Some(944)));
    }

    #[test]
    fn a_limit_that_is_changed_is_followed_and_somebody_elses_value_stays() {
        let files = MadeUp::new(64 * MIB);
        let mut holder = files.holder();
        for (max, high) in [(128, 112), (32, 28)] {
            files.number("memory.max", max * MIB);
            assert_eq!((look(&mut holder), files.high()), (Standing::Quiet, Some(high)));
        }
        files.write("memory.max", "max\n");
        files.memory(500, 0);
        assert_eq!((look(&mut holder), files.high()), (Standing::Quiet, None));
        files.write("memory.high", "max\n");
        files.number("memory.max", 512 * MIB);
        files.memory(10, 0);
        assert_eq!((look(&mut holder), files.high()), (Standing::Quiet, Some(448)));
        files.number("memory.high", 40 * MIB);
        assert!(holder.may_change());
        assert_eq!((look(&mut holder), files.high(), holder.may_change()), (Standing::Quiet, Some(40), false));
        files.memory(40, 0);
        assert_eq!(look(&mut holder), Standing::Held);
        holder.let_go().unwrap();
        drop(holder);
        assert_eq!(files.high(), Some(40));
    }

    #[test]
    fn what_was_there_before_is_nobodys_choice() {
        let files = MadeUp::new(64 * MIB);
        let mut holder = files.holder();
        // As systemd does when it is reloaded, whatever the group is at.
        for (anonymous, standing) in [(10, Standing::Quiet), (58, Standing::Held)] {
            files.memory(anonymous, 0);
            files.write("memory.high", "max\n");
            assert_eq!((look(&mut holder), holder.may_change()), (standing, true));
            assert!(files.high().is_some_and(|high| high < 64), "{:?}", files.high());
        }
        files.write("memory.high", "max\n");
        holder.let_go().unwrap();
        assert_eq!((files.high(), holder.may_change()), (None, true));
    }

    #[test]
    fn a_value_of_its_own_counts_once_the_limit_is_above_it() {
        let files = MadeUp::new(64 * MIB);
        files.number("memory.high", 64 * MIB);
        let mut holder = files.holder();
        assert_eq!((look(&mut holder), files.high(), holder.may_change()), (Standing::Quiet, Some(56), true));
        files.number("memory.max", 32 * MIB);
        assert_eq!((look(&mut holder), files.high(), holder.may_change()), (Standing::Quiet, Some(28), true));
        files.number("memory.max", 128 * MIB);
        assert_eq!((look(&mut holder), files.high(), holder.may_change()), (Standing::Quiet, Some(64), false));
        drop(holder);
        assert_eq!(files.high(), Some(64));
    }

    #[test]
    fn a_group_that_has_gone_is_quiet() {
        let files = MadeUp::new(64 * MIB);
        files.memory(60, 0);
        let mut holder = files.holder();
        assert_eq!(look(&mut holder), Standing::Held);
        files.write("memory.current", "");
        assert_eq!(look(&mut holder), Standing::Quiet);
    }
}
