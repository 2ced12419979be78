//! `pagecrew pool take`, `release` and `resize`.

use super::config::parse_file_size;
use super::{ServerAddress, failure};
use crate::failure::Failure;
use crate::output::print;
use pagecrew::pool::{Request, Taken, Until};
use pagecrew::units::{Bytes, parse_size};
use std::path::PathBuf;

/// Take memory: prints the path of a file that is backed and zeroed
///
/// What is not ready is zeroed on the spot. The file goes back when nobody has had it open for the pool's time
/// (--unused there), or when it is released.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagecrew pool take --size 8G
  memory=$(pagecrew pool take --size 8G) && ./program --memory \"$memory\"
  pagecrew pool take --size 8G --node 1 --json | jq -r .path

A program that maps it does so shared (MAP_SHARED), and at an address that is a multiple of 2 MiB.")]
pub struct TakeArguments {
    /// How much: a multiple of 2 MiB
    #[arg(long, value_name = "SIZE")]
    size: String,
    /// Of this NUMA node [default: whichever has it ready]
    #[arg(long, value_name = "N")]
    node: Option<usize>,
    /// JSON: path, size_bytes, ready_bytes, node, elsewhere_bytes (on other nodes; null if the kernel does not say) and backing
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: ServerAddress,
}

/// Give a taken file back
///
/// Only its owner and root can. Its memory is free when nobody has it open any more.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagecrew pool release /run/pagecrew/pool/mem/taken/0123456789abcdef-n0-8589934592-u1000-t1750000000-unused")]
pub struct ReleaseArguments {
    /// The file
    path: PathBuf,
    #[command(flatten)]
    place: ServerAddress,
}

/// Change how much is kept ready, until the server reads its settings again
///
/// Only root and the server's user can.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagecrew pool resize --size 32G
  pagecrew pool resize --size 8G --node 1
  pagecrew pool resize --size 0             (keep nothing ready)")]
pub struct ResizeArguments {
    /// How much: a multiple of 2 MiB, or 0
    #[arg(long, value_name = "SIZE")]
    size: String,
    /// On this NUMA node [default: in all, the same on each node]
    #[arg(long, value_name = "N")]
    node: Option<usize>,
    #[command(flatten)]
    place: ServerAddress,
}

pub fn take(arguments: &TakeArguments) -> Result<(), Failure> {
    let size = size(&arguments.size)?;
    let client = arguments.place.connect()?;
    let taken = client.take(&Request { size, node: arguments.node, until: Until::Unused }).map_err(failure)?;
    let elsewhere = taken.elsewhere();
    if let Some(bytes) = elsewhere.filter(|&bytes| bytes > 0) {
        eprintln!("pagecrew: {} of it are not on node {}", Bytes(bytes as u64), taken.node);
    }
    print(&if arguments.json { json(&taken, elsewhere) } else { format!("{}\n", taken.path.display()) })
}

pub fn release(arguments: &ReleaseArguments) -> Result<(), Failure> {
    // The server knows the path in full.
    let path = std::path::absolute(&arguments.path)
        .map_err(|error| Failure::Failed(format!("{}: {error}", arguments.path.display())))?;
    arguments.place.connect()?.release(&path).map(drop).map_err(failure)
}

pub fn resize(arguments: &ResizeArguments) -> Result<(), Failure> {
    // Nothing, unlike for a file, is a size that can be kept ready.
    let size = if parse_size(&arguments.size) == Ok(0) { 0 } else { size(&arguments.size)? };
    let all = arguments.place.connect()?.resize(size, arguments.node).map_err(failure)?;
    print(&format!("{} are kept ready from now on\n", Bytes(all as u64)))
}

/// The value of `--size`.
pub fn size(text: &str) -> Result<usize, Failure> {
    parse_file_size(text).map_err(|reason| Failure::Usage(format!("--size: {reason}")))
}

fn json(taken: &Taken, elsewhere: Option<usize>) -> String {
    let object = serde_json::json!({
        "path": taken.path.to_string_lossy(),
        "size_bytes": taken.size,
        "ready_bytes": taken.ready,
        "node": taken.node,
        "elsewhere_bytes": elsewhere,
        "backing": taken.backing.name(),
    });
    format!("{object}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagecrew::pool::Backing;

    #[test]
    fn sizes_that_no_file_has() {
        assert_eq!(size("8G"), Ok(8 << 30));
        for text in ["0", "1M", "3M", "x"] {
            assert!(matches!(size(text), Err(Failure::Usage(reason)) if reason.starts_with("--size: ")), "{text}");
        }
    }

    #[test]
    fn the_object_has_all_there_is_to_know() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let taken = Taken { file, path: "/p".into(), size: 4, ready: 2, node: 1, backing: Backing::Tmpfs };
        let object: serde_json::Value = serde_json::from_str(&json(&taken, Some(0))).unwrap();
        let expected = serde_json::json!({ "path": "/p", "size_bytes": 4, "ready_bytes": 2, "node": 1, "elsewhere_bytes": 0, "backing": "tmpfs" });
        assert_eq!(object, expected);
        assert!(json(&taken, None).contains("\"elsewhere_bytes\":null"));
    }
}
