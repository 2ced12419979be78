//! Everything as a JSON object, as `docs/top.md` describes it.

use super::model::{Count, Model};
use super::sample::NodeNow;
use super::service::{Figures, Service};
use crate::figures::object;
use pagecrew::sys::psi::{Pressure, Resource, Stalled};
use serde_json::{Map, Value, json};

/// Counted up when a key changes its meaning or goes.
const VERSION: u64 = 1;

/// The object, at `since_1970` seconds.
pub fn document(model: &Model, since_1970: u64) -> Value {
    let sample = &model.sample;
    let memory = sample.memory.map(|memory| {
        json!({
            "total_bytes": memory.total,
            "available_bytes": memory.available,
            "swap_bytes": memory.swap,
            "free_swap_bytes": memory.free_swap,
        })
    });
    let pressure = Resource::ALL.into_iter().enumerate().map(|(index, resource)| {
        let value =
            sample.pressure[index].as_ref().map(|now| pressure(now, model.some[index].last(), model.full[index]));
        (resource.name().to_owned(), value.into())
    });
    let counters = Count::ALL.map(|count| (count.key().to_owned(), count.of(&sample.activity).into()));
    let rates = Count::ALL.map(|count| (count.key().to_owned(), model.rate(count).into()));
    let threads = sample.kswapds.iter().zip(&model.kswapds).map(|(thread, busy)| {
        let cpu = thread.run_ns.map(|ns| ns as f64 / 1e9);
        json!({ "node": thread.node, "pid": thread.pid, "cpu_seconds": cpu, "busy_ratio": busy })
    });
    json!({
        "version": VERSION,
        "time_seconds": since_1970,
        "interval_seconds": model.seconds,
        "memory": memory,
        "watermark_scale_factor": sample.factor,
        "nodes": sample.nodes.iter().map(node).collect::<Vec<_>>(),
        "pressure": Value::Object(pressure.collect()),
        "counters": Value::Object(counters.into_iter().collect()),
        "per_second": Value::Object(rates.into_iter().collect()),
        "kswapds": threads.collect::<Vec<_>>(),
        "programs": programs(model),
        "huge_pages": huge_pages(model),
        "trim": service(&model.answers.trim),
        "pool": pool(model),
        "reclaim": service(&model.answers.reclaim),
    })
}

fn node(node: &NodeNow) -> Value {
    let [min, low, high] = node.watermarks.map_or([None; 3], |marks| marks.map(Some));
    let memory = &node.memory;
    json!({
        "node": memory.number,
        "total_bytes": memory.total,
        "free_bytes": memory.free,
        "min_bytes": min,
        "low_bytes": low,
        "high_bytes": high,
        "file_bytes": memory.file,
        "anon_bytes": memory.anon,
        "anon_huge_bytes": memory.anon_huge,
        "shmem_bytes": memory.shmem,
        "slab_bytes": memory.slab,
    })
}

fn pressure(pressure: &Pressure, some_now: Option<f64>, full_now: Option<f64>) -> Value {
    let line = |line: &Stalled, now: Option<f64>| {
        json!({
            "now_ratio": now,
            "avg10_ratio": line.avg10,
            "avg60_ratio": line.avg60,
            "avg300_ratio": line.avg300,
            "total_seconds": line.total_us as f64 / 1e6,
        })
    };
    json!({ "some": line(&pressure.some, some_now), "full": pressure.full.as_ref().map(|full| line(full, full_now)) })
}

fn programs(model: &Model) -> Vec<Value> {
    let program = |program: &super::programs::Program| {
        let bytes = program.snapshot.bytes();
        json!({
            "pid": program.pid,
            "name": program.name,
            "in_use_bytes": bytes.in_use,
            "retained_dirty_bytes": bytes.retained_dirty,
            "retained_zeroed_bytes": bytes.retained_zeroed,
            "per_second": { "background_bytes": program.background_rate },
            "counters": Value::Object(object(program.snapshot.figures())),
        })
    };
    model.programs.iter().map(program).collect()
}

