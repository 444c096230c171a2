//! `delete`: deletes volumes and snapshots, all that are named or none.

use anyhow::Result;
use clap::Args;
use forkdisk_control::{Deletion, params};

use crate::address::{names, same_pool};
use crate::global::Global;
use crate::output::{print_json, print_line};
use crate::session::{Access, call};
use crate::size::human;
use crate::verbs::examples::examples;
use crate::verbs::lifetime::SelectArgs;

/// Delete volumes and snapshots, all of them or none
///
/// The daemon of a served pool answers when the names are durably gone, and frees their space in the background.
#[derive(Args)]
#[command(after_help = examples![
    "forkdisk delete -n -r /srv/pool.img/vm1",
    "forkdisk delete /srv/pool.img/vm1@monday",
    "forkdisk delete -n -r /srv/pool.img --label job=42 --older-than 1d",
])]
pub struct DeleteArgs {
    #[arg(required = true, value_name = "POOL/VOLUME[@SNAPSHOT]")]
    objects: Vec<String>,

    #[arg(short, long)]
    recursive: bool,

    #[arg(short = 'n', long)]
    dry_run: bool,

    #[arg(short = 'v', long = "verbose")]
    count: bool,

    #[arg(long)]
    until_freed: bool,

    #[command(flatten)]
    select: SelectArgs,
}

/// Deletes.
pub fn run(args: DeleteArgs, global: &Global) -> Result<()> {
    let addresses = match args.select.is_given() {
        true => global.addresses(&args.objects)?,
        false => args.objects.iter().map(|text| global.object(text)).collect::<Result<Vec<_>>>()?,
    };
    let pool = same_pool(&addresses)?;
    let DeleteArgs { recursive, dry_run, until_freed, .. } = args;
    let access = if dry_run { Access::Read } else { Access::Write };
    let count = dry_run || args.count || global.output.json();
    let SelectArgs { label, pattern, older_than, expires_before } = args.select;
    let method = params::Delete {
        objects: names(addresses),
        recursive,
        dry_run,
        count,
        until_freed,
        label,
        pattern,
        older_than,
        expires_before,
    };
    let deletion = call(global, &pool, access, method)?;
    if let Some(why) = &deletion.waits {
        tracing::warn!("{why}");
    }
    if global.output.json() { print_json(&deletion) } else { print_text(&deletion) }
}

fn print_text(deletion: &Deletion) -> Result<()> {
    let Some(frees) = deletion.frees else { return Ok(()) };
    let (deletes, and_frees) = if deletion.dry_run { ("would delete", "would free") } else { ("deleted", "freed") };
    for name in &deletion.deleted {
        print_line(&format!("{deletes} {name}"))?;
    }
    print_line(&format!("{and_frees} {} ({frees} bytes)", human(frees)))
}
