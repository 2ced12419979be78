//! Reading a service's settings again while it serves. Names of users and groups are looked up for that, and whoever knows them may be a
//! server that does not answer; so each reading has a thread of its own, and the service goes on with what it has until that has ended.

use crate::failure::Failure;
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

type Read<S> = dyn Fn() -> Result<S, Failure> + Send + Sync;

/// How settings are read, and what is being read now. At most one thread reads; it ends with the process if need be.
pub struct Rereading<S> {
    read: Arc<Read<S>>,
    result: Sender<Result<S, Failure>>,
    results: Receiver<Result<S, Failure>>,
    /// Ready when there is a result.
    event: Arc<EventFd>,
    under_way: bool,
    /// The settings may have changed since the reading that is under way has begun.
    again: bool,
}

impl<S: Send + 'static> Rereading<S> {
    /// Nothing is read yet.
    pub fn new(read: impl Fn() -> Result<S, Failure> + Send + Sync + 'static) -> Result<Rereading<S>, Failure> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|error| Failure::Failed(format!("an event for settings: {error}")))?;
        let (result, results) = channel();
        Ok(Rereading { read: Arc::new(read), result, results, event: Arc::new(event), under_way: false, again: false })
    }

    /// Ready when [`take`](Rereading::take) may have something.
    pub fn descriptor(&self) -> RawFd {
        self.event.as_fd().as_raw_fd()
    }

    /// Reads them. Where they are being read already, that counts for nothing, and they are read once more after it.
    pub fn begin(&mut self) {
        if self.under_way {
            self.again = true;
            return;
        }
        self.under_way = true;
        let (read, result, event) = (self.read.clone(), self.result.clone(), self.event.clone());
        let run = move || {
            let _ = result.send(read());
            let _ = event.write(1);
        };
        if let Err(error) = std::thread::Builder::new().name("settings".into()).spawn(run) {
            let failure = Failure::Failed(format!("no thread can be had to read them: {error}"));
            let _ = self.result.send(Err(failure));
            let _ = self.event.write(1);
        }
    }

    /// What was read, once it was.
    pub fn take(&mut self) -> Option<Result<S, Failure>> {
        let _ = self.event.read();
        let result = self.results.try_recv().ok()?;
        self.under_way = false;
        if std::mem::take(&mut self.again) {
            self.begin();
            return None;
        }
        Some(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::time::{Duration, Instant};

    /// What is read is what was sent; until then, reading takes its time.
    fn reading() -> (Sender<Result<u32, Failure>>, Rereading<u32>) {
        let (settings, file) = channel();
        let file = Mutex::new(file);
        (settings, Rereading::new(move || file.lock().unwrap().recv().unwrap()).unwrap())
    }

    fn taken(reading: &mut Rereading<u32>) -> Result<u32, Failure> {
        let begin = Instant::now();
        loop {
            if let Some(result) = reading.take() {
                return result;
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "nothing was read");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn nobody_waits_for_a_reading() {
        let (settings, mut reading) = reading();
        assert!(reading.take().is_none());
        reading.begin();
        assert!(reading.take().is_none());
        settings.send(Ok(1)).unwrap();
        assert_eq!(taken(&mut reading), Ok(1));
        assert!(reading.take().is_none());
        reading.begin();
        settings.send(Err(Failure::Usage("line 1".into()))).unwrap();
        assert_eq!(taken(&mut reading), Err(Failure::Usage("line 1".into())));
    }

    #[test]
    fn what_may_have_changed_while_it_was_read_is_read_once_more() {
        let (settings, mut reading) = reading();
        reading.begin();
        reading.begin();
        reading.begin();
        settings.send(Ok(1)).unwrap();
        settings.send(Ok(2)).unwrap();
        settings.send(Ok(3)).unwrap();
        assert_eq!(taken(&mut reading), Ok(2));
        assert!(reading.take().is_none());
    }
}
