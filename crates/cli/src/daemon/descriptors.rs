//! Limit of file descriptors: raised as far as possible; configured connections must fit in it.

use anyhow::{Result, bail};
use forkdisk_control::ServerOptions as ControlOptions;
use forkdisk_nbd::ServerOptions;
use rustix::process::{Resource, getrlimit, setrlimit};

/// Descriptors that a daemon needs besides its connections: the pool, the ring, sockets, signals,
/// mounts, metrics connections, files passed with requests.
const OTHER_FILES: u64 = 128;

/// Raises the soft limit to the hard one; returns the new limit, `None` for unlimited.
pub fn raise() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(error) => {
            tracing::debug!(%error, "the limit of open files is unchanged");
            limit.current
        }
    }
}

/// Descriptors that an upgrade needs besides a second one for each listening socket.
const UPGRADE_FILES: usize = 64;

/// Checks that there are descriptors to pass on `listeners` listening sockets.
pub fn check_room(listeners: usize) -> Result<()> {
    let Some(limit) = getrlimit(Resource::Nofile).current else { return Ok(()) };
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let needed = open + listeners + UPGRADE_FILES;
    if needed as u64 > limit {
        bail!(
            "an upgrade needs {needed} file descriptors for a moment, and the limit of the daemon is {limit}: raise it \
             (ulimit -Hn, LimitNOFILE), or close connections"
        );
    }
    Ok(())
}

/// Returns how many descriptors are left for sockets of single volumes. Fails if the connections
/// alone exceed the limit.
pub fn check(limit: Option<u64>, data: &ServerOptions, control: &ControlOptions) -> Result<usize> {
    let Some(limit) = limit else { return Ok(usize::MAX) };
    let (clients, verbs) = (data.max_connections as u64, control.max_connections as u64);
    let needed = clients.saturating_add(verbs).saturating_add(OTHER_FILES);
    if needed <= limit {
        return Ok(usize::try_from(limit - needed).unwrap_or(usize::MAX));
    }
    let way_out = match limit.saturating_sub(verbs + OTHER_FILES) {
        0 => "raise it".to_string(),
        most => format!("lower max_connections to {most}, or raise it"),
    };
    bail!(
        "max_connections = {clients} does not fit: with control_connections = {verbs} and {OTHER_FILES} for other \
         files that takes {needed} file descriptors, and the limit of this process is {limit} (ulimit -Hn, \
         LimitNOFILE): {way_out}"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_without_descriptors_are_refused_with_what_would_fit() {
        let data = |max_connections| ServerOptions::default().with_max_connections(max_connections);
        let control = ControlOptions::default();
        let of = |limit, connections| check(limit, &data(connections), &control).map_err(|e| e.to_string());
        assert_eq!(of(None, 1 << 40), Ok(usize::MAX));
        assert_eq!(of(Some(1024), 768), Ok(0));
        let refused = of(Some(1024), 2000).unwrap_err();
        assert!(refused.contains("max_connections to 768") && refused.contains(" 1024 "), "{refused}");
        assert!(of(Some(100), 1).unwrap_err().ends_with("raise it"));
        assert_eq!(of(Some(1024), 128), Ok(640));
    }
}
