//! The services that run under a supervisor: which command each is, and which rights it has.

use crate::failure::Failure;
use pagecrew::control::supervision::Terms;
use pagecrew::sys::child::Capabilities;
use std::fmt;
use std::path::Path;
use std::time::Duration;

/// A service, or the process that joins the metrics of all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    Reclaim,
    Pool,
    Trim,
    Metrics,
}

impl Part {
    /// Those that an operator chooses among. Reclaim is the first to be started: it is ready at once, and the pool's filling may need it.
    pub const SERVICES: [Part; 3] = [Part::Reclaim, Part::Pool, Part::Trim];

    /// The name, in settings, metrics and the log.
    pub fn name(self) -> &'static str {
        match self {
            Part::Reclaim => "reclaim",
            Part::Pool => "pool",
            Part::Trim => "trim",
            Part::Metrics => "metrics",
        }
    }

    /// The service of that name.
    pub fn parse(name: &str) -> Result<Part, String> {
        let found = Part::SERVICES.into_iter().find(|part| part.name() == name);
        found.ok_or_else(|| format!("there is no service '{name}'; there are pool, trim and reclaim"))
    }

    /// The words of its command.
    pub fn command(self) -> &'static [&'static str] {
        match self {
            Part::Reclaim => &["reclaim"],
            Part::Pool => &["pool", "serve"],
            Part::Trim => &["trim", "--watch"],
            Part::Metrics => &["serve-metrics"],
        }
    }

    /// The rights that it works with, which are those of its unit in `contrib/`. No process that users reach by a socket has those of trim:
    /// the pool hasn't, and the one that serves the metrics of all has none at all.
    pub fn capabilities(self) -> Capabilities {
        match self {
            Part::Reclaim => Capabilities::PERFMON | Capabilities::SYS_ADMIN | Capabilities::SYS_NICE,
            Part::Pool => {
                Capabilities::SYS_ADMIN | Capabilities::CHOWN | Capabilities::DAC_OVERRIDE | Capabilities::LEASE
            }
            Part::Trim => Capabilities::SYS_PTRACE | Capabilities::SYS_NICE | Capabilities::DAC_READ_SEARCH,
            Part::Metrics => Capabilities::empty(),
        }
    }

    /// How long what may take.
    pub fn terms(self) -> Terms {
        match self {
            // Whoever locks a file of the pool holds up its end.
            Part::Pool => Terms { stop: Duration::from_secs(50), ..Terms::default() },
            Part::Reclaim | Part::Trim | Part::Metrics => Terms::default(),
        }
    }

    /// Fails as it would for the settings of `file`.
    pub fn check(self, file: Option<&Path>) -> Result<(), Failure> {
        match self {
            Part::Reclaim => crate::reclaim::check(file),
            Part::Pool => crate::pool::serve::check(file),
            Part::Trim => crate::trim::check(file),
            Part::Metrics => Ok(()),
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn unit(name: &str) -> String {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
        std::fs::read_to_string(root.join("contrib").join(name)).unwrap()
    }

    fn bounding(unit: &str) -> Capabilities {
        let line = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
        let names = line.split(' ').map(|name| name.strip_prefix("CAP_").unwrap());
        names.map(|name| Capabilities::from_name(name).unwrap_or_else(|| panic!("{name}"))).collect()
    }

    #[test]
    fn the_rights_are_those_of_the_units() {
        let mut all = Capabilities::SETPCAP;
        for part in Part::SERVICES {
            assert_eq!(part.capabilities(), bounding(&unit(&format!("pagecrew-{part}.service"))), "{part}");
            all |= part.capabilities();
        }
        assert_eq!(bounding(&unit("pagecrew.service")), all);
        assert!(Part::Metrics.capabilities().is_empty());
    }

    /// The lists of calls of the units together are in the one for all of them.
    #[test]
    fn the_calls_are_those_of_the_units() {
        let calls = |name: &str| -> BTreeSet<String> {
            let text = unit(name);
            let lines = text.lines().filter_map(|line| line.strip_prefix("SystemCallFilter="));
            lines.flat_map(|line| line.split(' ').map(str::to_owned)).collect()
        };
        let all = calls("pagecrew.service");
        let mut theirs: BTreeSet<String> = ["capset", "setpgid"].map(str::to_owned).into();
        for part in Part::SERVICES {
            theirs.extend(calls(&format!("pagecrew-{part}.service")));
        }
        assert_eq!(all, theirs);
    }

    #[test]
    fn names() {
        for part in Part::SERVICES {
            assert_eq!(Part::parse(part.name()), Ok(part));
        }
        for name in ["metrics", "Pool", "", "pol"] {
            assert!(Part::parse(name).unwrap_err().contains("pool, trim and reclaim"));
        }
    }
}
