//! Which spans are worth a cache: those of sizes that a program asks for again soon after they were given back.
//!
//! A span that waits in a cache can't be joined with the free memory around it. Where its size is asked for again soon, that is well
//! spent; where sizes differ from one request to the next, such spans lie about until somebody needs all of them, and the program takes
//! more memory than it would. So each size is watched: when a span of it is handed out by the zone, was one of its size among the
//! last few that came back from this CPU? If that is rarely so, spans of that size stay in the zone, until it is so again.
//!
//! Long spans with huge pages wait only where several CPUs give and take such spans by turns: from the zone, each would get what another one has
//! just written to, and has in its own caches.

use super::classes::CLASSES;

/// So many of the last spans that came back from a CPU are remembered.
const LAST: usize = size_of::<u64>();
/// A size of which so many spans more were handed out anew than again soon stays in the zone.
const ANEW: u8 = 32;
/// A span that is asked for again soon makes up for so many that are not.
const AGAIN: u8 = 4;

/// A long span that is handed out on another CPU than the last one came back from counts so much; on the same one, it takes 1 off.
const STRANGER: u8 = 8;
/// So much means that CPUs meet.
const MEET: u8 = 64;

/// What came back to one zone from each CPU, and what that says. Pure; the zone's lock protects it.
pub(super) struct Reuse {
    /// The classes of the last spans, a byte each, the last one in the lowest; 0 for none.
    last: Box<[u64]>,
    /// By how much more often a span of each class was asked for anew than again soon.
    anew: [u8; CLASSES + 1],
    /// From which CPU a long span came back last, and how often that was another one than the next one went to.
    long_from: usize,
    strangers: u8,
}

const _: () = assert!(CLASSES < 1 << (64 / LAST));

impl Reuse {
    /// Nothing has come back from any of `cpus` CPUs.
    pub fn new(cpus: usize) -> Reuse {
        Reuse { last: vec![0; cpus].into(), anew: [0; CLASSES + 1], long_from: usize::MAX, strangers: 0 }
    }

    /// A span of a class came back from a CPU; of class 0, it says nothing.
    pub fn came_back(&mut self, cpu: usize, class: u8) {
        if let Some(last) = self.last.get_mut(cpu).filter(|_| class != 0) {
            *last = *last << 8 | u64::from(class);
        }
    }

    /// A long span with huge pages came back from a CPU.
    pub fn long_came_back(&mut self, cpu: usize) {
        self.long_from = cpu;
    }

    /// A long span with huge pages is handed out on a CPU: whether several CPUs give and take such spans.
    pub fn long_goes_out(&mut self, cpu: usize) -> bool {
        self.strangers = match self.long_from {
            usize::MAX => self.strangers,
            from if from == cpu => self.strangers.saturating_sub(1),
            _ => (self.strangers + STRANGER).min(2 * MEET),
        };
        self.strangers >= MEET
    }

    /// A span of a class is handed out on a CPU: whether it may wait in a cache when it comes back. Each that came back speaks for one.
    pub fn may_wait(&mut self, cpu: usize, class: u8) -> bool {
        let Some((last, anew)) = self.last.get_mut(cpu).zip(self.anew.get_mut(usize::from(class))) else { return true };
        let mut classes = last.to_le_bytes();
        if let Some(found) = classes.iter_mut().find(|found| **found == class) {
            *found = 0;
            *last = u64::from_le_bytes(classes);
            *anew = anew.saturating_sub(AGAIN);
        } else {
            *anew = (*anew + 1).min(ANEW + AGAIN);
        }
        *anew <= ANEW
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The share, in percent, of spans that may wait in a program that replaces those in its slots by such of `sizes` sizes at random.
    fn share(sizes: u64, slots: usize) -> usize {
        let mut reuse = Reuse::new(1);
        let mut state = 1u64;
        let mut size = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % sizes) as u8 + 1
        };
        let mut slots: Vec<u8> = (0..slots).map(|_| size()).collect();
        let mut round = |count: usize| -> usize {
            (0..count)
                .map(|round| {
                    let slot = round % slots.len();
                    reuse.came_back(0, slots[slot]);
                    slots[slot] = size();
                    usize::from(reuse.may_wait(0, slots[slot]))
                })
                .sum()
        };
        round(10_000);
        round(10_000) / 100
    }

    #[test]
    fn of_a_mixture_few_wait_and_of_a_few_sizes_all() {
        assert_eq!([share(1, 16), share(2, 16), share(4, 32)], [100; 3]);
        assert!(share(80, 16) < 25 && share(80, 64) < 25, "{} {}", share(80, 16), share(80, 64));
    }

    #[test]
    fn a_size_that_is_not_asked_for_again_soon_stays_in_the_zone_until_it_is() {
        let mut reuse = Reuse::new(2);
        // A program fills its slots.
        assert_eq!((0..1000).filter(|_| reuse.may_wait(0, 5)).count(), ANEW as usize);
        reuse.came_back(0, 5);
        assert!(!reuse.may_wait(1, 5), "on another CPU");
        assert!(reuse.may_wait(0, 5));
        assert!(!reuse.may_wait(0, 5), "it spoke for one");
        assert!(reuse.may_wait(0, 6), "nothing is known of that size");
        assert!(reuse.may_wait(7, 5), "nor of that CPU");
    }

    #[test]
    fn long_spans_wait_where_several_cpus_give_and_take_them() {
        // Two threads, of which one in `every` times one is between the other's free and its next request.
        let meet = |every: usize| {
            let mut reuse = Reuse::new(2);
            (0..1000)
                .map(|round| {
                    reuse.long_came_back(usize::from(round % every == 0));
                    reuse.long_goes_out(0)
                })
                .skip(500)
                .filter(|&meet| meet)
                .count()
        };
        assert_eq!([meet(2), meet(5), meet(1000)], [500, 500, 0]);
        assert!(meet(9) <= 250, "{}", meet(9));
        let mut reuse = Reuse::new(2);
        assert!((0..1000).all(|_| !reuse.long_goes_out(0)), "nothing ever came back");
    }

    #[test]
    fn only_the_last_few_are_remembered() {
        let mut reuse = Reuse::new(1);
        (0..=ANEW).for_each(|_| assert!(reuse.may_wait(0, 1) || reuse.anew[1] > ANEW));
        reuse.came_back(0, 1);
        (2..LAST as u8 + 2).for_each(|class| reuse.came_back(0, class));
        assert!(!reuse.may_wait(0, 1));
    }
}
