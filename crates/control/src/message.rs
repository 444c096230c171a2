//! JSON-RPC 2.0: one message per line, in either direction.

use serde::Serialize;
use serde_json::{Value, json};

use crate::failure::{Failure, FailureKind};
use crate::method::{Request, Unclear};
use crate::observer::Step;

/// Method name of progress notifications.
pub const PROGRESS: &str = "progress";
/// Most requests in a batch.
pub const MAX_BATCH: usize = 32;

/// Error codes of the protocol other than those of verbs.
pub struct ErrorCode;

impl ErrorCode {
    /// Not JSON, or nested too deeply.
    pub const PARSE: i64 = -32700;
    /// JSON, but not a request.
    pub const REQUEST: i64 = -32600;
    /// Unknown method.
    pub const METHOD: i64 = -32601;
    /// Missing, unknown or invalid parameters.
    pub const PARAMS: i64 = -32602;
    /// The message exceeds the server's limit; the server closes the connection.
    pub const TOO_LONG: i64 = -32001;
    /// The peer is neither the daemon's user nor root; the server closes the connection.
    pub const NOT_PERMITTED: i64 = -32002;
    /// There are too many connections; the server closes this one.
    pub const TOO_MANY: i64 = -32003;
}

/// An error object of the protocol.
#[derive(Clone, Debug, PartialEq)]
pub struct RpcError {
    pub code: i64,
    pub message: String,
    /// Set for a verb's failure only.
    pub kind: Option<FailureKind>,
}

impl RpcError {
    pub fn new(code: i64, message: impl Into<String>) -> RpcError {
        RpcError { code, message: message.into(), kind: None }
    }
}

impl From<Failure> for RpcError {
    fn from(failure: Failure) -> RpcError {
        RpcError { code: failure.kind.code(), message: failure.message, kind: Some(failure.kind) }
    }
}

/// One request of a peer, or the error of an invalid one. `id` is `None` for a notification, which gets no answer.
#[derive(Debug, PartialEq)]
pub struct Item {
    pub id: Option<Value>,
    pub request: Result<Request, RpcError>,
}

/// A parsed line.
#[derive(Debug, PartialEq)]
pub enum Incoming {
    One(Box<Item>),
    Batch(Vec<Item>),
}

fn refused(code: i64, message: impl Into<String>) -> Item {
    Item { id: Some(Value::Null), request: Err(RpcError::new(code, message)) }
}

/// Parses one line.
pub fn parse(line: &[u8]) -> Incoming {
    match serde_json::from_slice(line) {
        Err(error) => Incoming::One(Box::new(refused(ErrorCode::PARSE, format!("this is not JSON: {error}")))),
        Ok(Value::Array(items)) if items.is_empty() => {
            Incoming::One(Box::new(refused(ErrorCode::REQUEST, "a batch has at least one request")))
        }
        Ok(Value::Array(items)) if items.len() > MAX_BATCH => {
            let text = format!("a batch has at most {MAX_BATCH} requests, this one {}", items.len());
            Incoming::One(Box::new(refused(ErrorCode::REQUEST, text)))
        }
        Ok(Value::Array(items)) => Incoming::Batch(items.into_iter().map(item).collect()),
        Ok(value) => Incoming::One(Box::new(item(value))),
    }
}

fn item(value: Value) -> Item {
    let Value::Object(mut members) = value else {
        return refused(ErrorCode::REQUEST, "a request is a JSON object");
    };
    let id = members.remove("id");
    if !matches!(id, None | Some(Value::Null | Value::String(_) | Value::Number(_))) {
        return refused(ErrorCode::REQUEST, "`id` is a string or a number");
    }
    if members.get("jsonrpc") != Some(&json!("2.0")) {
        let id = Some(id.unwrap_or(Value::Null));
        return Item { id, request: Err(RpcError::new(ErrorCode::REQUEST, "`jsonrpc` must be \"2.0\"")) };
    }
    let Some(Value::String(method)) = members.remove("method") else {
        let id = Some(id.unwrap_or(Value::Null));
        return Item { id, request: Err(RpcError::new(ErrorCode::REQUEST, "`method` is missing or no string")) };
    };
    let params = members.remove("params").unwrap_or_else(|| json!({}));
    let request = Request::from_parts(&method, params).map_err(|unclear| match unclear {
        Unclear::Params(why) => RpcError::new(ErrorCode::PARAMS, format!("bad parameters of {method}: {why}")),
        Unclear::Method => {
            let text = format!("there is no such method; there are {}", Request::NAMES.join(", "));
            RpcError::new(ErrorCode::METHOD, text)
        }
    });
    Item { id, request }
}

