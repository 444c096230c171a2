//! Sectors as registers: many connections read, write, zero, trim and flush overlapping ranges of a
//! volume on a served pool, and all reads of each sector must be explained by one order of events.

mod checker;

use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use checker::{Action, Operation, first_violation};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::harness::{Lab, Server};
use crate::nbd::{Client, FLUSH, READ, TRIM, WRITE, WRITE_ZEROES};

const SECTOR: usize = 512;
/// Sectors that all connections use: 24 pages, not aligned to a page.
const SECTORS: usize = 192;
const FIRST: u64 = 3 * 512;
const CONNECTIONS: usize = 16;
/// Most requests in flight on a connection, and most sectors of one.
const DEPTH: usize = 4;
const LONGEST: usize = 20;
/// Operations after which all connections pause and their history is checked.
const ROUND: usize = 50_000;
const OPERATIONS: usize = 100_000;
const OPERATIONS_VARIABLE: &str = "FORKDISK_TEST_LINEARIZABLE_OPERATIONS";

/// State shared by all connections.
struct Shared {
    clock: AtomicU64,
    values: AtomicU64,
    /// Requests left in this round.
    left: AtomicUsize,
}

/// Operations on each sector.
type Histories = Vec<Vec<Operation>>;

/// A request in flight.
struct Request {
    cookie: u64,
    kind: u16,
    invoked: u64,
    first: usize,
    /// Values written to each sector; for a read, as many zeroes.
    values: Vec<u64>,
}

/// Returns a sector that repeats a value, so that a mix of two values is detected.
fn sector(value: u64) -> Vec<u8> {
    value.to_be_bytes().repeat(SECTOR / 8)
}

fn value(sector: &[u8]) -> u64 {
    let mut words = sector.chunks_exact(8).map(|word| u64::from_be_bytes(word.try_into().unwrap()));
    let first = words.next().unwrap();
    assert!(words.all(|word| word == first), "a sector with parts of several writes: {sector:02x?}");
    first
}

impl Shared {
    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    /// Sends a random request.
    fn start(&self, client: &mut Client, rng: &mut SmallRng) -> Request {
        let kind = match rng.random_range(0..100) {
            0..40 => READ,
            40..75 => WRITE,
            75..86 => WRITE_ZEROES,
            86..97 => TRIM,
            _ => FLUSH,
        };
        let first = rng.random_range(0..SECTORS);
        let count = rng.random_range(1..=LONGEST).min(SECTORS - first);
        let count = if kind == FLUSH { 0 } else { count };
        let value = |_| if kind == WRITE { self.values.fetch_add(1, Ordering::Relaxed) } else { 0 };
        let values: Vec<u64> = (0..count).map(value).collect();
        let data: Vec<u8> = if kind == WRITE { values.iter().flat_map(|&v| sector(v)).collect() } else { vec![] };
        // Occasionally FUA or, with zeroes, NO_HOLE.
        let flags = match kind {
            WRITE | TRIM => u16::from(rng.random_ratio(1, 50)),
            WRITE_ZEROES => 2 * u16::from(rng.random_ratio(1, 3)),
            _ => 0,
        };
        let offset = if kind == FLUSH { 0 } else { FIRST + (first * SECTOR) as u64 };
        let invoked = self.now();
        let cookie = client.start(kind, flags, offset, (count * SECTOR) as u32, &data).unwrap();
        Request { cookie, kind, invoked, first, values }
    }

    /// Receives one reply and records its result.
    fn finish(&self, client: &mut Client, flight: &mut Vec<Request>, histories: &mut Histories) {
        let len = |cookie| {
            let of = flight.iter().find(|request| request.cookie == cookie).expect("a reply to what was asked");
            if of.kind == READ { of.values.len() * SECTOR } else { 0 }
        };
        let (cookie, data) = client.finish(len).unwrap();
        let returned = self.now();
        let place = flight.iter().position(|request| request.cookie == cookie).unwrap();
        let Request { kind, invoked, first, values, .. } = flight.swap_remove(place);
        for (i, &written) in values.iter().enumerate() {
            let action = match kind {
                READ => Action::Read(value(&data[i * SECTOR..][..SECTOR])),
                _ => Action::Write(written),
            };
            histories[first + i].push(Operation { invoked, returned, action });
        }
    }

    /// Runs one connection's part of a round.
    fn work(&self, socket: &Path, seed: u64) -> Histories {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut client = Client::connect(socket, "a").unwrap();
        let mut histories = vec![Vec::new(); SECTORS];
        let mut flight = Vec::new();
        loop {
            let wanted = rng.random_range(1..=DEPTH);
            let may = |left: usize| left.checked_sub(1);
            let mut is_over = false;
            while flight.len() < wanted && !is_over {
                is_over = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, may).is_err();
                if !is_over {
                    flight.push(self.start(&mut client, &mut rng));
                }
            }
            if flight.is_empty() {
                return histories;
            }
            self.finish(&mut client, &mut flight, &mut histories);
        }
    }
}

#[test]
fn sectors_are_linearizable_over_many_connections() {
    let operations = std::env::var(OPERATIONS_VARIABLE).map_or(OPERATIONS, |text| text.parse().expect("a number"));
    let lab = Lab::with_pool("64M");
    lab.ok(&["create", "pool.img/a", "--size", "1M"]);
    let server = Server::start(&lab);
    let (clock, values, left) = (AtomicU64::new(0), AtomicU64::new(1), AtomicUsize::new(0));
    let shared = Shared { clock, values, left };
    let mut before = vec![0; SECTORS];
    for round in 0..operations.div_ceil(ROUND) as u64 {
        shared.left.store(ROUND.min(operations - round as usize * ROUND), Ordering::Relaxed);
        let histories = std::thread::scope(|scope| {
            let (shared, socket) = (&shared, server.socket());
            let seed = |i: usize| round * CONNECTIONS as u64 + i as u64;
            let all: Vec<_> = (0..CONNECTIONS).map(|i| scope.spawn(move || shared.work(socket, seed(i)))).collect();
            // Meanwhile the sectors become shared, and exclusive again.
            let snapshot = format!("pool.img/a@{round}");
            lab.ok(&["snapshot", &snapshot]);
            lab.ok(&["delete", &snapshot]);
            let parts: Vec<Histories> = all.into_iter().map(|thread| thread.join().unwrap()).collect();
            (0..SECTORS)
                .map(|i| parts.iter().flat_map(|part| part[i].iter().copied()).collect::<Vec<_>>())
                .collect::<Histories>()
        });
        let counted: usize = histories.iter().map(Vec::len).sum();
        assert!(counted > 0);
        let last = Client::connect(server.socket(), "a").unwrap().read(FIRST, SECTORS * SECTOR).unwrap();
        for (i, mut history) in histories.into_iter().enumerate() {
            let found = value(&last[i * SECTOR..][..SECTOR]);
            history.push(Operation { invoked: shared.now(), returned: shared.now(), action: Action::Read(found) });
            let violation = first_violation(before[i], &history);
            assert_eq!(violation, None, "round {round}, sector {i}, beginning with {}:\n{history:?}", before[i]);
            before[i] = found;
        }
    }
    server.stop();
    lab.assert_clean();
}
