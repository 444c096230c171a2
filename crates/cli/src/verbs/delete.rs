//! `delete`: removes volumes and snapshots, all that are named or none.

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;

use crate::address::{Address, same_pool};
use crate::cli::Global;
use crate::output::{print_json, print_line};
use crate::progress::Progress;
use crate::session::{Access, Session, settle, with_pool};
use crate::size::human;
use crate::verbs::list::select;

/// Delete volumes and snapshots, all of them or none
#[derive(Args)]
pub struct DeleteArgs {
    /// What to delete
    #[arg(required = true, value_name = "POOL/VOLUME[@SNAPSHOT]")]
    addresses: Vec<String>,

    /// With all snapshots of a volume, and all volumes of a folder
    #[arg(short, long)]
    recursive: bool,

    /// Delete nothing, list everything that would be deleted and the space it would free
    #[arg(short = 'n', long)]
    dry_run: bool,

    /// List everything that is deleted and the space it frees
    #[arg(short, long)]
    verbose: bool,
}

#[derive(Serialize)]
struct Report {
    dry_run: bool,
    deleted: Vec<String>,
    /// Bytes; `null` when nobody asked for them to be counted.
    frees: Option<u64>,
}

/// Deletes, and waits until the space is free.
pub fn run(args: DeleteArgs, global: &Global) -> Result<()> {
    let addresses: Vec<Address> = args.addresses.iter().map(|text| global.object(text)).collect::<Result<_>>()?;
    let pool = same_pool(&addresses)?;
    let access = if args.dry_run { Access::Read } else { Access::Write };
    let is_counted = args.dry_run || args.verbose || global.output.json();
    let (dry_run, recursive) = (args.dry_run, args.recursive);
    let report = with_pool(&pool, access, |session| async move {
        let names = victims(&session, &addresses, recursive)?;
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let frees = if is_counted { Some(count(&session, &names).await?) } else { None };
        if !dry_run {
            session.pool.delete(&names).await?;
            settle(&session).await?;
        }
        Ok(Report { dry_run, deleted: names.iter().map(|name| name.to_string()).collect(), frees })
    })?;
    if global.output.json() { print_json(&report) } else { print_text(&report) }
}

async fn count(session: &Session, names: &[&str]) -> Result<u64> {
    let _progress = Progress::spinner("counting");
    Ok(session.pool.freed_by(names).await?)
}

fn print_text(report: &Report) -> Result<()> {
    let Some(frees) = report.frees else { return Ok(()) };
    let (deletes, and_frees) = if report.dry_run { ("would delete", "would free") } else { ("deleted", "freed") };
    for name in &report.deleted {
        print_line(&format!("{deletes} {name}"))?;
    }
    print_line(&format!("{and_frees} {} ({frees} bytes)", human(frees)))
}

/// The name of every object that goes, in the order of the list.
fn victims(session: &Session, addresses: &[Address], recursive: bool) -> Result<Vec<String>> {
    let all: Vec<String> = select(session, addresses)?.into_iter().map(|info| info.name).collect();
    if recursive {
        return Ok(all);
    }
    for address in addresses {
        if !all.contains(&address.name) {
            bail!("{} is a folder: -r deletes everything in it", address.show());
        }
    }
    let is_named = |name: &String| addresses.iter().any(|address| address.name == *name);
    let snapshots_of = |name: &String| {
        let volume = name.split_once('@')?.0;
        addresses.iter().any(|address| address.name == volume).then(|| name.clone())
    };
    let left: Vec<String> = all.iter().filter(|name| !is_named(name)).filter_map(snapshots_of).collect();
    if !left.is_empty() {
        let (shown, more) = shorten(&left);
        bail!("there are snapshots left: {shown}{more}; -r deletes them too (-n shows what it would delete)");
    }
    Ok(all.into_iter().filter(is_named).collect())
}

fn shorten(names: &[String]) -> (String, String) {
    const SHOWN: usize = 5;
    let shown = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    let rest = names.len().saturating_sub(SHOWN);
    (shown, if rest > 0 { format!(" and {rest} more") } else { String::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_of_snapshots_is_cut() {
        let names: Vec<String> = (0..7).map(|i| format!("a@{i}")).collect();
        assert_eq!(shorten(&names), ("a@0, a@1, a@2, a@3, a@4".into(), " and 2 more".into()));
        assert_eq!(shorten(&names[..1]), ("a@0".into(), String::new()));
    }
}
