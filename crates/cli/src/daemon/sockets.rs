//! The sockets of the data server and of the control server.

use std::path::PathBuf;

use anyhow::{Context, Result};
use forkdisk::Pool;
use forkdisk_control::runtime_dir;
use forkdisk_uring::{Rt, SocketAccess, UnixListener, UringDevice};

use super::activation::{self, Activated};
use super::run::Settings;

/// Sockets that clients connect to.
pub struct Sockets {
    pub data: Vec<UnixListener>,
    pub data_path: Option<PathBuf>,
    pub control: UnixListener,
    pub control_path: Option<PathBuf>,
    pub private: Option<runtime_dir::PrivateDir>,
}

impl Sockets {
    pub fn open(runtime: &Rt, pool: &Pool<UringDevice>, settings: &Settings, activated: Activated) -> Result<Sockets> {
        let needs_private = settings.socket.is_none() && activated.data.is_empty()
            || settings.control.is_none() && activated.control.is_none();
        let private = match needs_private {
            true => Some(runtime_dir::PrivateDir::make(&pool.info().uuid)?),
            false => None,
        };
        let place_of = |chosen: &Option<PathBuf>, usual: fn(&runtime_dir::PrivateDir) -> PathBuf| -> Result<PathBuf> {
            let path = chosen.clone().or_else(|| private.as_ref().map(usual)).context("no place for the socket")?;
            std::path::absolute(&path).with_context(|| format!("{}: no such place", path.display()))
        };
        let (mut data, data_path) = match activated.data.is_empty() {
            true => {
                let path = place_of(&settings.socket, runtime_dir::PrivateDir::data)?;
                let access = if settings.socket.is_some() { settings.access } else { SocketAccess::OWNER };
                (vec![UnixListener::bind_for(runtime, &path, access)?], Some(path))
            }
            false => (Vec::new(), activated.data.first().and_then(|passed| activation::path_of(&passed.socket))),
        };
        data.extend(activated.data.into_iter().map(|passed| UnixListener::activated(runtime, passed)));
        let (control, control_path) = match activated.control {
            Some(passed) => {
                let path = activation::path_of(&passed.socket);
                (UnixListener::activated(runtime, passed), path)
            }
            None => {
                let path = place_of(&settings.control, runtime_dir::PrivateDir::control)?;
                (UnixListener::bind(runtime, &path)?, Some(path))
            }
        };
        Ok(Sockets { data, data_path, control, control_path, private })
    }
}
