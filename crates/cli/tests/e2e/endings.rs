//! Prompt ends: peers of every listener see the end of their connection, and descriptors, sockets, locks and
//! devices are released while the daemon continues. Also runs in guests with older kernels (`kernels`).

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use forkdisk::Device;
use forkdisk::device::{Buf, Segment};
use forkdisk_uring::{Config, DeviceOptions, Rt, Stream, TcpListener, UnixListener, UringDevice, Watched, block_on};

use crate::certificates::Authority;
use crate::harness::{Lab, POOL, Server, client, missing, succeed};
use crate::mount_programs::{Below, Loop};
use crate::nbd::Client;

/// Number of connections of each kind that are opened and closed.
const MANY: usize = 50;
/// How long an end may take to be seen, including on an emulated processor.
const SOON: Duration = Duration::from_secs(30);

/// Resources of a daemon: descriptors, connected unix sockets, connections of its TCP ports.
#[derive(Debug)]
struct Held {
    descriptors: usize,
    sockets: usize,
    connections: usize,
}

impl Held {
    /// Returns those of a server in the folder of `lab`.
    fn by(lab: &Lab, server: &Server) -> Held {
        let descriptors = fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap().count();
        // The server's end of a connection is listed with the path of the listening socket.
        let (folder, control) = (lab.path(""), server.announced()["control"].as_str().unwrap());
        let table = fs::read_to_string("/proc/net/unix").unwrap();
        let paths = table.lines().filter_map(|line| line.split_whitespace().nth(7));
        let sockets = paths.filter(|path| Path::new(path).starts_with(&folder) || *path == control).count();
        Held { descriptors, sockets, connections: tcp_ports(server).map(connections).sum() }
    }

    /// Waits until `server` holds no more than this.
    #[track_caller]
    fn wait(&self, lab: &Lab, server: &Server) {
        let start = Instant::now();
        loop {
            let now = Held::by(lab, server);
            if now.descriptors <= self.descriptors && now.sockets <= self.sockets && now.connections <= self.connections
            {
                return;
            }
            assert!(start.elapsed() < SOON, "held before: {self:?}, now: {now:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn tcp_ports(server: &Server) -> impl Iterator<Item = u16> {
    let announced = server.announced();
    let places = [&announced["tcp"], &announced["metrics"]].into_iter().flat_map(|list| list.as_array().unwrap());
    places.filter_map(|place| {
        let place = place.as_str().unwrap().trim_end_matches("/metrics").trim_end_matches('/');
        place.rsplit_once(':')?.1.parse().ok()
    })
}

/// Returns the connections that a port of this machine still has; those in TIME_WAIT are not counted.
fn connections(port: u16) -> usize {
    const LISTENING: &str = "0A";
    const TIME_WAIT: &str = "06";
    let own = format!(":{port:04X}");
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| fs::read_to_string(path).unwrap_or_default());
    let lines = tables.iter().flat_map(|table| table.lines());
    let fields = lines.map(|line| line.split_whitespace().collect::<Vec<_>>());
    fields.filter(|f| f.len() > 3 && f[1].ends_with(&own) && f[3] != LISTENING && f[3] != TIME_WAIT).count()
}

/// A stream of a client, unix or TCP.
trait Door: Read + Write {
    fn limit(&self);
    fn finish(&self);
}

impl Door for UnixStream {
    fn limit(&self) {
        self.set_read_timeout(Some(SOON)).unwrap();
    }

    fn finish(&self) {
        self.shutdown(Shutdown::Write).unwrap();
    }
}

impl Door for TcpStream {
    fn limit(&self) {
        self.set_read_timeout(Some(SOON)).unwrap();
    }

    fn finish(&self) {
        self.shutdown(Shutdown::Write).unwrap();
    }
}

fn unix(path: impl AsRef<Path>) -> Box<dyn Door> {
    let stream = UnixStream::connect(path).unwrap();
    stream.limit();
    Box::new(stream)
}

fn tcp(port: u16) -> Box<dyn Door> {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.limit();
    Box::new(stream)
}

/// Sends `words` and reads up to the end of the connection, which must come.
#[track_caller]
fn say(mut door: Box<dyn Door>, words: &[u8], is_all: bool) -> Vec<u8> {
    // The server may close the connection while this still sends.
    let _ = door.write_all(words);
    if is_all {
        door.finish();
    }
    let mut answer = Vec::new();
    match door.read_to_end(&mut answer) {
        Ok(_) => {}
        // Unread data at the end makes it a reset, which is an end as well.
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        Err(error) => panic!("no end of the connection: {error}"),
    }
    answer
}

/// Returns a handshake message: an option without data, after the client's flags.
fn option(number: u32) -> Vec<u8> {
    [&3u32.to_be_bytes()[..], b"IHAVEOPT", &number.to_be_bytes(), &0u32.to_be_bytes()].concat()
}

const ABORT: u32 = 2;

fn lab() -> Lab {
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "8M"]);
    lab
}

