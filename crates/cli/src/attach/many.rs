//! Several devices at a time: attached by threads, all of them or none, and mounted.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::{Attachment, Means, Owner, Target, attach, detach};
use crate::braces;
use crate::global::Global;

/// Devices that are made at the same time. Each has a connection to the daemon.
const WORKERS_COUNT: usize = 16;
/// Most failures that a message shows.
const SHOWN_COUNT: usize = 3;

/// Attaches all of `targets`, or none; `owner` returns a further connection to the process that has the pool open.
pub fn attach_all(
    global: &Global,
    (first_owner, owner): (&mut Owner, &(dyn Fn() -> Result<Owner> + Sync)),
    targets: &[Target<'_>],
    means: &[Means],
) -> Result<Vec<Attachment>> {
    let Some((first, rest)) = targets.split_first() else { return Ok(Vec::new()) };
    // It shows which means works, and mounts the pool for the others if that is needed.
    let first = attach(first_owner, first, means)?;
    let by = [first.by];
    let made = at_once(rest, |worker: &mut Option<Owner>, target| {
        let owner = match worker {
            Some(owner) => owner,
            none => none.insert(owner()?),
        };
        attach(owner, target, &by)
    });
    let all = std::iter::once(Ok(first)).chain(made).collect();
    whole(all, |made| detach(global, made))
}

/// Mounts the file systems of devices, each in its folder, all of them or none. Missing folders are made.
pub fn mount_all(attached: &[Attachment], dirs: &[PathBuf], read_only: &[bool]) -> Result<()> {
    let wanted: Vec<_> = attached.iter().zip(dirs).zip(read_only).collect();
    let mounted = at_once(&wanted, |_: &mut (), ((attached, dir), read_only)| {
        mount(&attached.device, dir, **read_only).map(|()| dir.to_path_buf())
    });
    whole(mounted, |dir| run(Command::new("umount").arg(dir))).map(drop)
}

/// Returns the folder for each of `names`: `{}` in `pattern` stands for the name, other braces are expanded.
pub fn dirs_for(pattern: &str, names: &[&str]) -> Result<Vec<PathBuf>> {
    if pattern.contains("{}") {
        return Ok(names.iter().map(|name| PathBuf::from(pattern.replace("{}", name))).collect());
    }
    let dirs = braces::expand(pattern, 0)?;
    ensure!(
        dirs.len() == names.len(),
        "--mount-at {pattern} names {} folders for {} devices; {{}} stands for the name of each volume",
        dirs.len(),
        names.len()
    );
    Ok(dirs.into_iter().map(PathBuf::from).collect())
}

fn mount(device: &Path, dir: &Path, read_only: bool) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    let mut mount = Command::new("mount");
    if read_only {
        mount.args(["-o", "ro"]);
    }
    run(mount.arg(device).arg(dir)).with_context(|| format!("mounting {} at {}", device.display(), dir.display()))
}

fn run(command: &mut Command) -> Result<()> {
    let ended = command.stdin(Stdio::null()).output().with_context(|| format!("{command:?}"))?;
    ensure!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr).trim());
    Ok(())
}

/// Carries out `work` for each of `items`, several at a time; the results have their order. Each thread has a state of
/// its own.
fn at_once<I: Sync, S: Default, T: Send>(items: &[I], work: impl Fn(&mut S, &I) -> Result<T> + Sync) -> Vec<Result<T>> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..items.len().min(WORKERS_COUNT) {
            scope.spawn(|| {
                let mut state = S::default();
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(at) else { break };
                    let result = work(&mut state, item);
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((at, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Returns what was made if nothing failed; else takes it back, in the opposite order, and returns the failures.
fn whole<T>(results: Vec<Result<T>>, take_back: impl Fn(&T) -> Result<()>) -> Result<Vec<T>> {
    let (made, failures): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    let made: Vec<T> = made.into_iter().flatten().collect();
    if failures.is_empty() {
        return Ok(made);
    }
    for made in made.iter().rev() {
        if let Err(error) = take_back(made) {
            tracing::warn!("{error:#}");
        }
    }
    let count = failures.len();
    let shown: Vec<String> =
        failures.into_iter().filter_map(Result::err).take(SHOWN_COUNT).map(|error| format!("{error:#}")).collect();
    let more = if count > shown.len() { format!("; and {} more", count - shown.len()) } else { String::new() };
    match made.len() {
        0 => bail!("{}{more}", shown.join("; ")),
        taken => Err(anyhow!("{}{more}; the other {taken} were taken back", shown.join("; "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_belong_to_devices_in_their_order() {
        let names = ["kids/1", "kids/2"];
        assert_eq!(dirs_for("/mnt/{}", &names).unwrap(), [Path::new("/mnt/kids/1"), Path::new("/mnt/kids/2")]);
        assert_eq!(dirs_for("/mnt/{a,b}", &names).unwrap(), [Path::new("/mnt/a"), Path::new("/mnt/b")]);
        let refused = dirs_for("/mnt/{1..3}", &names).unwrap_err().to_string();
        assert!(refused.contains("3 folders for 2 devices"), "{refused}");
        assert!(dirs_for("/mnt", &names).is_err());
    }

    #[test]
    fn all_are_made_in_order_or_none_is_left() {
        let items: Vec<u32> = (0..100).collect();
        let results = at_once(&items, |count: &mut u32, item| {
            *count += 1;
            Ok(*item * 2)
        });
        let doubled: Vec<u32> = results.into_iter().map(Result::unwrap).collect();
        assert_eq!(doubled, items.iter().map(|item| item * 2).collect::<Vec<_>>());
        let taken = Mutex::new(Vec::new());
        let results = at_once(&items, |_: &mut (), item| if *item % 40 == 7 { bail!("no {item}") } else { Ok(*item) });
        let error = whole(results, |item| {
            taken.lock().unwrap().push(*item);
            Ok(())
        });
        let error = error.unwrap_err().to_string();
        assert_eq!(error, "no 7; no 47; no 87; the other 97 were taken back");
        assert_eq!(taken.into_inner().unwrap().len(), 97);
    }
}
