//! The methods of the protocol: one table that defines requests, replies and their names.

use forkdisk::PoolInfo;
use forkdisk_monitor::Statistics;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::reply::{
    Check, CopierRecord, Deletion, Device, Diff, Done, Flattening, Gathering, PieceMap, Status, Usage, VolumeRecord,
};
use crate::schema::{Declared, Field};

/// Parameters of every method. Names are those of volumes (`a`) and snapshots (`a@x`) of the pool, without
/// the pool's path; sizes are bytes.
pub mod params {
    use super::{Deserialize, Serialize};
    use crate::schema::{Declared, Field};

    macro_rules! parameters {
        ($($(#[doc = $about:literal])* $name:ident {
            $($(#[doc = $doc:literal])* $(#[serde($($serde:tt)*)])? $field:ident: $kind:ty),* $(,)?
        })*) => {
            $($(#[doc = $about])*
            #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
            #[serde(deny_unknown_fields)]
            pub struct $name { $($(#[doc = $doc])* $(#[serde($($serde)*)])? pub $field: $kind),* }

            impl Declared for $name {
                const ABOUT: &'static str = concat!($($about),*);
                const FIELDS: &'static [Field] = &[$(Field {
                    name: stringify!($field),
                    kind: stringify!($kind),
                    serde: stringify!($($($serde)*)?),
                    doc: concat!($($doc),*),
                }),*];
            })*
        };
    }

    parameters! {
        /// Creates empty volumes, all of them or none.
        Create {
            /// Their names.
            volumes: Vec<String>,
            /// The size of each.
            size: u64,
            /// Bytes that a first write reserves around itself; `null` for the default.
            #[serde(default)]
            chunk: Option<u64>,
            /// What a first write to a shared chunk does: `split` or `copy`; `null` for the default.
            #[serde(default, rename = "break")]
            break_policy: Option<String>,
            /// Most bytes that each may have mapped; 0 and `null` for no limit.
            #[serde(default)]
            quota: Option<u64>,
            /// When their scattered pages are gathered: `off`, `auto`, `idle` or a percentage as in
            /// `20%`; `null` for `auto`.
            #[serde(default)]
            gather: Option<String>,
        }
        /// Creates a volume from the image whose descriptor comes with the request.
        Import {
            /// The new volume.
            volume: String,
            /// Bytes that a first write reserves around itself; `null` for the default.
            #[serde(default)]
            chunk: Option<u64>,
            /// Format of the image: `raw`, or the name of a format; `nbd`: the descriptor is a socket
            /// to an NBD server that offers the image; `null`: recognised by its first bytes.
            #[serde(default)]
            format: Option<String>,
            /// The size of the volume: a shorter image is followed by zeroes, a longer one is
            /// refused; `null` for the size of the image.
            #[serde(default)]
            size: Option<u64>,
            /// Name of the image in messages.
            #[serde(default)]
            source: Option<String>,
            /// Import an image even if another process has locked it for writing.
            #[serde(default)]
            force: bool,
        }
        /// Writes a volume or snapshot to the file whose descriptor comes with the request.
        Export {
            /// The volume or snapshot.
            object: String,
            /// Name of the file in messages.
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
            /// Keep separate copies instead of sharing the chain's (origins only).
            #[serde(default)]
            independent: bool,
            /// They may be deleted when the pool is full.
            #[serde(default)]
            droppable: bool,
            /// They can be written; their changes are visible nowhere else (origins only).
            #[serde(default)]
            writable: bool,
        }
        /// Creates writable clones that share everything with `source`, all of them or none.
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
        /// Counts the bytes that volumes reference, and those that each holds exclusively.
        Du {
            /// As in `list`.
            #[serde(default)]
            objects: Vec<String>,
        }
        /// Compares two volumes or snapshots; the result comes in parts.
        Diff {
            /// The older side.
            left: String,
            /// The newer side.
            right: String,
            /// Start of this part: 0, or `next` of the previous part.
            #[serde(default)]
            from: u64,
        }
        /// Shows where a volume or snapshot has data; the result comes in parts.
        Map {
            /// The volume or snapshot.
            object: String,
            /// Start of this part: 0, or `next` of the previous part.
            #[serde(default)]
            from: u64,
        }
        /// Renames a volume or snapshot.
        Rename {
            /// Current name.
            from: String,
            /// New name.
            to: String,
        }
        /// Changes the length of a volume.
        Resize {
            /// The volume.
            volume: String,
            /// New length.
            size: u64,
            /// Allow a smaller length: data beyond it is lost.
            #[serde(default)]
            allow_shrink: bool,
            /// Shrink a volume even if it is in use.
            #[serde(default)]
            force: bool,
        }
        /// Changes properties of a volume.
        Set {
            /// The volume.
            volume: String,
            /// Bytes that a first write reserves around itself; `null` leaves it unchanged.
            #[serde(default)]
            chunk: Option<u64>,
            /// What a first write to a shared chunk does: `split` or `copy`; `null` leaves it unchanged.
            #[serde(default, rename = "break")]
            break_policy: Option<String>,
            /// Most bytes it may have mapped; 0 for no limit, `null` leaves it unchanged.
            #[serde(default)]
            quota: Option<u64>,
            /// When its scattered pages are gathered: `off`, `auto`, `idle` or a percentage as in
            /// `20%`; `null` leaves it unchanged.
            #[serde(default)]
            gather: Option<String>,
            /// For an origin: most bytes copied ahead of a sequential writer; `null` leaves it unchanged.
            #[serde(default)]
            copy_ahead: Option<u64>,
            /// For an origin: `wait`, `wait:SECONDS`, `error` or `drop-oldest`; `null` leaves it unchanged.
            #[serde(default)]
            when_full: Option<String>,
            /// For an origin that could not be opened: the new path of its device; `null` leaves it unchanged.
            #[serde(default)]
            path: Option<String>,
        }
        /// Protects a device or file in place.
        Protect {
            /// Name of the new origin.
            volume: String,
            /// Absolute path of the device or file.
            path: String,
            /// The unit in which old contents are kept; `null` for the default.
            #[serde(default)]
            chunk: Option<u64>,
            /// Most bytes copied ahead of a sequential writer; `null` for the default.
            #[serde(default)]
            copy_ahead: Option<u64>,
            /// `wait`, `wait:SECONDS`, `error` or `drop-oldest`; `null` for the default.
            #[serde(default)]
            when_full: Option<String>,
        }
        /// Ends the protection of an origin, which becomes an ordinary disk.
        Unprotect {
            /// The origin.
            volume: String,
            /// Also delete its snapshots.
            #[serde(default)]
            recursive: bool,
            /// Change nothing.
            #[serde(default)]
            dry_run: bool,
        }
        /// Gathers the scattered pages of a volume or snapshot, as far as that unshares nothing.
        Defrag {
            /// The volume or snapshot.
            object: String,
        }
        /// Makes a clone of an origin's snapshot independent: copies everything that shows through.
        Flatten {
            /// The clone.
            volume: String,
        }
        /// Shows the settings and figures of the pool's copier or of one volume, after changing those that are given.
        Copier {
            /// The volume; `null` for the pool.
            #[serde(default)]
            volume: Option<String>,
            /// Most bytes copied by one pair of requests; as in all fields below, `null` leaves it
            /// unchanged. Pool only.
            #[serde(default)]
            subjob_size: Option<u32>,
            /// Most sub-jobs of one job in flight. Pool only.
            #[serde(default)]
            split_count: Option<u32>,
            /// Bytes of buffers. Pool only.
            #[serde(default)]
            buffers: Option<u64>,
            /// Whether the host's file system is asked to clone copied ranges. Pool only.
            #[serde(default)]
            offload: Option<bool>,
            /// Percent of the time in which copies may be in flight; 100 for no limit.
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
            /// Also delete all snapshots of a volume, and all volumes of a folder.
            #[serde(default)]
            recursive: bool,
            /// Delete nothing.
            #[serde(default)]
            dry_run: bool,
            /// Count the bytes that this frees.
            #[serde(default)]
            count: bool,
        }
        /// Makes the pool larger.
        Grow {
            /// Its new size.
            size: u64,
        }
        /// Recounts all references and compares them with the stored counts.
        Check {}
        /// Shows the state of the pool.
        Stats {}
        /// Shows all counters: of the pool, its volumes, the server and the process.
        Statistics {}
        /// Shows the daemon and its clients.
        Status {}
        /// Mounts the pool as a folder of files: the descriptor that comes with the request is a
        /// connection to the kernel's FUSE driver, which the caller has mounted.
        Mount {
            /// Where it is mounted: an absolute path without links.
            dir: String,
            /// Owner of files whose owner was never set.
            uid: u32,
            /// Their group.
            gid: u32,
            /// When scattered pages of files created there are gathered, as in `create`; `null` for `auto`.
            #[serde(default)]
            gather: Option<String>,
            /// Whether `.snapshots` is listed in the root.
            #[serde(default)]
            show_snapshots: bool,
        }
        /// Attaches a volume or snapshot as a block device through the kernel's ublk driver.
        Attach {
            /// The volume or snapshot.
            object: String,
            /// Make the device read-only; the device of a snapshot always is.
            #[serde(default)]
            read_only: bool,
        }
        /// Removes a block device that `attach` created, after writing out what the kernel has cached for it.
        Detach {
            /// Path of the device.
            device: String,
        }
        /// Ends the daemon; answered when the pool is closed. Refused while NBD clients are connected.
        Stop {
            /// Stop even if clients are connected; they are disconnected when their requests in flight were answered.
            #[serde(default)]
            force: bool,
        }
    }
}

/// The parameters of a method, with the method's name and the type of its reply.
pub trait Method: Into<Request> {
    /// The method's name.
    const NAME: &'static str;
    /// Type of its reply.
    type Reply: Serialize + for<'a> Deserialize<'a>;

    /// Returns the reply of this method; `None` if `reply` belongs to another method.
    fn reply_of(reply: Reply) -> Option<Self::Reply>;
}

/// Why a request could not be parsed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unclear {
    Method,
    Params(String),
}

macro_rules! methods {
    ($($name:literal $params:ident => $reply:ty,)*) => {
        /// A method with its parameters.
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[allow(missing_docs, reason = "each is documented with its parameters")]
        pub enum Request { $($params(params::$params)),* }

        /// The reply of a method.
        #[derive(Clone, Debug, PartialEq, Eq, Serialize)]
        #[serde(untagged)]
        #[allow(missing_docs, reason = "each is documented as a type of its own")]
        pub enum Reply { $($params($reply)),* }

        impl Request {
            /// The names of all methods.
            pub const NAMES: &'static [&'static str] = &[$($name),*];

            /// Returns the name of the method.
            pub fn method(&self) -> &'static str {
                match self { $(Request::$params(_) => $name),* }
            }

            /// Every method: its name, what it does, and its parameters.
            pub(crate) const DECLARED: &'static [(&'static str, &'static str, &'static [Field])] =
                &[$(($name, <params::$params as Declared>::ABOUT, <params::$params as Declared>::FIELDS)),*];

            /// Returns the parameters as JSON.
            pub(crate) fn params(&self) -> serde_json::Result<Value> {
                match self { $(Request::$params(params) => serde_json::to_value(params)),* }
            }

            /// Builds the request for `method` with `params`.
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
    "grow" Grow => PoolInfo,
    "check" Check => Check,
    "stats" Stats => PoolInfo,
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
