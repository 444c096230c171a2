//! Table of all configuration keys. Flags, environment variables, keys of the file, defaults and
//! documentation are derived from it.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::{Arg, ArgAction};
use forkdisk::LowWater;

use crate::patterns::Patterns;
use crate::{listen_address, size, volume_sockets};

/// Type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A path.
    Path,
    /// Bytes, with an optional unit.
    Size,
    /// Bytes with an optional unit, or a percentage.
    Share,
    /// A whole number above 0.
    Count,
    /// Permissions of a file: octal, as chmod takes them.
    Mode,
    /// A group of users, by name or number.
    Group,
    /// Rules for modes and groups of the sockets of single volumes, one or several.
    Sockets,
    /// A duration: a number and `us`, `ms`, `s`, `m` or `h`; seconds without a unit.
    Time,
    /// `yes` or `no`.
    Switch,
    /// `yes`, `no` or this word.
    SwitchOr(&'static str),
    /// TCP addresses, one or several.
    Addresses,
    /// TCP addresses and unix sockets, one or several.
    Places,
    /// Names or patterns of names, separated by commas.
    Patterns,
    /// One of these words.
    Choice(&'static [&'static str]),
}

/// Verbs to which a key applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All of them.
    Every,
    /// `serve`.
    Serve,
}

/// A configuration key.
#[derive(Debug)]
pub struct Key {
    /// Its name in the file: `log_file`.
    pub name: &'static str,
    /// Its identifier in the parser of the command line.
    pub id: &'static str,
    pub kind: Kind,
    pub scope: Scope,
    /// Empty if there is no default.
    pub default: &'static str,
    /// Effect of the key, in one sentence.
    pub help: &'static str,
}

macro_rules! keys {
    ($($constant:ident $name:literal $kind:expr, $scope:ident, $default:literal, $help:literal;)*) => {
        $(#[doc = $help]
        pub const $constant: Key =
            Key {
                name: $name,
                id: concat!("key ", $name),
                kind: $kind,
                scope: Scope::$scope,
                default: $default,
                help: $help,
            };)*

        /// All keys, in the order in which they are shown.
        pub const KEYS: &[Key] = &[$($constant),*];
    };
}