/// Builds the answer to request `id`.
pub fn answer(id: &Value, outcome: Result<impl Serialize, RpcError>) -> Value {
    let outcome = outcome.and_then(|reply| {
        serde_json::to_value(reply).map_err(|e| RpcError::new(-32603, format!("the answer cannot be written: {e}")))
    });
    match outcome {
        Ok(result) => json!({"jsonrpc": "2.0", "id": id, "result": result}),
        Err(RpcError { code, message, kind }) => {
            let mut error = json!({"code": code, "message": message});
            if let Some(kind) = kind {
                error["data"] = json!({"kind": kind});
            }
            json!({"jsonrpc": "2.0", "id": id, "error": error})
        }
    }
}

/// Builds the notification that request `id` has reached `step`.
pub fn progress(id: &Value, step: &Step) -> Value {
    let Step { what, done, total } = step;
    json!({"jsonrpc": "2.0", "method": PROGRESS, "params": {"id": id, "what": what, "done": done, "total": total}})
}

/// Serialises `value` as one line.
pub fn line(value: &Value) -> Vec<u8> {
    let mut line = value.to_string().into_bytes();
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use forkdisk::ErrorKind;

    use super::*;

    fn code_of(text: &str) -> i64 {
        match parse(text.as_bytes()) {
            Incoming::One(item) => item.request.unwrap_err().code,
            Incoming::Batch(_) => panic!("a batch: {text}"),
        }
    }

    #[test]
    fn what_is_no_request_is_told_apart() {
        assert_eq!(code_of("{"), ErrorCode::PARSE);
        assert_eq!(code_of(&"[".repeat(100_000)), ErrorCode::PARSE, "nested too deeply");
        for text in [
            "[]",
            "1",
            "{}",
            r#"{"jsonrpc":"1.0","method":"stats","id":1}"#,
            r#"{"jsonrpc":"2.0","method":1,"id":1}"#,
            r#"{"jsonrpc":"2.0","method":"stats","id":[]}"#,
        ] {
            assert_eq!(code_of(text), ErrorCode::REQUEST, "{text}");
        }
        assert_eq!(code_of(r#"{"jsonrpc":"2.0","method":"nothing","id":1}"#), ErrorCode::METHOD);
        assert_eq!(code_of(r#"{"jsonrpc":"2.0","method":"grow","params":{"size":-1},"id":1}"#), ErrorCode::PARAMS);
    }

    #[test]
    fn a_batch_is_bounded_and_its_members_stand_for_themselves() {
        let stats = r#"{"jsonrpc":"2.0","method":"stats","id":"x"}"#;
        let Incoming::Batch(items) = parse(format!("[{stats},7]").as_bytes()) else { panic!("no batch") };
        assert_eq!(items[0].id, Some(json!("x")));
        assert!(items[0].request.is_ok() && items[1].request.is_err());
        let many = vec![stats; MAX_BATCH + 1].join(",");
        assert_eq!(code_of(&format!("[{many}]")), ErrorCode::REQUEST);
    }

    #[test]
    fn a_request_without_an_id_is_a_notification() {
        let Incoming::One(item) = parse(br#"{"jsonrpc":"2.0","method":"stats"}"#) else { panic!("a batch") };
        assert_eq!((item.id, item.request.is_ok()), (None, true));
    }

    #[test]
    fn a_failure_carries_its_kind() {
        let failure = Failure::new(ErrorKind::Busy, "no");
        let value = answer(&json!(7), Err::<(), _>(failure.into()));
        assert_eq!(value["error"], json!({"code": 4, "message": "no", "data": {"kind": "busy"}}));
        assert_eq!(value["id"], 7);
    }
}
