//! Many volumes are attached, and mounted, by one command: all of them or none.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::attach::Attaching;
use crate::harness::{POOL, Server, noise, succeed};

const MIB: usize = 1 << 20;

fn by() -> String {
    std::env::var("FORKDISK_TEST_ATTACH_BY").unwrap_or("loop".to_string())
}

/// A lab with the volume `base`, which has a file system with a file.
fn lab() -> Option<Attaching> {
    let it = Attaching::with_pool("1G")?;
    it.lab.ok(&["create", &format!("{POOL}/base"), "--size", "32M"]);
    let device = it.attach("base");
    succeed(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&device));
    it.mount(&device, "rw");
    fs::write(it.below.join("file"), noise(1, MIB)).unwrap();
    it.umount();
    it.lab.ok(&["detach", device.to_str().unwrap()]);
    Some(it)
}

fn attached(it: &Attaching) -> Vec<(String, String)> {
    let list = it.lab.json(&["attach", "--list", POOL]);
    let text = |value: &Value| value.as_str().unwrap().to_string();
    list.as_array().unwrap().iter().map(|a| (text(&a["object"]), text(&a["device"]))).collect()
}

fn umount(dir: &Path) {
    succeed(Command::new("umount").arg(dir));
}

#[test]
fn twenty_children_are_attached_and_mounted_by_one_command() {
    let Some(it) = lab() else { return };
    let lab = &it.lab;
    let server = Server::start(lab);
    lab.ok(&["fork", "pool.img/base", "pool.img/kids/{01..20}"]);
    let below = it.below.to_str().unwrap();
    let pattern = format!("{below}/{{}}");
    let made = lab.json(&["attach", "pool.img/kids/*", "--by", &by(), "--mount-at", &pattern]);
    let made = made.as_array().unwrap();
    assert_eq!(made.len(), 20);
    for (n, made) in made.iter().enumerate() {
        let (object, dir) = (made["object"].as_str().unwrap(), made["mounted"].as_str().unwrap());
        assert_eq!((object, dir), (&*format!("kids/{:02}", n + 1), &*format!("{below}/{object}")));
        assert!(fs::read(Path::new(dir).join("file")).unwrap() == noise(1, MIB));
        fs::write(Path::new(dir).join("own"), object).unwrap();
    }
    let again = lab.run(&["attach", "pool.img/kids/*", "--by", &by()]).refused();
    assert!(again.contains("kids/01 is attached already: /dev/"), "{again}");
    for made in made {
        let dir = Path::new(made["mounted"].as_str().unwrap());
        assert_eq!(fs::read_to_string(dir.join("own")).unwrap(), made["object"].as_str().unwrap());
        umount(dir);
        lab.ok(&["detach", made["device"].as_str().unwrap()]);
    }
    assert!(attached(&it).is_empty());
    server.stop();
    lab.assert_clean();
}

#[test]
fn one_that_cannot_be_attached_or_mounted_takes_the_others_back() {
    let Some(it) = lab() else { return };
    let lab = &it.lab;
    lab.ok(&["fork", "pool.img/base", "pool.img/kids/{1..6}"]);
    lab.ok(&["create", "pool.img/kids/4x", "--size", "100"]);
    lab.ok(&["create", "pool.img/kids/7", "--size", "32M"]);
    let refused = lab.run(&["attach", "pool.img/kids/*", "--by", &by()]).refused();
    assert!(refused.contains("kids/4x") && refused.contains("the other 7 were taken back"), "{refused}");
    assert!(attached(&it).is_empty());
    // The seventh has no file system.
    let pattern = format!("{}/{{1..7}}", it.below.display());
    let words = ["attach", "pool.img/kids/{1..7}", "--by", &by(), "--mount-at", &pattern];
    let refused = lab.run(&words).refused();
    assert!(refused.contains("/7") && refused.contains("the other 6 were taken back"), "{refused}");
    assert!(attached(&it).is_empty() && fs::read_dir(it.below.join("1")).unwrap().next().is_none());
    for (words, why) in [
        (&["attach", "pool.img/nothing*"][..], "no volume has a name like 'nothing*'"),
        (&["attach", "pool.img/kids/1", "pool.img/kids/{1..2}"], "is named twice"),
        (&["attach", "pool.img/kids/{1..3}", "--mount-at", "/mnt/{1..2}"], "names 2 folders for 3 devices"),
        (&["attach", "pool.img/kids/1", "pool.img/none"], "none"),
    ] {
        let refused = lab.run(words).refused();
        assert!(refused.contains(why), "{refused}");
        assert!(attached(&it).is_empty(), "{words:?}");
    }
    // The daemon that was started for the devices has ended.
    lab.assert_clean();
}

#[test]
fn children_are_made_attached_and_mounted_at_once() {
    let Some(it) = lab() else { return };
    let lab = &it.lab;
    let pattern = format!("{}/{{a,b,c}}", it.below.display());
    let words = ["fork", "pool.img/base", "pool.img/kids/{1..3}", "--attach", "--mount-at", &pattern];
    let printed = lab.ok(&words);
    for (line, dir) in printed.lines().zip(["a", "b", "c"]) {
        let (device, at) = line.split_once(' ').unwrap();
        assert!(device.starts_with("/dev/") && at.ends_with(&format!("/{dir}")), "{line}");
        assert!(fs::read(it.below.join(dir).join("file")).unwrap() == noise(1, MIB));
        umount(&it.below.join(dir));
    }
    assert_eq!(printed.lines().count(), 3);
    let refused = lab.run(&["fork", "pool.img/base", "pool.img/k", "--mount-at", "/mnt/k"]).refused();
    assert!(refused.contains("it needs --attach"), "{refused}");
    assert_eq!(attached(&it).len(), 3);
}
