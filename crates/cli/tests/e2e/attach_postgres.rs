//! PostgreSQL on ext4 on an attached volume: a snapshot during its operation is a consistent
//! database, on which a second server works.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::attach::Attaching;
use crate::harness::{LIMIT, Lab, Limited, POOL, missing, noise, succeed, wait_until};
use crate::mount_served::Both;

/// User that runs the servers, which refuse to run as root.
pub const NOBODY: &str = "65534";
/// Number of clients of the load, and transactions of each.
const CLIENTS: &str = "4";
const TRANSACTIONS: &str = "300";

/// Returns the newest installed PostgreSQL; `None` (after saying why) if there is none.
pub fn programs() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let found = versions.map(|version| version.path().join("bin")).filter(|bin| bin.join("initdb").exists()).max();
    if found.is_none() {
        missing("PostgreSQL is not installed: postgresql has it");
    }
    found
}

/// A server with its own data folder. Killed when dropped.
pub struct Postgres {
    bin: PathBuf,
    data: PathBuf,
    sockets: PathBuf,
}

impl Postgres {
    #[track_caller]
    pub fn start(bin: &Path, data: PathBuf, sockets: PathBuf) -> Postgres {
        fs::create_dir_all(&sockets).unwrap();
        fs::set_permissions(&sockets, fs::Permissions::from_mode(0o777)).unwrap();
        let server = Postgres { bin: bin.to_path_buf(), data, sockets };
        let options = format!("-c listen_addresses='' -k {}", server.sockets.display());
        let log = server.sockets.join("log");
        let mut start = server.run("pg_ctl");
        start.arg("-D").arg(&server.data).args(["-w", "-o", &options, "-l"]).arg(log).arg("start");
        succeed(&mut start);
        server
    }

    /// A server with the tables of pgbench in the folder `data` of a mount of the served pool.
    pub fn start_on_mount(bin: &Path, lab: &Lab) -> Option<(Both, Postgres)> {
        fs::set_permissions(lab.path(""), fs::Permissions::from_mode(0o755)).unwrap();
        let both = Both::start_for_all_users(lab)?;
        let data = both.path("data");
        fs::create_dir(&data).unwrap();
        succeed(Command::new("chown").arg(NOBODY).arg(&data));
        succeed(as_nobody(bin, "initdb").args(["-U", "postgres", "-A", "trust", "-D"]).arg(&data));
        let server = Postgres::start(bin, data, lab.path("first"));
        succeed(server.client("pgbench").args(["-q", "-i", "-s", "1", "postgres"]));
        Some((both, server))
    }

    fn run(&self, program: &str) -> Command {
        as_nobody(&self.bin, program)
    }

    pub fn client(&self, program: &str) -> Command {
        let mut command = self.run(program);
        command.arg("-h").arg(&self.sockets).args(["-U", "postgres"]);
        command
    }

    #[track_caller]
    pub fn query(&self, sql: &str) -> String {
        succeed(self.client("psql").args(["-X", "-A", "-t", "-c", sql, "postgres"])).trim().to_string()
    }

    /// Invariant of every transaction of the load: all balances, and the history, have the same sum.
    #[track_caller]
    pub fn transactions_of_whole_database(&self) -> u64 {
        let sums = self.query(
            "select (select sum(abalance) from pgbench_accounts) = (select sum(tbalance) from pgbench_tellers) \
             and (select sum(tbalance) from pgbench_tellers) = (select sum(bbalance) from pgbench_branches) \
             and (select sum(bbalance) from pgbench_branches) = (select coalesce(sum(delta), 0) from pgbench_history)",
        );
        assert_eq!(sums, "t", "a transaction is there in part");
        self.query("select count(*) from pgbench_history").parse().unwrap()
    }

    pub fn stop(&self, how: &str) {
        let _ = self.run("pg_ctl").arg("-D").arg(&self.data).args(["-w", "-m", how, "stop"]).output_within(LIMIT);
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.stop("immediate");
    }
}

pub fn as_nobody(bin: &Path, program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--"]).arg(bin.join(program));
    command.current_dir("/").env("LC_ALL", "C");
    command
}

