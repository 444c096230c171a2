//! The real program under real clients: one behaviour per test, named for it.

mod bad_input;
mod bench;
mod clients;
mod config;
mod control;
mod daemon;
mod file_systems;
mod harness;
mod kill_loop;
mod kill_verbs;
mod nbd;
mod nbd_clients;
mod origins;
mod output;
mod readme;
mod served;
mod service_manager;
mod serving;
mod vanishing;
mod verbs;
