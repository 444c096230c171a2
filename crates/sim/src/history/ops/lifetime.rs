//! Lifetimes: volumes and snapshots with labels that expire and are deleted by themselves.

use std::collections::BTreeSet;

use forkdisk::{Changes, CreateOptions, ExtensionChanges, ForkOptions, Mode, SnapshotFlags, VolumeInfo};

use super::control::{all, control, drawn_volume, is_crowded, names_of_one, new_name, strs};
use super::target::is_unsure;
use crate::driver::{Class, Life, Op, Operation, PATIENCE_STEPS, Violation};
use crate::history::op::Profile::*;
use crate::history::place;
use crate::history::run::{Run, Volumes};
use crate::model::{Control, Key, Lifetime};
use crate::rng::Rng;

/// Renews, shortens or ends a lifetime, and changes a label.
pub static SET_LIFETIME: Operation<Volumes> = Operation {
    name: "set-lifetime",
    weight: |profile| match profile {
        Lifetimes => 24,
        _ => 0,
    },
    launch: set_lifetime,
};

/// Creates, clones or snapshots with lifetimes.
pub static MAKE_EXPIRING: Operation<Volumes> = Operation {
    name: "make-expiring",
    weight: |profile| match profile {
        Lifetimes => 20,
        _ => 0,
    },
    launch: make_expiring,
};

/// Some time passes, and what has expired is deleted.
pub static DELETE_EXPIRED: Operation<Volumes> = Operation {
    name: "delete-expired",
    weight: |profile| match profile {
        Lifetimes => 16,
        _ => 0,
    },
    launch: delete_expired,
};

/// Sets or removes an extended attribute, as a mount does.
pub static SET_XATTR: Operation<Volumes> = Operation {
    name: "set-xattr",
    weight: |profile| match profile {
        Lifetimes => 16,
        _ => 0,
    },
    launch: set_xattr,
};

/// The name of the extended attribute.
const XATTR: &str = "sim";

/// The key of the label.
const LABEL: &str = "sim/label";

/// Returns what the pool shows of a lifetime.
pub fn lifetime_of(info: &VolumeInfo) -> Lifetime {
    let label = info.labels.get(LABEL).and_then(|value| value.parse().ok()).unwrap_or(0);
    let value = info.xattrs.get(XATTR).and_then(|value| <[u8; 4]>::try_from(&value[..]).ok());
    Lifetime { expires: info.expires, label, xattr: value.map_or(0, u32::from_le_bytes) }
}

fn drawn(run: &Run, op: &Op) -> Lifetime {
    let mut rng = Rng::new(op.draws[1]);
    let expires = if rng.one_in(4) { 0 } else { run.world.seconds + 1 + rng.below(12) };
    Lifetime { expires, label: if rng.one_in(3) { 0 } else { op.number }, xattr: 0 }
}

fn changes(lifetime: Lifetime) -> ExtensionChanges {
    let label = (lifetime.label != 0).then(|| lifetime.label.to_string());
    ExtensionChanges::default().with_expires(lifetime.expires).with_labels([(LABEL.to_string(), label)].into())
}

fn set_lifetime(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let Some(key) = place::choose(&all(run), op.draws[0]) else { return Ok(()) };
    let lifetime = drawn(run, op);
    control(run, Control::SetLifetime(key, lifetime), |run| {
        let (pool, name) = (run.session.pool.clone(), run.known.model.name(key));
        (format!("set {name} {lifetime:?}"), async move {
            pool.set(&name, &Changes::default().with_extension(changes(lifetime))).await
        })
    })
}

fn set_xattr(run: &mut Run, op: &Op) -> Result<(), Violation> {
    let Some(key) = drawn_volume(run, op) else { return Ok(()) };
    let value = if Rng::new(op.draws[1]).one_in(3) { 0 } else { op.number };
    control(run, Control::SetXattr(key, value), |run| {
        let (pool, name) = (run.session.pool.clone(), run.known.model.name(key));
        (format!("set the extended attribute of {name} to {value}"), async move {
            let bytes = value.to_le_bytes();
            pool.set_xattr(pool.find(&name)?.id, XATTR, (value != 0).then_some(&bytes[..]))?;
            pool.flush().await
        })
    })
}

