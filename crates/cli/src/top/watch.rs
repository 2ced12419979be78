//! Looks at everything again and again: the samples, the programs, and those who are asked by threads of their own.

use super::candidates::Report;
use super::feed::Feed;
use super::model::{Answers, Model};
use super::sample::{Places, Sampler};
use super::service::Figures;
use super::sources::{Addresses, Pool, PoolStatus, SOCKETS};
use super::walker::Walker;
use crate::failure::Failure;
use crate::pool;
use pagecrew::stats::Part;
use std::path::Path;
use std::time::Duration;

/// Who takes longer than this is called silent: more than a scrape may take.
const PATIENCE: Duration = Duration::from_millis(1200);
/// How long the first answers are waited for where there is no second look.
const ANSWERS_PATIENCE: Duration = Duration::from_millis(1500);

/// What looks, and what is known.
pub struct Watch {
    sampler: Sampler,
    trim: Feed<Figures>,
    reclaim: Feed<Figures>,
    pool: Feed<PoolStatus>,
    pool_figures: Feed<Figures>,
    candidates: Feed<Report>,
    /// What is known.
    pub model: Model,
}

impl Watch {
    /// Of this machine, with the file of settings that services read.
    pub fn start(settings: &Path) -> Result<Watch, Failure> {
        let failed = |error: std::io::Error| Failure::Failed(format!("starting a thread: {error}"));
        let figures = |name: &str, part: Part| {
            let mut addresses = Addresses::new(part, Path::new(SOCKETS), settings);
            Feed::start(name, PATIENCE, move || addresses.ask()).map_err(failed)
        };
        let mut pool = Pool::new(pool::socket());
        let mut walker = Walker::new("/".into());
        Ok(Watch {
            sampler: Sampler::new("/".into(), Places::of_this_user()),
            trim: figures("top/trim", Part::Trim)?,
            reclaim: figures("top/reclaim", Part::Reclaim)?,
            pool_figures: figures("top/metrics", Part::Pool)?,
            pool: Feed::start("top/pool", PATIENCE, move || pool.ask()).map_err(failed)?,
            // What was found stays true for a while.
            candidates: Feed::start("top/walk", Duration::MAX, move || walker.step()).map_err(failed)?,
            model: Model::default(),
        })
    }

    /// Looks once, takes what was answered since, and asks again.
    pub fn look(&mut self) {
        let programs = self.sampler.read_programs().all();
        let sample = self.sampler.read();
        let answers = Answers {
            trim: self.trim.latest(),
            reclaim: self.reclaim.latest(),
            pool: self.pool.latest(),
            pool_figures: self.pool_figures.latest(),
            candidates: self.candidates.latest(),
        };
        self.model.next(sample, programs, answers);
        self.trim.ask();
        self.reclaim.ask();
        self.pool.ask();
        self.pool_figures.ask();
        self.candidates.ask();
    }

    /// Waits until everybody has answered for the first time, or does not in time.
    pub fn wait_for_answers(&self) {
        let until = std::time::Instant::now() + ANSWERS_PATIENCE;
        let left = || until.saturating_duration_since(std::time::Instant::now());
        self.trim.wait(1, left());
        self.reclaim.wait(1, left());
        self.pool.wait(1, left());
        self.pool_figures.wait(1, left());
        self.candidates.wait(1, left());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::service::Service;

    #[test]
    fn this_machine_is_looked_at_twice() {
        let mut watch = Watch::start(Path::new("/no/such/file")).unwrap();
        watch.look();
        watch.wait_for_answers();
        std::thread::sleep(Duration::from_millis(20));
        watch.look();
        let model = &watch.model;
        assert!(model.seconds.is_some_and(|seconds| seconds > 0.0) && !model.sample.nodes.is_empty());
        assert!(model.rate(crate::top::model::Count::Stalls).is_some());
        assert!(model.answers.candidates.here().is_some());
        assert_ne!(model.answers.trim, Service::NotAsked);
    }
}
