//! region
mod options;
pub use options::{NAMES, Name, OptionError, Options};
