//! Metrics over HTTP: their values match the operations.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use crate::harness::{LIMIT, Lab, POOL, Server, client, succeed, wait_until};
use crate::nbd::Client;

fn address(server: &Server) -> String {
    let place = server.announced()["metrics"][0].as_str().expect("a place");
    place.trim_start_matches("http://").trim_end_matches("/metrics").to_owned()
}

/// Connects with a timeout for answers.
pub fn unix(path: impl AsRef<std::path::Path>) -> UnixStream {
    let stream = UnixStream::connect(path).expect("connected");
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

fn tcp(server: &Server) -> TcpStream {
    let stream = TcpStream::connect(address(server)).expect("connected");
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

fn ask(stream: &mut (impl Read + Write), request: &[u8]) -> String {
    stream.write_all(request).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("answered");
    answer
}

/// Sends a request of HTTP/1.0, whose answer is not chunked.
pub fn scrape(stream: &mut (impl Read + Write)) -> BTreeMap<String, f64> {
    let answer = ask(stream, b"GET /metrics HTTP/1.0\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("text/plain; version=0.0.4"), "{head}");
    let samples = body.lines().filter(|line| !line.starts_with('#'));
    let sample = |line: &str| {
        let (key, value) = line.rsplit_once(' ').expect("a value");
        (key.to_owned(), value.parse().expect("a number"))
    };
    samples.map(sample).collect()
}

#[test]
fn what_was_copied_is_told_for_the_pool_and_for_the_volume() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "pool.img/plain", "--size", "4M"]);
    lab.ok(&["set", "break=copy", "pool.img/a"]);
    let server = Server::start_with(&lab, POOL, &["--metrics", "unix:metrics"]);
    let fill = |export| {
        let mut nbd = Client::connect(server.socket(), export).expect("connected");
        nbd.write(0, &[7; 1 << 20], false).expect("written");
        nbd
    };
    let (mut a, mut plain) = (fill("a"), fill("plain"));
    lab.ok(&["snapshot", "pool.img/a@s", "pool.img/plain@s"]);
    lab.ok(&["copier", POOL, "--volume", "a", "--set", "throttle=50%"]);
    // A chunk of 64 KiB each, of which a page is the client's.
    (0..3).for_each(|i| a.write(i << 18, &[8; 4096], false).expect("written"));
    plain.write(0, &[8; 4096], false).expect("written");
    let samples = scrape(&mut unix(lab.path("metrics")));
    let all = |name: &str| samples[&format!("forkdisk_copier_{name}")];
    let of = |volume: &str, name: &str| samples[&format!("forkdisk_volume_copier_{name}{{volume=\"{volume}\"}}")];
    assert_eq!([all("jobs_total"), of("a", "jobs_total"), of("plain", "jobs_total")], [3.0, 3.0, 0.0]);
    assert_eq!([all("written_bytes_total"), of("a", "written_bytes_total")], [3.0 * 65536.0; 2]);
    assert_eq!([all("given_bytes_total"), of("a", "given_bytes_total")], [3.0 * 4096.0; 2]);
    assert_eq!([all("queued_jobs"), all("in_flight_subjobs"), all("buffer_used_bytes")], [0.0; 3]);
    assert_eq!([all("throttle_ratio"), of("a", "throttle_ratio"), of("plain", "throttle_ratio")], [1.0, 0.5, 1.0]);
    assert!(of("a", "duration_seconds_total") > 0.0 && all("buffer_bytes") > 0.0);
    let stats = lab.ok(&["stats", POOL]);
    let jobs = stats.lines().find(|line| line.starts_with("copier_jobs")).expect("the copier's jobs");
    assert!(jobs.contains("3 (0 failed, 0 queued, 0 sub-jobs in flight)"), "{jobs}");
    let live = lab.json(&["stats", POOL])["live"].clone();
    assert_eq!([&live["copier"]["written"], &live["volumes"][0]["copier"]["jobs"]], [3 * 65536, 3]);
    let top = lab.ok(&["top", POOL, "--once"]);
    assert!(top.contains("copier   ") && top.contains("COPY B/S"), "{top}");
    server.stop();
}

