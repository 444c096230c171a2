//! The real program under real clients: one behaviour per test, named for it.

mod attach;
mod attach_postgres;
mod bad_input;
mod bench;
#[allow(dead_code, reason = "shared with the tests of the NBD server")]
#[path = "../../../frontend/nbd/tests/support/tls.rs"]
mod certificates;
mod clients;
mod config;
mod control;
mod daemon;
mod defrag;
mod endings;
mod file_systems;
mod full_host;
mod harness;
mod kernel_nbd;
mod kill_loop;
mod kill_verbs;
mod linearizable;
mod live_backup;
mod metrics;
mod mount;
mod mount_files;
mod mount_kill;
mod mount_programs;
mod mount_served;
mod nbd;
mod nbd_clients;
mod offload;
mod origins;
mod origins_full;
mod origins_told;
mod output;
mod process_crash;
mod quota;
mod readme;
mod scenarios;
mod served;
mod service_manager;
mod serving;
mod stomper;
mod tls;
mod under_load;
mod vanishing;
mod verbs;
