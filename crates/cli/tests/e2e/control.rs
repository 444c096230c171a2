//! The control socket with peers that follow the protocol, and with others.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::bad_input::run_without_rights;
use crate::harness::{LIMIT, Lab, LimitedWait, POOL, Server, missing, noise, wait_until};

fn socket(server: &Server) -> PathBuf {
    server.announced()["control"].as_str().unwrap().into()
}

/// Connects with a timeout for answers.
fn connect(socket: &std::path::Path) -> UnixStream {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
    stream
}

/// Sends `text` and reads one answer.
fn ask(socket: &std::path::Path, text: &str) -> Value {
    let mut stream = connect(socket);
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
    let mut stream = connect(&socket(&server));
    // Far more than the socket buffers: the server receives all of it, so that the answer can be read.
    stream.write_all(&vec![b' '; 16 << 20]).unwrap();
    let mut said = String::new();
    stream.read_to_string(&mut said).unwrap();
    assert!(said.contains("-32001") && said.contains("at most 1048576 bytes"), "{said}");
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
    let mut stream = connect(&socket(&server));
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
                let mut stream = BufReader::new(connect(socket));
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
            let stream = connect(&socket(&server));
            stream.set_nonblocking(true).unwrap();
            // Fills the socket: the server waits for this peer to read.
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
    let before = lab.stat("used");
    stdin.write_all(&noise(1, 8 << 20)).unwrap();
    wait_until("the import has written", || lab.stat("used") >= before + (4 << 20));
    assert!(lab.names().is_empty(), "an import that goes on is not seen");
    import.put_down().unwrap();
    wait_until("the import is undone", || lab.stat("used") < before + (1 << 20));
    assert!(lab.names().is_empty());
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

#[test]
fn another_user_may_not_control_a_pool_even_if_the_socket_lets_him_connect() {
    if !rustix::process::geteuid().is_root() {
        return missing("only root can run programs as another user");
    }
    let lab = Lab::with_pool("64M");
    let server = Server::start_with(&lab, POOL, &["--control", "control.sock"]);
    for open in [POOL, "control.sock"] {
        std::fs::set_permissions(lab.path(open), std::fs::Permissions::from_mode(0o666)).unwrap();
    }
    let message =
        run_without_rights(&lab, &["create", "pool.img/a", "--size", "1M", "--control", "control.sock"]).refused();
    assert!(message.contains("user 65534 may not control this pool"), "{message}");
    assert_eq!(lab.json(&["list", POOL, "--control", "control.sock"]), json!([]));
    server.stop();
}

#[test]
fn a_long_request_tells_how_far_it_has_come() {
    let lab = Lab::with_pool("64M");
    let server = Server::start(&lab);
    let mut client = forkdisk_control::Client::connect(&socket(&server)).unwrap();
    let (reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(&noise(1, 8192)).unwrap();
    // The image ends after the first progress notification of its import.
    let mut writer = Some(writer);
    let mut steps = Vec::new();
    let import = forkdisk_control::params::Import { volume: "a".into(), ..Default::default() };
    let made = client.call(import, Some(reader.as_fd()), |step| {
        writer = None;
        steps.push(step);
    });
    assert_eq!(made.unwrap().size, 8192);
    let first = format!("{:?}", steps[0]);
    assert!(first.contains("importing"), "{first}");
    server.stop();
    assert!(lab.contents("a") == noise(1, 8192));
}

/// Returns the requests in docs/control.md, each with the promised answer.
fn documented() -> Vec<(Value, Value)> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/control.md");
    let text = std::fs::read_to_string(path).expect("docs/control.md");
    let examples = text.split_once("## Examples").expect("examples").1.split("\n## ").next().unwrap();
    let lines: Vec<Value> = examples
        .lines()
        .filter(|line| line.starts_with("{\""))
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    lines.chunks(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect()
}

/// Checks that both have the same names at the same places.
fn assert_alike(documented: &Value, is: &Value, place: &str) {
    match (documented, is) {
        (Value::Object(documented), Value::Object(is)) => {
            let names = |object: &serde_json::Map<String, Value>| object.keys().cloned().collect::<Vec<_>>();
            assert_eq!(names(documented), names(is), "{place}");
            documented.iter().for_each(|(name, value)| assert_alike(value, &is[name], &format!("{place}.{name}")));
        }
        (Value::Array(documented), Value::Array(is)) => {
            assert_eq!(documented.len(), is.len(), "{place}: {is:?}");
            documented.iter().zip(is).for_each(|(documented, is)| assert_alike(documented, is, place));
        }
        _ => assert_eq!(std::mem::discriminant(documented), std::mem::discriminant(is), "{place}"),
    }
}

#[test]
fn the_documentation_has_an_example_of_every_method_and_each_is_answered_as_it_says() {
    let lab = Lab::with_pool("64M");
    let server = Server::start(&lab);
    let socket = socket(&server);
    let message = ask(&socket, &request("none", json!({})));
    let methods = message["error"]["message"].as_str().unwrap().split_once("there are ").unwrap().1.to_string();
    let examples = documented();
    let shown: Vec<&str> = examples.iter().map(|(request, _)| request["method"].as_str().unwrap()).collect();
    for method in methods.split(", ") {
        assert!(shown.contains(&method), "no example of {method}");
    }
    let disk = lab.write_file("disk.img", &noise(2, 1 << 20));
    for (request, promised) in &examples {
        let method = request["method"].as_str().unwrap();
        let file = match method {
            "import" => Some(std::fs::File::open(lab.write_file("image.raw", &noise(1, 1 << 20))).unwrap()),
            "export" => Some(std::fs::File::create(lab.path("copy.raw")).unwrap()),
            _ => None,
        };
        let mut stream = connect(&socket);
        let program = lab.command(&[]).get_program().to_str().unwrap().to_string();
        let text = format!("{request}\n").replace("/srv/disk.img", disk.to_str().unwrap());
        let text = text.replace("/usr/bin/forkdisk", &program);
        match file {
            Some(file) => send_with_file(&stream, text.as_bytes(), &file),
            None => stream.write_all(text.as_bytes()).unwrap(),
        }
        let mut reader = BufReader::new(stream);
        let answer = std::iter::repeat_with(|| answer(&mut reader)).find(|said| said["method"].is_null()).unwrap();
        assert_alike(promised, &answer, method);
    }
}

fn send_with_file(stream: &UnixStream, text: &[u8], file: &std::fs::File) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let fds = [file.as_fd()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let sent = sendmsg(stream, &[std::io::IoSlice::new(text)], &mut control, SendFlags::empty()).unwrap();
    assert_eq!(sent, text.len());
}
