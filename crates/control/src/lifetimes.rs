//! Lifetimes of volumes and snapshots: what a request gives them, and the deletion of what has expired.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

use forkdisk::{ErrorKind, ExtensionChanges, Lease, Writes, Zeroes};

use crate::call::Call;
use crate::failure::Failure;
use crate::session::Session;

/// How often what has expired and is needed is tried again, and the processes of leases are looked up.
const AGAIN: Duration = Duration::from_secs(1);
/// A time that has passed by more than this is taken for a mistake.
const LATE_SECONDS: u64 = 60;
/// Longest time between two looks at the clock, which may have been set.
const LONGEST: Duration = Duration::from_secs(60);

/// What a request says of lifetimes, labels, the policy of writes and the bound.
#[derive(Default)]
pub(crate) struct Given<'a> {
    pub expires: Option<u64>,
    pub labels: &'a [String],
    pub lease: Option<&'a str>,
    pub created_by: Option<&'a str>,
    pub writes: Option<&'a str>,
    pub zeroes: Option<&'a str>,
    pub diverge: Option<u64>,
    pub reserve: Option<u64>,
}

/// What parameters say of lifetimes and labels, with a lease, a bound and the policy of writes or without.
macro_rules! given {
    ($p:ident) => {
        crate::lifetimes::Given {
            expires: $p.expires,
            labels: &$p.labels,
            lease: None,
            created_by: $p.created_by.as_deref(),
            writes: None,
            zeroes: None,
            diverge: None,
            reserve: None,
        }
    };
    ($p:ident, lease) => {
        crate::lifetimes::Given {
            lease: $p.lease.as_deref(),
            diverge: $p.diverge,
            reserve: $p.reserve,
            ..crate::lifetimes::given!($p)
        }
    };
    ($p:ident, lease, writes) => {
        crate::lifetimes::Given {
            writes: $p.writes.as_deref(),
            zeroes: $p.zeroes.as_deref(),
            ..crate::lifetimes::given!($p, lease)
        }
    };
}
pub(crate) use given;

fn invalid(text: String) -> Failure {
    Failure::new(ErrorKind::Invalid, text)
}

impl Given<'_> {
    /// The extension of what the request makes.
    pub fn of_new(&self, session: &Session, call: &Call) -> Result<ExtensionChanges, Failure> {
        let created_by = self.created_by.map(str::to_string).or_else(|| call.created_by.clone());
        Ok(self.changes(session, call)?.with_created_by(created_by))
    }

    /// The changes of an extension that exists or not.
    pub fn changes(&self, session: &Session, call: &Call) -> Result<ExtensionChanges, Failure> {
        // A short time may have passed on the way here.
        let is_past = |&expires: &u64| expires != 0 && expires.saturating_add(LATE_SECONDS) < session.now();
        if let Some(expires) = self.expires.filter(is_past) {
            let text = format!("expires: {expires} (seconds since 1970) has passed; name a later time, or delete it");
            return Err(invalid(text));
        }
        let lease = match self.lease {
            None => None,
            Some("none") => Some(None),
            Some(text) => Some(Some(lease(text, call)?)),
        };
        let labels = self.labels.iter().map(|text| label(text)).collect::<Result<BTreeMap<_, _>, _>>()?;
        let writes = self.writes.map(|name| parsed::<Writes>("writes", name)).transpose()?;
        let zeroes = self.zeroes.map(|name| parsed::<Zeroes>("zeroes", name)).transpose()?;
        let changes = ExtensionChanges::default().with_expires(self.expires).with_lease(lease).with_labels(labels);
        Ok(changes.with_writes(writes).with_zeroes(zeroes).with_diverge(self.diverge).with_reserve(self.reserve))
    }
}

fn parsed<T: FromStr<Err: Display>>(property: &str, text: &str) -> Result<T, Failure> {
    text.parse().map_err(|refused| invalid(format!("{property}: {refused}")))
}

/// Parses `KEY=VALUE`, or `KEY=`, which removes the label.
fn label(text: &str) -> Result<(String, Option<String>), Failure> {
    match text.split_once('=') {
        Some((key, value)) => Ok((key.to_string(), (!value.is_empty()).then(|| value.to_string()))),
        None => Err(invalid(format!("bad label {text:?}: write KEY=VALUE"))),
    }
}

fn lease(text: &str, call: &Call) -> Result<Lease, Failure> {
    if text == "connection" {
        let none = || {
            let text = "no control connection makes this request that could hold the lease: serve the pool \
                        (`forkdisk serve`), or name the number of a process";
            invalid(text.to_string())
        };
        return call.connection.map(Lease::Connection).ok_or_else(none);
    }
    let bad = || invalid(format!("bad lease {text:?}: `connection`, or the number of a process"));
    let pid: u32 = text.parse().map_err(|_| bad())?;
    match (start_of(pid), boot()) {
        (Some(start), Some(boot)) => Ok(Lease::Process { pid, start, boot }),
        _ => Err(invalid(format!("bad lease {text:?}: there is no such process"))),
    }
}