#[test]
fn a_second_postgresql_works_on_a_clone_of_a_running_ones_disk() {
    let Some(bin) = programs() else { return };
    let Some(it) = Attaching::with_pool("3G") else { return };
    let lab = &it.lab;
    let (device, first) = database(&it, &bin);
    let mut load = first.client("pgbench");
    load.args(["-n", "-c", CLIENTS, "-t", TRANSACTIONS, "postgres"]);
    let load = std::thread::spawn(move || succeed(&mut load));
    let count = || first.query("select count(*) from pgbench_history").parse::<u64>().unwrap();
    wait_until("the load is under way", || count() > 50);
    let before = count();
    lab.ok(&["snapshot", "pool.img/db@running"]);
    load.join().unwrap();
    assert_eq!(first.transactions_of_whole_database(), 1200);

    lab.ok(&["clone", "pool.img/db@running", "pool.img/copy"]);
    let copy = it.attach("copy");
    let beside = Beside(lab.path("beside"));
    fs::create_dir(&beside.0).unwrap();
    succeed(Command::new("mount").arg(&copy).arg(&beside.0));
    let left = beside.0.join("data");
    // The lock file of the first server, which still runs on the original.
    fs::remove_file(left.join("postmaster.pid")).unwrap();
    let second = Postgres::start(&bin, left, lab.path("second"));
    let taken = second.transactions_of_whole_database();
    assert!((before..=1200).contains(&taken), "{taken} transactions, and {before} had been acknowledged");
    // Both continue independently.
    succeed(second.client("pgbench").args(["-n", "-c", CLIENTS, "-t", "50", "postgres"]));
    assert_eq!(second.transactions_of_whole_database(), taken + 200);
    assert_eq!(first.transactions_of_whole_database(), 1200);
    second.stop("fast");
    first.stop("fast");
    drop((second, first));
    fs::write(it.below.join("after"), noise(1, 5000)).unwrap();
    drop(beside);
    it.umount();
    for device in [&device, &copy] {
        succeed(Command::new("fsck.ext4").arg("-fn").arg(device));
        lab.ok(&["detach", device.to_str().unwrap()]);
    }
    lab.assert_clean();
}

/// Makes a database on the volume `db`; returns its device and the server.
fn database(it: &Attaching, bin: &Path) -> (PathBuf, Postgres) {
    let lab = &it.lab;
    fs::set_permissions(lab.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    lab.ok(&["create", "pool.img/db", "--size", "1G"]);
    let device = it.attach("db");
    succeed(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&device));
    it.mount(&device, "defaults");
    let data = it.below.join("data");
    fs::create_dir(&data).unwrap();
    succeed(Command::new("chown").arg(NOBODY).arg(&data));
    succeed(as_nobody(bin, "initdb").args(["-U", "postgres", "-A", "trust", "-D"]).arg(&data));
    let server = Postgres::start(bin, data, lab.path("first"));
    succeed(server.client("pgbench").args(["-q", "-i", "-s", "2", "postgres"]));
    (device, server)
}

#[test]
fn postgresql_goes_on_over_five_upgrades() {
    let Some(bin) = programs() else { return };
    let Some(it) = Attaching::with_pool("3G") else { return };
    let (device, server) = database(&it, &bin);
    let mut load = server.client("pgbench");
    load.args(["-n", "-c", CLIENTS, "-T", "10", "postgres"]);
    let load = std::thread::spawn(move || succeed(&mut load));
    let count = || server.query("select count(*) from pgbench_history").parse::<u64>().unwrap();
    for _ in 0..5 {
        let before = count();
        it.lab.ok(&["upgrade", POOL]);
        wait_until("the load goes on", || count() > before + 20);
    }
    assert!(load.join().unwrap().contains("number of failed transactions: 0"));
    server.transactions_of_whole_database();
    server.stop("fast");
    drop(server);
    it.umount();
    succeed(Command::new("fsck.ext4").arg("-fn").arg(&device));
    it.lab.ok(&["detach", device.to_str().unwrap()]);
    it.lab.assert_clean();
}

/// A second mount point. Unmounted when dropped.
struct Beside(PathBuf);

impl Drop for Beside {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-q").arg(&self.0).output_within(LIMIT);
    }
}