fn huge_pages(model: &Model) -> Value {
    let service = &model.answers.candidates;
    let mut document = Map::from_iter([("state".to_owned(), service.word().into())]);
    if let Some(report) = service.here() {
        let candidate = |candidate: &super::candidates::Candidate| {
            json!({
                "pid": candidate.pid,
                "name": candidate.name,
                "anon_bytes": candidate.memory.anonymous,
                "anon_huge_bytes": candidate.memory.anon_huge,
            })
        };
        document.insert("processes".into(), report.processes.into());
        document.insert("denied".into(), report.denied.into());
        document.insert("waiting".into(), report.waiting.into());
        document.insert("candidates".into(), report.candidates.iter().map(candidate).collect());
    }
    Value::Object(document)
}

fn service(service: &Service<Figures>) -> Value {
    json!({ "state": service.word(), "figures": service.here().map(|figures| Value::Object(figures.object())) })
}

fn pool(model: &Model) -> Value {
    let Service::Here(status) = &model.answers.pool else {
        let figures = model.answers.pool_figures.here().map(|figures| Value::Object(figures.object()));
        return json!({ "state": model.answers.pool.word(), "status": null, "figures": figures });
    };
    json!({ "state": "here", "status": status.document, "figures": null })
}

#[cfg(test)]
mod tests {
    use super::super::model::made_up::model;
    use super::*;

    #[test]
    fn everything_is_there_with_its_unit() {
        let document = document(&model(2, 3), 1_700_000_000);
        assert_eq!(document["nodes"][1]["low_bytes"], 128_u64 << 20);
        assert_eq!(document["pressure"]["memory"]["some"]["now_ratio"], 0.02);
        assert_eq!(document["pressure"]["io"]["full"]["total_seconds"], 0.19);
        assert_eq!((&document["counters"]["stalls"], &document["per_second"]["stalls"]), (&95.into(), &5.0.into()));
        assert_eq!(document["kswapds"][1]["busy_ratio"], 0.25);
        assert_eq!(document["programs"][2]["in_use_bytes"], 3 << 20);
        assert_eq!(document["programs"][2]["counters"]["discarded_in_background_bytes"], 3 << 20);
        assert_eq!(
            (&document["huge_pages"]["denied"], &document["huge_pages"]["candidates"][0]["pid"]),
            (&12.into(), &1.into())
        );
        assert_eq!((&document["trim"]["figures"]["members"], &document["trim"]["state"]), (&3.into(), &"here".into()));
        assert_eq!(document["reclaim"]["figures"]["lead_seconds"], 0.05);
        assert_eq!(document["pool"]["status"]["ready_bytes"], 12_u64 << 30);
        assert_eq!((&document["time_seconds"], &document["interval_seconds"]), (&1_700_000_000.into(), &1.0.into()));
    }

    #[test]
    fn what_is_not_known_is_null_and_the_keys_are_the_same() {
        fn keys(value: &Value) -> Vec<String> {
            value.as_object().unwrap().keys().cloned().collect()
        }
        let (none, some) = (document(&Model::default(), 0), document(&model(1, 1), 0));
        assert_eq!(keys(&none), keys(&some));
        assert_eq!(keys(&none["counters"]), keys(&some["counters"]));
        assert!(
            none["memory"].is_null() && none["pressure"]["memory"].is_null() && none["per_second"]["stalls"].is_null()
        );
        assert_eq!((&none["trim"]["state"], &none["pool"]["state"]), (&"not asked".into(), &"not asked".into()));
        let mut model = model(0, 0);
        model.answers.pool = Service::Silent;
        assert_eq!(document(&model, 0)["pool"], json!({ "state": "silent", "status": null, "figures": null }));
    }

    #[test]
    fn the_page_has_every_key() {
        fn collect(value: &Value, found: &mut Vec<String>) {
            match value {
                Value::Object(members) => members.iter().for_each(|(key, value)| {
                    found.push(key.clone());
                    // Those have pages of their own.
                    if !["figures", "status", "counters"].contains(&key.as_str()) {
                        collect(value, found);
                    }
                }),
                Value::Array(items) => items.iter().for_each(|item| collect(item, found)),
                _ => {}
            }
        }
        let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().join("docs/top.md");
        let page = std::fs::read_to_string(page).unwrap();
        let mut found = Vec::new();
        let document = document(&model(1, 1), 0);
        collect(&document, &mut found);
        collect(&document["counters"], &mut found);
        for key in found {
            assert!(page.contains(&format!("`{key}`")), "docs/top.md does not say what {key} is");
        }
    }
}
