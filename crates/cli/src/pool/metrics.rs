//! The figures of a served pool as metrics.

use super::status::name;
use crate::failure::Failure;
use crate::metrics::{Listener, Service};
use crate::values::parse_user;
use pagecrew::pool::Server;
use pagecrew::stats::Sample;
use std::collections::BTreeMap;

/// Serves the metrics of `server`. To be dropped before that is stopped.
pub fn serve(listener: Listener, server: &Server) -> Result<Service, Failure> {
    let observer = server.observer();
    let mut names = Names::default();
    Service::start(listener, move || {
        let mut samples = observer.status().samples();
        names.put_into(&mut samples);
        samples
    })
}

/// The names of users by their numbers. To look one up may take long.
#[derive(Default)]
struct Names(BTreeMap<String, String>);

impl Names {
    /// Calls users by their names.
    fn put_into(&mut self, samples: &mut [Sample]) {
        let of_users = samples.iter_mut().filter(|sample| sample.metric.labels == ["user"]);
        for label in of_users.flat_map(|sample| &mut sample.labels) {
            let name = self.0.entry(label.clone()).or_insert_with(|| unique_name(label));
            label.clone_from(name);
        }
    }
}

/// The name of the user with this number, or the number, where there is no name or another user has the same.
fn unique_name(number: &str) -> String {
    let name = number.parse().map(name).unwrap_or_default();
    let own = parse_user(&name).is_ok_and(|user| user.to_string() == number);
    if own { name } else { number.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::check::{assert_complete, assert_registered};
    use crate::metrics::text;
    use pagecrew::pool::{Counters, FileStatus, NodeStatus, Status, Sums, TakenStatus, UserStatus};
    use pagecrew::stats::Part;

    fn status() -> Status {
        let file = FileStatus { size_bytes: 8, filled_bytes: 4 };
        let node = NodeStatus { size_bytes: 64, ready_bytes: 32, node: 3, files: vec![file], ..NodeStatus::default() };
        let user = UserStatus { taken_bytes: 16, files: 1, quota_bytes: Some(20), user: 0 };
        let other = UserStatus { user: 3_999_999_999, quota_bytes: None, ..user };
        Status {
            pid: 7,
            backing: "tmpfs",
            directory: "/run/x".into(),
            cpu: 0.25,
            state: "waiting: memory is short".into(),
            sums: Sums { size_bytes: 64, ..Sums::default() },
            nodes: vec![node.clone(), NodeStatus { node: 4, ..node }],
            users: vec![user, other],
            taken: vec![TakenStatus { size_bytes: 16, held_ns: 1_500_000_000, ..TakenStatus::default() }],
            counters: Counters { takes: 3, cpu_ns: 2_500_000_000, ..Counters::default() },
        }
    }

    fn samples() -> Vec<Sample> {
        let mut samples = status().samples();
        Names::default().put_into(&mut samples);
        samples
    }

    #[test]
    fn the_exposition_is_what_is_registered() {
        assert_complete(Part::Pool, samples());
        let text = text(samples());
        for line in [
            "pagecrew_pool_size_bytes 64\n",
            "pagecrew_pool_node_ready_bytes{node=\"4\"} 32\n",
            "pagecrew_pool_user_taken_bytes{user=\"root\"} 16\n",
            "pagecrew_pool_user_taken_bytes{user=\"3999999999\"} 16\n",
            "pagecrew_pool_user_quota_bytes{user=\"root\"} 20\n",
            "pagecrew_pool_takes_total 3\n",
            "pagecrew_pool_cpu_seconds_total 2.5\n",
            "pagecrew_pool_budget_cpu_ratio 0.25\n",
            "pagecrew_pool_waiting 1\n",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        assert!(!text.contains("quota_bytes{user=\"3999999999\"}"));
    }

    #[test]
    fn the_document_is_what_is_registered() {
        let document = serde_json::from_str(&status().json(0)).unwrap();
        assert_registered(
            Part::Pool,
            &document,
            &["version", "pid", "nodes[].node", "users[].user", "taken[].user", "taken[].node"],
        );
    }
}
