//! `map`: shows where a volume has data, and where that lies in the pool.

use anyhow::Result;
use clap::Args;
use forkdisk_control::{Piece, params};
use serde::Serialize;

use crate::global::Global;
use crate::output::{Column, TableArgs, print_json};
use crate::session::{Access, with_pool};
use crate::verbs::examples::examples;

/// Show where a volume or snapshot has data
///
/// In JSON as `qemu-img map` writes it; depth is 0 for exclusive data, 1 for shared data.
#[derive(Args)]
#[command(after_help = examples!["forkdisk map /srv/pool.img/vm1"])]
pub struct MapArgs {
    #[arg(value_name = "POOL/VOLUME[@SNAPSHOT]")]
    object: String,

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

impl From<&Piece> for Record {
    fn from(piece: &Piece) -> Record {
        Record {
            start: piece.offset,
            length: piece.length,
            depth: u32::from(piece.data && piece.shared),
            present: piece.data,
            zero: !piece.data,
            data: piece.data,
        }
    }
}

/// Shows every run, holes too.
pub fn run(args: MapArgs, global: &Global) -> Result<()> {
    let address = global.object(&args.object)?;
    let json = global.output.json();
    let pieces = with_pool(global, &address.pool, Access::Read, async |caller| {
        let (mut pieces, mut from) = (Vec::new(), Some(0));
        while let Some(at) = from {
            let part = caller.call(params::Map { object: address.name.clone(), from: at }, None).await?;
            part.pieces.into_iter().for_each(|piece| add(&mut pieces, piece, json));
            from = part.next;
        }
        Ok(pieces)
    })?;
    if json {
        return print_json(&pieces.iter().map(Record::from).collect::<Vec<_>>());
    }
    let header = [
        Column::Right("START"),
        Column::Right("LENGTH"),
        Column::Left("KIND"),
        Column::Left("SHARED"),
        Column::Right("PHYSICAL"),
    ];
    let rows: Vec<Vec<String>> = pieces.iter().map(|piece| row(piece, &args.table)).collect();
    args.table.print(&header, &rows)
}

fn row(piece: &Piece, table: &TableArgs) -> Vec<String> {
    let (kind, shared, physical) = match (piece.data, piece.shared) {
        (true, true) => ("data", "yes", piece.physical.to_string()),
        (true, false) => ("data", "no", piece.physical.to_string()),
        (false, _) => ("hole", "-", "-".to_string()),
    };
    vec![piece.offset.to_string(), table.size(piece.length), kind.to_string(), shared.to_string(), physical]
}

/// Appends `next`; extends the run before if both are alike.
fn add(pieces: &mut Vec<Piece>, next: Piece, anywhere: bool) {
    match pieces.last_mut() {
        Some(last) if continues(last, &next, anywhere) => last.length += next.length,
        _ => pieces.push(next),
    }
}

/// Returns whether `next` continues `last` with the same properties; `anywhere` ignores the place in the pool.
fn continues(last: &Piece, next: &Piece, anywhere: bool) -> bool {
    if last.data != next.data || last.offset + last.length != next.offset {
        return false;
    }
    !next.data || last.shared == next.shared && (anywhere || last.physical + last.length == next.physical)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alike_neighbours_are_one_run() {
        let at = |offset, data, physical| Piece { offset, length: 10, data, physical, shared: false };
        assert!(continues(&at(0, true, 100), &at(10, true, 110), false));
        assert!(!continues(&at(0, true, 100), &at(10, true, 200), false));
        assert!(continues(&at(0, true, 100), &at(10, true, 200), true));
        assert!(continues(&at(0, false, 0), &at(10, false, 0), false));
        assert!(!continues(&at(0, false, 0), &at(10, true, 0), true));
        assert!(!continues(&at(0, true, 100), &at(20, true, 110), true));
    }
}
