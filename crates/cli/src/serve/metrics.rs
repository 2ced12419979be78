//! How the services stand, as metrics of the supervisor's own.

use super::part::Part;
use crate::failure::Failure;
use crate::metrics::{Address, Listener, Service};
use pagecrew::control::supervision::Standing;
use pagecrew::stats::{Sample, samples};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Where it is written down how they stand, for those who serve it.
#[derive(Clone, Default)]
pub struct Board(Arc<Mutex<Vec<(Part, Standing)>>>);

impl Board {
    /// Writes it down.
    pub fn write(&self, standings: Vec<(Part, Standing)>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = standings;
    }

    /// Serves it at the socket `path`.
    pub fn serve(&self, path: &Path) -> Result<Service, Failure> {
        let board = self.clone();
        let source = move || all(&board.0.lock().unwrap_or_else(PoisonError::into_inner));
        Service::start(Listener::new(&Address::Socket(path.to_owned()))?, source)
    }
}

/// Every sample of the supervisor's.
pub fn all(standings: &[(Part, Standing)]) -> Vec<Sample> {
    let of = |(part, standing): &(Part, Standing)| {
        samples(standing.figures(), &[part.name().to_owned()]).collect::<Vec<_>>()
    };
    standings.iter().flat_map(of).collect()
}
