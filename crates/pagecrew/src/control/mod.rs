//! Laws that several services share: what background work may take ([`Budget`]), and when something that brought nothing is tried again
//! ([`Backoff`]). Pure: each is a function of what it was told and of the time.

pub mod backoff;
pub mod budget;

pub use backoff::Backoff;
pub use budget::{Bucket, Budget};
