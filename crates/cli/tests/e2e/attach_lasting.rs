//! Attached volumes over time: persistent names, units for boot, daemons when memory runs out.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::attach::{Attaching, device_text, shell};
use crate::harness::{Lab, POOL, Server, client, missing, noise, succeed};

const LINKS: &str = "/dev/forkdisk";

/// A pool with a unique name, next to the lab's own. Its devices are removed when it is dropped.
struct Named<'a> {
    lab: &'a Lab,
    path: PathBuf,
}

impl<'a> Named<'a> {
    fn new(lab: &'a Lab, path: &str) -> Named<'a> {
        let path = lab.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let named = Named { lab, path };
        lab.ok(&["init", named.at(""), "--size", "256M"].map(|word| word.trim_end_matches('/')));
        named
    }

    fn at(&self, name: &str) -> &'static str {
        Box::leak(format!("{}/{name}", self.path.display()).into_boxed_str())
    }

    fn file_name(&self) -> String {
        self.path.file_name().unwrap().to_str().unwrap().to_string()
    }

    fn attach(&self, name: &str) -> PathBuf {
        PathBuf::from(self.lab.ok(&["attach", "--by", "loop", self.at(name)]).trim_end())
    }
}

impl Drop for Named<'_> {
    fn drop(&mut self) {
        let list = self.lab.run(&["attach", "--list", self.path.to_str().unwrap(), "--json"]).stdout;
        let list: serde_json::Value = serde_json::from_str(&list).unwrap_or_default();
        for device in list.as_array().into_iter().flatten().filter_map(|a| a["device"].as_str()) {
            self.lab.run(&["detach", device]);
        }
        self.lab.run(&["stop", self.path.to_str().unwrap()]);
    }
}

fn own_name(kind: &str) -> String {
    format!("links-{kind}-{}.img", std::process::id())
}

#[test]
fn an_attached_volume_has_a_lasting_name_that_verbs_take() {
    let Some(it) = Attaching::with_pool("64M") else { return };
    let (lab, name) = (&it.lab, own_name("one"));
    let pool = Named::new(lab, &format!("1/{name}"));
    lab.ok(&["create", pool.at("a"), pool.at("vm/disk.1"), "--size", "8M"]);
    lab.ok(&["snapshot", pool.at("vm/disk.1@then")]);
    let uuid = lab.json(&["list", pool.path.to_str().unwrap()]);
    assert_eq!(uuid.as_array().unwrap().len(), 3);
    for object in ["a", "vm/disk.1", "vm/disk.1@then"] {
        let device = pool.attach(object);
        let link = Path::new(LINKS).join(&name).join(object);
        assert_eq!(fs::canonicalize(&link).unwrap(), device);
        let by_uuid = shell(&format!("find {LINKS}/by-uuid -path '*/{object}' -lname '*{}'", device.display()));
        assert_eq!(by_uuid.lines().count(), 1, "{by_uuid}");
        let told = lab.ok(&["device-links", &device_text(&device)[5..]]);
        assert!(told.contains(&format!("forkdisk/{name}/{object}")) && told.contains("forkdisk/by-uuid/"), "{told}");
    }
    // Another pool with the same file name leaves the name to the pool that has it.
    let other = Named::new(lab, &format!("2/{name}"));
    lab.ok(&["create", other.at("a"), other.at("b"), "--size", "8M"]);
    let (first, second) = (fs::canonicalize(format!("{LINKS}/{name}/a")).unwrap(), other.attach("a"));
    let b = other.attach("b");
    assert_eq!(fs::canonicalize(format!("{LINKS}/{name}/a")).unwrap(), first);
    assert!(!Path::new(LINKS).join(&name).join("b").exists());
    let by_uuid = shell(&format!("find {LINKS}/by-uuid -lname '*{}'", second.display()));
    assert_eq!(by_uuid.lines().count(), 1, "{by_uuid}");
    for device in [&second, &b] {
        lab.ok(&["detach", device_text(device)]);
    }
    for object in ["vm/disk.1@then", "vm/disk.1", "a"] {
        lab.ok(&["detach", &format!("{LINKS}/{name}/{object}")]);
        assert!(fs::symlink_metadata(Path::new(LINKS).join(&name).join(object)).is_err());
    }
    assert!(!Path::new(LINKS).join(&name).exists(), "with its folders");
    let refused = lab.run(&["detach", &format!("{LINKS}/{name}/a")]).refused();
    assert!(refused.contains("attached nothing there"), "{refused}");
}

