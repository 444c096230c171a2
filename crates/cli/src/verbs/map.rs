//! `map`: where a volume has data, and where in the pool that lies.

use anyhow::Result;
use clap::Args;
use forkdisk::Extent;
use serde::Serialize;

use crate::cli::Global;
use crate::output::{Column, TableArgs, print_json};
use crate::progress::Progress;
use crate::session::{Access, Session, with_pool};

/// Bytes of a volume that are looked up at a time.
const STEP: u64 = 1 << 40;

/// Show where a volume or snapshot has data
///
/// In JSON as `qemu-img map` writes it; depth is 0 for what it holds alone, 1 for what it shares.
#[derive(Args)]
pub struct MapArgs {
    /// The volume or snapshot
    #[arg(value_name = "POOL/VOLUME[@SNAPSHOT]")]
    address: String,

    #[command(flatten)]
    table: TableArgs,
}

#[derive(Serialize)]
struct Record {
    start: u64,
    length: u64,
    depth: u32,
    present: bool,
    zero: bool,
    data: bool,
}

impl From<&Extent> for Record {
    fn from(extent: &Extent) -> Record {
        Record {
            start: extent.offset,
            length: extent.len,
            depth: u32::from(extent.data && extent.shared),
            present: extent.data,
            zero: !extent.data,
            data: extent.data,
        }
    }
}

/// Shows every run, holes too.
pub fn run(args: MapArgs, global: &Global) -> Result<()> {
    let address = global.object(&args.address)?;
    let json = global.output.json();
    let pool = address.pool.clone();
    let extents = with_pool(&pool, Access::Read, |session| look_up(session, address.name, json))?;
    if json {
        return print_json(&extents.iter().map(Record::from).collect::<Vec<_>>());
    }
    let header = [
        Column::Right("START"),
        Column::Right("LENGTH"),
        Column::Left("KIND"),
        Column::Left("SHARED"),
        Column::Right("PHYSICAL"),
    ];
    let rows: Vec<Vec<String>> = extents.iter().map(|extent| row(extent, &args.table)).collect();
    args.table.print(&header, &rows)
}

fn row(extent: &Extent, table: &TableArgs) -> Vec<String> {
    let (kind, shared, physical) = match (extent.data, extent.shared) {
        (true, true) => ("data", "yes", extent.physical.to_string()),
        (true, false) => ("data", "no", extent.physical.to_string()),
        (false, _) => ("hole", "-", "-".to_string()),
    };
    vec![extent.offset.to_string(), table.size(extent.len), kind.to_string(), shared.to_string(), physical]
}

async fn look_up(session: Session, name: String, anywhere: bool) -> Result<Vec<Extent>> {
    let volume = session.pool.volume(&name)?;
    let _progress = Progress::spinner("looking up");
    let mut extents: Vec<Extent> = Vec::new();
    let mut from = 0;
    while from < volume.size() {
        let len = STEP.min(volume.size() - from);
        for extent in volume.extents(from, len).await? {
            match extents.last_mut() {
                Some(last) if continues(last, &extent, anywhere) => last.len += extent.len,
                _ => extents.push(extent),
            }
        }
        from += len;
    }
    Ok(extents)
}

/// Whether `next` is alike what lies before it; `anywhere` leaves out where in the pool they are.
fn continues(last: &Extent, next: &Extent, anywhere: bool) -> bool {
    if last.data != next.data || last.offset + last.len != next.offset {
        return false;
    }
    !next.data || last.shared == next.shared && (anywhere || last.physical + last.len == next.physical)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alike_neighbours_are_one_run() {
        let at = |offset, data, physical| Extent { offset, len: 10, data, physical, shared: false };
        assert!(continues(&at(0, true, 100), &at(10, true, 110), false));
        assert!(!continues(&at(0, true, 100), &at(10, true, 200), false));
        assert!(continues(&at(0, true, 100), &at(10, true, 200), true));
        assert!(continues(&at(0, false, 0), &at(10, false, 0), false));
        assert!(!continues(&at(0, false, 0), &at(10, true, 0), true));
        assert!(!continues(&at(0, true, 100), &at(20, true, 110), true));
    }
}
