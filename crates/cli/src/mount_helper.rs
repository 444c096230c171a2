//! The program as `mount.fuse.forkdisk`, which mount(8) runs for lines of /etc/fstab and `mount -t
//! fuse.forkdisk`: `mount.fuse.forkdisk POOL DIR [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE]`
//! becomes `forkdisk mount --daemon POOL DIR`.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Names of links to the program that make it a helper of mount(8).
const NAMES: [&str; 2] = ["mount.fuse.forkdisk", "mount.forkdisk"];
/// Options for mount(8), systemd and /etc/fstab, which the helper ignores.
const OF_OTHERS: [&str; 14] = [
    "defaults", "auto", "noauto", "nofail", "user", "nouser", "users", "owner", "group", "_netdev", "relatime",
    "async", "suid", "dev",
];
const PREFIXES_OF_OTHERS: [&str; 6] = ["x-", "X-", "user=", "comment=", "uhelper=", "subtype="];

/// Task of the helper.
#[derive(Debug, PartialEq, Eq)]
enum Task {
    /// Nothing (`-f`).
    Nothing,
    /// Run the program with these arguments.
    Run(Vec<String>),
}

/// Runs as the helper of mount(8) if the program was started under a helper's name; else returns `None`.
pub fn begin() -> Option<Result<()>> {
    let mut arguments = std::env::args_os();
    let name = arguments.next()?;
    let name = Path::new(&name).file_name().and_then(OsStr::to_str)?;
    NAMES.contains(&name).then(|| match task(arguments)? {
        Task::Nothing => Ok(()),
        Task::Run(arguments) => run(&arguments).map(|never| match never {}),
    })
}

/// Replaces this process by the program with other arguments.
fn run(arguments: &[String]) -> Result<Infallible> {
    let program = std::env::current_exe().context("this program's own file is not found")?;
    Err(Command::new(program).args(arguments).exec()).context("starting forkdisk mount")
}

fn task(arguments: impl Iterator<Item = OsString>) -> Result<Task> {
    let text = |a: OsString| a.into_string().map_err(|a| anyhow::anyhow!("{} is not UTF-8", a.display()));
    let mut arguments = arguments.map(text);
    let (mut places, mut options) = (Vec::new(), Vec::new());
    let (mut is_fake, mut is_sloppy) = (false, false);
    while let Some(argument) = arguments.next().transpose()? {
        let Some(flags) = argument.strip_prefix('-') else {
            places.push(argument);
            continue;
        };
        for (at, flag) in flags.char_indices() {
            match flag {
                'f' => is_fake = true,
                's' => is_sloppy = true,
                'n' | 'v' => {}
                'o' | 't' | 'N' => {
                    let rest = &flags[at + 1..];
                    let given = if rest.is_empty() { arguments.next().transpose()? } else { Some(rest.to_string()) };
                    let value = given.with_context(|| format!("-{flag} needs a value"))?;
                    if flag == 'o' {
                        options.extend(value.split(',').filter(|o| !is_of_others(o)).map(String::from));
                    }
                    break;
                }
                _ => bail!("-{flag} is no option of {}", NAMES[0]),
            }
        }
    }
    let [pool, dir] = &places[..] else { bail!("usage: {} POOL DIR [-sfnv] [-o OPTIONS]", NAMES[0]) };
    if is_fake {
        return Ok(Task::Nothing);
    }
    if is_sloppy {
        options.retain(|option| crate::verbs::mount::is_known(option));
    }
    // mount.fuse3 writes program and source as one word.
    let pool = pool.strip_prefix("forkdisk#").unwrap_or(pool);
    let mut run: Vec<String> = ["mount", "--daemon"].map(String::from).into();
    if !options.is_empty() {
        run.extend(["-o".to_string(), options.join(",")]);
    }
    run.extend(["--".to_string(), pool.to_string(), dir.clone()]);
    Ok(Task::Run(run))
}

fn is_of_others(option: &str) -> bool {
    option.is_empty() || OF_OTHERS.contains(&option) || PREFIXES_OF_OTHERS.iter().any(|p| option.starts_with(p))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Result<Task> {
        task(line.split(' ').map(OsString::from))
    }

    fn runs(line: &str) -> String {
        match of(line).unwrap() {
            Task::Run(arguments) => arguments.join(" "),
            Task::Nothing => panic!("nothing is run"),
        }
    }

    #[test]
    fn what_mount_says_becomes_arguments_of_the_verb() {
        assert_eq!(runs("p.img /mnt -o rw"), "mount --daemon -o rw -- p.img /mnt");
        assert_eq!(runs("forkdisk#p.img /mnt"), "mount --daemon -- p.img /mnt");
        let systemd = "rw,nofail,_netdev,x-systemd.automount,x-systemd.requires=a.mount,gather=20%,noexec,user=me";
        assert_eq!(
            runs(&format!("p.img /mnt -n -o {systemd}")),
            "mount --daemon -o rw,gather=20%,noexec -- p.img /mnt"
        );
        assert_eq!(runs("p.img /mnt -vo ro -t fuse.forkdisk"), "mount --daemon -o ro -- p.img /mnt");
    }

    #[test]
    fn what_is_not_known_is_left_to_the_verb_unless_mount_is_sloppy() {
        assert_eq!(runs("p.img /mnt -o ro,acl"), "mount --daemon -o ro,acl -- p.img /mnt");
        assert_eq!(runs("p.img /mnt -s -o ro,acl"), "mount --daemon -o ro -- p.img /mnt");
        assert_eq!(of("p.img /mnt -f").unwrap(), Task::Nothing);
        for bad in ["p.img", "p.img /mnt x", "p.img /mnt -o", "p.img /mnt -q"] {
            assert!(of(bad).is_err(), "{bad}");
        }
    }
}