#[test]
fn nbd_clients_read_the_end_and_nothing_of_them_is_kept() {
    let lab = lab();
    let server = Server::start_with(&lab, POOL, &["--tcp", "127.0.0.1:0"]);
    let port = tcp_ports(&server).next().unwrap();
    let held = Held::by(&lab, &server);
    for i in 0..MANY {
        let mut nbd = Client::connect(server.socket(), "a").unwrap();
        nbd.write(0, &[i as u8; 4096], false).unwrap();
        nbd.leave().unwrap_or_else(|error| panic!("connection {i}: {error}"));
        for door in [&|| unix(server.socket()), &|| tcp(port)] as [&dyn Fn() -> Box<dyn Door>; 2] {
            assert!(say(door(), &option(ABORT), false).starts_with(b"NBDMAGIC"));
            assert!(say(door(), b"GET / HTTP/1.1\r\n\r\n", false).starts_with(b"NBDMAGIC"), "no client at all");
            assert!(say(door(), b"", true).starts_with(b"NBDMAGIC"), "gone without a word");
        }
    }
    held.wait(&lab, &server);
    server.stop();
    lab.assert_clean();
}

#[test]
fn programs_that_wait_for_the_end_of_nbd_end() {
    let lab = lab();
    let server = Server::start_with(&lab, POOL, &["--tcp", "127.0.0.1:0"]);
    let Some(mut nbdsh) = client("nbdsh", "python3-libnbd") else { return };
    let Some(mut nbdcopy) = client("nbdcopy", "libnbd-bin") else { return };
    let nbdinfo = || client("nbdinfo", "libnbd-bin").unwrap();
    let tcp = server.announced()["tcp"][0].as_str().unwrap();
    let held = Held::by(&lab, &server);
    let uris = [server.uri("a"), format!("{tcp}a")];
    for uri in &uris {
        assert_eq!(succeed(nbdinfo().args(["--size", uri])).trim(), "8388608");
        succeed(nbdinfo().args(["--map", uri]));
    }
    for uri in [server.uri(""), tcp.to_owned()] {
        assert!(succeed(nbdinfo().args(["--list", &uri])).contains("export=\"a\""));
    }
    let image = lab.write_file("image", &[7; 1 << 20]);
    succeed(nbdcopy.arg(&image).arg(server.uri("a")));
    let script = "
import os
for uri in os.environ['URIS'].split():
    for i in range(25):
        h = nbd.NBD()
        h.connect_uri(uri)
        assert h.pread(4096, 0) == b'\\x07' * 4096
        h.shutdown()
";
    succeed(nbdsh.args(["-n", "-c", script]).env("URIS", uris.join(" ")));
    held.wait(&lab, &server);
    server.stop();
}

#[test]
fn a_client_that_is_refused_or_takes_too_long_reads_the_end() {
    let lab = lab();
    let options = ["--max-connections", "2", "--handshake-timeout", "1s", "--tcp", "127.0.0.1:0"];
    let server = Server::start_with(&lab, POOL, &options);
    let port = tcp_ports(&server).next().unwrap();
    let held = Held::by(&lab, &server);
    assert!(say(unix(server.socket()), b"", false).starts_with(b"NBDMAGIC"), "too long for a handshake");
    assert!(say(tcp(port), b"", false).starts_with(b"NBDMAGIC"), "too long for a handshake");
    let both = [(); 2].map(|()| Client::connect(server.socket(), "a").unwrap());
    for _ in 0..MANY {
        assert_eq!(say(unix(server.socket()), b"", false), b"", "one too many");
        assert_eq!(say(tcp(port), b"", false), b"", "one too many");
    }
    both.into_iter().for_each(|nbd| nbd.leave().unwrap());
    held.wait(&lab, &server);
    server.stop();
}