keys! {
    POOL "pool" Kind::Path, Every, "", "The pool of addresses without a path";
    CONTROL "control" Kind::Path, Every, "",
        "The control socket of the daemon that serves the pool; without it, the one in the pool's own folder";
    WAIT "wait" Kind::Time, Every, "10s",
        "How long a verb waits while another verb has the pool open; 0: not at all";
    LOG "log" Kind::Choice(&["off", "error", "warn", "info", "debug", "trace"]), Every, "",
        "Least severe level that is logged; without it, info by serve and warn by other verbs";
    LOG_FORMAT "log_format" Kind::Choice(&["text", "json"]), Every, "text", "How log lines are written";
    SOCKET "socket" Kind::Path, Serve, "",
        "Path of the data socket; without it, /run/forkdisk/UUID/nbd.sock for root, else \
        $XDG_RUNTIME_DIR/forkdisk/UUID/nbd.sock";
    SOCKET_DIR "socket_dir" Kind::Path, Serve, "",
        "A folder with a separate data socket for each volume, VOLUME.sock (docs/nbd.md)";
    SOCKET_MODE "socket_mode" Kind::Mode, Serve, "",
        "The mode of data sockets; without it, 0660 with a group, else 0600";
    SOCKET_GROUP "socket_group" Kind::Group, Serve, "", "The group of data sockets, by name or number";
    VOLUME_SOCKETS "volume_sockets" Kind::Sockets, Serve, "",
        "Mode and group of single sockets in socket_dir and vhost_user; VOLUME may end in '*'; the first match applies";
    VHOST_USER "vhost_user" Kind::Path, Serve, "",
        "A folder with a vhost-user-blk socket for each volume, VOLUME.sock, for virtual machines (docs/vhost-user.md)";
    VHOST_USER_VOLUMES "vhost_user_volumes" Kind::Patterns, Serve, "*",
        "Volumes that have such a socket: names or patterns with '*' and '?', separated by commas";
    VHOST_USER_QUEUES "vhost_user_queues" Kind::Count, Serve, "16", "Most queues of such a disk, up to 64";
    VHOST_USER_BLOCK_SIZE "vhost_user_block_size" Kind::Choice(&["512", "4096"]), Serve, "512",
        "Size in bytes of the logical blocks of such a disk";
    VHOST_USER_POLL "vhost_user_poll" Kind::Time, Serve, "0",
        "Longest time, such as 50us, for which an idle queue is polled before the daemon waits for the guest's \
        notification; costs CPU";
    MOUNT "mount" Kind::Path, Serve, "",
        "Also mount the pool on this folder: every volume is a file there (docs/mount.md)";
    FUSE_URING "fuse_uring" Kind::Choice(&["auto", "yes", "no"]), Serve, "auto",
        "Whether requests of mounts come by io_uring, with less CPU: auto: where the kernel offers it; yes: a mount \
        fails without (docs/mount.md)";
    KEEPER "keeper" Kind::Switch, Serve, "no",
        "Whether mounts, and loop devices on them, go on when this process is killed and another one serves the pool \
        (docs/serving.md)";
    KEEPER_LIMIT "keeper_limit" Kind::Time, Serve, "10m",
        "How long they wait for that process before they end";
    TCP "tcp" Kind::Addresses, Serve, "",
        "Also serve over TCP, to other machines only with TLS or --insecure; 127.0.0.1:10809 if no address is given";
    TLS_CERT "tls_cert" Kind::Path, Serve, "",
        "The server's certificate for TLS over TCP (PEM), followed by intermediate certificates";
    TLS_KEY "tls_key" Kind::Path, Serve, "", "The private key of the certificate (PEM)";
    TLS_CLIENT_CA "tls_client_ca" Kind::Path, Serve, "",
        "Certificate authorities (PEM); clients over TCP must present a certificate of one of them";
    TLS_CLIENTS "tls_clients" Kind::Path, Serve, "",
        "Table of the exports that each client certificate may open (TOML, docs/tls.md)";
    TLS "tls" Kind::Choice(&["off", "allowed", "required"]), Serve, "",
        "Whether clients over TCP use TLS; without it, required if there is a certificate, else off";
    METRICS "metrics" Kind::Places, Serve, "", "Answer HTTP requests for /metrics in the Prometheus text format";
    INSECURE "insecure" Kind::Switch, Serve, "no", "Let clients on other machines connect without TLS";
    PID_FILE "pid_file" Kind::Path, Serve, "", "File for the process number";
    LOG_FILE "log_file" Kind::Path, Serve, "", "Log file, instead of stderr; SIGHUP reopens it";
    SYSLOG "syslog" Kind::Path, Serve, "/dev/log",
        "Target of the log with --daemon and without a log file: the socket of journald or syslogd, if it exists";
    LOG_BURST "log_burst" Kind::Count, Serve, "20",
        "Most log lines of one kind within ten seconds; more are counted and left out";
    WHEN_FULL "when_full" Kind::Choice(&["wait", "error"]), Serve, "wait",
        "What a write does when the pool, or the file system under it, is full";
    WAIT_FOR_SPACE "wait_for_space" Kind::Time, Serve, "60s", "How long such a write waits before it fails";
    LOW_WATER "low_water" Kind::Share, Serve, "5%",
        "Free space below which a warning is logged, a size or percent of the pool; 0: never";
    CACHE "cache" Kind::Size, Serve, "32M", "Clean metadata kept in memory";
    SHARED_CACHE "shared_cache" Kind::Size, Serve, "256M",
        "Data kept in memory that several volumes or snapshots refer to, so that it is read once for all of them; 0: \
        none";
    DIRTY "dirty" Kind::Size, Serve, "64M", "Most changed metadata that is not yet in a checkpoint";
    COMMIT_INTERVAL "commit_interval" Kind::Time, Serve, "5s",
        "Longest time until an acknowledged write is committed and flushed in the background; 0: never";
    DISCARD "discard" Kind::SwitchOr("lazy"), Serve, "lazy",
        "Whether freed space becomes holes in the pool's file or is discarded on its device; lazy: later, so that it \
        is used again before (docs/configuration.md)";
    DISCARD_ABOVE "discard_above" Kind::Size, Serve, "1G",
        "With discard = lazy: most freed space that is not discarded yet";
    DISCARD_AFTER "discard_after" Kind::Time, Serve, "10m",
        "With discard = lazy: time for which freed space is not discarded, at most twice; 0: no limit";
    MEMORY_RESERVES "memory_reserves" Kind::Switch, Serve, "yes",
        "Whether a daemon of root is exempt from the out-of-memory killer and locks its memory, as its devices \
        need it (docs/attach.md)";
    MAX_CONNECTIONS "max_connections" Kind::Count, Serve, "128", "Most connections to the data socket at a time";
    MAX_EXPORT_CONNECTIONS "max_export_connections" Kind::Count, Serve, "96",
        "Most connections to one export at a time; further ones are refused when they choose it";
    MAX_REQUESTS "max_requests" Kind::Count, Serve, "128", "Most requests of one connection that are not answered yet";
    MAX_REQUEST_BYTES "max_request_bytes" Kind::Size, Serve, "64M", "Most data of such requests";
    CONNECTION_RESERVE "connection_reserve" Kind::Size, Serve, "1M",
        "Data that each connection may have in flight before it uses shared memory";
    SHARED_MEMORY "shared_memory" Kind::Size, Serve, "256M",
        "Most data in flight beyond that, of all connections together";
    STARTED_REQUESTS "started_requests" Kind::Count, Serve, "128",
        "Most requests that all connections together have under way in the pool; active connections get equal \
        shares";
    STARTED_BYTES "started_bytes" Kind::Size, Serve, "64M", "Most data of such requests, shared in the same manner";
    HANDSHAKE_TIMEOUT "handshake_timeout" Kind::Time, Serve, "10s",
        "How long a client that has not chosen an export may be idle";
    STALL_TIMEOUT "stall_timeout" Kind::Time, Serve, "10s",
        "How long a client may hold shared memory without progress while others wait for it";
    DRAIN_TIMEOUT "drain_timeout" Kind::Time, Serve, "10s",
        "How long the end of the daemon waits for requests in flight";
    CONTROL_CONNECTIONS "control_connections" Kind::Count, Serve, "128",
        "Most connections to the control socket at a time";
    CONTROL_MESSAGE "control_message" Kind::Size, Serve, "1M", "Longest message on the control socket";
}

