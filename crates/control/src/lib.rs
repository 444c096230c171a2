//! Verbs on an open pool, and the control protocol that makes them available to other processes.
//!
//! [`perform`] carries out a [`Request`] on a pool that is open in this process. A program that opens
//! an idle pool for one verb calls it; a daemon that serves the pool calls it for requests on its
//! control socket ([`Server`], JSON-RPC 2.0, docs/control.md). So a verb does the same in both places.
//!
//! Owns: the meaning of verbs, their parameters, results and failures; the protocol. Never does:
//! parse command lines, print, decide which process may open the pool. Invariants: what a peer can
//! make the daemon hold is bounded by [`ServerOptions`]; nothing here blocks the thread that serves
//! the pool (callers' files are read and written on separate threads).
#![forbid(unsafe_code)]
#![warn(missing_docs)]
#![deny(clippy::missing_errors_doc)]

mod bridge;
mod call;
mod client;
mod connection;
mod connections;
mod declared;
mod failure;
mod files;
mod identity;
pub mod image;
mod lifetimes;
mod message;
mod method;
mod observer;
mod origins;
mod perform;
mod reply;
pub mod runtime_dir;
mod schema;
mod server;
mod server_options;
mod session;
pub mod size;
mod sparse;
mod window;

pub use call::Call;
pub use client::Client;
pub use connection::PassedPeer;
pub use declared::{Declaration, Field};
pub use failure::{Failure, FailureKind};
pub use lifetimes::{delete_expired, watch_lifetimes};
pub use message::ErrorCode;
pub use method::{Method, Reply, Request, params};
pub use observer::{Observer, Silent, Step};
pub use origins::{attach_origins, detach_origins};
pub use perform::{gather_policy, perform};
pub use reply::{
    Change, Check, ClientRecord, CopierRecord, Deletion, Diff, Done, DuRecord, Flattening, Forked, Gathering, Piece,
    PieceMap, Place, Status, Switched, Upgraded, Usage, VolumeRecord,
};
pub use schema::schema;
pub use server::{Server, ServerHandle};
pub use server_options::ServerOptions;
pub use session::{Exchange, Guard, Host, NoHost, Session};
