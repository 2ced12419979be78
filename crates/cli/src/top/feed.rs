//! Answers of somebody who may be slow or hang: asked by a thread of its own, and nobody else waits for it.

use super::service::Service;
use pagecrew::sys::clock::now_ns;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The thread, and what it was answered last.
pub struct Feed<T> {
    asks: SyncSender<()>,
    patience: Duration,
    slot: Arc<(Mutex<Slot<T>>, Condvar)>,
}

struct Slot<T> {
    answer: Service<T>,
    /// When the question was taken that is not answered yet.
    asked_ns: Option<u64>,
    answers: u64,
}

impl<T: Clone + Send + 'static> Feed<T> {
    /// Starts the thread, which asks `source` whenever it is told to. Who takes longer than `patience` is called silent. It ends with this, or with
    /// the process.
    pub fn start(
        name: &str,
        patience: Duration,
        mut source: impl FnMut() -> Service<T> + Send + 'static,
    ) -> std::io::Result<Feed<T>> {
        let slot =
            Arc::new((Mutex::new(Slot { answer: Service::NotAsked, asked_ns: None, answers: 0 }), Condvar::new()));
        let (asks, questions) = sync_channel(1);
        let shared = slot.clone();
        let body = move || {
            for () in questions {
                let change = |change: &dyn Fn(&mut Slot<T>)| {
                    change(&mut shared.0.lock().unwrap_or_else(PoisonError::into_inner));
                    shared.1.notify_all();
                };
                change(&|slot| slot.asked_ns = Some(now_ns()));
                let answer = source();
                change(&|slot| (slot.answer, slot.asked_ns, slot.answers) = (answer.clone(), None, slot.answers + 1));
            }
        };
        std::thread::Builder::new().name(name.into()).stack_size(512 << 10).spawn(body)?;
        Ok(Feed { asks, patience, slot })
    }

    /// Has it ask once more, unless it is still at it.
    pub fn ask(&self) {
        let _ = self.asks.try_send(());
    }

    /// What it was answered last.
    pub fn latest(&self) -> Service<T> {
        let slot = self.slot.0.lock().unwrap_or_else(PoisonError::into_inner);
        match slot.asked_ns {
            Some(asked) if u128::from(now_ns().saturating_sub(asked)) > self.patience.as_nanos() => Service::Silent,
            _ => slot.answer.clone(),
        }
    }

    /// Waits until it has answered `answers` times, but no longer than `patience`. Returns whether it has.
    pub fn wait(&self, answers: u64, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let (mutex, answered) = &*self.slot;
        let mut slot = mutex.lock().unwrap_or_else(PoisonError::into_inner);
        while slot.answers < answers {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            slot = answered.wait_timeout(slot, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn the_last_answer_is_there_and_nobody_waits_for_the_next_one() {
        let (go, gone) = channel::<u32>();
        let feed = Feed::start("test", SOON, move || gone.recv().map_or(Service::Silent, Service::Here)).unwrap();
        assert_eq!(feed.latest(), Service::NotAsked);
        feed.ask();
        go.send(1).unwrap();
        assert!(feed.wait(1, SOON));
        assert_eq!(feed.latest(), Service::Here(1));
        // It hangs: the answer stays what it was, and more questions are not held up.
        for _ in 0..1000 {
            feed.ask();
        }
        assert!(!feed.wait(2, Duration::from_millis(50)));
        assert_eq!(feed.latest(), Service::Here(1));
        go.send(2).unwrap();
        assert!(feed.wait(2, SOON));
        assert_eq!(feed.latest(), Service::Here(2));
    }

    #[test]
    fn who_hangs_for_long_is_silent() {
        let (go, gone) = channel::<u32>();
        let feed =
            Feed::start("test", Duration::from_millis(10), move || gone.recv().map_or(Service::Silent, Service::Here))
                .unwrap();
        feed.ask();
        let until = Instant::now() + SOON;
        while feed.latest() != Service::Silent && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(feed.latest(), Service::Silent);
        go.send(3).unwrap();
        assert!(feed.wait(1, SOON));
        assert_eq!(feed.latest(), Service::Here(3));
    }
}