#[test]
fn tls_clients_read_the_end_and_nothing_of_them_is_kept() {
    let lab = lab();
    let authority = Authority::make(&lab.path("pki"));
    let options = ["--tcp", "127.0.0.1:0", "--tls-cert", "pki/server-cert.pem", "--tls-key", "pki/server-key.pem"];
    let server = Server::start_with(&lab, POOL, &[&options[..], &["--tls-client-ca", "pki/ca-cert.pem"]].concat());
    let port = tcp_ports(&server).next().unwrap();
    let Some(mut nbdsh) = client("nbdsh", "python3-libnbd") else { return };
    let held = Held::by(&lab, &server);
    let folder = authority.client("someone");
    let uri = format!("nbds://localhost:{port}/a?tls-certificates={}", folder.display());
    let script = "
import os
for i in range(10):
    h = nbd.NBD()
    h.set_uri_allow_local_file(True)
    h.connect_uri(os.environ['URI'])
    h.pwrite(b'x' * 4096, 0)
    h.shutdown()
";
    succeed(nbdsh.args(["-n", "-c", script]).env("URI", uri));
    const STARTTLS: u32 = 5;
    for _ in 0..10 {
        let answer = say(tcp(port), &[option(STARTTLS), vec![b'x'; 100]].concat(), true);
        assert!(answer.starts_with(b"NBDMAGIC"), "no TLS after all");
        // An option that needs TLS, followed by an end without it.
        say(tcp(port), &option(3), true);
    }
    held.wait(&lab, &server);
    server.stop();
}

#[test]
fn control_peers_read_the_end_and_nothing_of_them_is_kept() {
    let lab = lab();
    let server = Server::start(&lab);
    let control = PathBuf::from(server.announced()["control"].as_str().unwrap());
    lab.ok(&["stats", POOL]);
    let held = Held::by(&lab, &server);
    let request = br#"{"jsonrpc":"2.0","id":1,"method":"stats"}"#;
    for _ in 0..MANY {
        let answer = String::from_utf8(say(unix(&control), request, true)).unwrap();
        assert!(answer.contains("\"mode\""), "{answer}");
        assert_eq!(say(unix(&control), b"", true), b"");
    }
    let answer = String::from_utf8(say(unix(&control), &vec![b' '; 2 << 20], true)).unwrap();
    assert!(answer.contains("-32001"), "{answer}");
    for i in 0..5 {
        lab.ok(&["snapshot", &format!("pool.img/a@{i}")]);
        lab.ok(&["list", POOL]);
    }
    held.wait(&lab, &server);
    server.stop();
}

#[test]
fn scrapers_read_the_end_and_nothing_of_them_is_kept() {
    let lab = lab();
    let server = Server::start_with(&lab, POOL, &["--metrics", "127.0.0.1:0", "--metrics", "unix:metrics"]);
    let port = tcp_ports(&server).next().unwrap();
    let held = Held::by(&lab, &server);
    for door in [&|| unix(lab.path("metrics")), &|| tcp(port)] as [&dyn Fn() -> Box<dyn Door>; 2] {
        for _ in 0..MANY {
            let answer = String::from_utf8(say(door(), b"GET /metrics HTTP/1.1\r\n\r\n", false)).unwrap();
            assert!(answer.ends_with("\r\n0\r\n\r\n"), "all of it: {answer}");
            assert!(say(door(), b"POST / HTTP/1.1\r\n\r\n", false).starts_with(b"HTTP/1.1 405"));
            assert_eq!(say(door(), b"GET", true), b"");
        }
        assert!(say(door(), &[b'x'; 8 << 10], false).starts_with(b"HTTP/1.1 431"));
    }
    held.wait(&lab, &server);
    server.stop();
}

#[test]
fn a_disk_that_is_not_protected_any_more_is_closed_while_its_daemon_goes_on() {
    let lab = lab();
    fs::write(lab.path("disk.img"), vec![1; 8 << 20]).unwrap();
    let server = Server::start(&lab);
    for i in 0..3u8 {
        lab.ok(&["protect", "pool.img/disk", "disk.img"]);
        let mut nbd = Client::connect(server.socket(), "disk").unwrap();
        nbd.write(0, &[i; 4096], false).unwrap();
        nbd.flush().unwrap();
        nbd.leave().unwrap();
        assert!(!is_free(&lab.path("disk.img")), "it is protected");
        lab.ok(&["unprotect", "pool.img/disk"]);
        assert!(is_free(&lab.path("disk.img")), "its lock is held");
    }
    server.stop();
    assert_eq!(fs::read(lab.path("disk.img")).unwrap()[..4096], [2; 4096]);
}

