//! `pagecrew bench` and `pagecrew demo`, which are crates of their own.

use crate::failure::Failure;
use clap::Args;
use std::path::PathBuf;

/// Measure against what would be used instead
///
/// Each comparison is made in one run, alternating between the two sides.
#[derive(Args)]
#[command(after_help = "\
Examples:
  pagecrew bench                      everything but reclaim
  pagecrew bench reclaim              takes nearly all of the memory of a machine that is not in use
  pagecrew bench free alloc           two of them
  pagecrew bench free --quick         smaller and fewer rounds: a first impression
  pagecrew bench run --only cells --only \"64 KiB\"   some cases of one of them
  pagecrew bench reclaim --only neighbour           the same of another
  pagecrew bench --json > out.jsonl   one object a line
  pagecrew bench free --plot free.svg a picture as well

The objects have the fields bench, case, ours, peer, theirs, unit, ratio and better, where ratio says how \
many times better ours is: the median of the rounds' ratios, in which both sides met the same machine.")]
pub struct BenchArguments {
    /// Which benches [default: all but reclaim]
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Of the bench `run` or `reclaim`, only cases whose names contain TEXT; may be given several times, and then each has to be in the
    /// name
    ///
    /// The names of run begin with cells:, burst:, crowd:, small: or programs:.
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Fewer rounds and smaller sizes
    #[arg(long)]
    quick: bool,
    /// One JSON object a line instead of a table
    #[arg(long)]
    json: bool,
    /// Draw the comparisons as well, into FILE (SVG)
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// Run real programs with and without pagecrew and compare
///
/// Compares time, page faults and memory, and checks that the results are the same.
#[derive(Args)]
#[command(after_help = "\
Examples:
  pagecrew demo
  pagecrew demo --json")]
pub struct DemoArguments {
    /// JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// A process that a bench starts.
#[derive(Args)]
pub struct WorkerArguments {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// `pagecrew bench`.
pub fn bench(arguments: &BenchArguments) -> Result<(), Failure> {
    if let Some(unknown) = arguments.names.iter().find(|name| !pagecrew_bench::NAMES.contains(&name.as_str())) {
        let known = pagecrew_bench::NAMES.join(", ");
        return Err(Failure::Usage(format!("there is no bench '{unknown}'; there are {known}")));
    }
    let of_one = matches!(&arguments.names[..], [name] if pagecrew_bench::OF_CASES.contains(&name.as_str()));
    if !arguments.only.is_empty() && !of_one {
        let benches = pagecrew_bench::OF_CASES.join(" or ");
        return Err(Failure::Usage(format!(
            "--only chooses among the cases of the bench {benches}: name that one alone"
        )));
    }
    let options = pagecrew_bench::Options {
        names: arguments.names.clone(),
        only: arguments.only.clone(),
        quick: arguments.quick,
        json: arguments.json,
        plot: arguments.plot.clone(),
    };
    Ok(pagecrew_bench::bench(&options)?)
}

/// `pagecrew demo`.
pub fn demo(arguments: &DemoArguments) -> Result<(), Failure> {
    Ok(pagecrew_bench::demo(arguments.json)?)
}

/// `pagecrew bench-worker`.
pub fn worker(arguments: &WorkerArguments) -> Result<(), Failure> {
    Ok(pagecrew_bench::worker(&arguments.arguments)?)
}
