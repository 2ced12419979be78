//! `pagecrew pool wait`: for whoever starts when enough is ready.

use super::{ServerAddress, config, failure, status};
use crate::failure::Failure;
use pagecrew::pool::Client;
use pagecrew::units::{Bytes, parse_duration};
use std::time::{Duration, Instant};

/// Wait until so much is ready
///
/// Ends with status 0 as soon as that much can be taken without waiting, with 1 if that is not so in time, and with 2 if the pool
/// keeps less than that.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagecrew pool wait --size 8G                        (as ExecStartPre of a service that takes 8 GiB)
  pagecrew pool wait --size 8G --node 1 --timeout 2m  (also for a server that is only just being started)")]
pub struct Arguments {
    /// How much
    #[arg(long, value_name = "SIZE", value_parser = config::parse_file_size)]
    size: usize,
    /// On this node [default: on all together]
    #[arg(long, value_name = "N")]
    node: Option<usize>,
    /// Give up after so long, and until then wait for a server as well [default: as long as it takes]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    timeout: Option<Duration>,
    #[command(flatten)]
    place: ServerAddress,
}

const PAUSE: Duration = Duration::from_millis(100);
/// A server that has not answered after so long is not taken for one that answers.
const ANSWERS: Duration = Duration::from_secs(1);

/// `pagecrew pool wait`.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let begin = Instant::now();
    let wanted = arguments.size as u64;
    let mut client: Option<Client> = None;
    loop {
        let left = arguments.timeout.map(|timeout| timeout.saturating_sub(begin.elapsed()).max(ANSWERS));
        let asked = match client.take() {
            Some(client) => Ok(client),
            None => arguments.place.connect_within(left),
        };
        let asked = asked.and_then(|connected| {
            connected.set_patience(left);
            let json = connected.status().map_err(failure)?;
            client = Some(connected);
            status::ready_of(&json, arguments.node)
        });
        let late = arguments.timeout.is_some_and(|timeout| begin.elapsed() >= timeout);
        match asked {
            Ok((ready, _)) if ready >= wanted => return Ok(()),
            Ok((_, size)) if size < wanted => {
                let [size, wanted] = [size, wanted].map(Bytes);
                return Err(Failure::Usage(format!(
                    "{wanted} are never ready: the pool keeps {size} there; see pool resize"
                )));
            }
            Ok((ready, _)) if late => {
                let [ready, wanted] = [ready, wanted].map(Bytes);
                return Err(Failure::Failed(format!("only {ready} of {wanted} are ready; pool status says why")));
            }
            // A server that is being started, or started again.
            Err(Failure::Failed(_)) if arguments.timeout.is_some() && !late => {}
            Err(failure) => return Err(failure),
            Ok(_) => {}
        }
        std::thread::sleep(PAUSE);
    }
}
