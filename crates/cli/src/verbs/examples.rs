//! Examples of each verb, for its help and its manual page.

/// Returns the examples of `verb`.
pub fn of(verb: &str) -> Option<&'static [&'static str]> {
    let lines: &[&str] = match verb {
        "init" => &["forkdisk init /srv/pool.img --size 100G", "forkdisk init /dev/sdb"],
        "create" => &["forkdisk create /srv/pool.img/vm1 --size 20G"],
        "import" => &["forkdisk import debian.qcow2 /srv/pool.img/base"],
        "export" => &["forkdisk export /srv/pool.img/vm1@monday vm1.raw", "forkdisk export /srv/pool.img/vm1 - | zstd"],
        "snapshot" => &["forkdisk snapshot /srv/pool.img/vm1@monday /srv/pool.img/vm2@monday"],
        "clone" => &["forkdisk clone /srv/pool.img/base@v1 /srv/pool.img/vm1 /srv/pool.img/vm2"],
        "rollback" => &["forkdisk rollback /srv/pool.img/vm1@monday"],
        "list" => &["forkdisk list /srv/pool.img", "forkdisk list -Hp /srv/pool.img/vm1"],
        "du" => &["forkdisk du /srv/pool.img"],
        "diff" => &["forkdisk diff /srv/pool.img/vm1@monday /srv/pool.img/vm1"],
        "map" => &["forkdisk map /srv/pool.img/vm1"],
        "rename" => &["forkdisk rename /srv/pool.img/vm1 /srv/pool.img/old/vm1"],
        "resize" => &["forkdisk resize /srv/pool.img/vm1 --size 40G"],
        "set" => &["forkdisk set quota=30G /srv/pool.img/vm1"],
        "defrag" => &["forkdisk defrag /srv/pool.img/vm1"],
        "flatten" => &["forkdisk flatten /srv/pool.img/copy"],
        "copier" => &["forkdisk copier /srv/pool.img --set throttle=50%"],
        "delete" => &["forkdisk delete -n -r /srv/pool.img/vm1", "forkdisk delete /srv/pool.img/vm1@monday"],
        "protect" => &["forkdisk protect /srv/pool.img/data /dev/disk/by-id/nvme-1"],
        "unprotect" => &["forkdisk unprotect /srv/pool.img/data"],
        "grow" => &["forkdisk grow /srv/pool.img --size 200G"],
        "check" => &["forkdisk check /srv/pool.img"],
        "repair" => &["forkdisk repair /srv/pool.img"],
        "stats" => &["forkdisk stats /srv/pool.img"],
        "top" => &["forkdisk top /srv/pool.img"],
        "serve" => &["forkdisk serve /srv/pool.img --daemon"],
        "mount" => &["forkdisk mount /srv/pool.img /mnt/pool --daemon"],
        "umount" => &["forkdisk umount /mnt/pool"],
        "attach" => &["forkdisk attach /srv/pool.img/vm1"],
        "detach" => &["forkdisk detach /dev/ublkb0"],
        "stop" => &["forkdisk stop /srv/pool.img"],
        "config" => &["forkdisk config"],
        "bench" => &["forkdisk bench engine"],
        "completions" => &["forkdisk completions bash > /usr/share/bash-completion/completions/forkdisk"],
        "man" => &["forkdisk man /usr/share/man/man1"],
        _ => return None,
    };
    Some(lines)
}
