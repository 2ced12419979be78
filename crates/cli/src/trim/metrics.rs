//! The figures of a watch as metrics.

use super::hold::Waiter;
use super::session::Session;
use crate::failure::Failure;
use crate::metrics::{Listener, Service};
use crate::output::note;
use pagecrew::stats::{Number, Sample, samples};
use pagecrew::sys::clock::{now_ns, thread_cpu_ns};
use pagecrew::trim::{BUDGET, Holds, Kernel, Overview, Tally};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How often the figures are renewed.
const INTERVAL: Duration = Duration::from_secs(1);

/// Where a watch writes down its figures, for those who serve them: the watch waits for nobody.
pub struct Board {
    samples: Arc<Mutex<Vec<Sample>>>,
    next_ns: u64,
    _service: Service,
}

impl Board {
    /// Serves the figures where the job of `session` says; `None` where it says nothing.
    pub fn new(session: &Session) -> Result<Option<Board>, Failure> {
        let Some(address) = &session.job().metrics else { return Ok(None) };
        let samples = Arc::new(Mutex::new(Vec::new()));
        let read = samples.clone();
        let source = move || read.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let service = Service::start(Listener::new(address)?, source)?;
        note(&format!("metrics at {}", service.address()));
        Ok(Some(Board { samples, next_ns: 0, _service: service }))
    }

    /// Renews the figures if it is time to, which counts for the budget. Returns when it is time the next time.
    pub fn renew(&mut self, session: &mut Session, waiter: &Waiter) -> u64 {
        let (now, begin_ns) = (now_ns(), thread_cpu_ns());
        if now >= self.next_ns {
            self.next_ns = now + INTERVAL.as_nanos() as u64;
            let fresh = all(session.overview(), &session.total(), waiter.holds(), session.job().options.cpu);
            *self.samples.lock().unwrap_or_else(PoisonError::into_inner) = fresh;
            session.fleet.charge(thread_cpu_ns() - begin_ns, &Kernel);
        }
        self.next_ns
    }
}

/// Every sample of a watch.
fn all(overview: Overview, total: &Tally, holds: Holds, cpu: Option<f64>) -> Vec<Sample> {
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
        let samples = all(overview, &total, holds, Some(0.01));
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
