//! `fork`: creates any number of clones of a volume, a snapshot or a folder, all of one instant.

use std::ffi::OsString;
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use forkdisk_control::{Forked, params};
use forkdisk_uring::{Inherited, exec_with};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};

use crate::address::{names, same_pool, within_a_file};
use crate::braces;
use crate::global::Global;
use crate::group;
use crate::output::print_line;
use crate::session::{Access, Caller, call, with_pool};
use crate::verbs::attach::{self, MountAtArg, Wanted};
use crate::verbs::examples::examples;
use crate::verbs::lifetime::{LeaseArg, created_by, make};
use crate::verbs::set::{self, Property};

/// Create any number of clones of a volume, a snapshot, or a folder with everything in it
///
/// All of them or none, all of one instant, at the cost of one. `'kids/{001..100}'` stands for a hundred names. Prints
/// the NBD address of each new volume of a served pool; --json prints its number and files on mounts, too.
#[derive(Args)]
#[command(after_help = examples![
    "forkdisk fork /srv/pool.img/base '/srv/pool.img/kids/{001..100}'",
    "forkdisk fork /srv/pool.img/base '/srv/pool.img/kids/{001..100}' --set diverge=1G,expires=1h",
    "forkdisk fork /srv/pool.img/vm@ready /srv/pool.img/vm2 --set quota=2G --owner 1000:1000 --mode 0600",
    "forkdisk fork /srv/pool.img/base '/srv/pool.img/kids/{1..4}' --attach --mount-at '/mnt/{}'",
    "forkdisk fork /srv/pool.img/base '/srv/pool.img/kids/{1..4}' --connect -- ./run-tests --disks 4",
])]
pub struct ForkArgs {
    #[arg(value_name = "POOL/SOURCE[@SNAPSHOT]")]
    source: String,

    #[arg(required = true, value_name = "POOL/NAME")]
    children: Vec<String>,

    /// Properties of the new volumes: chunk, break, quota, diverge, reserve, gather, expires, label.KEY, writes and
    /// zeroes, separated by commas; can be given several times
    #[arg(long, value_name = "PROPERTY=VALUE", value_parser = parse_new_property, value_delimiter = ',')]
    set: Vec<Property>,

    #[command(flatten)]
    lease: LeaseArg,

    /// User and group of the new files and folders on a mount, by name or number [default: as in the source]
    #[arg(long, value_name = "USER[:GROUP]", value_parser = group::owner)]
    owner: Option<(Option<u32>, Option<u32>)>,

    /// Permission bits of the new files on a mount, in octal [default: as in the source]
    #[arg(long = "mode", value_name = "MODE", value_parser = parse_mode)]
    permissions: Option<u32>,

    /// Attach the new volumes as block devices, all at the same time, and print their paths (needs root)
    #[arg(long, conflicts_with_all = ["lease", "connect"])]
    attach: bool,

    #[command(flatten)]
    mounted: MountAtArg,

    #[arg(long, requires = "program")]
    connect: bool,

    /// A program to which the connections are passed as descriptors 3, 4, …, as by a service manager (LISTEN_FDS,
    /// LISTEN_FDNAMES); it replaces this process
    #[arg(last = true, requires = "connect", value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Properties that are described by the parameters of the method.
pub const PROPERTIES: [(&str, &str); 10] = [
    ("chunk", "chunk"),
    ("break", "break_policy"),
    ("quota=SIZE|none", "quota"),
    ("diverge=SIZE|none", "diverge"),
    ("reserve=SIZE|none", "reserve"),
    ("gather", "gather"),
    ("expires=TIME|DATE|none", "expires"),
    ("label.KEY=VALUE", "labels"),
    ("writes", "writes"),
    ("zeroes", "zeroes"),
];

fn parse_new_property(text: &str) -> Result<Property> {
    match text.split(['=', '.']).next().unwrap_or_default() {
        "chunk" | "break" | "quota" | "diverge" | "reserve" | "gather" | "expires" | "label" | "writes" | "zeroes" => {
            set::parse_property(text)
        }
        name => bail!(
            "there is no property '{name}' that a new volume can have: chunk, break, quota, diverge, reserve, \
             gather, expires, label.KEY, writes and zeroes are"
        ),
    }
}

fn parse_mode(text: &str) -> Result<u32> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o7777 => Ok(mode),
        _ => bail!("'{text}' is not a mode from 0 to 7777, such as 0640"),
    }
}

