//! QEMU's monitor, in its own language (QMP): a line of JSON a message.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};

/// One end of a connection to a monitor.
pub struct Monitor<C> {
    connection: BufReader<C>,
}

impl<C: Read + Write> Monitor<C> {
    pub fn new(connection: C) -> Monitor<C> {
        Monitor { connection: BufReader::new(connection) }
    }

    /// Waits until the virtual machine is there. The monitor's greeting isn't enough for that: a thread of its own
    /// sends it, while another one still gets the memory. Only an answer comes from the one that has got it.
    ///
    /// # Errors
    /// If it ends instead.
    pub fn wait_until_it_answers(&mut self) -> Result<()> {
        self.ask("qmp_capabilities")?;
        let status = self.ask("query-status")?;
        status.get("running").map(drop).with_context(|| format!("QEMU's status is '{status}'"))
    }

    /// Has it end, and waits until it has nothing more to say.
    ///
    /// # Errors
    /// If it refuses.
    pub fn quit(mut self) -> Result<()> {
        self.ask("quit")?;
        // How the connection ends doesn't matter.
        let _ = self.connection.read_to_end(&mut Vec::new());
        Ok(())
    }

    /// What it returns for `command`; whatever else it has to say is passed over.
    fn ask(&mut self, command: &str) -> Result<Value> {
        writeln!(self.connection.get_mut(), r#"{{"execute":"{command}"}}"#)?;
        loop {
            let mut line = String::new();
            let length = self.connection.read_line(&mut line).with_context(|| format!("QEMU's answer to {command}"))?;
            if length == 0 {
                bail!("QEMU ended before it answered to {command}");
            }
            let message: Value =
                serde_json::from_str(&line).with_context(|| format!("'{}' from QEMU", line.trim_end()))?;
            if let Some(error) = message.get("error") {
                bail!("QEMU refuses {command}: {error}");
            }
            if let Some(answer) = message.get("return") {
                return Ok(answer.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    const GREETING: &str =
        r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}}, "capabilities": []}}"#;
    const DONE: &str = r#"{"return": {}}"#;
    const EVENT: &str = r#"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "RESUME"}"#;
    const STATUS: &str = r#"{"return": {"status": "prelaunch", "singlestep": false, "running": false}}"#;

    /// A monitor that gives these answers whatever it is told, and remembers it.
    struct MadeUp {
        answers: Cursor<String>,
        told: Vec<u8>,
    }

    impl Read for MadeUp {
        fn read(&mut self, room: &mut [u8]) -> std::io::Result<usize> {
            self.answers.read(room)
        }
    }

    impl Write for MadeUp {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.told.write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn monitor(answers: &[&str]) -> Monitor<MadeUp> {
        Monitor::new(MadeUp { answers: Cursor::new(answers.join("\r\n") + "\r\n"), told: Vec::new() })
    }

    #[test]
    fn the_answer_counts_and_neither_the_greeting_nor_what_happens_meanwhile() {
        let mut monitor = monitor(&[GREETING, DONE, EVENT, STATUS, EVENT, DONE, EVENT]);
        monitor.wait_until_it_answers().unwrap();
        let told = String::from_utf8(monitor.connection.get_ref().told.clone()).unwrap();
        assert_eq!(told, "{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"query-status\"}\n");
        monitor.quit().unwrap();
    }

    #[test]
    fn a_machine_that_did_not_come_up() {
        let refusal = r#"{"error": {"class": "GenericError", "desc": "no memory"}}"#;
        let failures = [
            (&[GREETING][..], "ended before it answered to qmp_capabilities"),
            (&[GREETING, DONE, EVENT], "ended before it answered to query-status"),
            (&[GREETING, DONE, refusal], "no memory"),
            (&[GREETING, DONE, DONE], "QEMU's status is '{}'"),
            (&["qemu: hello"], "'qemu: hello' from QEMU"),
        ];
        for (answers, expected) in failures {
            let error = monitor(answers).wait_until_it_answers().unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
