//! The pool, as `pagecrew pool status` has it.

use super::super::model::Model;
use super::super::text::{Piece, Row, Tone, bytes, piece};
use super::{Page, figures, missing};
use crate::output::printable;
use pagecrew::stats::Part;
use serde_json::Value;

pub fn page(model: &Model) -> Page {
    if let Some(status) = model.answers.pool.here() {
        return Page { head: Vec::new(), body: status.lines.iter().map(Row::plain).collect() };
    }
    let mut body = vec![Row::about("pool", [short(model)])];
    if let Some(found) = model.answers.pool_figures.here() {
        body.push(Row::of(Tone::Dim, "What its metrics say:"));
        body.extend(figures(Part::Pool, found));
    }
    Page { head: Vec::new(), body }
}

/// What the pool has, in a few words.
pub fn short(model: &Model) -> Piece {
    let say = |ready: Option<u64>, size: Option<u64>, taken: Option<u64>, state: &str| {
        piece(Tone::Good, format!("{} of {} ready, {} taken{state}", bytes(ready), bytes(size), bytes(taken)))
    };
    if let Some(status) = model.answers.pool.here() {
        let size = |key: &str| status.document.get(key).and_then(Value::as_u64);
        let state = status
            .document
            .get("state")
            .and_then(Value::as_str)
            .map_or(String::new(), |s| format!(": {}", printable(s)));
        return say(size("ready_bytes"), size("size_bytes"), size("taken_bytes"), &state);
    }
    if let Some(figures) = model.answers.pool_figures.here() {
        return say(figures.whole("ready_bytes"), figures.whole("size_bytes"), figures.whole("taken_bytes"), "");
    }
    missing(&model.answers.pool, "not served", "pagecrew pool serve --size 16G").unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::super::model::made_up::{figures, model};
    use super::super::super::service::Service;
    use super::super::View;
    use super::super::tests::{LOOK, text};
    use super::*;

    #[test]
    fn a_pool_as_its_status_has_it() {
        let model = model(1, 0);
        assert!(text(View::Pool, &model, &LOOK).starts_with("pool at /run/pagecrew/pool/mem"));
        assert_eq!(short(&model).text, "12 GiB of 16 GiB ready, 8 GiB taken: filling");
    }

    #[test]
    fn a_pool_that_may_not_be_asked_has_its_metrics() {
        let mut model = model(1, 0);
        model.answers.pool = Service::Refused;
        assert!(text(View::Pool, &model, &LOOK).contains("root"));
        model.answers.pool_figures =
            figures(Part::Pool, "pagecrew_pool_ready_bytes 1048576\npagecrew_pool_size_bytes 2097152\n");
        let shown = text(View::Pool, &model, &LOOK);
        assert!(shown.contains("1 MiB of 2 MiB ready, - taken\n") && shown.contains("ready_bytes"), "{shown}");
        (model.answers.pool, model.answers.pool_figures) = (Service::Absent, Service::Absent);
        assert_eq!(text(View::Pool, &model, &LOOK), "pool       not served (pagecrew pool serve --size 16G)\n");
    }
}
