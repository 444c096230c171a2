//! Programs with data in a folder of a mount: each is forked while it works, and each fork is right. The programs go
//! on, although files of the snapshots are replaced, renamed and removed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::attach_postgres::{Postgres, programs};
use crate::harness::{LIMIT, Lab, Limited, client, succeed, wait_until};
use crate::mount_served::Both;

/// Takes a snapshot of `data`, forks the snapshot and the folder itself; returns both forks.
fn fork(lab: &Lab, both: &Both, round: u32) -> [PathBuf; 2] {
    fs::create_dir(both.path(&format!(".snapshots/data/s{round}"))).unwrap();
    let names = ["live", "kept"].map(|kind| format!("{kind}/{round}"));
    lab.ok(&["fork", "pool.img/data", &format!("pool.img/{}", names[0])]);
    lab.ok(&["fork", &format!("pool.img/data@s{round}"), &format!("pool.img/{}", names[1])]);
    names.map(|name| both.path(&name))
}

/// Ends the load when it is dropped, also by a panic.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `work` again and again in another thread while `forks` runs.
fn under_load<T>(work: impl Fn(u32) + Sync, forks: impl FnOnce() -> T) -> T {
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            for round in 0.. {
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                work(round);
            }
        });
        let ends = Ends(&ended);
        let result = forks();
        drop(ends);
        load.join().unwrap();
        result
    })
}

#[test]
fn sqlite_with_a_write_ahead_log_is_forked_while_it_writes() {
    let lab = Lab::with_pool("1G");
    let Some(both) = Both::start(&lab) else { return };
    if client("sqlite3", "sqlite3").is_none() {
        return;
    }
    let sql = |dir: &Path, text: &str| {
        succeed(
            client("sqlite3", "sqlite3")
                .unwrap()
                .args(["-bail", "-cmd", ".timeout 20000", "db", text])
                .current_dir(dir),
        )
        .trim()
        .to_string()
    };
    let data = both.path("data");
    fs::create_dir(&data).unwrap();
    sql(&data, "pragma journal_mode=wal; create table a(x, y); create table b(x, y);");
    let work = |_| {
        let insert = "begin; insert into a values (1, randomblob(5000)); insert into b values (1, 2); commit;";
        sql(&data, &insert.repeat(20));
    };
    let count = |dir: &Path| sql(dir, "select count(*) from a").parse::<u32>().unwrap();
    let check = |dir: &Path, least: u32| {
        assert_eq!(sql(dir, "pragma integrity_check; select count(*) - (select count(*) from b) from a"), "ok\n0");
        assert!(count(dir) >= least, "{} of {least} transactions", count(dir));
        sql(dir, "insert into a values (2, 2); pragma wal_checkpoint(truncate)");
    };
    under_load(work, || {
        for round in 0..4 {
            let before = count(&data);
            wait_until("the load goes on", || count(&data) > before);
            let least = count(&data);
            fork(&lab, &both, round).iter().for_each(|dir| check(dir, least));
        }
    });
    check(&data, 0);
    both.stop();
    lab.assert_clean();
}

#[test]
fn a_git_repository_is_forked_while_commits_are_made() {
    let lab = Lab::with_pool("1G");
    let Some(both) = Both::start(&lab) else { return };
    if client("git", "git").is_none() {
        return;
    }
    let git = |dir: &Path, args: &[&str]| {
        let mut git = client("git", "git").unwrap();
        git.args(["-c", "user.name=a", "-c", "user.email=a@b", "-c", "gc.auto=50", "-c", "gc.autoDetach=false"]);
        git.env("GIT_CONFIG_NOSYSTEM", "1").env("HOME", dir);
        succeed(git.args(args).current_dir(dir)).trim().to_string()
    };
    let data = both.path("data");
    fs::create_dir(&data).unwrap();
    git(&data, &["init", "-q", "-b", "a@b"]);
    let work = |round: u32| {
        fs::write(data.join(format!("file {}~", round % 7)), format!("{round}\n")).unwrap();
        let _ = fs::remove_file(data.join("link"));
        std::os::unix::fs::symlink(format!("file {}~", round % 7), data.join("link")).unwrap();
        git(&data, &["add", "-A"]);
        git(&data, &["commit", "-q", "-m", &format!("{round}")]);
    };
    let count = |dir: &Path| git(dir, &["rev-list", "--count", "HEAD"]).parse::<u32>().unwrap();
    let check = |dir: &Path, least: u32| {
        // What a kill of git leaves, too.
        let _ = fs::remove_file(dir.join(".git/index.lock"));
        let _ = fs::remove_file(dir.join(".git/HEAD.lock"));
        let _ = fs::remove_file(dir.join(".git/refs/heads/a@b.lock"));
        git(dir, &["fsck", "--strict", "--no-dangling"]);
        assert!(count(dir) >= least, "{} of {least} commits", count(dir));
        git(dir, &["reset", "-q", "--hard"]);
        // A file that was written and not added yet may be there.
        assert_eq!(git(dir, &["status", "--porcelain", "--untracked-files=no"]), "");
        assert!(fs::read_link(dir.join("link")).unwrap().to_str().unwrap().starts_with("file "));
    };
    work(0);
    work(1);
    under_load(work, || {
        for round in 0..4 {
            let before = count(&data);
            wait_until("the load goes on", || count(&data) > before);
            let least = count(&data);
            fork(&lab, &both, round).iter().for_each(|dir| check(dir, least));
        }
    });
    check(&data, 5);
    both.stop();
    lab.assert_clean();
}

