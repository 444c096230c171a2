//! Parameters of every method. Names are those of volumes (`a`) and snapshots (`a@x`) of the pool, without
//! the pool's path; sizes are bytes.

use serde::{Deserialize, Serialize};

use crate::declared::{Declared, Field};

macro_rules! parameters {
    ($($(#[doc = $about:literal])* $name:ident {
        $($(#[doc = $doc:literal])* $(#[serde($($serde:tt)*)])? $field:ident: $kind:ty),* $(,)?
    })*) => {
        $($(#[doc = $about])*
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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

mod daemon;

pub use daemon::*;

parameters! {
    /// Creates empty volumes, all of them or none.
    Create {
        /// The new volumes.
        volumes: Vec<String>,
        /// Size of each volume in bytes. Space is allocated only where it is written.
        size: u64,
        /// Bytes that a first write reserves around itself: a power of two from 4K to 64M. Default: 64K.
        #[serde(default)]
        chunk: Option<u64>,
        /// What a first write to a shared chunk does: `split` moves only the written pages, `copy` moves the
        /// whole chunk to a new place in one piece. Default: `split`.
        #[serde(default, rename = "break")]
        break_policy: Option<String>,
        /// Most bytes, exclusive and shared, that each volume may have mapped; a write beyond it fails with
        /// ENOSPC. Default: 0, no limit.
        #[serde(default)]
        quota: Option<u64>,
        /// Most bytes of new pages that each volume, with its snapshots and clones, may hold; a write beyond it fails
        /// with ENOSPC. 4K to 1 PiB. Default: 0, no bound.
        #[serde(default)]
        diverge: Option<u64>,
        /// Bytes of new pages that each volume can write whatever else takes space; the pool keeps them
        /// free, and what their tables may take. 4K to 1 PiB. Default: 0, none.
        #[serde(default)]
        reserve: Option<u64>,
        /// When scattered pages are gathered in the background: `off`; `auto`, while the volume is idle, as
        /// long as few pages have to move; `idle`, while the volume is idle; or a percentage such as `20%`,
        /// while the fragmentation is above it. Default: `auto`.
        #[serde(default)]
        gather: Option<String>,
        /// When each volume is deleted by itself, unless something needs it then, in seconds since 1970. Default:
        /// never.
        #[serde(default)]
        expires: Option<u64>,
        /// Labels of the volumes, each as `KEY=VALUE`.
        #[serde(default)]
        labels: Vec<String>,
        /// The volumes are deleted after this has ended: `connection`, the control connection that makes the request,
        /// or
        /// the number of a process.
        #[serde(default)]
        lease: Option<String>,
        /// What makes the volumes, a text of at most 64 bytes. Default: the user of the connection.
        #[serde(default)]
        created_by: Option<String>,
    }
    /// Creates a volume from an image; its descriptor comes with the request. With the format `nbd` the
    /// descriptor is a connection to an NBD server that offers the image.
    Import {
        /// The new volume.
        volume: String,
        /// Bytes that a first write reserves around itself: a power of two from 4K to 64M. Default: 64K.
        #[serde(default)]
        chunk: Option<u64>,
        /// Format of the image; `raw` takes the bytes unchanged. Default: the format that the first bytes show.
        #[serde(default)]
        format: Option<String>,
        /// Size of the volume in bytes: a shorter image is followed by zeroes, a longer one is an error.
        /// Default: the size of the image.
        #[serde(default)]
        size: Option<u64>,
        /// Name of the image in messages.
        #[serde(default)]
        source: Option<String>,
        /// Import an image even if another process has it open for writing: the volume may mix its states.
        #[serde(default)]
        force: bool,
        /// When the volume is deleted by itself, unless something needs it then, in seconds since 1970. Default: never.
        #[serde(default)]
        expires: Option<u64>,
        /// Most bytes of new pages that the volume, with its snapshots and clones, may hold beyond the image; a write
        /// beyond it fails with ENOSPC. 4K to 1 PiB. Default: 0, no bound.
        #[serde(default)]
        diverge: Option<u64>,
        /// Bytes of new pages that the volume can write whatever else takes space, beyond the image; the pool keeps
        /// them free, and what their tables may take. 4K to 1 PiB. Default: 0, none.
        #[serde(default)]
        reserve: Option<u64>,
        /// Labels of the volume, each as `KEY=VALUE`.
        #[serde(default)]
        labels: Vec<String>,
        /// What makes the volume, a text of at most 64 bytes. Default: the user of the connection.
        #[serde(default)]
        created_by: Option<String>,
    }
    /// Writes a volume or snapshot to a file; its descriptor, open for writing, comes with the request.
    Export {
        /// The volume or snapshot to export.
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
        /// The new snapshots, each as `volume@snapshot`.
        snapshots: Vec<String>,
        /// `folder@snapshot` takes one of every volume in the folder, `@snapshot` of every volume in the pool.
        #[serde(default)]
        recursive: bool,
        /// Keep separate copies of old contents instead of sharing those of other snapshots (origins only).
        #[serde(default)]
        independent: bool,
        /// The snapshots may be deleted when the pool is full and the origin's policy is `drop-oldest`.
        #[serde(default)]
        droppable: bool,
        /// The snapshots can be written; their changes are visible nowhere else (origins only).
        #[serde(default)]
        writable: bool,
        /// Take no snapshot, only report of what.
        #[serde(default)]
        dry_run: bool,
        /// Only of volumes with this label, as `KEY` or `KEY=VALUE`; of several: with all of them.
        #[serde(default)]
        label: Vec<String>,
        /// Only of volumes with a name like one of these patterns, separated by commas; `*` stands for any characters.
        #[serde(default, rename = "match")]
        pattern: Option<String>,
        /// Only of volumes that are older than this number of seconds.
        #[serde(default)]
        older_than: Option<u64>,
        /// Only of volumes that expire before this time, in seconds since 1970.
        #[serde(default)]
        expires_before: Option<u64>,
        /// When each snapshot is deleted by itself, unless something needs it then, in seconds since 1970. Default:
        /// never.
        #[serde(default)]
        expires: Option<u64>,
        /// Labels of the snapshots, each as `KEY=VALUE`.
        #[serde(default)]
        labels: Vec<String>,
        /// What makes the snapshots, a text of at most 64 bytes. Default: the user of the connection.
        #[serde(default)]
        created_by: Option<String>,
    }
    /// Creates writable clones that share everything with `source`, all of them or none.
    Clone {
        /// The volume or snapshot to clone.
        source: String,
        /// The new volumes.
        volumes: Vec<String>,
        /// Clone a folder with everything in it, or, as `folder@snapshot`, its snapshots of this name; the new
        /// names are those of folders.
        #[serde(default)]
        recursive: bool,
        /// When each clone is deleted by itself, unless something needs it then, in seconds since 1970. Default: never.
        #[serde(default)]
        expires: Option<u64>,
        /// Most bytes of new pages that each new volume, with its snapshots and clones, may hold beyond its source: for
        /// holes, and in place of shared pages. A write beyond it fails with ENOSPC. 4K to 1 PiB. Default: 0, no bound.
        #[serde(default)]
        diverge: Option<u64>,
        /// Bytes of new pages that each new volume can write whatever else takes space, beyond its source; the pool
        /// keeps them free, and what their tables may take. 4K to 1 PiB. Default: 0, none.
        #[serde(default)]
        reserve: Option<u64>,
        /// Labels of the clones, each as `KEY=VALUE`.
        #[serde(default)]
        labels: Vec<String>,
        /// The clones are deleted after this has ended: `connection`, the control connection that makes the request, or
        /// the number of a process.
        #[serde(default)]
        lease: Option<String>,
        /// What makes the clones, a text of at most 64 bytes. Default: the user of the connection.
        #[serde(default)]
        created_by: Option<String>,
    }
    /// Creates any number of writable clones of a volume, a snapshot, or a folder with everything in it, all of
    /// them or none, all of one instant.
    Fork {
        /// A volume, a snapshot, a folder, or `folder@snapshot`: the snapshots of this name of the volumes in it.
        source: String,
        /// The new volumes, or folders.
        children: Vec<String>,
        /// Bytes that a first write reserves around itself: a power of two from 4K to 64M. Default: as in the
        /// source.
        #[serde(default)]
        chunk: Option<u64>,
        /// What a first write to a shared chunk does, `split` or `copy`. Default: as in the source.
        #[serde(default, rename = "break")]
        break_policy: Option<String>,
        /// Most bytes, exclusive and shared, that each new volume may have mapped. Default: 0, no limit.
        #[serde(default)]
        quota: Option<u64>,
        /// Most bytes of new pages that each new volume, with its snapshots and clones, may hold beyond its source: for
        /// holes, and in place of shared pages. A write beyond it fails with ENOSPC. 4K to 1 PiB. Default: 0, no bound.
        #[serde(default)]
        diverge: Option<u64>,
        /// Bytes of new pages that each new volume can write whatever else takes space, beyond its source; the pool
        /// keeps them free, and what their tables may take. 4K to 1 PiB. Default: 0, none.
        #[serde(default)]
        reserve: Option<u64>,
        /// When scattered pages are gathered in the background. Default: as in the source.
        #[serde(default)]
        gather: Option<String>,
        /// User ID of the owner of the new files and folders on a mount. Default: as in the source.
        #[serde(default)]
        uid: Option<u32>,
        /// Group ID of the new files and folders on a mount. Default: as in the source.
        #[serde(default)]
        gid: Option<u32>,
        /// Permission bits of the new files on a mount, at most 4095 (octal 7777). Default: as in the source.
        #[serde(default)]
        mode: Option<u32>,
        /// When each new volume is deleted by itself, unless something needs it then, in seconds since 1970. Default:
        /// never.
        #[serde(default)]
        expires: Option<u64>,
        /// Labels of the new volumes, each as `KEY=VALUE`.
        #[serde(default)]
        labels: Vec<String>,
        /// The new volumes are deleted after this has ended: `connection`, the control connection that makes the
        /// request, or
        /// the number of a process.
        #[serde(default)]
        lease: Option<String>,
        /// What is done with written bytes that are there already: `all`, they are written; `compare`, a write that
        /// needs new space is compared with what is there, and what is the same is dropped, page by page.
        /// Default: as in the source.
        #[serde(default)]
        writes: Option<String>,
        /// What is done with written pages of zeroes: `written` or `holes`. Default: as in the source.
        #[serde(default)]
        zeroes: Option<String>,
        /// What makes the new volumes, a text of at most 64 bytes. Default: the user of the connection.
        #[serde(default)]
        created_by: Option<String>,
        /// Pass an NBD connection to each new volume with the answer, in the order of the volumes, as if it was just
        /// made; it can open that volume only. Of a served pool, at most 253 volumes, and no folder.
        #[serde(default)]
        connect: bool,
    }
    /// Gives a volume the contents of one of its snapshots.
    Rollback {
        /// The snapshot to go back to, as `volume@snapshot`.
        snapshot: String,
        /// Disconnect the clients that use the volume: requests in flight end first, and later connections
        /// see the old contents.
        #[serde(default)]
        force: bool,
        /// Exchange the contents under the clients: requests in flight end first, later ones see the new contents.
        #[serde(default)]
        live: bool,
    }
    /// Gives a volume the contents and the size of any other volume or snapshot. Its number, name, properties and
    /// snapshots stay.
    RollbackTo {
        /// The volume.
        volume: String,
        /// The volume or snapshot that has the contents. Default: the snapshot that it was cloned from.
        #[serde(default)]
        to: Option<String>,
        /// Disconnect the clients that use the volume: requests in flight end first, and later connections
        /// see the new contents.
        #[serde(default)]
        force: bool,
        /// Exchange the contents under the clients: requests in flight end first, later ones see the new contents.
        #[serde(default)]
        live: bool,
    }
    /// Gives all volumes in a folder that have a snapshot of one name its contents, all of them or none. Volumes
    /// without it stay as they are.
    RollbackFolder {
        /// The folder and the name of the snapshots, as `folder@snapshot`.
        snapshot: String,
        /// Disconnect the clients that use the volumes: requests in flight end first, and later connections
        /// see the new contents.
        #[serde(default)]
        force: bool,
        /// Exchange the contents under the clients, of all volumes at one instant: requests in flight end first, later
        /// ones see the new contents.
        #[serde(default)]
        live: bool,
    }
    /// Lists volumes and snapshots by name. An empty name in `objects` is the whole pool.
    List {
        /// The pool, or folders, volumes and snapshots in it. Default: the pool.
        #[serde(default)]
        objects: Vec<String>,
        /// Only those with this label, as `KEY` or `KEY=VALUE`; of several with all of them.
        #[serde(default)]
        label: Vec<String>,
        /// Only those with a name like one of these patterns, separated by commas; `*` stands for any characters.
        #[serde(default, rename = "match")]
        pattern: Option<String>,
        /// Only those that are older than this number of seconds.
        #[serde(default)]
        older_than: Option<u64>,
        /// Only those that expire before this time, in seconds since 1970.
        #[serde(default)]
        expires_before: Option<u64>,
    }
    /// Counts the bytes that volumes reference, and those that each holds exclusively. An empty name in
    /// `objects` is the whole pool.
    Du {
        /// The pool, or folders, volumes and snapshots in it. Default: the pool.
        #[serde(default)]
        objects: Vec<String>,
    }
    /// Compares two volumes or snapshots; the result comes in parts.
    Diff {
        /// The older volume or snapshot.
        left: String,
        /// The newer volume or snapshot.
        right: String,
        /// Offset in bytes where this part begins: 0, or `next` of the previous part. Default: 0.
        #[serde(default)]
        from: u64,
    }
    /// Shows where a volume or snapshot has data; the result comes in parts.
    Map {
        /// The volume or snapshot.
        object: String,
        /// Offset in bytes where this part begins: 0, or `next` of the previous part. Default: 0.
        #[serde(default)]
        from: u64,
    }
    /// Renames a volume or snapshot.
    Rename {
        /// The volume or snapshot to rename.
        from: String,
        /// Its new name, in the same pool.
        to: String,
    }
    /// Exchanges the names of two volumes or folders, with everything in them.
    Swap {
        /// A volume or folder.
        first: String,
        /// Another one.
        second: String,
    }
    /// Changes the size of a volume.
    Resize {
        /// The volume.
        volume: String,
        /// New size in bytes. Added bytes read as zeroes.
        size: u64,
        /// Allow a smaller size: data beyond it is lost.
        #[serde(default)]
        allow_shrink: bool,
        /// Shrink the volume even if clients use it: their requests beyond its end fail.
        #[serde(default)]
        force: bool,
    }
    /// Changes properties of a volume, all of them or none. A property that is absent or `null` is unchanged. A folder
    /// has three: `quota` and `diverge`, which limit all volumes below it together, and `clone`.
    Set {
        /// The volume or folder. A folder with a slash at its end is made if it does not exist.
        volume: String,
        /// Bytes that a first write reserves around itself: a power of two from 4K to 64M.
        #[serde(default)]
        chunk: Option<u64>,
        /// What a first write to a shared chunk does: `split` moves only the written pages, `copy` moves the
        /// whole chunk to a new place in one piece.
        #[serde(default, rename = "break")]
        break_policy: Option<String>,
        /// Most bytes, exclusive and shared, that the volume may have mapped; a write beyond it fails with
        /// ENOSPC. 0: no limit.
        #[serde(default)]
        quota: Option<u64>,
        /// Most bytes of new pages that the volume, with its snapshots and clones, may hold beyond what it is when a
        /// bound is set first: for holes, and in place of shared pages. A write beyond it fails with ENOSPC. 4K to 1
        /// PiB. 0: no bound.
        #[serde(default)]
        diverge: Option<u64>,
        /// Bytes of new pages that the volume can write whatever else takes space, beyond what it is when a bound is
        /// set first; the pool keeps them free, and what their tables may take. 4K to 1 PiB. 0: none.
        #[serde(default)]
        reserve: Option<u64>,
        /// When scattered pages are gathered in the background: `off`; `auto`, while the volume is idle, as
        /// long as few pages have to move; `idle`, while the volume is idle; or a percentage such as `20%`,
        /// while the fragmentation is above it.
        #[serde(default)]
        gather: Option<String>,
        /// Most bytes copied ahead of a sequential writer; 0 for none (origins only).
        #[serde(default)]
        copy_ahead: Option<u64>,
        /// What a write does if there is no space for the old contents (origins only): `wait`,
        /// `wait:SECONDS`, `error`, or `drop-oldest`, which deletes the oldest droppable snapshot.
        #[serde(default)]
        when_full: Option<String>,
        /// New path of the device of an origin that could not be opened.
        #[serde(default)]
        path: Option<String>,
        /// When the volume or snapshot is deleted by itself, unless something needs it then, in seconds since 1970. 0:
        /// never.
        #[serde(default)]
        expires: Option<u64>,
        /// Labels of the volume or snapshot, each as `KEY=VALUE`.
        /// One without a value, `KEY=`, is removed; others stay.
        #[serde(default)]
        labels: Vec<String>,
        /// The volume is deleted after this has ended: `connection`, the control connection that makes the request, or
        /// the number of a process; `none`: nothing.
        #[serde(default)]
        lease: Option<String>,
        /// What is done with written bytes that are there already: `all`, they are written; `compare`, a write that
        /// needs new space is compared with what is there, and what is the same is dropped, page by page.
        #[serde(default)]
        writes: Option<String>,
        /// What is done with written pages of zeroes: `written` or `holes`.
        #[serde(default)]
        zeroes: Option<String>,
        /// Of a folder: properties of clones that are made below it and are not given others, each as
        /// `PROPERTY=VALUE`: `chunk`, `break`, `quota`, `gather`, `diverge`, `reserve`, `writes`, `zeroes` as here, and
        /// `expires` in seconds from the time of the clone. One without a value, `PROPERTY=`, is removed, so that
        /// clones inherit it from the folder above; others stay.
        #[serde(default)]
        clone: Vec<String>,
    }
    /// Protects a device or file in place.
    Protect {
        /// Name of the new origin.
        volume: String,
        /// Absolute path of the device or file.
        path: String,
        /// Bytes of the unit in which old contents are kept: a power of two from 4K to 1M. Default: 64K.
        #[serde(default)]
        chunk: Option<u64>,
        /// Most bytes copied ahead of a sequential writer; 0 for none. Default: 8M.
        #[serde(default)]
        copy_ahead: Option<u64>,
        /// What a write does if there is no space for the old contents: `wait`, `wait:SECONDS`, `error`, or
        /// `drop-oldest`, which deletes the oldest droppable snapshot. Default: `wait`.
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
        /// Change nothing, only report what would be deleted.
        #[serde(default)]
        dry_run: bool,
    }
    /// Gathers the scattered pages of a volume or snapshot, as far as that unshares nothing. Fails with `busy`
    /// while another request gathers it.
    Defrag {
        /// The volume or snapshot.
        object: String,
    }
    /// Makes a clone of an origin's snapshot independent: copies everything that shows through.
    Flatten {
        /// The clone.
        volume: String,
    }
    /// Shows the settings and figures of the pool's copier or of one volume, after changing those that are
    /// given. A setting that is absent or `null` is unchanged.
    Copier {
        /// One volume of the pool: its throttle and figures. Default: those of the pool.
        #[serde(default)]
        volume: Option<String>,
        /// Most bytes copied by one pair of requests, from 64K to 1M (pool only).
        #[serde(default)]
        subjob_size: Option<u32>,
        /// Most sub-jobs of one job in flight, from 1 to 64 (pool only).
        #[serde(default)]
        split_count: Option<u32>,
        /// Bytes of buffers, from five sub-jobs to 1G (pool only).
        #[serde(default)]
        buffers: Option<u64>,
        /// Whether the host's file system clones ranges instead of reading and writing them: on XFS and btrfs,
        /// with the pool in a file; elsewhere it has no effect (pool only).
        #[serde(default)]
        offload: Option<bool>,
        /// Percentage of the time in which copies may be in flight, from 1 to 100. 100: no limit.
        #[serde(default)]
        percent: Option<u8>,
        /// Most bytes copied per second. 0: no limit.
        #[serde(default)]
        bytes_per_second: Option<u64>,
    }
    /// Deletes volumes and snapshots, all of them or none.
    Delete {
        /// The volumes and snapshots to delete; with `recursive` also folders.
        objects: Vec<String>,
        /// Also delete all snapshots of a volume, and all volumes of a folder, and the folder if it has properties.
        #[serde(default)]
        recursive: bool,
        /// Delete nothing, only report what would be deleted.
        #[serde(default)]
        dry_run: bool,
        /// Report what is deleted and the bytes that this frees.
        #[serde(default)]
        count: bool,
        /// Answer when the space is free, not when the names are durably gone.
        #[serde(default)]
        until_freed: bool,
        /// Only those with this label, as `KEY` or `KEY=VALUE`; of several with all of them.
        #[serde(default)]
        label: Vec<String>,
        /// Only those with a name like one of these patterns, separated by commas; `*` stands for any characters.
        #[serde(default, rename = "match")]
        pattern: Option<String>,
        /// Only those that are older than this number of seconds.
        #[serde(default)]
        older_than: Option<u64>,
        /// Only those that expire before this time, in seconds since 1970.
        #[serde(default)]
        expires_before: Option<u64>,
    }
    /// Makes the pool larger.
    Grow {
        /// New size in bytes. A pool file is extended.
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
}
