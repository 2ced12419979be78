//! `--metrics`: the figures of a command that goes on, as OpenMetrics, for this machine only; and who reads them here.

mod address;
mod client;
mod exposition;
mod http;
mod listener;
mod service;
mod text;

#[cfg(test)]
pub mod check;

pub use address::Address;
pub use client::{NoMetrics, scrape};
pub use exposition::Exposition;
pub use listener::Listener;
pub use service::Service;
pub use text::text;
