//! The methods of the protocol: one table, from which the requests, the replies and their names come.

use forkdisk_monitor::Statistics;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::reply::{
    Check, CopierRecord, Deletion, Device, Diff, Done, Flattening, Gathering, PieceMap, PoolRecord, Status, Usage,
    VolumeRecord,
};

/// Parameters of every method. Names are those of volumes (`a`) and snapshots (`a@x`) of the pool, without
/// the pool's path; sizes are bytes.
pub mod params {
    use super::{Deserialize, Serialize};

    macro_rules! parameters {
        ($($(#[$doc:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $kind:ty),* $(,)? })*) => {
            $($(#[$doc])*
            #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
            #[serde(deny_unknown_fields)]
            pub struct $name { $($(#[$field_meta])* pub $field: $kind),* })*
        };
    }

    parameters! {
        /// Makes empty volumes, all of them or none.
        Create {
            /// Their names.
            volumes: Vec<String>,
            /// The size of each.
            size: u64,
            /// How much room a first write reserves; `null` for the default.
            #[serde(default)]
            chunk: Option<u64>,
            /// What a first write to a shared chunk does: `split` or `copy`; `null` for the default.
            #[serde(default, rename = "break")]
            break_policy: Option<String>,
            /// Most bytes each may have mapped; 0 and `null` for no bound.
            #[serde(default)]
            quota: Option<u64>,
            /// When their scattered pages are brought together: `off`, `auto`, `idle` or a percentage as in `20%`;
            /// `null` for `off`.
            #[serde(default)]
            gather: Option<String>,
        }
        /// Makes a volume out of the image whose descriptor comes with the request.
        Import {
            /// The new volume.
            volume: String,
            /// How much room a first write reserves; `null` for the default.
            #[serde(default)]
            chunk: Option<u64>,
            /// What the image is: `raw`, or the name of a format; `nbd`: the descriptor is a socket at whose other
            /// end an NBD server offers the image; `null`: what its first bytes say.
            #[serde(default)]
            format: Option<String>,
            /// The size of the volume: a shorter image is followed by zeroes, a longer one refused; `null` for the
            /// image's.
            #[serde(default)]
            size: Option<u64>,
            /// What messages call the image.
            #[serde(default)]
            source: Option<String>,
            /// Import what another process has locked for writing.
            #[serde(default)]
            force: bool,
        }
        /// Writes a volume or snapshot to the file whose descriptor comes with the request.
        Export {
            /// What is written.
            object: String,
            /// What messages call the file.
            #[serde(default)]
            target: Option<String>,
            /// Overwrite a file that is not empty, or a block device.
            #[serde(default)]
            force: bool,
        }
        /// Takes snapshots, all at one instant or none.
        Snapshot {
            /// `volume@snapshot` each.
            snapshots: Vec<String>,
            /// With copies of their own instead of sharing the chain's (origins only).
            #[serde(default)]
            independent: bool,
            /// They may be deleted when the pool is full.
            #[serde(default)]
            droppable: bool,
            /// They can be written, seen by nobody else (origins only).
            #[serde(default)]
            writable: bool,
        }
        /// Makes writable volumes that share everything with `source`, all of them or none.
        Clone {
            /// A volume or snapshot.
            source: String,
            /// The new volumes.
            volumes: Vec<String>,
        }
        /// Gives a volume the contents of one of its snapshots.
        Rollback {
            /// `volume@snapshot`.
            snapshot: String,
            /// Disconnect the clients of the volume.
            #[serde(default)]
            force: bool,
        }
        /// Lists volumes and snapshots by name.
        List {
            /// Volumes, snapshots and folders; an empty name, or none at all, is the whole pool.
            #[serde(default)]
            objects: Vec<String>,
        }
        /// Counts what volumes hold, and what they hold alone.
        Du {
            /// As in `list`.
            #[serde(default)]
            objects: Vec<String>,
        }
        /// Compares two volumes or snapshots, in parts.
        Diff {
            /// The older side.
            left: String,
            /// The newer side.
            right: String,
            /// Where this part begins: 0, or `next` of the part before.
            #[serde(default)]
            from: u64,
        }
        /// Shows where a volume or snapshot has data, in parts.
        Map {
            /// The volume or snapshot.
            object: String,
            /// Where this part begins: 0, or `next` of the part before.
            #[serde(default)]
            from: u64,
        }
        /// Gives a volume or snapshot another name.
        Rename {
            /// Its name.
            from: String,
            /// Its new name.
            to: String,
        }
        /// Changes the length of a volume.
        Resize {
            /// The volume.
            volume: String,
            /// Its new length.
            size: u64,
            /// Allow a smaller one: what lies beyond it is lost.
            #[serde(default)]
            allow_shrink: bool,
            /// Make a volume smaller although it is in use.
            #[serde(default)]
            force: bool,
        }
        /// Changes properties of a volume.
        Set {
            /// The volume.
            volume: String,
            /// How much room a first write reserves; `null` leaves it.
            #[serde(default)]
            chunk: Option<u64>,
            /// What a first write to a shared chunk does: `split` or `copy`; `null` leaves it.
            #[serde(default, rename = "break")]
            break_policy: Option<String>,
            /// Most bytes it may have mapped; 0 for no bound, `null` leaves it.
            #[serde(default)]
            quota: Option<u64>,
            /// When its scattered pages are brought together: `off`, `auto`, `idle` or a percentage as in `20%`; `null`
            /// leaves it.
            #[serde(default)]
            gather: Option<String>,
            /// Of an origin: most that is kept ahead of a sequential writer; `null` leaves it.
            #[serde(default)]
            copy_ahead: Option<u64>,
            /// Of an origin: `wait`, `wait:SECONDS`, `error` or `drop-oldest`; `null` leaves it.
            #[serde(default)]
            when_full: Option<String>,
            /// Of an origin that could not be opened: where its device is now; `null` leaves it.
            #[serde(default)]
            path: Option<String>,
        }
        /// Protects a device or file in place.
        Protect {
            /// The name it gets.
            volume: String,
            /// The device or file, an absolute path.
            path: String,
            /// The unit in which old contents are kept; `null` for the default.
            #[serde(default)]
            chunk: Option<u64>,
            /// Most that is kept ahead of a sequential writer; `null` for the default.
            #[serde(default)]
            copy_ahead: Option<u64>,
            /// `wait`, `wait:SECONDS`, `error` or `drop-oldest`; `null` for the default.
            #[serde(default)]
            when_full: Option<String>,
        }
        /// Leaves an origin an ordinary disk.
        Unprotect {
            /// The origin.
            volume: String,
            /// Delete its snapshots, too.
            #[serde(default)]
            recursive: bool,
            /// Change nothing.
            #[serde(default)]
            dry_run: bool,
        }
        /// Brings together what a volume or snapshot has scattered, as far as that unshares nothing.
        Defrag {
            /// The volume or snapshot.
            object: String,
        }
        /// Makes a clone of an origin's snapshot independent: whatever shows through is copied.
        Flatten {
            /// The clone.
            volume: String,
        }
        /// Shows, and first changes, how the pool's copier works, or how a volume is copied.
        Copier {
            /// The volume; `null` for the pool.
            #[serde(default)]
            volume: Option<String>,
            /// Most bytes copied by one pair of requests; as all that follow, `null` leaves it. The pool's alone.
            #[serde(default)]
            subjob_size: Option<u32>,
            /// Most sub-jobs of one job in flight. The pool's alone.
            #[serde(default)]
            split_count: Option<u32>,
            /// Bytes of buffers. The pool's alone.
            #[serde(default)]
            buffers: Option<u64>,
            /// Whether the host's file system is asked to clone what is copied. The pool's alone.
            #[serde(default)]
            offload: Option<bool>,
            /// Percent of the time in which anything may be in flight; 100 for no limit.
            #[serde(default)]
            percent: Option<u8>,
            /// Bytes copied per second; 0 for no limit.
            #[serde(default)]
            bytes_per_second: Option<u64>,
        }
        /// Deletes volumes and snapshots, all of them or none.
        Delete {
            /// Volumes, snapshots, and with `recursive` folders.
            objects: Vec<String>,
            /// With all snapshots of a volume, and all volumes of a folder.
            #[serde(default)]
            recursive: bool,
            /// Delete nothing.
            #[serde(default)]
            dry_run: bool,
            /// Count what it frees.
            #[serde(default)]
            count: bool,
        }
        /// Makes the pool larger.
        Grow {
            /// Its new size.
            size: u64,
        }
        /// Counts every reference again and compares.
        Check {}
        /// Shows the state of the pool.
        Stats {}
        /// Shows everything that is counted: the pool, its volumes, the server, the process.
        Statistics {}
        /// Shows the daemon and its clients.
        Status {}
        /// Shows the pool as a folder of files: the descriptor that comes with the request is a connection to
        /// the kernel's FUSE, which whoever asks has mounted.
        Mount {
            /// Where it is mounted: an absolute path without links.
            dir: String,
            /// Owner of files that nobody has given an owner to.
            uid: u32,
            /// Their group.
            gid: u32,
            /// When scattered pages of files that are made there are brought together, as in `create`; `null` for
            /// `off`.
            #[serde(default)]
            gather: Option<String>,
            /// Whether `.snapshots` is listed in the root.
            #[serde(default)]
            show_snapshots: bool,
        }
        /// Makes a volume or snapshot a block device of the kernel, by its ublk driver.
        Attach {
            /// The volume or snapshot.
            object: String,
            /// A device that cannot be written, as that of a snapshot always is.
            #[serde(default)]
            read_only: bool,
        }
        /// Takes a block device away that `attach` has made; what the kernel has cached of it is written first.
        Detach {
            /// Its path.
            device: String,
        }
        /// Ends the daemon; answered when the pool is closed. Refused while NBD clients are connected.
        Stop {
            /// Also with clients, which are disconnected when their requests in flight have been answered.
            #[serde(default)]
            force: bool,
        }
    }
}

/// A method's parameters, and what it answers with.
pub trait Method: Into<Request> {
    /// The method's name.
    const NAME: &'static str;
    /// What it answers with.
    type Reply: Serialize + for<'a> Deserialize<'a>;

    /// Takes this method's reply out of any; `None` if it is another's.
    fn reply_of(reply: Reply) -> Option<Self::Reply>;
}

/// Why a request could not be understood.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unclear {
    Method,
    Params(String),
}

macro_rules! methods {
    ($($name:literal $params:ident => $reply:ty,)*) => {
        /// What can be asked of a pool: a method with its parameters.
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[allow(missing_docs, reason = "each is documented with its parameters")]
        pub enum Request { $($params(params::$params)),* }

        /// What a method answers with.
        #[derive(Clone, Debug, PartialEq, Eq, Serialize)]
        #[serde(untagged)]
        #[allow(missing_docs, reason = "each is documented as a type of its own")]
        pub enum Reply { $($params($reply)),* }

        impl Request {
            /// The names of all methods.
            pub const NAMES: &'static [&'static str] = &[$($name),*];

            /// The method's name.
            pub fn method(&self) -> &'static str {
                match self { $(Request::$params(_) => $name),* }
            }

            /// Its parameters as JSON.
            pub(crate) fn params(&self) -> serde_json::Result<Value> {
                match self { $(Request::$params(params) => serde_json::to_value(params)),* }
            }

            /// The request for `method` with `params`.
            pub(crate) fn from_parts(method: &str, params: Value) -> Result<Request, Unclear> {
                match method {
                    $($name => serde_json::from_value(params)
                        .map(Request::$params)
                        .map_err(|e| Unclear::Params(e.to_string())),)*
                    _ => Err(Unclear::Method),
                }
            }
        }

        $(impl From<params::$params> for Request {
            fn from(params: params::$params) -> Request {
                Request::$params(params)
            }
        }

        impl Method for params::$params {
            const NAME: &'static str = $name;
            type Reply = $reply;

            fn reply_of(reply: Reply) -> Option<$reply> {
                match reply {
                    Reply::$params(reply) => Some(reply),
                    _ => None,
                }
            }
        })*
    };
}

methods! {
    "create" Create => Vec<VolumeRecord>,
    "import" Import => VolumeRecord,
    "export" Export => Done,
    "snapshot" Snapshot => Vec<VolumeRecord>,
    "clone" Clone => Vec<VolumeRecord>,
    "rollback" Rollback => VolumeRecord,
    "list" List => Vec<VolumeRecord>,
    "du" Du => Usage,
    "diff" Diff => Diff,
    "map" Map => PieceMap,
    "rename" Rename => VolumeRecord,
    "resize" Resize => VolumeRecord,
    "set" Set => VolumeRecord,
    "defrag" Defrag => Gathering,
    "flatten" Flatten => Flattening,
    "copier" Copier => CopierRecord,
    "delete" Delete => Deletion,
    "protect" Protect => VolumeRecord,
    "unprotect" Unprotect => Deletion,
    "grow" Grow => PoolRecord,
    "check" Check => Check,
    "stats" Stats => PoolRecord,
    "statistics" Statistics => Box<Statistics>,
    "status" Status => Status,
    "mount" Mount => Done,
    "attach" Attach => Device,
    "detach" Detach => Done,
    "stop" Stop => Done,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_request_survives_its_way_through_json() {
        let request = Request::from(params::Create {
            volumes: vec!["a".into()],
            size: 1 << 50,
            chunk: None,
            break_policy: None,
            quota: None,
            gather: None,
        });
        let again = Request::from_parts(request.method(), request.params().unwrap()).unwrap();
        assert_eq!(again, request);
    }

    #[test]
    fn optional_parameters_may_be_left_out_and_unknown_ones_are_refused() {
        let parse = |params| Request::from_parts("delete", params);
        let all = params::Delete { objects: vec!["a".into()], recursive: false, dry_run: false, count: false };
        assert_eq!(parse(json!({"objects": ["a"]})), Ok(Request::Delete(all)));
        assert!(matches!(parse(json!({"objects": ["a"], "really": true})), Err(Unclear::Params(_))));
        assert!(matches!(parse(json!({})), Err(Unclear::Params(_))));
        assert_eq!(Request::from_parts("dlete", json!({})), Err(Unclear::Method));
    }
}