/// Returns options for an open that fails at once if the device is locked.
fn now() -> DeviceOptions {
    DeviceOptions::default().with_patience(Duration::ZERO)
}

/// Returns whether the lock of the file at `path` is free.
fn is_free(path: &Path) -> bool {
    let path = path.to_path_buf();
    block_on(Config::default(), |rt| async move { UringDevice::open(&rt, path, &now()).is_ok() }).unwrap()
}

#[test]
fn a_mount_that_is_taken_away_leaves_nothing_in_its_daemon() {
    let lab = lab();
    if !Path::new("/dev/fuse").exists() {
        return missing("/dev/fuse does not exist: load the kernel module fuse");
    }
    let server = Server::start(&lab);
    fs::create_dir(lab.path("mnt")).unwrap();
    // The first mount starts threads that stay.
    let mut held = None;
    for i in 0..5u8 {
        lab.ok(&["mount", POOL, "mnt"]);
        fs::write(lab.path("mnt/file"), [i; 4096]).unwrap();
        assert_eq!(fs::read(lab.path("mnt/file")).unwrap(), [i; 4096]);
        lab.ok(&["umount", "mnt"]);
        let held = held.get_or_insert_with(|| Held::by(&lab, &server));
        held.wait(&lab, &server);
    }
    server.stop();
    lab.assert_clean();
}

/// Serves `pool` to one client, then stops.
fn serve_for_a_while(lab: &Lab, pool: &str) {
    let server = Server::start_on(lab, pool);
    let mut nbd = Client::connect(server.socket(), "a").unwrap();
    nbd.write(0, &[7; 8192], true).unwrap();
    let mut idle = Client::connect(server.socket(), "a").unwrap();
    idle.start_read(0, 4096).unwrap();
    server.stop();
}

#[test]
fn what_a_pool_lies_on_is_free_when_its_daemon_has_stopped() {
    let lab = Lab::empty();
    let Some(mut mkfs) = client("mkfs.ext4", "e2fsprogs") else { return };
    for name in ["disk", "below"] {
        fs::File::create(lab.path(name)).unwrap().set_len(128 << 20).unwrap();
    }
    // A loop device in autoclear mode loses its backing file when its last descriptor is closed.
    let Some(disk) = Loop::new(&lab.path("disk")) else { return };
    lab.ok(&["init", &disk.0]);
    lab.ok(&["create", &format!("{}/a", disk.0), "--size", "8M"]);
    serve_for_a_while(&lab, &disk.0);
    assert!(is_free(Path::new(&disk.0)), "it is in use");
    let backing = PathBuf::from(format!("/sys/block/{}/loop/backing_file", &disk.0[5..]));
    assert!(backing.exists());
    drop(disk);
    assert!(!backing.exists(), "it is open");
    // For a file: its file system can be unmounted.
    let Some(disk) = Loop::new(&lab.path("below")) else { return };
    succeed(mkfs.args(["-q", "-F", &disk.0]));
    let below = lab.path("mnt");
    fs::create_dir(&below).unwrap();
    succeed(Command::new("mount").arg(&disk.0).arg(&below));
    let guard = Below(below.clone());
    lab.ok(&["init", "mnt/pool.img", "--size", "64M"]);
    lab.ok(&["create", "mnt/pool.img/a", "--size", "8M"]);
    for _ in 0..3 {
        serve_for_a_while(&lab, "mnt/pool.img");
        succeed(Command::new("umount").arg(&below));
        succeed(Command::new("mount").arg(&disk.0).arg(&below));
    }
    drop(guard);
}

/// Runs `test` on a ring with pending operations that never complete: a connection, a byte, a pipe.
fn on_a_busy_ring<F: Future + 'static>(lab: &Lab, test: impl FnOnce(Rt) -> F) -> F::Output {
    let path = lab.path("never");
    block_on(Config::default(), |rt| async move {
        let listener = UnixListener::bind(&rt, path).unwrap();
        let (idle, _other) = Stream::pair(&rt).unwrap();
        let (reader, _writer) = std::io::pipe().unwrap();
        let watched = Watched::new(&rt, OwnedFd::from(reader));
        drop(rt.spawn(async move { drop(listener.accept().await) }));
        drop(rt.spawn(idle.recv(Buf::zeroed(8), 0, 8)));
        drop(rt.spawn(async move { watched.readable().await }));
        rt.sleep_for(Duration::from_millis(10)).await;
        test(rt).await
    })
    .unwrap()
}

