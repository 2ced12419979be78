//! What is known: the last sample, what it says together with the one before, and what the services have answered.

use super::candidates::Report;
use super::programs::Program;
use super::rates::{History, per_second};
use super::sample::{Kswapd, Sample};
use super::service::{Figures, Service};
use super::sources::PoolStatus;
use pagecrew::sys::activity::Activity;
use pagecrew::sys::psi::{Pressure, Stalled};

/// What is counted of reclaim, swap and refaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    Stalls,
    DirectScanned,
    DirectReclaimed,
    BackgroundScanned,
    BackgroundReclaimed,
    SwappedIn,
    SwappedOut,
    RefaultedAnon,
    RefaultedFile,
}

impl Count {
    /// All of them, in their order.
    pub const ALL: [Count; 9] = [
        Count::Stalls,
        Count::DirectScanned,
        Count::DirectReclaimed,
        Count::BackgroundScanned,
        Count::BackgroundReclaimed,
        Count::SwappedIn,
        Count::SwappedOut,
        Count::RefaultedAnon,
        Count::RefaultedFile,
    ];

    /// The key in JSON.
    pub fn key(self) -> &'static str {
        match self {
            Count::Stalls => "stalls",
            Count::DirectScanned => "direct_scanned_bytes",
            Count::DirectReclaimed => "direct_reclaimed_bytes",
            Count::BackgroundScanned => "background_scanned_bytes",
            Count::BackgroundReclaimed => "background_reclaimed_bytes",
            Count::SwappedIn => "swapped_in_bytes",
            Count::SwappedOut => "swapped_out_bytes",
            Count::RefaultedAnon => "refaulted_anon_bytes",
            Count::RefaultedFile => "refaulted_file_bytes",
        }
    }

    /// Since the machine was started.
    pub fn of(self, activity: &Activity) -> Option<u64> {
        match self {
            Count::Stalls => activity.stalls,
            Count::DirectScanned => activity.direct_scanned,
            Count::DirectReclaimed => activity.direct_reclaimed,
            Count::BackgroundScanned => activity.background_scanned,
            Count::BackgroundReclaimed => activity.background_reclaimed,
            Count::SwappedIn => activity.swapped_in,
            Count::SwappedOut => activity.swapped_out,
            Count::RefaultedAnon => activity.refaulted_anon,
            Count::RefaultedFile => activity.refaulted_file,
        }
    }
}

/// What those say who are asked by threads of their own.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answers {
    /// `pagecrew trim --watch`.
    pub trim: Service<Figures>,
    /// `pagecrew reclaim`.
    pub reclaim: Service<Figures>,
    /// The pool's socket.
    pub pool: Service<PoolStatus>,
    /// The pool's metrics, which others may read than those who may take from it.
    pub pool_figures: Service<Figures>,
    /// The processes with the most huge pages.
    pub candidates: Service<Report>,
}

/// Everything that is shown.
#[derive(Debug, Clone, Default)]
pub struct Model {
    /// The last one.
    pub sample: Sample,
    /// Seconds since the one before it.
    pub seconds: Option<f64>,
    /// In the order of [`Count::ALL`], a second.
    pub rates: [History; 9],
    /// In the order of [`pagecrew::sys::psi::Resource::ALL`]: the share of the time since the sample before in which some task waited.
    pub some: [History; 3],
    /// The same of all tasks.
    pub full: [Option<f64>; 3],
    /// In the order of the sample's: the share of one CPU that a thread had.
    pub kswapds: Vec<Option<f64>>,
    /// The most of those.
    pub kswapd: History,
    /// By number.
    pub programs: Vec<Program>,
    /// What services have answered.
    pub answers: Answers,
}

