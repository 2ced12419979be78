//! Counters under the names that the field uses, in one page of memory that other processes may read.

mod counters;
mod page;

pub use counters::{Counter, Counters, Description, Unit};
pub use page::{
    MAX_LANES, MAX_ZONES, Page, ReadError, Snapshot, StatsPage, ZoneBytes, ZoneStates, directory, directory_of,
    own_directory, read,
};