fn make_expiring(run: &mut Run, op: &Op) -> Result<(), Violation> {
    if is_crowded(run) {
        return Ok(());
    }
    let mut rng = Rng::new(op.draws[2]);
    let lifetime = drawn(run, op);
    let with = |made| Control::WithLifetime(Box::new(made), lifetime);
    let (kind, source) = (rng.below(3), drawn_volume(run, op));
    match (kind, source) {
        (0, Some(key)) => {
            let short = new_name(run, "s");
            control(run, with(Control::Snapshot(vec![(key, short.clone())])), |run| {
                let (pool, name) = (run.session.pool.clone(), run.known.model.name(key));
                (format!("snapshot {name}@{short} {lifetime:?}"), async move {
                    let of = [(name.as_str(), short.as_str())];
                    pool.snapshot_extended(&of, SnapshotFlags::default(), &changes(lifetime), 1).await.map(drop)
                })
            })
        }
        (1, Some(_)) => {
            let key = place::choose(&all(run), op.draws[0]).expect("there is a volume");
            let names = names_of_one(run, "c", &mut rng);
            control(run, with(Control::CloneAll(key, names.clone())), |run| {
                let (pool, source) = (run.session.pool.clone(), run.known.model.name(key));
                (format!("clone {source} to {} {lifetime:?}", names.join(" ")), async move {
                    let given = Changes::default().with_extension(changes(lifetime));
                    pool.fork(&source, &strs(&names), &ForkOptions::new(1).with_changes(given)).await.map(drop)
                })
            })
        }
        _ => {
            let (name, size) = (new_name(run, "v"), run.setup.pages * place::PAGE);
            let properties = super::properties::drawn_properties(run, &mut rng);
            let made = Control::CreateAll(vec![name.clone()], size, properties);
            control(run, with(made), |run| {
                let pool = run.session.pool.clone();
                let options: CreateOptions = super::properties::options_with(size, properties);
                (format!("create {name}, {size} bytes, {properties:?} {lifetime:?}"), async move {
                    pool.create_all(&[&name], &options.with_extension(changes(lifetime))).await.map(drop)
                })
            })
        }
    }
}

/// Returns what is deleted now, with `open` in use: what has expired, a volume only if all of its snapshots have.
fn victims(run: &Run, open: Option<Key>) -> Vec<Key> {
    let model = &run.known.model;
    let due = |key: Key| {
        let expires = model.get(key).map_or(0, |v| v.lifetime.expires);
        expires != 0 && expires <= run.world.seconds && open != Some(key)
    };
    let goes = |key: &Key| due(*key) && place::snapshots(model, Some(*key)).into_iter().all(due);
    all(run).into_iter().filter(goes).collect()
}

/// Nothing else runs meanwhile, so that it is known what is in use; a volume may be.
fn delete_expired(run: &mut Run, op: &Op) -> Result<(), Violation> {
    run.drain()?;
    let is_certain = all(run).iter().all(|&key| !is_unsure(run, key)) && run.known.pending.is_empty();
    if !is_certain || run.session.pool.info().mode == Mode::Failed {
        return Ok(());
    }
    let mut rng = Rng::new(op.draws[1]);
    run.world.seconds += rng.below(6);
    let open = drawn_volume(run, op).filter(|_| rng.one_in(2));
    let handle = match open {
        Some(key) => Some(super::target::handle(run, key)?),
        None => None,
    };
    let keys = victims(run, open);
    let (pool, now) = (run.session.pool.clone(), run.world.seconds);
    if keys.is_empty() {
        let call = async move { pool.delete_expired(now, |_| false).await };
        let gone = run.session.exec.run(PATIENCE_STEPS, call)?;
        let wrong = |what: String| Err(Violation::new("P4", format!("at {now} nothing expires, and {what}")));
        return match gone {
            Ok(gone) if gone.is_empty() => Ok(()),
            Ok(gone) => wrong(format!("{gone:?} are gone")),
            Err(error) if run.session.disk.faults_hit() == 0 && !run.session.has_failed() => wrong(error.to_string()),
            Err(_) => Ok(()),
        };
    }
    let names: BTreeSet<String> = keys.iter().map(|&key| run.known.model.name(key)).collect();
    control(run, Control::Delete(keys), |_| {
        (format!("at {now} {names:?} expire"), async move {
            let gone = pool.delete_expired(now, |_| false).await?;
            let gone: BTreeSet<String> = gone.into_iter().map(|expired| expired.name).collect();
            assert_eq!(gone, names, "what has expired at {now} is deleted, and nothing else");
            drop(handle);
            Ok(())
        })
    })?;
    run.wait(|o| matches!(o.class, Class::Control(_)))
}
