//! A client of a daemon's control socket: JSON-RPC, a line for each message. It makes calls without starting a program
//! for each, so that only the daemon is timed.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// A connection to a control socket; one call at a time.
pub struct Control {
    stream: BufReader<UnixStream>,
    id: u64,
}

impl Control {
    /// Connects to the socket at `path`.
    pub fn connect(path: &Path) -> Result<Control> {
        let stream = UnixStream::connect(path).with_context(|| path.display().to_string())?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Control { stream: BufReader::new(stream), id: 0 })
    }

    /// Calls `method` and returns its result.
    pub fn call(&mut self, method: &str, params: Value) -> Result<Value> {
        self.id += 1;
        let request = json!({"jsonrpc": "2.0", "id": self.id, "method": method, "params": params});
        self.stream.get_mut().write_all(format!("{request}\n").as_bytes())?;
        loop {
            let mut line = String::new();
            let read = self.stream.read_line(&mut line).with_context(|| format!("the answer to {method}"))?;
            if read == 0 {
                bail!("the daemon closed its control socket before it answered {method}");
            }
            let mut answer: Value = serde_json::from_str(&line)?;
            if answer.get("method").is_some() {
                // A notification of progress.
                continue;
            }
            if let Some(error) = answer.get("error") {
                bail!("{method}: {}", error["message"].as_str().unwrap_or_default());
            }
            return Ok(answer["result"].take());
        }
    }
}