impl Key {
    /// Returns the name of its flag, without dashes: `log-file`.
    pub fn flag(&self) -> String {
        self.name.replace('_', "-")
    }

    /// Returns the name of its environment variable: `FORKDISK_LOG_FILE`.
    pub fn variable(&self) -> String {
        format!("FORKDISK_{}", self.name.to_uppercase())
    }

    /// Returns its argument of the command line.
    pub fn arg(&'static self) -> Arg {
        let default = if self.default.is_empty() { String::new() } else { format!(" [default: {}]", self.default) };
        let arg = Arg::new(self.id)
            .long(self.flag())
            .help(format!("{}{default}", self.help))
            .value_name(self.kind.value_name())
            .global(self.scope == Scope::Every)
            .value_parser(move |text: &str| self.check(text).map(|()| text.to_string()).map_err(|e| format!("{e:#}")));
        match self.kind {
            Kind::Addresses => {
                arg.num_args(0..=1).default_missing_value(listen_address::USUAL).action(ArgAction::Append)
            }
            Kind::Places | Kind::Sockets => arg.action(ArgAction::Append),
            Kind::Switch | Kind::SwitchOr(_) => arg.num_args(0..=1).require_equals(true).default_missing_value("yes"),
            _ => arg,
        }
    }

    /// Checks that `text` is a valid value of this key. An empty text counts as unset.
    pub fn check(&self, text: &str) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        match self.kind {
            Kind::Path => Ok(()),
            Kind::Size => size::parse(text).map(drop),
            Kind::Share => share(text).map(drop),
            Kind::Count => count(text).map(drop),
            Kind::Time => time(text).map(drop),
            Kind::Mode => volume_sockets::mode(text).map(drop),
            Kind::Group => Ok(()),
            Kind::Sockets => volume_sockets::parse(text).map(drop),
            Kind::Addresses => listen_address::parse_addresses(text).map(drop),
            Kind::Places => listen_address::parse_places(text).map(drop),
            Kind::Switch => switch(text).map(drop),
            Kind::SwitchOr(word) if text == word => Ok(()),
            Kind::SwitchOr(word) => switch(text).map(drop).with_context(|| format!("it may also be {word}")),
            Kind::Patterns => Patterns::parse(text).map(drop),
            Kind::Choice(words) if words.contains(&text) => Ok(()),
            Kind::Choice(words) => bail!("'{text}' is none of {}", words.join(", ")),
        }
    }
}

