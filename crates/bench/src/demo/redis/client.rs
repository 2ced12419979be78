//! As much of the Redis protocol (RESP 2) as the demo speaks.

use anyhow::{Context, Result, bail, ensure};
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// An answer of the server.
#[derive(Debug, PartialEq, Eq)]
pub enum Reply {
    /// A status, such as `OK`.
    Status(String),
    /// An error.
    Error(String),
    /// A number.
    Number(i64),
    /// A value.
    Bytes(Vec<u8>),
    /// No value.
    Nothing,
}

/// At most this many answers are outstanding; more could fill both directions of the connection, and each side would wait.
const PIPELINE: usize = 256;

/// A connection that may have several commands under way.
pub struct Client<Input = UnixStream, Output: Write = UnixStream> {
    input: BufReader<Input>,
    output: BufWriter<Output>,
    pending: usize,
}

impl Client {
    /// Connects to the server that listens at `path`.
    pub fn connect(path: &Path) -> Result<Client> {
        let stream = UnixStream::connect(path).with_context(|| format!("connecting to {}", path.display()))?;
        Ok(Client::new(stream.try_clone()?, stream))
    }
}

impl<Input: Read, Output: Write> Client<Input, Output> {
    fn new(input: Input, output: Output) -> Client<Input, Output> {
        Client { input: BufReader::new(input), output: BufWriter::with_capacity(256 << 10, output), pending: 0 }
    }

    /// Sends a command whose answer is to be `OK`; the answer may be read later.
    pub fn send(&mut self, words: &[&[u8]]) -> Result<()> {
        write!(self.output, "*{}\r\n", words.len())?;
        for word in words {
            write!(self.output, "${}\r\n", word.len())?;
            self.output.write_all(word)?;
            self.output.write_all(b"\r\n")?;
        }
        self.pending += 1;
        if self.pending == PIPELINE { self.expect_ok() } else { Ok(()) }
    }

    /// Reads the answers that are outstanding, each of which has to be a status.
    pub fn expect_ok(&mut self) -> Result<()> {
        self.output.flush()?;
        while self.pending > 0 {
            match self.read()? {
                Reply::Status(_) => {}
                other => bail!("the server answered {other:?}"),
            }
        }
        Ok(())
    }

    /// Sends a command and waits for its answer.
    pub fn call(&mut self, words: &[&[u8]]) -> Result<Reply> {
        self.expect_ok()?;
        self.send(words)?;
        self.output.flush()?;
        self.read()
    }

    /// Sends a command whose answer has to be a status, and waits for it.
    pub fn ask_ok(&mut self, words: &[&[u8]]) -> Result<()> {
        self.send(words)?;
        self.expect_ok()
    }

    /// Sends what is left and leaves without waiting for an answer.
    pub fn close(mut self) -> Result<()> {
        Ok(self.output.flush()?)
    }

    fn read(&mut self) -> Result<Reply> {
        let mut line = String::new();
        ensure!(self.input.read_line(&mut line)? > 0, "the server closed the connection");
        self.pending = self.pending.saturating_sub(1);
        let line = line.trim_end();
        let (kind, text) = line.split_at_checked(1).context("an empty answer")?;
        Ok(match kind {
            "+" => Reply::Status(text.to_owned()),
            "-" => Reply::Error(text.to_owned()),
            ":" => Reply::Number(text.parse()?),
            "$" if text == "-1" => Reply::Nothing,
            "$" => {
                let mut bytes = vec![0; text.parse::<usize>()? + 2];
                self.input.read_exact(&mut bytes)?;
                bytes.truncate(bytes.len() - 2);
                Reply::Bytes(bytes)
            }
            _ => bail!("'{line}' is no answer"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_answers() {
        let answers: &[u8] = b"+OK\r\n:42\r\n$3\r\na\r\n\r\n$-1\r\n-ERR no\r\n?\r\n";
        let mut sent = Vec::new();
        let mut client = Client::new(answers, &mut sent);
        client.ask_ok(&[b"SET", b"k", b"\r\n"]).unwrap();
        assert_eq!(client.call(&[b"DBSIZE"]).unwrap(), Reply::Number(42));
        assert_eq!(client.call(&[b"GET", b"k"]).unwrap(), Reply::Bytes(b"a\r\n".to_vec()));
        assert_eq!(client.call(&[b"GET", b"x"]).unwrap(), Reply::Nothing);
        assert!(client.ask_ok(&[b"BAD"]).unwrap_err().to_string().contains("ERR no"));
        assert!(client.call(&[b"GET", b"k"]).is_err());
        assert!(client.call(&[b"GET", b"k"]).is_err());
        drop(client);
        assert!(sent.starts_with(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$2\r\n\r\n\r\n*1\r\n$6\r\nDBSIZE\r\n"));
    }
}