impl Model {
    /// Takes the next sample, with what belongs to it.
    pub fn next(&mut self, sample: Sample, programs: Vec<Program>, answers: Answers) {
        let before = std::mem::replace(&mut self.sample, sample);
        let first = before.at_ns == 0;
        let passed = self.sample.at_ns.saturating_sub(before.at_ns) as f64 / 1e9;
        self.seconds = (!first && passed > 0.0).then_some(passed);
        (self.programs, self.answers) = (programs, answers);
        let Some(seconds) = self.seconds else {
            self.kswapds = vec![None; self.sample.kswapds.len()];
            return;
        };
        for (history, count) in self.rates.iter_mut().zip(Count::ALL) {
            history.push(per_second(count.of(&before.activity), count.of(&self.sample.activity), seconds));
        }
        for (index, (before, now)) in before.pressure.iter().zip(&self.sample.pressure).enumerate() {
            let share = |line: &dyn Fn(&Pressure) -> Option<Stalled>| {
                let total = |pressure: &Option<Pressure>| pressure.as_ref().and_then(line).map(|line| line.total_us);
                per_second(total(before), total(now), seconds).map(|us| (us / 1e6).min(1.0))
            };
            self.some[index].push(share(&|pressure| Some(pressure.some)));
            self.full[index] = share(&|pressure| pressure.full);
        }
        let busy = |thread: &Kswapd| {
            let earlier = before.kswapds.iter().find(|other| other.pid == thread.pid)?;
            per_second(earlier.run_ns, thread.run_ns, seconds).map(|ns| (ns / 1e9).min(1.0))
        };
        self.kswapds = self.sample.kswapds.iter().map(busy).collect();
        self.kswapd.push(self.kswapds.iter().flatten().copied().reduce(f64::max));
    }

    /// The rate now.
    pub fn rate(&self, count: Count) -> Option<f64> {
        self.history(count).last()
    }

    /// The rates so far.
    pub fn history(&self, count: Count) -> &History {
        &self.rates[count as usize]
    }
}

/// Made-up ones.
#[cfg(test)]
pub mod made_up {
    use super::super::candidates::Candidate;
    use super::super::programs::made_up::program;
    use super::super::sample::NodeNow;
    use super::*;
    use crate::metrics::Exposition;
    use pagecrew::stats::Part;
    use pagecrew::sys::nodes::Node;
    use pagecrew::sys::procfs::MemoryInfo;
    use pagecrew::sys::smaps::Rollup;

    /// A sample of a machine with so many nodes, `second` seconds after its start.
    pub fn sample(nodes: usize, second: u64) -> Sample {
        let line = |total_us| Stalled { avg10: 0.0125, avg60: 0.0, avg300: 0.0, total_us };
        let pressure = Pressure { some: line(second * 20_000), full: Some(line(second * 10_000)) };
        let node = |number: usize| NodeNow {
            memory: Node {
                number,
                total: 64 << 30,
                free: (number as u64) * (50 << 20),
                anon: Some(30 << 30),
                anon_huge: Some(20 << 30),
                file: Some(20 << 30),
                shmem: Some(1 << 30),
                slab: Some(2 << 30),
            },
            watermarks: Some([64 << 20, 128 << 20, 192 << 20]),
        };
        let count = |each: u64| Some(second * each);
        Sample {
            at_ns: (second + 1) * 1_000_000_000,
            memory: Some(MemoryInfo {
                total: 64 << 30,
                available: 20 << 30,
                swap: 8 << 30,
                free_swap: 7 << 30,
                files: 20 << 30,
                reclaimable: 1 << 30,
            }),
            nodes: (0..nodes).map(node).collect(),
            factor: Some(10),
            pressure: [Some(pressure); 3],
            activity: Activity {
                stalls: count(5),
                direct_scanned: count(2 << 20),
                direct_reclaimed: count(1 << 20),
                background_scanned: count(200 << 20),
                background_reclaimed: count(100 << 20),
                swapped_in: count(0),
                swapped_out: count(4096),
                refaulted_anon: count(0),
                refaulted_file: count(8 << 20),
            },
            kswapds: (0..nodes)
                .map(|node| Kswapd { node, pid: 40 + node as i32, run_ns: count(250_000_000) })
                .collect(),
        }
    }

    /// The figures of a part, out of lines of an exposition.
    pub fn figures(part: Part, lines: &str) -> Service<Figures> {
        Service::Here(Figures::of(part, &Exposition::parse(&format!("{lines}# EOF\n")).unwrap()).unwrap())
    }

