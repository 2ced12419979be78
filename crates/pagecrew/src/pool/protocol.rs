//! What server and clients say to each other: one packet of text a request, one an answer.
//!
//! `word key=value key=value ...`, separated by single spaces. A value that may hold anything is the last one and goes to the end of the
//! packet. Sizes are in bytes. `docs/pool.md` has all of it with an example. Nothing here makes a system call, and whatever the bytes
//! are, the answer is a request, an answer or an error.

use super::options::Backing;
use std::fmt;

/// The longest request, in bytes.
pub const REQUEST_MOST: usize = 4096;
/// The longest answer, in bytes.
pub const ANSWER_MOST: usize = 65536;

/// When a file that was taken goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// When the connection that took it is closed and nobody has it open any more.
    Closed,
    /// When nobody has had it open for as long as the pool's settings say.
    Unused,
}

/// What a client asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// A file.
    Take {
        /// Its size.
        size: usize,
        /// The node that its memory is to be of; none: whichever has it ready.
        node: Option<usize>,
        /// When it goes.
        until: Until,
    },
    /// A taken file is no longer needed.
    Release {
        /// Its path.
        path: String,
    },
    /// From now on so much is to be kept ready, on one node or on all together.
    Resize {
        /// How much.
        size: usize,
        /// Where.
        node: Option<usize>,
    },
    /// How it stands.
    Status {
        /// Of users and taken files, so many are passed over.
        from: usize,
    },
}

/// What the server answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// To [`Request::Take`], with a descriptor of the file.
    Taken {
        /// Its size.
        size: usize,
        /// Bytes from its beginning that are backed and zero; the rest reads as zero and is backed when it is touched.
        ready: usize,
        /// The node that its memory is of.
        node: usize,
        /// What it is made of.
        backing: Backing,
        /// Where it is.
        path: String,
    },
    /// To [`Request::Release`].
    Released {
        /// The file's size.
        size: usize,
    },
    /// To [`Request::Resize`].
    Resized {
        /// What is kept ready from now on.
        size: usize,
    },
    /// To [`Request::Status`]: an object.
    Status {
        /// In JSON.
        json: String,
    },
    /// It can't be done.
    Error {
        /// Of what kind.
        code: Code,
        /// In words.
        message: String,
    },
}

/// The kinds of errors that a server answers with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// The request makes no sense.
    BadRequest,
    /// The machine doesn't have so much memory.
    NoMemory,
    /// The pool may not have so much memory.
    Limit,
    /// The user may not have so much memory.
    Quota,
    /// The user may not do that.
    Denied,
    /// There is no such file.
    NotFound,
    /// Too many connections or files.
    TooMany,
    /// The server tried and failed.
    Failed,
}

impl Code {
    const ALL: [(Code, &str); 8] = [
        (Code::BadRequest, "bad-request"),
        (Code::NoMemory, "no-memory"),
        (Code::Limit, "limit"),
        (Code::Quota, "quota"),
        (Code::Denied, "denied"),
        (Code::NotFound, "not-found"),
        (Code::TooMany, "too-many"),
        (Code::Failed, "failed"),
    ];

    /// Its name in the protocol.
    pub fn name(self) -> &'static str {
        Code::ALL.iter().find(|(code, _)| *code == self).map_or("failed", |(_, name)| name)
    }
}

/// What is wrong with a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed(String);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Malformed {}

/// The fields of a packet that have not been looked at yet.
struct Fields<'p> {
    word: &'p str,
    rest: &'p str,
}

impl<'p> Fields<'p> {
    fn of(packet: &'p [u8]) -> Result<Fields<'p>, Malformed> {
        let text = std::str::from_utf8(packet).map_err(|_| Malformed("a packet is UTF-8 text".into()))?;
        // Whoever types a request ends it like that; no path and no object does.
        let text = text.trim_end_matches('\n');
        let (word, rest) = text.split_once(' ').unwrap_or((text, ""));
        Ok(Fields { word, rest })
    }

    /// The value of `key`, if it is next.
    fn next(&mut self, key: &str) -> Option<&'p str> {
        let value = self.rest.strip_prefix(key)?.strip_prefix('=')?;
        let (value, rest) = value.split_once(' ').unwrap_or((value, ""));
        self.rest = rest;
        Some(value)
    }

