//! Memory that is ready and zeroed before it is asked for, in files that are handed to virtual machines and big processes.
//!
//! **Life of a file.** The keeper makes it in a private mount (`store`), of a size that is likely to be asked for (`demand`, `stock`), and has it
//! filled with zeroed huge pages by the filler, a process of the idle class, within a share of a CPU, as long as the machine has memory
//! that nobody else wants (`gate`), and not while somebody starts with what he has just taken (`rest`). A client's request makes it
//! that client's, once: what was asked for and is not ready the client itself zeroes on the spot (`completion`). When nobody has it any
//! more, its memory goes to the kernel, and only when the kernel has it, it is off the books, which are the files' names (`ledger`).
//!
//! **Who is served.** Of a few threads one waits for all clients (`front`, `duties`), the others do what is asked, each user in turn (`turns`, `server`), and
//! what users can hold up is done by threads that nobody else needs (`errands`); how much each user may have is in `quota`, and how many may
//! come is in `capacity`; what is said, in `protocol`.
//!
//! **Who decides.** All that is decided about files is a pure function of events (`broker`, with what is known in `state`); the threads hand
//! events in and perform what comes out. It is tried with made-up machines, users and kills (`world`).
//!
//! Source: zero free pages ahead of time (Liang Li, 2020), whose reviewers asked for a pool of ready files instead, for many CPUs at
//! allocation, and for somebody to pay.

mod broker;
mod capacity;
mod client;
mod completion;
pub mod demand;
mod duties;
mod errands;
mod error;
mod filler;
mod front;
pub mod gate;
mod keeper;
mod ledger;
mod options;
mod protocol;
mod quota;
mod rest;
mod server;
#[cfg(test)]
mod simulation;
mod state;
mod status;
pub mod stock;
mod store;
pub mod support;
mod turns;
mod unread;
#[cfg(test)]
mod world;

pub use client::{Client, Request, Taken};
pub use error::Error;
pub use filler::fill;
pub use options::{Backing, CPU, DIRECTORY, Options, SOCKET, Sizes, UNUSED};
pub use protocol::{ANSWER_MOST, Answer, Code, Malformed, REQUEST_MOST, Request as Packet, Until};
pub use quota::{Exceeded, FILES_MOST, GroupQuota, Quotas, Subordinates};
pub use server::{Observer, Progress, Server, Tell};
pub use state::Counters;
pub use status::{FileStatus, NodeStatus, STATUS_SHOWN, STATUS_VERSION, Status, Sums, TakenStatus, UserStatus};
pub use store::{holders, safe_directory, socket_directory};
