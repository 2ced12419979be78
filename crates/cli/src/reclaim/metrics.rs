//! How it stands, as metrics.

use crate::failure::Failure;
use crate::metrics::{Address, Listener, Service};
use crate::output::note;
use pagecrew::reclaim::{BehindStanding, GroupStanding, Standing};
use pagecrew::stats::{Sample, samples};
use std::sync::{Arc, Mutex, PoisonError};

/// What says how it stands with groups, and with drop-behind.
pub type OfGroups = Arc<dyn Fn() -> GroupStanding + Send + Sync>;
pub type OfBehind = Arc<dyn Fn() -> BehindStanding + Send + Sync>;

/// Where it is written down how it stands with nodes, for those who serve it.
#[derive(Clone, Default)]
pub struct Board(Arc<Mutex<Standing>>);

impl Board {
    /// Writes it down.
    pub fn write(&self, standing: Standing) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = standing;
    }

    /// Serves it at `address`, with how it stands with groups and drop-behind.
    pub fn serve(&self, address: &Address, groups: OfGroups, behind: OfBehind) -> Result<Service, Failure> {
        let board = self.clone();
        let source = move || all(*board.0.lock().unwrap_or_else(PoisonError::into_inner), groups(), behind());
        let service = Service::start(Listener::new(address)?, source)?;
        note(&format!("metrics at {}", service.address()));
        Ok(service)
    }
}

fn all(standing: Standing, groups: GroupStanding, behind: BehindStanding) -> Vec<Sample> {
    samples(standing.figures(), &[])
        .chain(samples(groups.figures(), &[]))
        .chain(samples(behind.figures(), &[]))
        .collect()
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
        let groups =
            GroupStanding { listened_to: 12, reclaimed_bytes: 5, cpu_ns: 1_500_000_000, ..GroupStanding::default() };
        let behind = BehindStanding { processes: 2, dropped_bytes: 77, ..BehindStanding::default() };
        assert_complete(Part::Reclaim, all(standing, groups, behind));
        let text = text(all(standing, groups, behind));
        for line in [
            "pagecrew_reclaim_factor 120\n",
            "pagecrew_reclaim_demand_bytes 6442450944\n",
            "pagecrew_reclaim_lead_seconds 0.05\n",
            "pagecrew_reclaim_stalls_total 3\n",
            "pagecrew_reclaim_groups_listened_to 12\n",
            "pagecrew_reclaim_groups_reclaimed_bytes_total 5\n",
            "pagecrew_reclaim_groups_cpu_seconds_total 1.5\n",
            "pagecrew_reclaim_behind_processes 2\n",
            "pagecrew_reclaim_behind_dropped_bytes_total 77\n",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
    }
}