    fn number(&mut self, key: &str) -> Result<Option<usize>, Malformed> {
        let parse = |text: &str| {
            // Rust's own reading takes a sign.
            let digits = text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse().ok().filter(|_| digits).ok_or_else(|| Malformed(format!("{key}={text} is not a number")))
        };
        self.next(key).map(parse).transpose()
    }

    fn need<T>(&self, key: &str, value: Option<T>) -> Result<T, Malformed> {
        value.ok_or_else(|| Malformed(format!("'{}' needs {key}=... at this place", self.word)))
    }

    fn size(&mut self) -> Result<usize, Malformed> {
        let size = self.number("size")?;
        self.need("size", size)
    }

    /// The value of `key`, which is the last one.
    fn last(&mut self, key: &str) -> Result<String, Malformed> {
        let value = self.rest.strip_prefix(key).and_then(|rest| rest.strip_prefix('='));
        let value = self.need(key, value)?.to_owned();
        self.rest = "";
        Ok(value)
    }

    fn end<T>(&self, value: T) -> Result<T, Malformed> {
        match self.rest {
            "" => Ok(value),
            rest => Err(Malformed(format!("'{}' has no place for '{}'", self.word, clipped(rest)))),
        }
    }
}

/// As much of `text` as an error needs.
fn clipped(text: &str) -> String {
    text.chars().take(60).collect()
}

impl Request {
    /// Reads a packet.
    ///
    /// # Errors
    /// If it is not a request.
    pub fn read(packet: &[u8]) -> Result<Request, Malformed> {
        let mut fields = Fields::of(packet)?;
        let request = match fields.word {
            "take" => Request::Take {
                size: fields.size()?,
                node: fields.number("node")?,
                until: match fields.next("until") {
                    None | Some("unused") => Until::Unused,
                    Some("closed") => Until::Closed,
                    Some(other) => {
                        return Err(Malformed(format!("until={} is neither closed nor unused", clipped(other))));
                    }
                },
            },
            "release" => Request::Release { path: fields.last("path")? },
            "resize" => Request::Resize { size: fields.size()?, node: fields.number("node")? },
            "status" => Request::Status { from: fields.number("from")?.unwrap_or(0) },
            other => {
                let message = format!("'{}' is not one of take, release, resize, status", clipped(other));
                return Err(Malformed(message));
            }
        };
        fields.end(request)
    }
}

impl fmt::Display for Request {
    /// The packet.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let node = |node: &Option<usize>| node.map(|node| format!(" node={node}")).unwrap_or_default();
        match self {
            Request::Take { size, node: of, until } => {
                let until = match until {
                    Until::Closed => "closed",
                    Until::Unused => "unused",
                };
                write!(f, "take size={size}{} until={until}", node(of))
            }
            Request::Release { path } => write!(f, "release path={path}"),
            Request::Resize { size, node: of } => write!(f, "resize size={size}{}", node(of)),
            Request::Status { from: 0 } => write!(f, "status"),
            Request::Status { from } => write!(f, "status from={from}"),
        }
    }
}

impl Answer {
    /// Reads a packet.
    ///
    /// # Errors
    /// If it is not an answer.
    pub fn read(packet: &[u8]) -> Result<Answer, Malformed> {
        let mut fields = Fields::of(packet)?;
        let answer = match fields.word {
            "taken" => {
                let size = fields.size()?;
                let ready = fields.number("ready")?;
                let node = fields.number("node")?;
                let backing = fields.next("backing").and_then(Backing::named);
                Answer::Taken {
                    size,
                    ready: fields.need("ready", ready)?,
                    node: fields.need("node", node)?,
                    backing: fields.need("backing", backing)?,
                    path: fields.last("path")?,
                }
            }
            "released" => Answer::Released { size: fields.size()? },
            "resized" => Answer::Resized { size: fields.size()? },
            "status" => Answer::Status { json: fields.last("json")? },
            "error" => {
                let code = fields.next("code");
                let code = fields.need("code", code)?;
                let known = Code::ALL.iter().find(|(_, name)| *name == code);
                // A kind that a newer server knows is an error all the same.
                Answer::Error { code: known.map_or(Code::Failed, |(code, _)| *code), message: fields.last("message")? }
            }
            other => return Err(Malformed(format!("'{}' is not an answer", clipped(other)))),
        };
        fields.end(answer)
    }
}

