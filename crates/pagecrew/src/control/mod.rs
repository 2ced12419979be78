//! Laws that several services share: what background work may take ([`Budget`]), when something that brought nothing is tried again
//! ([`Backoff`]), whether tasks wait for memory ([`Pressure`]), how much has to be free ahead of demand ([`Lead`]), how a service is kept
//! going ([`Supervision`]), what is said of what happens again and again ([`Repeats`]), and how services keep from chasing each other ([`arbiter`]). Pure: each is a function of what it was told and of the time.

pub mod arbiter;
pub mod backoff;
pub mod budget;
pub mod lead;
pub mod pressure;
pub mod repeats;
pub mod supervision;

pub use backoff::Backoff;
pub use budget::{Bucket, Budget};
pub use lead::Lead;
pub use pressure::{Pressure, Spell};
pub use repeats::Repeats;
pub use supervision::Supervision;