#[test]
fn postgresql_in_a_folder_of_a_mount_is_forked_while_it_writes() {
    let Some(bin) = programs() else { return };
    let lab = Lab::with_pool("3G");
    let Some((both, server)) = Postgres::start_on_mount(&bin, &lab) else { return };
    let count = || server.query("select count(*) from pgbench_history").parse::<u64>().unwrap();
    let work = |_| {
        succeed(server.client("pgbench").args(["-n", "-c", "2", "-t", "50", "postgres"]));
        server.query("checkpoint");
    };
    under_load(work, || {
        for round in 0..2 {
            let before = count();
            wait_until("the load goes on", || count() > before + 20);
            let least = count();
            for (i, dir) in fork(&lab, &both, round).into_iter().enumerate() {
                fs::remove_file(dir.join("postmaster.pid")).unwrap();
                let second = Postgres::start(&bin, dir, lab.path(&format!("second{round}{i}")));
                let taken = second.transactions_of_whole_database();
                assert!(taken >= least, "{taken} transactions, and {least} had been acknowledged");
                second.stop("fast");
            }
        }
    });
    server.transactions_of_whole_database();
    server.stop("fast");
    drop(server);
    both.stop();
    lab.assert_clean();
}

/// A MariaDB server with its own data folder. Killed when dropped.
struct Maria {
    server: Child,
    socket: PathBuf,
}

impl Maria {
    fn start(data: &Path, dir: &Path) -> Maria {
        fs::create_dir_all(dir).unwrap();
        let socket = dir.join("sock");
        let mut server = client("mariadbd", "mariadb-server-core").unwrap();
        server.args(["--no-defaults", "--user=root", "--skip-networking", "--innodb-buffer-pool-size=32M"]);
        server.arg(format!("--datadir={}", data.display())).arg(format!("--socket={}", socket.display()));
        server.arg(format!("--pid-file={}", dir.join("pid").display()));
        let log = fs::File::create(dir.join("log")).unwrap();
        let server = server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let maria = Maria { server, socket };
        wait_until("MariaDB answers", || {
            maria.client("select 1").output_within(LIMIT).is_ok_and(|out| out.status.success())
        });
        maria
    }

    fn client(&self, sql: &str) -> Command {
        let mut client = client("mariadb", "mariadb-client-core").unwrap();
        client.args(["--no-defaults", "-uroot", "-N", "-B", "-e", sql]);
        client.arg(format!("--socket={}", self.socket.display()));
        client
    }

    #[track_caller]
    fn query(&self, sql: &str) -> String {
        succeed(&mut self.client(sql)).trim().to_string()
    }

    /// Both tables have the same number of rows, which is returned.
    #[track_caller]
    fn check(&self) -> u32 {
        assert_eq!(self.query("check table d.a, d.`b:c@d`").matches("OK").count(), 2);
        let rows = self.query("select (select count(*) from d.a), (select count(*) from d.`b:c@d`)");
        let (a, b) = rows.split_once('\t').unwrap();
        assert_eq!(a, b, "a transaction is there in part");
        a.parse().unwrap()
    }

    fn stop(mut self) {
        self.query("shutdown");
        assert!(self.server.wait().unwrap().success());
    }
}

impl Drop for Maria {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

#[test]
fn mariadb_in_a_folder_of_a_mount_is_forked_while_it_writes() {
    if client("mariadbd", "mariadb-server-core").is_none() || client("mariadb", "mariadb-client-core").is_none() {
        return;
    }
    let lab = Lab::with_pool("3G");
    let Some(both) = Both::start(&lab) else { return };
    let data = both.path("data");
    let mut install = client("mariadb-install-db", "mariadb-server-core").unwrap();
    install.args(["--no-defaults", "--user=root", "--auth-root-authentication-method=normal"]);
    succeed(install.arg(format!("--datadir={}", data.display())));
    let server = Maria::start(&data, &lab.path("first"));
    let table = "(x int auto_increment primary key, y varchar(4000)) engine=innodb";
    server.query(&format!("create database d; create table d.a {table}; create table d.`b:c@d` {table}"));
    let work = |round: u32| {
        let pair = "begin; insert into d.a(y) values (repeat('a', 3000)); \
                    insert into d.`b:c@d`(y) values (repeat('b', 2000)); commit; ";
        server.query(&pair.repeat(20));
        // Files come and go.
        server.query(&format!("create table d.t{round} {table}; drop table d.t{round}; flush tables"));
    };
    let count = || server.query("select count(*) from d.a").parse::<u32>().unwrap();
    under_load(work, || {
        for round in 0..2 {
            let before = count();
            wait_until("the load goes on", || count() > before + 20);
            let least = count();
            for (i, dir) in fork(&lab, &both, round).iter().enumerate() {
                let second = Maria::start(dir, &lab.path(&format!("second{round}{i}")));
                assert!(second.check() >= least, "acknowledged transactions are missing");
                second.stop();
            }
        }
    });
    server.check();
    server.stop();
    both.stop();
    lab.assert_clean();
}
