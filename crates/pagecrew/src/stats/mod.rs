//! Counters under the names that the field uses, in one page of memory that other processes may read; and what every number is, in any part
//! ([`Metric`]).

mod ahead;
mod counters;
mod metric;
mod page;
mod process;

pub use ahead::{Ahead, Publisher, read as read_ahead};
pub use counters::{Counter, Counters};
pub(crate) use metric::figures;
pub use metric::{Figure, Kind, Metric, Number, Part, Sample, Unit, samples};
pub use page::{
    MAX_LANES, MAX_ZONES, Page, ReadError, Snapshot, StatsPage, ZoneBytes, ZoneStates, directory, directory_of,
    own_directory, read,
};
pub use process::{Elsewhere, NodeMemory, Usage};
