//! A guest that does anything with its rings, and a front end that sends anything: an input is a script. After each,
//! the server still serves another disk, with that disk's own contents.

#[path = "../../crates/frontend/vhost-user/tests/support/mod.rs"]
mod support;

use std::cell::RefCell;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use forkdisk_vhost_user::ServerOptions;
use forkdisk_vhost_user::testing::Guest;

use support::{Fixture, disk};

const SIZE: u16 = 16;
const DISK_BYTES: usize = 64 << 10;
/// Addresses that a script can name: in the rings, in the data, at edges, outside.
const ADDRESSES: [u64; 8] = [0, 0x1_0000, 0x2_0000, 0x4_0000, 1 << 20, (1 << 20) + 0x5000, 1 << 40, u64::MAX - 0x100];

/// The server, and a guest whose disk no script reaches.
pub struct Rings {
    server: Fixture,
    other: RefCell<Guest>,
}

/// The rest of an input; zeroes follow its end.
struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.byte()).collect()
    }
}

impl Default for Rings {
    fn default() -> Rings {
        let make = || vec![disk("d", DISK_BYTES), disk("e", DISK_BYTES)];
        let server = Fixture::new(ServerOptions::default(), make);
        let other = Guest::connect(&server.socket("e"), 1, SIZE, 4096).unwrap();
        Rings { server, other: RefCell::new(other) }
    }
}

impl Rings {
    /// A guest does what `input` says with two queues.
    pub fn run(&self, input: &[u8]) {
        let mut guest = Guest::connect(&self.server.socket("d"), 2, SIZE, 4096).unwrap();
        let mut script = Script(input);
        while !script.0.is_empty() {
            // An error of the driver's own side: an address outside of its memory.
            let _ = step(&mut guest, &mut script);
        }
        for queue in &guest.queues {
            let _ = queue.notify();
        }
        drop(guest);
        self.check();
    }

    /// A front end sends the messages of `input`, without files.
    pub fn run_messages(&self, input: &[u8]) {
        let mut stream = UnixStream::connect(self.server.socket("d")).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let mut script = Script(input);
        while !script.0.is_empty() {
            let (code, flags, len) = (u32::from(script.byte()), u32::from(script.byte()), script.byte());
            let body = script.bytes(usize::from(len));
            let said = [&code.to_ne_bytes()[..], &flags.to_ne_bytes(), &u32::from(len).to_ne_bytes(), &body].concat();
            if stream.write_all(&said).is_err() {
                break;
            }
            // There may be no reply.
            let _ = stream.read(&mut [0; 4096]);
        }
        drop(stream);
        self.check();
    }

    fn check(&self) {
        let (status, found) = self.other.borrow_mut().request(0, 0, &[], 4096).unwrap();
        let expected: Vec<u8> = (0..4096).map(|n| (n / 512) as u8).collect();
        assert!(status == 0 && found == expected, "another disk is served with its own contents");
    }
}

fn step(guest: &mut Guest, script: &mut Script<'_>) -> Result<(), forkdisk_vhost_user::testing::Error> {
    let choice = script.byte();
    let queue = &mut guest.queues[usize::from(choice >> 7)];
    match choice & 7 {
        0 => {
            let address = ADDRESSES[usize::from(script.byte() & 7)].wrapping_add(u64::from(script.word()));
            let len = usize::from(script.byte() & 31);
            let bytes = script.bytes(len);
            queue.poke(address, &bytes)
        }
        1 => {
            let index = script.word() % SIZE;
            let address = ADDRESSES[usize::from(script.byte() & 7)].wrapping_add(u64::from(script.word()));
            let (shift, len) = (script.byte() & 31, u32::from(script.word()));
            let (flags, next) = (script.byte(), script.byte());
            queue.describe(index, address, len.wrapping_shl(shift.into()), flags.into(), next.into())
        }
        2 => queue.offer(script.byte().into()),
        3 => queue.lie_about_available(script.word()),
        4 => queue.notify(),
        5 => {
            let (slot, kind, sector) = (u16::from(script.byte()) % queue.slots(), script.byte(), script.byte());
            let len = u32::from(script.byte() & 15) * 512;
            queue.submit(slot, kind.into(), sector.into(), len, kind & 1 == 0)
        }
        6 => queue.next_answer().map(drop),
        _ => {
            queue.notify()?;
            std::thread::yield_now();
            Ok(())
        }
    }
}
