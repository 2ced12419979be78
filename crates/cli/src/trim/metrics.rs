//! The figures of a watch as metrics.

use crate::failure::Failure;
use crate::metrics::{Address, Listener, Service};
use crate::output::note;
use pagecrew::group::Holds;
use pagecrew::stats::{Number, Sample, samples};
use pagecrew::trim::{BUDGET, Overview, Tally};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The figures of a watch, as they were written down last.
#[derive(Debug, Clone, Copy, Default)]
pub struct Figures {
    pub overview: Overview,
    pub total: Tally,
    pub holds: Holds,
    /// The budget, if there is one.
    pub cpu: Option<f64>,
}

/// Where a watch writes down its figures, for those who serve them: the watch waits for nobody.
#[derive(Clone, Default)]
pub struct Board {
    figures: Arc<Mutex<Figures>>,
    /// What serving them has taken.
    scraped_ns: Arc<AtomicU64>,
}

impl Board {
    /// Changes some of them.
    pub fn change(&self, change: impl FnOnce(&mut Figures)) {
        change(&mut self.figures.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// CPU time that was used to answer those who ask for them.
    pub fn scraped_ns(&self) -> u64 {
        self.scraped_ns.load(Ordering::Relaxed)
    }

    /// Serves them at `address`.
    pub fn serve(&self, address: &Address) -> Result<Service, Failure> {
        let board = self.clone();
        let source = move || {
            let mut figures = Figures::default();
            board.change(|now| figures = *now);
            all(&figures)
        };
        let service = Service::start_counted(Listener::new(address)?, source, self.scraped_ns.clone())?;
        note(&format!("metrics at {}", service.address()));
        Ok(service)
    }
}

/// Every sample of a watch.
fn all(figures: &Figures) -> Vec<Sample> {
    let Figures { overview, total, holds, cpu } = figures;
    let budget = cpu.map(|cpu| Sample { metric: BUDGET, labels: Vec::new(), number: Number::Real(cpu) });
    samples(overview.figures(), &[])
        .chain(samples(total.figures(), &[]))
        .chain(samples(holds.figures(), &[]))
        .chain(total.left.samples())
        .chain(budget)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::check::assert_complete;
    use crate::metrics::text;
    use pagecrew::stats::Part;
    use pagecrew::trim::Left;

    #[test]
    fn the_exposition_is_what_is_registered() {
        let overview = Overview { members: 3, budget_cpu_ns: 1_500_000_000, ..Overview::default() };
        let left = Left { resting: 7, busy: 9, ..Left::default() };
        let total = Tally { gone_bytes: 1 << 40, split_ns: 250_000_000, left, ..Tally::default() };
        let holds = Holds { holding: 1, held: 2, let_go: 1 };
        let samples = all(&Figures { overview, total, holds, cpu: Some(0.01) });
        assert_complete(Part::Trim, samples.clone());
        let text = text(samples);
        for line in [
            "pagecrew_trim_members 3\n",
            "pagecrew_trim_budget_cpu_seconds_total 1.5\n",
            "pagecrew_trim_budget_cpu_ratio 0.01\n",
            "pagecrew_trim_gone_bytes_total 1099511627776\n",
            "pagecrew_trim_split_seconds_total 0.25\n",
            "pagecrew_trim_huge_pages_excepted{reason=\"resting\"} 7\n",
            "pagecrew_trim_huge_pages_left_total{reason=\"busy\"} 9\n",
            "pagecrew_trim_holding 1\n",
            "pagecrew_trim_held_total 2\n",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
    }
}