#[test]
fn metrics_are_what_was_done() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "pool.img/idle", "--size", "1M"]);
    lab.ok(&["snapshot", "pool.img/a@s"]);
    let server = Server::start_with(&lab, POOL, &["--metrics", "127.0.0.1:0"]);
    let mut nbd = Client::connect(server.socket(), "a").expect("connected");
    for i in 0..5 {
        nbd.write(i * 8192, &[7; 8192], false).expect("written");
    }
    nbd.read(0, 4096).expect("read");
    nbd.trim(0, 4096).expect("trimmed");
    nbd.flush().expect("flushed");
    let samples = scrape(&mut tcp(&server));
    let of = |name: &str| samples[&format!("forkdisk_{name}")];
    let volume = |name: &str| of(&format!("volume_{name}{{volume=\"a\"}}"));
    assert_eq!([volume("write_operations_total"), volume("write_bytes_total")], [5.0, 40960.0]);
    assert_eq!([volume("read_operations_total"), volume("read_bytes_total")], [1.0, 4096.0]);
    assert_eq!([volume("discard_operations_total"), volume("zero_operations_total")], [1.0, 0.0]);
    assert_eq!([volume("flush_operations_total"), volume("write_in_flight")], [1.0, 0.0]);
    assert_eq!([volume("write_duration_seconds_count"), volume("read_duration_seconds_count")], [5.0, 1.0]);
    assert!(volume("write_duration_seconds_sum") > 0.0);
    assert_eq!([volume("provisioned_bytes_total"), volume("breaks_total")], [40960.0, 0.0]);
    assert_eq!(volume("referenced_bytes"), 40960.0 - 4096.0);
    assert_eq!(of("volume_size_bytes{volume=\"idle\"}"), 1048576.0);
    assert!(!samples.contains_key("forkdisk_volume_read_operations_total{volume=\"idle\"}"), "it was not opened");
    assert_eq!(of("pool_write_bytes_total"), 40960.0);
    assert_eq!([of("pool_size_bytes"), of("pool_volumes"), of("pool_snapshots")], [67108864.0, 2.0, 1.0]);
    assert_eq!([of("pool_mode{mode=\"rw\"}"), of("nbd_connections")], [1.0, 1.0]);
    assert_eq!(of("device_bytes_total{kind=\"data\",direction=\"write\"}"), 40960.0);
    assert!(of("device_bytes_total{kind=\"journal\",direction=\"write\"}") >= 4096.0);
    assert!(of("commit_group_size_count") >= 1.0 && of("device_flushes_total") >= 1.0);
    drop(nbd);
    server.stop();
}

#[test]
fn metrics_are_to_be_had_on_a_unix_socket() {
    let lab = Lab::with_pool("64M");
    let socket = lab.path("metrics.sock");
    let server = Server::start_with(&lab, POOL, &["--metrics", &format!("unix:{}", socket.display())]);
    let samples = scrape(&mut unix(&socket));
    assert_eq!(samples["forkdisk_pool_volumes"], 0.0);
    server.stop();
    assert!(!socket.exists(), "nothing is left behind");
}

#[test]
fn curl_reads_the_answer_in_chunks() {
    let lab = Lab::with_pool("64M");
    let names: Vec<String> = (0..300).map(|i| format!("pool.img/v{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    lab.ok(&[&["create"], &names[..], &["--size", "1M"]].concat());
    let server = Server::start_with(&lab, POOL, &["--metrics", "127.0.0.1:0"]);
    let Some(mut curl) = client("curl", "curl") else { return };
    let text = succeed(curl.args(["-sS", "--fail", &format!("http://{}/metrics", address(&server))]));
    assert_eq!(text.lines().filter(|l| l.starts_with("forkdisk_volume_size_bytes{")).count(), 300);
    server.stop();
}

#[test]
fn hostile_scrapers_are_turned_away_and_bounded() {
    let lab = Lab::with_pool("64M");
    let server = Server::start_with(&lab, POOL, &["--metrics", "127.0.0.1:0"]);
    let connect = || tcp(&server);
    let cases: [(&[u8], &str); 4] = [
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", "HTTP/1.1 404"),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", "HTTP/1.1 400"),
        (&[b'a'; 8192], "HTTP/1.1 431"),
    ];
    for (request, status) in cases {
        let answer = ask(&mut connect(), request);
        assert!(answer.starts_with(status), "{answer}");
    }
    assert!(!ask(&mut connect(), b"HEAD /metrics HTTP/1.1\r\n\r\n").contains("forkdisk_"));
    // Silent connections take all places; they time out, and nothing else suffers.
    let silent: Vec<TcpStream> = (0..40).map(|_| connect()).collect();
    let mut late = connect();
    let mut end = [0; 1];
    assert!(matches!(late.read(&mut end), Ok(0) | Err(_)), "there is no place left");
    drop(silent);
    wait_until("there is a place again", || {
        let mut stream = connect();
        let sent = stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").is_ok();
        let mut answer = String::new();
        sent && stream.read_to_string(&mut answer).is_ok() && answer.starts_with("HTTP/1.1 200")
    });
    server.stop();
}

#[test]
fn metrics_beyond_this_machine_are_refused() {
    let lab = Lab::with_pool("64M");
    let said = lab.run(&["serve", POOL, "--metrics", "0.0.0.0:0"]).refused();
    assert!(said.contains("--insecure"), "{said}");
    assert!(lab.run(&["serve", POOL, "--metrics", "nonsense"]).stderr.contains("ADDR:PORT"));
}

#[test]
fn stats_of_a_served_pool_has_live_counters() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    assert!(lab.json(&["stats", POOL])["live"].is_null(), "it is not served");
    let server = Server::start(&lab);
    let mut nbd = Client::connect(server.socket(), "a").expect("connected");
    nbd.write(0, &[7; 8192], false).expect("written");
    let stats = lab.json(&["stats", POOL]);
    let write = &stats["live"]["activity"]["volumes"]["operations"]["write"];
    assert_eq!([&write["operations"], &write["bytes"], &write["latency"]["count"]], [1, 8192, 1]);
    assert_eq!(stats["live"]["server"]["connections"], 1);
    assert_eq!(stats["live"]["volumes"][0]["activity"]["provision"]["bytes"], 8192);
    let text = lab.ok(&["stats", POOL, "-H", "-p"]);
    assert!(text.contains("write_bytes\t8192\n"), "{text}");
    server.stop();
}