/// Creates all clones, or none.
pub fn run(args: ForkArgs, global: &Global) -> Result<()> {
    let mut addresses = vec![global.object(&args.source)?];
    for word in &args.children {
        // A pool's path is not expanded.
        let pool_len = within_a_file(word).map_or(0, |(pool, _)| pool.len());
        for name in braces::expand(word, pool_len)? {
            addresses.push(global.volume(&name)?);
        }
    }
    let pool = same_pool(&addresses)?;
    let source = addresses.remove(0).name;
    let (uid, gid) = args.owner.unwrap_or_default();
    let mut method = params::Fork {
        source,
        children: names(addresses),
        uid,
        gid,
        mode: args.permissions,
        lease: args.lease.lease.clone(),
        created_by: created_by(),
        connect: args.connect,
        ..params::Fork::default()
    };
    for property in args.set {
        match property {
            Property::Chunk(chunk) => method.chunk = Some(chunk),
            Property::Break(policy) => method.break_policy = Some(policy),
            Property::Quota(quota) => method.quota = Some(quota),
            Property::Diverge(bytes) => method.diverge = Some(bytes),
            Property::Reserve(bytes) => method.reserve = Some(bytes),
            Property::Gather(policy) => method.gather = Some(policy.to_string()),
            Property::Expires(time) => method.expires = Some(time),
            Property::Label(label) => method.labels.push(label),
            Property::Writes(policy) => method.writes = Some(policy.to_string()),
            Property::Zeroes(policy) => method.zeroes = Some(policy.to_string()),
            _ => bail!("a new volume cannot have this property"),
        }
    }
    ensure!(args.attach || args.mounted.mount_at.is_none(), "--mount-at mounts devices: it needs --attach");
    if args.connect {
        return with_pool(global, &pool, Access::Write, async |caller| connect(caller, method, &args.program).await);
    }
    let show = |made: &Vec<Forked>| match global.output.json() {
        true => global.print_if_json(made),
        false => made.iter().filter_map(|volume| volume.uri.as_deref()).try_for_each(print_line),
    };
    if args.attach {
        let made = call(global, &pool, Access::Write, method)?;
        let names: Vec<String> = made.iter().map(|volume| volume.info.name.clone()).collect();
        let count = names.len();
        let wanted = Wanted { pool, names, mount_at: args.mounted.mount_at, ..Wanted::default() };
        let made = attach::make(wanted, global)
            .with_context(|| format!("the {count} volumes are made, and not attached: `forkdisk attach` does that"))?;
        return attach::print(&made, global);
    }
    with_pool(global, &pool, Access::Write, async |caller| make(caller, method, &args.lease, show).await)
}

/// Creates all clones, and replaces this process by a program that has a connection to each; returns only on failure.
async fn connect(caller: &Caller, method: params::Fork, words: &[OsString]) -> Result<()> {
    let is_leased = method.lease.as_deref() == Some("connection");
    let made = caller.call(method, None).await?;
    let Caller::Served(client) = caller else { bail!("connections are those of a served pool: `forkdisk serve`") };
    let mut client = client.borrow_mut();
    let passed: Vec<Inherited> = made
        .iter()
        .zip(client.take_files())
        .map(|(volume, fd)| Inherited { name: volume.info.name.clone(), fd })
        .collect();
    if passed.len() != made.len() {
        return Err(anyhow!("{} connections came for {} volumes", passed.len(), made.len()));
    }
    if is_leased {
        // The program and what it starts hold the lease.
        let first = i32::try_from(passed.len()).context("too many")? + 3;
        let kept = fcntl_dupfd_cloexec(&*client, first).context("the control connection")?;
        fcntl_setfd(&kept, FdFlags::empty()).context("the control connection")?;
        std::mem::forget(kept);
    }
    let (program, words) = words.split_first().context("no program")?;
    let error = exec_with(Command::new(program).args(words), passed);
    Err(error).with_context(|| program.display().to_string())
}