impl Kind {
    /// Returns the placeholder of a value in help texts.
    pub fn value_name(self) -> String {
        match self {
            Kind::Path => "PATH".to_string(),
            Kind::Size => "SIZE".to_string(),
            Kind::Share => "SIZE|PERCENT%".to_string(),
            Kind::Count => "NUMBER".to_string(),
            Kind::Time => "TIME".to_string(),
            Kind::Mode => "MODE".to_string(),
            Kind::Group => "GROUP".to_string(),
            Kind::Sockets => "VOLUME=MODE[:GROUP]".to_string(),
            Kind::Addresses => "ADDR:PORT".to_string(),
            Kind::Places => "ADDR:PORT|unix:PATH".to_string(),
            Kind::Switch => "yes|no".to_string(),
            Kind::SwitchOr(word) => format!("yes|no|{word}"),
            Kind::Patterns => "PATTERN,…".to_string(),
            Kind::Choice(words) => words.join("|"),
        }
    }
}

/// Parses a whole number above 0.
pub fn count(text: &str) -> Result<usize> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => bail!("'{text}' is not a whole number above 0"),
    }
}

/// Parses a size, or a percentage as in `5%`.
pub fn share(text: &str) -> Result<LowWater> {
    let Some(number) = text.strip_suffix('%') else { return size::parse(text).map(LowWater::Bytes) };
    match number.trim().parse() {
        Ok(percent) if percent <= 100 => Ok(LowWater::Percent(percent)),
        _ => bail!("'{text}' is not a percentage from 0% to 100%"),
    }
}

/// Parses `yes` or `no`.
pub fn switch(text: &str) -> Result<bool> {
    match text {
        "yes" | "true" => Ok(true),
        "no" | "false" => Ok(false),
        _ => bail!("'{text}' is neither yes nor no"),
    }
}

/// Parses a number and `us`, `ms`, `s`, `m` or `h`; seconds without a unit.
pub fn time(text: &str) -> Result<Duration> {
    if text.starts_with('-') {
        bail!("'{text}' is negative: a time is positive");
    }
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor = match unit.trim() {
        "us" => 1,
        "ms" => 1000,
        "" | "s" => 1_000_000,
        "m" | "min" => 60_000_000,
        "h" => 3_600_000_000,
        _ => bail!("'{text}' is not a time: the unit is one of us, ms, s, m, h"),
    };
    match number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor)) {
        Some(microseconds) => Ok(Duration::from_micros(microseconds)),
        None => bail!("'{text}' is not a time: write a number and a unit, such as 10s"),
    }
}

/// Returns the key with the name most similar to `name`; `None` if none is similar enough.
pub fn nearest(name: &str) -> Option<&'static Key> {
    let wanted = name.replace('-', "_").to_lowercase();
    let near = KEYS.iter().map(|key| (distance(&wanted, key.name), key)).min_by_key(|(distance, _)| *distance);
    near.filter(|(distance, key)| *distance <= key.name.len().max(wanted.len()) / 2).map(|(_, key)| key)
}

/// Returns the edit distance of `a` and `b`: letters changed, added or removed.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.chars().enumerate() {
            let cost = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = cost.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[row.len() - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_is_a_value_of_its_key() {
        for key in KEYS {
            key.check(key.default).unwrap_or_else(|e| panic!("{}: {e}", key.name));
        }
    }

    #[test]
    fn the_nearest_key_is_found_if_one_is_near() {
        assert_eq!(nearest("log-fil").map(|key| key.name), Some("log_file"));
        assert_eq!(nearest("max_conections").map(|key| key.name), Some("max_connections"));
        assert!(nearest("xyzzy_plugh_quux").is_none());
    }

    #[test]
    fn shares_are_sizes_or_percentages() {
        for (text, value) in
            [("0", LowWater::Bytes(0)), ("10G", LowWater::Bytes(10 << 30)), ("5%", LowWater::Percent(5))]
        {
            assert_eq!(share(text).unwrap(), value);
        }
        for text in ["", "%", "101%", "-1%", "5.5%", "x"] {
            assert!(share(text).is_err(), "{text}");
        }
        assert_eq!(LowWater::Percent(5).bytes(200), 10);
    }

    #[test]
    fn times_have_units() {
        for (text, milliseconds) in
            [("10", 10_000), ("10s", 10_000), ("250ms", 250), ("2m", 120_000), ("1h", 3_600_000)]
        {
            assert_eq!(time(text).unwrap(), Duration::from_millis(milliseconds), "{text}");
        }
        for text in ["", "s", "-1s", "1d", "1.5s", "99999999999999999999s"] {
            assert!(time(text).is_err(), "{text}");
        }
    }
}