impl fmt::Display for Answer {
    /// The packet.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Answer::Taken { size, ready, node, backing, path } => {
                write!(f, "taken size={size} ready={ready} node={node} backing={} path={path}", backing.name())
            }
            Answer::Released { size } => write!(f, "released size={size}"),
            Answer::Resized { size } => write!(f, "resized size={size}"),
            Answer::Status { json } => write!(f, "status json={json}"),
            Answer::Error { code, message } => write!(f, "error code={} message={message}", code.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn requests_as_people_write_them() {
        let take = |size, node, until| Ok(Request::Take { size, node, until });
        assert_eq!(Request::read(b"take size=2097152"), take(2 << 20, None, Until::Unused));
        assert_eq!(Request::read(b"take size=4194304 node=1 until=closed\n"), take(4 << 20, Some(1), Until::Closed));
        assert_eq!(Request::read(b"release path=/a b=c"), Ok(Request::Release { path: "/a b=c".into() }));
        assert_eq!(Request::read(b"status"), Ok(Request::Status { from: 0 }));
        assert_eq!(Request::read(b"status from=100"), Ok(Request::Status { from: 100 }));
    }

    #[test]
    fn nonsense_is_named() {
        for (packet, word) in [
            (&b""[..], "take"),
            (b"steal", "steal"),
            (b"take", "size"),
            (b"take size=", "number"),
            (b"take size=-1", "-1"),
            (b"take size=+1", "+1"),
            (b"take size=99999999999999999999", "number"),
            (b"take size=1 size=2", "size=2"),
            (b"take node=1 size=1", "size"),
            (b"take size=1 until=later", "later"),
            (b"release", "path"),
            (b"resize size=1 path=/x", "path=/x"),
            (b"status now", "now"),
            (b"status from=now", "now"),
            (b"take \xff", "UTF-8"),
        ] {
            let error = Request::read(packet).unwrap_err().to_string();
            assert!(error.contains(word), "{packet:?}: {error}");
        }
    }

    #[test]
    fn an_error_of_a_kind_to_come_is_an_error() {
        let answer = Answer::read(b"error code=too-late message=sorry").unwrap();
        assert_eq!(answer, Answer::Error { code: Code::Failed, message: "sorry".into() });
    }

    fn any_request() -> impl Strategy<Value = Request> {
        let until = prop_oneof![Just(Until::Closed), Just(Until::Unused)];
        prop_oneof![
            (any::<usize>(), any::<Option<usize>>(), until).prop_map(|(size, node, until)| Request::Take {
                size,
                node,
                until
            }),
            "[^\n]*".prop_map(|path| Request::Release { path }),
            (any::<usize>(), any::<Option<usize>>()).prop_map(|(size, node)| Request::Resize { size, node }),
            any::<usize>().prop_map(|from| Request::Status { from }),
        ]
    }

    fn any_answer() -> impl Strategy<Value = Answer> {
        let backing = prop_oneof![Just(Backing::Tmpfs), Just(Backing::Hugetlbfs)];
        let code = (0..Code::ALL.len()).prop_map(|index| Code::ALL[index].0);
        prop_oneof![
            (any::<usize>(), any::<usize>(), any::<usize>(), backing, "[^\n]*")
                .prop_map(|(size, ready, node, backing, path)| Answer::Taken { size, ready, node, backing, path }),
            any::<usize>().prop_map(|size| Answer::Released { size }),
            any::<usize>().prop_map(|size| Answer::Resized { size }),
            "[^\n]*".prop_map(|json| Answer::Status { json }),
            (code, "[^\n]*").prop_map(|(code, message)| Answer::Error { code, message }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_is_written_is_read_again(request in any_request(), answer in any_answer()) {
            prop_assert_eq!(Request::read(request.to_string().as_bytes()), Ok(request));
            prop_assert_eq!(Answer::read(answer.to_string().as_bytes()), Ok(answer));
        }

        /// Whatever the bytes are, and whatever a packet becomes that was meant well.
        #[test]
        fn any_bytes_are_read_to_an_end(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            request in any_request(),
            cuts in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        ) {
            let _ = (Request::read(&bytes), Answer::read(&bytes));
            let mut packet = request.to_string().into_bytes();
            for (index, byte) in cuts {
                let place = index.index(packet.len());
                packet[place] = byte;
            }
            // What is read is what would be written, but for the field that may be left out.
            if let Ok(request) = Request::read(&packet) {
                prop_assert_eq!(Request::read(request.to_string().as_bytes()), Ok(request));
            }
        }
    }
}
