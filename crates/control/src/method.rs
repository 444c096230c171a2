//! The methods of the protocol: one table that defines requests, replies and their names.

use forkdisk::PoolInfo;
use forkdisk_monitor::Statistics;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::declared::{Declaration, Declared};
use crate::reply::{
    Check, CopierRecord, Deletion, Device, Diff, Done, Flattening, Forked, Gathering, PieceMap, Status, Switched,
    Upgraded, Usage, VolumeRecord,
};

pub mod params;

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

/// The table of methods: name, struct of parameters, type of the reply, and the function in `perform` that carries it
/// out. `$use` is a macro that takes the rows.
macro_rules! each_method {
    ($use:ident) => {
        $use! {
            "create" Create => Vec<VolumeRecord>, volumes::create;
            "import" Import => VolumeRecord, import::import;
            "export" Export => Done, export::export;
            "snapshot" Snapshot => Vec<VolumeRecord>, volumes::snapshot;
            "clone" Clone => Vec<VolumeRecord>, volumes::clone;
            "fork" Fork => Vec<Forked>, fork::fork;
            "rollback-to" RollbackTo => VolumeRecord, rollback::rollback_to;
            "rollback-folder" RollbackFolder => Vec<VolumeRecord>, folders::rollback;
            "rollback" Rollback => VolumeRecord, rollback::rollback;
            "list" List => Vec<VolumeRecord>, look::list;
            "du" Du => Usage, look::du;
            "diff" Diff => Diff, look::diff;
            "map" Map => PieceMap, look::map;
            "rename" Rename => VolumeRecord, volumes::rename;
            "swap" Swap => Done, folders::swap;
            "resize" Resize => VolumeRecord, volumes::resize;
            "set" Set => VolumeRecord, volumes::set;
            "defrag" Defrag => Gathering, defrag::defrag;
            "flatten" Flatten => Flattening, flatten::flatten;
            "copier" Copier => CopierRecord, copier::copier;
            "delete" Delete => Deletion, delete::delete;
            "protect" Protect => VolumeRecord, origins::protect;
            "unprotect" Unprotect => Deletion, origins::unprotect;
            "grow" Grow => PoolInfo, pool::grow;
            "check" Check => Check, pool::check;
            "stats" Stats => PoolInfo, pool::stats;
            "statistics" Statistics => Box<Statistics>, pool::statistics;
            "status" Status => Status, host::status;
            "mount" Mount => Done, host::mount;
            "attach" Attach => Device, host::attach;
            "detach" Detach => Done, host::detach;
            "vhost-user" VhostUser => Done, host::vhost_user;
            "switch" Switch => Switched, host::switch;
            "upgrade" Upgrade => Upgraded, host::upgrade;
            "stop" Stop => Done, host::stop;
        }
    };
}
pub(crate) use each_method;

macro_rules! methods {
    ($($name:literal $params:ident => $reply:ty, $perform:path;)*) => {
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

            /// The declaration of every method.
            pub const DECLARED: &'static [Declaration] = &[$(Declaration {
                method: $name,
                about: <params::$params as Declared>::ABOUT,
                fields: <params::$params as Declared>::FIELDS,
            }),*];

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

each_method!(methods);

#[cfg(test)]
mod tests;