    /// Services that all run.
    pub fn answers() -> Answers {
        let candidate = |pid: u32| Candidate {
            pid,
            name: format!("name-{pid}"),
            memory: Rollup { anonymous: 8 << 30, anon_huge: u64::from(1000 - pid) << 21 },
        };
        let pool = PoolStatus {
            document: serde_json::json!({ "ready_bytes": 12_u64 << 30, "size_bytes": 16_u64 << 30, "taken_bytes": 8_u64 << 30, "state": "filling" }),
            lines: vec![
                "pool at /run/pagecrew/pool/mem (tmpfs, served by process 7): filling".into(),
                String::new(),
                "node  size".into(),
            ],
        };
        Answers {
            trim: figures(
                Part::Trim,
                "pagecrew_trim_members 3\npagecrew_trim_gone_bytes_total 1073741824\npagecrew_trim_huge_pages 77\n",
            ),
            reclaim: figures(
                Part::Reclaim,
                "pagecrew_reclaim_factor 120\npagecrew_reclaim_own_factor 10\npagecrew_reclaim_gap_bytes 1073741824\n\
                 pagecrew_reclaim_demand_bytes 2147483648\npagecrew_reclaim_lead_seconds 0.05\npagecrew_reclaim_stalls_total 3\n",
            ),
            pool: Service::Here(pool),
            pool_figures: Service::NotAsked,
            candidates: Service::Here(Report {
                candidates: (1..=30).map(candidate).collect(),
                processes: 300,
                denied: 12,
                waiting: 3,
            }),
        }
    }

    /// A machine with so many nodes and programs, after some seconds.
    pub fn model(nodes: usize, programs: u32) -> Model {
        let mut model = Model::default();
        let all = || (1..=programs).map(|pid| program(pid, "a program", u64::from(pid) << 20, Some(1024.0))).collect();
        for second in 0..20 {
            model.next(sample(nodes, second), all(), answers());
        }
        model
    }
}

#[cfg(test)]
mod tests {
    use super::made_up::{answers, sample};
    use super::*;

    #[test]
    fn one_sample_says_nothing_about_rates() {
        let mut model = Model::default();
        model.next(sample(2, 0), Vec::new(), answers());
        assert_eq!((model.seconds, model.rate(Count::Stalls), &model.kswapds), (None, None, &vec![None, None]));
        assert!(model.answers.trim.here().is_some());
    }

    #[test]
    fn two_samples_do() {
        let mut model = Model::default();
        model.next(sample(2, 0), Vec::new(), Answers::default());
        model.next(sample(2, 2), Vec::new(), Answers::default());
        assert_eq!((model.seconds, model.rate(Count::Stalls)), (Some(2.0), Some(5.0)));
        assert_eq!(model.rate(Count::BackgroundReclaimed), Some((100 << 20) as f64));
        assert_eq!((model.some[0].last(), model.full[0]), (Some(0.02), Some(0.01)));
        assert_eq!((model.kswapds.clone(), model.kswapd.last()), (vec![Some(0.25); 2], Some(0.25)));
    }

    #[test]
    fn what_begins_anew_or_goes_has_no_rate() {
        let mut model = Model::default();
        model.next(sample(2, 5), Vec::new(), Answers::default());
        // Counters that are lower than before, a thread that is another one, no pressure any more.
        let mut next = sample(2, 1);
        next.at_ns = 7_000_000_000;
        next.pressure[0] = None;
        next.kswapds[0].pid = 99;
        next.kswapds[1].run_ns = None;
        model.next(next, Vec::new(), Answers::default());
        assert_eq!((model.rate(Count::Stalls), model.rate(Count::SwappedIn)), (None, Some(0.0)));
        assert_eq!((model.some[0].last(), model.some[1].last(), model.full[0]), (None, None, None));
        assert_eq!((model.kswapds.clone(), model.kswapd.last()), (vec![None, None], None));
        // A machine that has lost everything, and a clock that stands still.
        model.next(Sample { at_ns: 7_000_000_000, ..Sample::default() }, Vec::new(), Answers::default());
        assert_eq!((model.seconds, model.kswapds.len()), (None, 0));
    }

    #[test]
    fn counts_are_in_their_order() {
        for (index, count) in Count::ALL.into_iter().enumerate() {
            assert_eq!(count as usize, index);
        }
    }
}