#[test]
fn names_that_a_killed_daemon_left_are_put_right() {
    let Some(it) = Attaching::with_pool("64M") else { return };
    let lab = &it.lab;
    let pool = Named::new(lab, &own_name("killed"));
    lab.ok(&["create", pool.at("a"), "--size", "8M"]);
    let link = Path::new(LINKS).join(pool.file_name()).join("a");
    let is_there = || fs::symlink_metadata(&link).is_ok();
    for correction in ["serve", "attach", "detach"] {
        let server = Server::start_on(lab, &pool.file_name());
        let device = pool.attach("a");
        assert!(is_there());
        server.kill();
        if correction == "detach" {
            lab.ok(&["detach", link.to_str().unwrap()]);
            assert!(!is_there());
            continue;
        }
        // The device is removed without `forkdisk detach`.
        succeed(Command::new("losetup").arg("-d").arg(&device));
        crate::harness::wait_until("the device is gone", || {
            !Path::new("/sys/block").join(device.file_name().unwrap()).join("loop").exists()
        });
        match correction {
            // Another verb, of another test, may refresh the links at any time, and corrects them as well.
            "serve" => {
                let server = Server::start_on(lab, &pool.file_name());
                crate::harness::wait_until("the name is gone", || !is_there());
                server.stop();
            }
            _ => {
                let device = pool.attach("a");
                assert_eq!(fs::canonicalize(&link).unwrap(), device);
                lab.ok(&["detach", device_text(&device)]);
            }
        }
    }
}

/// The units are for systemd, with the program's path on this machine.
#[test]
fn the_units_are_right_for_systemd_and_the_name_of_a_volume_is_its_instance() {
    let (Some(mut analyze), Some(mut escape)) =
        (client("systemd-analyze", "systemd"), client("systemd-escape", "systemd"))
    else {
        return;
    };
    let lab = Lab::empty();
    let contrib = concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib/systemd");
    for name in ["forkdisk@.service", "forkdisk@.socket", "forkdisk-attach@.service"] {
        let text = fs::read_to_string(format!("{contrib}/{name}")).unwrap();
        lab.write_file(name, text.replace("/usr/bin/forkdisk", env!("CARGO_BIN_EXE_forkdisk")).as_bytes());
    }
    let instance = succeed(escape.args(["--path", "--template=forkdisk-attach@.service", "/srv/pool.img/vm1"]));
    assert_eq!(instance.trim(), "forkdisk-attach@srv-pool.img-vm1.service");
    let fstab = fs::read_to_string(format!("{contrib}/forkdisk-attach@.service")).unwrap();
    assert!(fstab.contains(&format!("x-systemd.requires={}", instance.trim())));
    analyze.args(["verify", "--man=no", "--recursive-errors=no"]).arg(lab.path(instance.trim()));
    let output = analyze.arg(lab.path("forkdisk@srv-pool.img.service")).current_dir(lab.path("")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.trim().is_empty(), "{said}");
}

/// Returns the number in a line of a process's status.
fn status(pid: u32, name: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap()
}

/// Returns the out-of-memory score, and whether the kernel allocates for the process without waiting for devices.
fn score_and_flusher(pid: u32) -> (i32, bool) {
    const NO_IO: u64 = 0x0008_0000;
    const LOCAL_THROTTLE: u64 = 0x0010_0000;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let flags: u64 = stat.rsplit_once(") ").unwrap().1.split(' ').nth(6).unwrap().parse().unwrap();
    let score = fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap().trim().parse().unwrap();
    (score, flags & NO_IO != 0 && flags & LOCAL_THROTTLE != 0)
}

#[test]
fn a_daemon_of_root_is_spared_keeps_its_memory_and_does_not_wait_for_its_devices() {
    let Some(it) = Attaching::with_pool("256M") else { return };
    let lab = &it.lab;
    lab.import("a", &noise(1, 8 << 20));
    let capabilities = shell("sed -n 's/CapEff:[[:space:]]*//p' /proc/self/status");
    let capabilities = u64::from_str_radix(capabilities.trim(), 16).unwrap();
    let may = |number: u32| capabilities >> number & 1 == 1;
    let (ipc_lock, resource) = (may(14), may(24));
    let own = score_and_flusher(std::process::id());
    for option in [&["--memory-reserves=no"][..], &[]] {
        let server = Server::start_with(lab, POOL, option);
        let device = it.attach("a");
        assert!(fs::read(&device).unwrap() == noise(1, 8 << 20));
        let is_on = option.is_empty();
        let expected = if is_on && resource { (-1000, true) } else { own };
        assert_eq!(score_and_flusher(server.pid()), expected, "{option:?}");
        let (locked, resident) = (status(server.pid(), "VmLck"), status(server.pid(), "VmRSS"));
        println!("{option:?}: {locked} kB locked of {resident} kB resident");
        assert_eq!(locked > 0, is_on && ipc_lock, "{option:?}: {locked} kB");
        // No more is resident than without: only used memory is locked.
        assert!(resident < 120 << 10, "{option:?}: {resident} kB");
        lab.ok(&["detach", device_text(&device)]);
        server.stop();
    }
    if !resource {
        eprintln!("not tested: the score and the flusher want CAP_SYS_RESOURCE (kernel_nbd has them)");
    }
    if !ipc_lock {
        missing("locking memory wants CAP_IPC_LOCK");
    }
}
