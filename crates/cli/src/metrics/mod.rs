//! `--metrics`: the figures of a command that goes on, as OpenMetrics, for this machine only.

mod address;
mod http;
mod listener;
mod service;
mod text;

#[cfg(test)]
pub mod check;

pub use address::Address;
pub use listener::Listener;
pub use service::Service;
pub use text::text;
