//! What is understood of HTTP: `GET /metrics`, and what is answered to everything else.

/// The longest head of a request, in bytes.
pub const HEAD_MOST: usize = 8 << 10;

/// What is done with what a client has sent so far.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The head of the request is not complete yet.
    More,
    /// It asks for the metrics.
    Metrics,
    /// It gets this status.
    Refused(&'static str),
}

/// What `bytes`, the first of a connection, ask for.
pub fn judge(bytes: &[u8]) -> Outcome {
    let complete = bytes.windows(4).any(|end| end == b"\r\n\r\n") || bytes.windows(2).any(|end| end == b"\n\n");
    if !complete {
        return if bytes.len() < HEAD_MOST { Outcome::More } else { Outcome::Refused(TOO_LARGE) };
    }
    let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let Ok(line) = std::str::from_utf8(line) else { return Outcome::Refused(BAD_REQUEST) };
    let mut words = line.trim_end_matches('\r').split(' ');
    let (Some(method), Some(target), Some(version), None) = (words.next(), words.next(), words.next(), words.next())
    else {
        return Outcome::Refused(BAD_REQUEST);
    };
    let sound = !method.is_empty() && method.bytes().all(|byte| byte.is_ascii_uppercase()) && target.starts_with('/');
    match (version, method, target.split('?').next()) {
        _ if !sound => Outcome::Refused(BAD_REQUEST),
        ("HTTP/1.1" | "HTTP/1.0", "GET", Some("/metrics")) => Outcome::Metrics,
        ("HTTP/1.1" | "HTTP/1.0", _, Some("/metrics")) => Outcome::Refused(NOT_ALLOWED),
        ("HTTP/1.1" | "HTTP/1.0", ..) => Outcome::Refused(NOT_FOUND),
        _ => Outcome::Refused(BAD_REQUEST),
    }
}

const BAD_REQUEST: &str = "400 Bad Request";
const NOT_FOUND: &str = "404 Not Found";
const NOT_ALLOWED: &str = "405 Method Not Allowed";
const TOO_LARGE: &str = "431 Request Header Fields Too Large";

/// The response with the metrics.
pub fn metrics(text: &str) -> Vec<u8> {
    response("200 OK", "application/openmetrics-text; version=1.0.0; charset=utf-8", "", text)
}

/// The response with another status.
pub fn refused(status: &str) -> Vec<u8> {
    let allow = if status == NOT_ALLOWED { "Allow: GET\r\n" } else { "" };
    response(status, "text/plain; charset=utf-8", allow, "GET /metrics is all there is here\n")
}

fn response(status: &str, kind: &str, more: &str, body: &str) -> Vec<u8> {
    let len = body.len();
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len}\r\n{more}Connection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_the_metrics_are_served() {
        for (head, verdict) in [
            ("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", Outcome::Metrics),
            ("GET /metrics?name=x HTTP/1.0\r\n\r\n", Outcome::Metrics),
            ("GET /metrics HTTP/1.1\n\n", Outcome::Metrics),
            ("GET / HTTP/1.1\r\n\r\n", Outcome::Refused(NOT_FOUND)),
            ("GET /metrics/ HTTP/1.1\r\n\r\n", Outcome::Refused(NOT_FOUND)),
            ("POST /other HTTP/1.1\r\n\r\n", Outcome::Refused(NOT_FOUND)),
            ("POST /metrics HTTP/1.1\r\n\r\n", Outcome::Refused(NOT_ALLOWED)),
            ("HEAD /metrics HTTP/1.1\r\n\r\n", Outcome::Refused(NOT_ALLOWED)),
            ("get /metrics HTTP/1.1\r\n\r\n", Outcome::Refused(BAD_REQUEST)),
            ("GET /metrics HTTP/2.0\r\n\r\n", Outcome::Refused(BAD_REQUEST)),
            ("GET /metrics\r\n\r\n", Outcome::Refused(BAD_REQUEST)),
            ("GET  /metrics HTTP/1.1\r\n\r\n", Outcome::Refused(BAD_REQUEST)),
            ("\r\n\r\n", Outcome::Refused(BAD_REQUEST)),
            ("GET /metrics HTTP/1.1\r\n", Outcome::More),
            ("", Outcome::More),
        ] {
            assert_eq!(judge(head.as_bytes()), verdict, "{head:?}");
        }
        assert_eq!(judge(&[b'a'; HEAD_MOST]), Outcome::Refused(TOO_LARGE));
        assert_eq!(judge(&[b'a'; HEAD_MOST - 1]), Outcome::More);
    }

    #[test]
    fn a_response_says_its_length() {
        let text = String::from_utf8(metrics("x 1\n# EOF\n")).unwrap();
        assert!(text.starts_with("HTTP/1.1 200 OK\r\nContent-Type: application/openmetrics-text; version=1.0.0;"));
        assert!(text.ends_with("\r\nContent-Length: 10\r\nConnection: close\r\n\r\nx 1\n# EOF\n"), "{text}");
        assert!(String::from_utf8(refused(NOT_ALLOWED)).unwrap().contains("\r\nAllow: GET\r\n"));
    }

    proptest! {
        #[test]
        fn garbage_is_never_the_metrics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(judge(&bytes) != Outcome::Metrics);
        }
    }
}