#[test]
fn top_shows_who_is_busy() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/busy", "pool.img/idle", "--size", "1M"]);
    assert!(lab.run(&["top", POOL, "--once"]).refused().contains("not being served"));
    let server = Server::start(&lab);
    let mut nbd = Client::connect(server.socket(), "busy").expect("connected");
    let ended = std::sync::atomic::AtomicBool::new(false);
    let said = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(std::sync::atomic::Ordering::Relaxed) {
                nbd.write(4096, &[9; 4096], false).expect("written");
            }
        });
        let said = lab.ok(&["top", POOL, "--once", "--interval", "0.5"]);
        ended.store(true, std::sync::atomic::Ordering::Relaxed);
        said
    });
    let row = |name: &str| said.lines().find(|line| line.split_whitespace().next() == Some(name));
    let writes = |name: &str| row(name).and_then(|row| row.split_whitespace().nth(4)?.parse::<f64>().ok());
    assert!(said.starts_with("pool     rw  used "), "{said}");
    assert!(writes("busy").is_some_and(|rate| rate > 0.0), "{said}");
    assert_eq!(writes("busy"), writes("all"), "{said}");
    assert_eq!(row("idle"), None, "it is not in use: {said}");
    server.stop();
}

#[test]
fn a_pool_that_runs_full_is_told_of_once_until_there_is_space_again() {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "48M"]);
    let server = Server::start_with(&lab, POOL, &["--metrics", "unix:metrics", "--low-water", "50%"]);
    let mut nbd = Client::connect(server.socket(), "a").expect("connected");
    let state = |name: &str| {
        let stats = lab.json(&["stats", POOL]);
        let samples = scrape(&mut unix(lab.path("metrics")));
        assert_eq!(samples["forkdisk_pool_low_water_bytes"], stats["low_water"].as_f64().unwrap());
        assert_eq!(samples["forkdisk_pool_low"], f64::from(u8::from(stats["low"].as_bool().unwrap())), "{name}");
        (stats["low"].as_bool().unwrap(), stats["low_water"].as_u64().unwrap())
    };
    let half = 67_108_864 / 100 * 50;
    let logged = |what: &str| std::fs::read_to_string(lab.path("serve.log")).unwrap().matches(what).count();
    assert_eq!(state("empty"), (false, half));
    for round in 1..=2 {
        (0..40).for_each(|i| nbd.write(i << 20, &vec![7; 1 << 20], false).expect("written"));
        assert_eq!(state("full"), (true, half));
        crate::harness::wait_until("it is told of", || logged("the pool runs full") == round);
        // Waits for two more checks: they log nothing.
        std::thread::sleep(std::time::Duration::from_millis(2500));
        assert_eq!((logged("the pool runs full"), logged("no longer low")), (round, round - 1));
        nbd.trim(0, 40 << 20).expect("trimmed");
        crate::harness::wait_until("that is told of, too", || logged("no longer low") == round);
        assert_eq!(state("emptied"), (false, half));
    }
    assert!(lab.ok(&["stats", POOL]).lines().any(|line| line.starts_with("low ") && line.ends_with("no")));
    drop(nbd);
    server.stop();
    let bad = lab.run(&["serve", POOL, "--low-water", "101%"]);
    assert!(bad.status.code() == Some(2) && bad.stderr.contains("not a percentage"), "{}", bad.stderr);
}
