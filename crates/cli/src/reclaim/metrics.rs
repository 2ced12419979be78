//! How it stands, as metrics.

use crate::failure::Failure;
use crate::metrics::{Address, Listener, Service};
use crate::output::note;
use pagecrew::reclaim::Standing;
use pagecrew::stats::{Sample, samples};
use std::sync::{Arc, Mutex, PoisonError};

/// Where it is written down how it stands, for those who serve it.
#[derive(Clone, Default)]
pub struct Board(Arc<Mutex<Standing>>);

impl Board {
    /// Writes it down.
    pub fn write(&self, standing: Standing) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = standing;
    }

    /// Serves it at `address`.
    pub fn serve(&self, address: &Address) -> Result<Service, Failure> {
        let board = self.clone();
        let source = move || all(*board.0.lock().unwrap_or_else(PoisonError::into_inner));
        let service = Service::start(Listener::new(address)?, source)?;
        note(&format!("metrics at {}", service.address()));
        Ok(service)
    }
}

fn all(standing: Standing) -> Vec<Sample> {
    samples(standing.figures(), &[]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::check::assert_complete;
    use crate::metrics::text;
    use pagecrew::stats::Part;

    #[test]
    fn the_exposition_is_what_is_registered() {
        let standing =
            Standing { factor: 120, demand_bytes: 6 << 30, lead_ns: 50_000_000, stalls: 3, ..Standing::default() };
        assert_complete(Part::Reclaim, all(standing));
        let text = text(all(standing));
        for line in [
            "pagecrew_reclaim_factor 120\n",
            "pagecrew_reclaim_demand_bytes 6442450944\n",
            "pagecrew_reclaim_lead_seconds 0.05\n",
            "pagecrew_reclaim_stalls_total 3\n",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
    }
}
