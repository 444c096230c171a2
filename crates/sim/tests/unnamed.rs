//! Volumes that get their name when they are finished: any interruption before that leaves nothing of them.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::rc::Rc;

use forkdisk::device::Buf;
use forkdisk::testing::MemoryDevice;
use forkdisk::{Attributes, Child, CreateOptions, ErrorKind, FileKind, FormatOptions, OpenOptions, Pool};
use forkdisk_sim::executor::Executor;

const MIB: u64 = 1 << 20;
/// Step limit of operations that must end.
const PATIENCE_STEPS: u64 = 3_000_000;

async fn open(device: &MemoryDevice, exec: &Executor) -> Pool<MemoryDevice> {
    Pool::open(device.clone(), Rc::new(exec.clone()), OpenOptions::default()).await.unwrap()
}

async fn pool(device: &MemoryDevice, exec: &Executor) -> Pool<MemoryDevice> {
    let options = FormatOptions::new(64 * MIB, [7; 16], 1);
    Pool::format(device, &options).await.unwrap();
    open(device, exec).await
}

fn run<F: Future<Output = ()> + 'static>(work: impl FnOnce(MemoryDevice, Executor) -> F) {
    let exec = Executor::new(1);
    exec.run(PATIENCE_STEPS, work(MemoryDevice::new(64 * MIB), exec.clone())).unwrap();
}

#[test]
fn a_volume_without_a_name_is_not_seen_and_goes_with_its_last_handle() {
    run(|device, runtime| async move {
        let pool = pool(&device, &runtime).await;
        let free = pool.info().unused;
        let volume = pool.create_unnamed(&CreateOptions::new(8 * MIB, 1)).unwrap();
        volume.write(0, Buf::copy_of(&[1; 1 << 20]), false).await.0.unwrap();
        volume.flush().await.unwrap();
        assert_eq!((pool.list().len(), pool.info().volumes), (0, 0));
        assert!(pool.info().unused < free);
        drop(volume);
        pool.wait_freed().await.unwrap();
        assert!(pool.info().unused >= free - MIB / 16, "{} of {free}", pool.info().unused);
        let report = pool.check().await.unwrap();
        assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
    });
}

#[test]
fn a_crash_before_the_name_deletes_the_volume_and_a_name_makes_it_last() {
    for is_named in [false, true] {
        run(move |device, runtime| async move {
            let pool = pool(&device, &runtime).await;
            // The root's record has the empty name: an orphan's record must not be mistaken for it.
            let attributes = Attributes { mode: 0o750, uid: 1, gid: 2, accessed: 3, modified: 4, changed: 5 };
            pool.set_folder_attributes("", attributes, 1).unwrap();
            let volume = pool.create_unnamed(&CreateOptions::new(8 * MIB, 1)).unwrap();
            volume.write(0, Buf::copy_of(b"contents"), false).await.0.unwrap();
            volume.set_size(5 * MIB + 1).await.unwrap();
            match is_named {
                true => pool.name_volume(&volume, "whole").await.unwrap(),
                false => volume.flush().await.unwrap(),
            }
            // A crash: nothing is closed.
            let again = open(&device, &runtime).await;
            let Ok(Child::Folder(Some(found), _)) = again.child("") else { panic!("the root has lost its record") };
            assert_eq!(found, attributes);
            let names: Vec<String> = again.list().into_iter().map(|info| info.name).collect();
            if !is_named {
                assert!(names.is_empty(), "{names:?}");
                again.wait_freed().await.unwrap();
            } else {
                assert_eq!(names, ["whole"]);
                let volume = again.volume("whole").unwrap();
                assert_eq!(volume.size(), 5 * MIB + 1);
                let (read, buf) = volume.read(0, Buf::zeroed(8)).await;
                read.unwrap();
                assert_eq!(&buf[..], b"contents");
            }
            let report = again.check().await.unwrap();
            assert!(report.damage.is_empty() && report.leaked == 0, "{report:?}");
        });
    }
}

#[test]
fn only_a_volume_without_a_name_is_named_and_only_with_a_free_one() {
    run(|device, runtime| async move {
        let pool = pool(&device, &runtime).await;
        pool.create("a/b", &CreateOptions::new(MIB, 1)).await.unwrap();
        let volume = pool.create_unnamed(&CreateOptions::new(MIB, 1)).unwrap();
        for (name, kind) in [("a/b", ErrorKind::Exists), ("a", ErrorKind::Exists), ("../x", ErrorKind::Invalid)] {
            assert_eq!(pool.name_volume(&volume, name).await.unwrap_err().kind(), kind, "{name}");
        }
        pool.name_volume(&volume, "a/c").await.unwrap();
        assert_eq!(pool.name_volume(&volume, "a/d").await.unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(pool.children("a"), [("b".to_string(), FileKind::File), ("c".to_string(), FileKind::File)]);
    });
}