/// Waits until `is_so`, while the ring keeps running.
async fn soon(rt: &Rt, what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < SOON, "waited in vain until {what}");
        rt.sleep_for(Duration::from_millis(5)).await;
    }
}

#[test]
fn a_device_is_closed_when_it_is_dropped_while_others_wait_on_its_ring() {
    let lab = Lab::empty();
    let path = lab.path("disk");
    on_a_busy_ring(&lab, |rt| async move {
        let mut device = UringDevice::create(&rt, &path, 1 << 20, false, &now()).unwrap();
        for _ in 0..3 {
            let page = || [Segment { offset: 4096, at: 0, len: 4096 }].into_iter().collect();
            device.write(device.buffer(4096), page(), false).await.0.unwrap();
            device.read(device.buffer(4096), page()).await.0.unwrap();
            drop(device);
            // The lock is released with the kernel's last reference.
            device = UringDevice::open(&rt, &path, &now()).expect("closed at once");
        }
    });
}

#[test]
fn a_connection_is_given_back_while_others_wait_on_its_ring() {
    let lab = Lab::empty();
    on_a_busy_ring(&lab, |rt| async move {
        for _ in 0..3 {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.limit();
            let inode = rustix::fs::fstat(&ours).unwrap().st_ino.to_string();
            let is_there = || {
                let table = fs::read_to_string("/proc/net/unix").unwrap();
                table.lines().any(|line| line.split_whitespace().nth(6) == Some(&inode))
            };
            let stream = Stream::from_fd(&rt, ours.into());
            assert!(is_there());
            let receive = stream.recv(Buf::zeroed(8), 0, 8);
            let sent = stream.send_vectored(vec![b"all of it".to_vec().into()]);
            drop(stream);
            sent.await.0.unwrap();
            rt.yield_now().await;
            drop(receive);
            let mut said = String::new();
            theirs.read_to_string(&mut said).expect("an end");
            assert_eq!(said, "all of it");
            soon(&rt, "the socket is given back", || !is_there()).await;
        }
    });
}

/// An awaited receive continues after its stream is dropped; one that is not awaited does not delay the end.
#[test]
fn a_connection_ends_with_the_last_who_waits_for_it() {
    let lab = Lab::empty();
    on_a_busy_ring(&lab, |rt| async move {
        let (ours, theirs) = Stream::pair(&rt).unwrap();
        let receive = ours.recv(Buf::zeroed(8), 0, 8);
        drop(ours);
        theirs.send_vectored(vec![b"late".to_vec().into()]).await.0.unwrap();
        let (result, buf) = receive.await;
        assert_eq!(&buf[..result.unwrap()], b"late");
        let (end, _) = theirs.recv(Buf::zeroed(8), 0, 8).await;
        assert_eq!(end.unwrap(), 0);
    });
}

#[test]
fn a_listener_that_is_dropped_takes_nobody_any_more() {
    let lab = Lab::empty();
    on_a_busy_ring(&lab, |rt| async move {
        let listener = TcpListener::bind(&rt, "127.0.0.1:0".parse().unwrap()).unwrap();
        let addr = listener.local_addr();
        let accepting = rt.spawn(async move { listener.accept().await.map(drop) });
        rt.yield_now().await;
        drop(accepting.cancel().await);
        soon(&rt, "no listener is left", || TcpStream::connect(addr).is_err()).await;
    });
}

#[test]
fn a_pipe_that_was_watched_is_closed_when_that_ends() {
    let lab = Lab::empty();
    on_a_busy_ring(&lab, |rt| async move {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let watched = Watched::new(&rt, OwnedFd::from(reader));
        assert!(rt.timeout(Duration::from_millis(20), watched.readable()).await.is_err());
        drop(watched);
        let broken = |writer: &mut std::io::PipeWriter| {
            writer.write(b"x").is_err_and(|error| error.kind() == ErrorKind::BrokenPipe)
        };
        soon(&rt, "the pipe has no reader", || broken(&mut writer)).await;
    });
}
