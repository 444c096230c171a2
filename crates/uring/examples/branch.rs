//! Every verb of the library on a pool file: format, create, write, snapshot, clone, range clone,
//! diff, discard, read back.
//!
//! Run it with the path of a file that does not exist yet:
//!
//!     cargo run -p forkdisk-uring --example branch -- /tmp/pool.img

use std::error::Error;
use std::path::Path;
use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};

use forkdisk::{Buf, CreateOptions, FormatOptions, OpenOptions, Pool, Volume};
use forkdisk_uring::{Config, DeviceOptions, UringDevice, block_on};

const POOL: u64 = 64 << 20;
const VOLUME: u64 = 1 << 40;
const PAGE: u64 = 4096;

/// Creates a pool in the file `path` and demonstrates each verb, one line per step.
pub fn run(path: &Path, mut say: impl FnMut(String) + 'static) -> Result<(), Box<dyn Error>> {
    let path = path.to_owned();
    block_on(Config::default(), |rt| async move {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
        let device = UringDevice::create(&rt, &path, POOL, false, &DeviceOptions::default())?;
        // A real program takes a new identity from the system's random numbers.
        let uuid = *b"forkdisk example";
        Pool::format(&device, &FormatOptions::new(POOL, uuid, now)).await?;
        let pool = Pool::open(device, Rc::new(rt.clone()), OpenOptions::default()).await?;
        say(format!("a pool of {} MiB", POOL >> 20));

        pool.create("base", &CreateOptions::new(VOLUME, now)).await?;
        let base = pool.volume("base")?;
        write(&base, 0, b"first").await?;
        write(&base, 1 << 30, b"far away").await?;
        base.flush().await?;
        say(format!("base: {} GiB long, {} KiB of it are there", VOLUME >> 30, pool.find("base")?.referenced >> 10));

        pool.snapshot(&[("base", "before")], now).await?;
        write(&base, 0, b"second").await?;
        let before = pool.volume("base@before")?;
        say(format!("base says {:?}, base@before says {:?}", read(&base, 0).await?, read(&before, 0).await?));

        pool.clone_volume("base@before", "branch", now).await?;
        let branch = pool.volume("branch")?;
        write(&branch, 0, b"third").await?;
        say(format!("branch says {:?}, base still {:?}", read(&branch, 0).await?, read(&base, 0).await?));

        branch.clone_range(&base, 0, 16 * PAGE, PAGE).await?;
        say(format!("after a range clone branch says {:?} there", read(&branch, 16 * PAGE).await?));

        for run in pool.diff("base@before", "branch").await? {
            if run.class != forkdisk::DiffClass::Same {
                say(format!("diff: {} bytes at {}: {:?}", run.len, run.offset, run.class));
            }
        }

        branch.discard(0, PAGE).await?;
        say(format!("after a discard branch says {:?}", read(&branch, 0).await?));

        drop((base, before, branch));
        pool.delete(&["base", "base@before", "branch"]).await?;
        pool.wait_freed().await?;
        let info = pool.info();
        say(format!("all deleted: {} KiB are used by volumes", (info.used - info.metadata) >> 10));
        Ok(pool.close().await?)
    })?
}

async fn write(volume: &Volume<UringDevice>, offset: u64, text: &[u8]) -> forkdisk::Result<()> {
    volume.write(offset, Buf::copy_of(text), false).await.0
}

/// Returns the text at `offset`, up to the first zero.
async fn read(volume: &Volume<UringDevice>, offset: u64) -> forkdisk::Result<String> {
    let (result, buf) = volume.read(offset, Buf::zeroed(PAGE as usize)).await;
    result?;
    let text = buf.split(|&b| b == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(text).into_owned())
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("which file shall become a pool? It must not exist yet")?;
    run(Path::new(&path), |line| println!("{line}"))
}