/// When a process started, in ticks since the boot; `None` if it has ended.
fn start_of(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may have any characters.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let [state, start] = [fields.first()?, fields.get(19)?];
    // What has ended and was not waited for.
    (!matches!(*state, "Z" | "X" | "x")).then(|| start.parse().ok())?
}

/// The identity of this boot of the machine.
fn boot() -> Option<[u8; 16]> {
    forkdisk::parse_uuid(std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?.trim())
}

/// The leases of processes that have ended.
fn ended_processes(session: &Session) -> BTreeSet<Lease> {
    let boot = boot();
    let has_ended = |lease: &Lease| match *lease {
        Lease::Process { pid, start, boot: of } => boot != Some(of) || start_of(pid) != Some(start),
        Lease::Connection(_) => false,
    };
    session.pool.leases().into_iter().filter(has_ended).collect()
}

/// Deletes the volumes and snapshots that have expired, as far as nothing needs them, and logs each.
///
/// # Errors
/// Those of [`Pool::delete_expired`](forkdisk::Pool::delete_expired).
pub async fn delete_expired(session: &Session) -> forkdisk::Result<()> {
    let (ended, connections) = (ended_processes(session), session.connections().clone());
    let gone = session.pool.delete_expired(session.now(), |lease| connections.has_ended(lease, &ended)).await?;
    for expired in &gone {
        match expired.lease {
            Some(Lease::Process { pid, .. }) => tracing::info!(pid, "deleted {}: its process has ended", expired.name),
            Some(Lease::Connection(_)) => tracing::info!("deleted {}: its control connection has ended", expired.name),
            None => tracing::info!(expires = expired.expires, "deleted {}: it has expired", expired.name),
        }
    }
    if !gone.is_empty() {
        if session.host().is_daemon() {
            session.settle_soon();
        }
        session.host().follow().await;
    }
    Ok(())
}

/// Task of a daemon: after a `pause`, deletes what expires, when it does, until it is dropped.
pub async fn watch_lifetimes(session: Session, pause: Duration) {
    session.runtime.sleep_for(pause).await;
    let mut has_failed = false;
    loop {
        let of_task = session.clone();
        // Runs to its end even if this is dropped.
        let deleted = session.runtime.spawn(async move { delete_expired(&of_task).await }).await;
        if let (Err(error), false) = (&deleted, has_failed) {
            tracing::warn!("what has expired cannot be deleted, which is tried again: {error}");
        }
        has_failed = deleted.is_err();
        let connections = session.connections().clone();
        let now = session.now();
        let is_left = session.pool.has_expired(now, |lease| connections.has_ended(lease, &BTreeSet::new()));
        let watches = session.pool.leases().iter().any(|lease| matches!(lease, Lease::Process { .. }));
        let next = session.pool.next_expiry(now).map(|time| Duration::from_secs(time.saturating_sub(now)));
        let wait = if is_left || watches { AGAIN } else { next.unwrap_or(LONGEST).min(LONGEST) };
        // Without any lifetime there is nothing to wait for but a change.
        let is_idle = next.is_none() && !is_left && session.pool.leases().is_empty();
        match is_idle {
            true => connections.changed().await,
            false => drop(session.runtime.timeout(wait, connections.changed()).await),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_number_and_start() {
        let pid = std::process::id();
        let start = start_of(pid).expect("it runs");
        assert!(start > 0 && start_of(pid) == Some(start));
        assert_eq!(start_of(u32::MAX), None);
        assert!(boot().is_some_and(|boot| boot != [0; 16]));
        let mut child = std::process::Command::new("/bin/true").spawn().expect("started");
        let pid = child.id();
        let mut waits = 0;
        while start_of(pid).is_some() && waits < 1000 {
            waits += 1;
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(start_of(pid), None, "it has ended and was not waited for");
        child.wait().expect("waited for");
    }

    #[test]
    fn labels_and_leases_that_make_no_sense_are_refused() {
        assert_eq!(label("a=b=c").unwrap(), ("a".to_string(), Some("b=c".to_string())));
        assert_eq!(label("a=").unwrap(), ("a".to_string(), None));
        assert!(label("a").is_err());
        let call = Call::default();
        for bad in ["connection", "", "-1", "4294967295", "4294967296"] {
            assert!(lease(bad, &call).is_err(), "{bad}");
        }
        assert!(matches!(lease(&std::process::id().to_string(), &call), Ok(Lease::Process { .. })));
        let call = Call { connection: Some(7), ..Call::default() };
        assert_eq!(lease("connection", &call).unwrap(), Lease::Connection(7));
    }
}
