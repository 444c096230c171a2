//! The control socket under peers that keep to the protocol, and under others.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::harness::{Lab, POOL, Server, noise, wait_until};

fn socket(server: &Server) -> PathBuf {
    server.announced()["control"].as_str().unwrap().into()
}

/// Sends `text` and reads one answer.
fn ask(socket: &PathBuf, text: &str) -> Value {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
    stream.write_all(b"\n").unwrap();
    answer(&mut BufReader::new(stream))
}

fn answer(reader: &mut BufReader<UnixStream>) -> Value {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e} in {line:?}"))
}

fn request(method: &str, params: Value) -> String {
    json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).to_string()
}

#[test]
fn messages_that_are_no_requests_get_the_errors_of_the_protocol() {
    let lab = Lab::with_pool("64M");
    let server = Server::start(&lab);
    let socket = socket(&server);
    for (text, code) in [
        ("{\"jsonrpc\": \"2.0\", \"method\"".to_string(), -32700),
        ("\u{1}\u{2}garbage".to_string(), -32700),
        ("[".repeat(200_000), -32700),
        (format!("{{\"a\":{}", "[".repeat(100_000)), -32700),
        ("[]".to_string(), -32600),
        ("17".to_string(), -32600),
        (r#"{"jsonrpc":"1.0","id":1,"method":"stats"}"#.to_string(), -32600),
        (r#"{"id":1,"method":"stats"}"#.to_string(), -32600),
        (request("explode", json!({})), -32601),
        (request("grow", json!({"size": "large"})), -32602),
        (request("grow", json!({})), -32602),
        (request("stats", json!({"more": 1})), -32602),
        (request("list", json!({"objects": ["none"]})), 1),
        (request("create", json!({"volumes": ["../x"], "size": 1})), 3),
        (request("delete", json!({"objects": [""], "recursive": true})), 3),
        (request("import", json!({"volume": "a"})), 3),
    ] {
        let answer = ask(&socket, &text);
        let shown: String = text.chars().take(80).collect();
        assert_eq!(answer["error"]["code"], code, "{shown}: {answer}");
        assert!(answer["error"]["message"].as_str().is_some_and(|message| message.len() > 5), "{answer}");
    }
    assert_eq!(lab.names(), Vec::<String>::new());
}

#[test]
fn a_message_that_is_too_long_ends_its_connection_and_no_other() {
    let lab = Lab::with_pool("64M");
    let server = Server::start(&lab);
    let mut stream = UnixStream::connect(socket(&server)).unwrap();
    // The server may close the connection before it has all of it.
    let _ = stream.write_all(&vec![b' '; 4 << 20]);
    let mut said = String::new();
    let _ = stream.read_to_string(&mut said);
    assert!(said.is_empty() || said.contains("-32001"), "{said}");
    assert_eq!(lab.names(), Vec::<String>::new());
}

#[test]
fn a_batch_is_answered_as_one_and_notifications_not_at_all() {
    let lab = Lab::with_pool("64M");
    let server = Server::start(&lab);
    let create = json!({"jsonrpc": "2.0", "method": "create", "params": {"volumes": ["a"], "size": 4096}});
    let list = json!({"jsonrpc": "2.0", "id": "l", "method": "list"});
    let answer = ask(&socket(&server), &json!([create, list, 7]).to_string());
    assert_eq!(answer.as_array().unwrap().len(), 2, "{answer}");
    assert_eq!((&answer[0]["id"], &answer[0]["result"][0]["name"]), (&json!("l"), &json!("a")));
    assert_eq!(answer[1]["error"]["code"], -32600);
}

#[test]
fn a_request_without_a_last_line_feed_is_answered_when_the_peer_has_finished() {
    let lab = Lab::with_pool("64M");
    let server = Server::start(&lab);
    let mut stream = UnixStream::connect(socket(&server)).unwrap();
    stream.write_all(request("stats", json!({})).as_bytes()).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(answer(&mut BufReader::new(stream))["result"]["mode"], "rw");
}

#[test]
fn fifty_peers_at_once_each_get_their_own_answers() {
    let lab = Lab::with_pool("64M");
    let server = Server::start(&lab);
    let socket = &socket(&server);
    std::thread::scope(|scope| {
        for peer in 0..50 {
            scope.spawn(move || {
                let mut stream = BufReader::new(UnixStream::connect(socket).unwrap());
                for round in 0..4 {
                    let name = format!("p{peer}/r{round}");
                    let create = request("create", json!({"volumes": [name], "size": 4096 * (peer + 1)}));
                    writeln!(stream.get_mut(), "{create}").unwrap();
                    let made = answer(&mut stream);
                    assert_eq!(made["result"][0]["name"], name, "{made}");
                    assert_eq!(made["result"][0]["size"], 4096 * (peer + 1));
                }
            });
        }
    });
    assert_eq!(lab.names().len(), 200);
    server.stop();
    lab.assert_clean();
}

#[test]
fn peers_that_never_read_hold_up_nobody_and_no_end() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let server = Server::start(&lab);
    let list = request("list", json!({})) + "\n";
    let peers: Vec<UnixStream> = (0..20)
        .map(|_| {
            let stream = UnixStream::connect(socket(&server)).unwrap();
            stream.set_nonblocking(true).unwrap();
            // Until nothing more goes in: the server waits for this peer to read.
            while (&stream).write(list.repeat(100).as_bytes()).is_ok() {}
            stream
        })
        .collect();
    for i in 0..20 {
        lab.ok(&["snapshot", &format!("pool.img/a@{i}")]);
    }
    server.stop();
    drop(peers);
    lab.assert_clean();
}

#[test]
fn an_import_whose_caller_is_killed_leaves_nothing() {
    let lab = Lab::with_pool("64M");
    let server = Server::start(&lab);
    let mut import = lab.command(&["import", "-", "pool.img/a"]).stdin(std::process::Stdio::piped()).spawn().unwrap();
    let mut stdin = import.stdin.take().unwrap();
    stdin.write_all(&noise(1, 1 << 20)).unwrap();
    wait_until("the import has begun", || lab.names().iter().any(|name| name.ends_with(".partial")));
    import.kill().unwrap();
    import.wait().unwrap();
    wait_until("the import is undone", || lab.names().is_empty());
    drop(stdin);
    server.stop();
    lab.assert_clean();
}

#[test]
fn the_documentation_lists_every_method() {
    let lab = Lab::with_pool("64M");
    let server = Server::start(&lab);
    let refusal = ask(&socket(&server), &request("none", json!({})));
    let message = refusal["error"]["message"].as_str().unwrap();
    let methods = message.split_once("there are ").unwrap().1;
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/control.md");
    let documented = std::fs::read_to_string(path).expect("docs/control.md");
    for method in methods.split(", ") {
        assert!(documented.contains(&format!("\n| `{method}` |")), "{method}");
    }
    assert_eq!(lab.json(&["stats", POOL])["mode"], "rw");
}
