//! A volume gets other contents while clients use it: what the kernel has cached of it on mounts and devices.

use std::io;
use std::path::Path;
use std::sync::Arc;

use forkdisk::{ErrorKind, LocalFuture, VolumeId};
use forkdisk_control::{Exchange, Failure};
use forkdisk_fuse::off_thread;
use forkdisk_uring::{ClaimedDevice, UringDevice};

use super::mounts::Mounts;

/// Devices from which nothing is mounted, and nothing can be, while this lives.
#[derive(Clone)]
pub struct Claimed(Arc<Vec<(String, ClaimedDevice)>>);

impl Claimed {
    /// Claims the devices of a volume, and writes what the kernel has cached of them.
    pub async fn claim(name: &str, devices: Vec<String>) -> Result<Claimed, Failure> {
        let claim = |device: String| match ClaimedDevice::claim(Path::new(&device)) {
            Ok(claimed) => Ok((device, claimed)),
            Err(error) => Err((device, error)),
        };
        let claimed: Result<Vec<_>, (String, io::Error)> = match devices.is_empty() {
            true => Ok(Vec::new()),
            false => off_thread(move || devices.into_iter().map(claim).collect()).await,
        };
        let devices = claimed.map_err(|(device, error)| match error.kind() {
            io::ErrorKind::ResourceBusy => {
                let text =
                    format!("{name} is attached as {device}, which is mounted or in use: `umount {device}` first");
                Failure::new(ErrorKind::Busy, text)
            }
            _ => Failure::file(format!("{device}, as which {name} is attached"), error),
        })?;
        Ok(Claimed(Arc::new(devices)))
    }

    /// Whether there are any.
    pub fn has_any(&self) -> bool {
        !self.0.is_empty()
    }

    /// Makes the kernel drop what it has cached of the devices.
    pub async fn drop_caches(&self) -> Result<(), Failure> {
        if self.0.is_empty() {
            return Ok(());
        }
        let devices = self.0.clone();
        let failed = |device: &str, error| {
            Failure::file(format!("{device}: the volume has its new contents, the cache of its device not"), error)
        };
        off_thread(move || {
            devices.iter().try_for_each(|(device, claimed)| claimed.drop_cache().map_err(|e| failed(device, e)))
        })
        .await
    }
}

/// The mounts and devices of a volume that is getting other contents.
pub struct LiveExchange {
    mounts: Vec<forkdisk_fuse::Exchange<UringDevice>>,
    devices: Claimed,
}

impl LiveExchange {
    /// Claims the devices of a volume, and writes back what is cached of it.
    pub async fn begin(
        (name, id): (&str, VolumeId),
        devices: Vec<String>,
        mounts: &Mounts,
    ) -> Result<LiveExchange, Failure> {
        let devices = Claimed::claim(name, devices).await?;
        let mounts = mounts.exchange(id).await.map_err(|error| match error.kind() {
            io::ErrorKind::ResourceBusy => {
                Failure::new(ErrorKind::Busy, format!("{name} is getting other contents already: try again"))
            }
            _ => Failure::file(format!("writing back what the kernel has cached of {name}"), error),
        })?;
        Ok(LiveExchange { mounts, devices })
    }
}

impl Exchange for LiveExchange {
    fn taken_place(&self) -> LocalFuture<Result<(), Failure>> {
        let devices = self.devices.clone();
        let shown: Vec<_> = self.mounts.iter().map(|mount| mount.taken_place()).collect();
        Box::pin(async move {
            for shown in shown {
                shown.await;
            }
            devices.drop_caches().await
        })
    }
}
