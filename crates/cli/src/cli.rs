//! The command line: the table of verbs.

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{ArgMatches, Command, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::command;
use crate::config::{Given, Settings, key};
use crate::global::Global;
use crate::logging::Logging;
use crate::verbs;

/// fork() for disks: snapshots, clones and thin provisioning in user space.
#[derive(Parser)]
#[command(
    name = "forkdisk",
    version,
    after_help = "An ADDRESS is POOL, POOL/volume or POOL/volume@snapshot. POOL is the shortest leading part \
                  of the path that exists and is not a directory. With --pool or FORKDISK_POOL an address is \
                  only volume@snapshot, unless it begins with the \
                  path of a pool.\nSizes take the units K M G T P, 1024 each."
)]
pub struct Cli {
    #[command(flatten)]
    global: Global,

    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Init(verbs::init::InitArgs),
    Create(verbs::create::CreateArgs),
    Import(verbs::import::ImportArgs),
    Export(verbs::export::ExportArgs),
    #[command(visible_alias = "snap")]
    Snapshot(verbs::snapshot::SnapshotArgs),
    Clone(verbs::clone::CloneArgs),
    Fork(verbs::fork::ForkArgs),
    Rollback(verbs::rollback::RollbackArgs),
    #[command(visible_alias = "ls")]
    List(verbs::list::ListArgs),
    Du(verbs::du::DuArgs),
    Diff(verbs::diff::DiffArgs),
    Map(verbs::map::MapArgs),
    #[command(alias = "mv")]
    Rename(verbs::rename::RenameArgs),
    Swap(verbs::swap::SwapArgs),
    Resize(verbs::resize::ResizeArgs),
    Set(verbs::set::SetArgs),
    Defrag(verbs::defrag::DefragArgs),
    Flatten(verbs::flatten::FlattenArgs),
    Copier(verbs::copier::CopierArgs),
    #[command(visible_alias = "rm", alias = "remove", alias = "destroy")]
    Delete(verbs::delete::DeleteArgs),
    Protect(verbs::protect::ProtectArgs),
    Unprotect(verbs::protect::UnprotectArgs),
    Grow(verbs::grow::GrowArgs),
    #[command(alias = "fsck")]
    Check(verbs::check::CheckArgs),
    Repair(verbs::repair::RepairArgs),
    #[command(alias = "info", alias = "df")]
    Stats(verbs::stats::StatsArgs),
    Top(verbs::top::TopArgs),
    Serve(verbs::serve::ServeArgs),
    Mount(verbs::mount::MountArgs),
    #[command(alias = "unmount")]
    Umount(verbs::umount::UmountArgs),
    Attach(verbs::attach::AttachArgs),
    Detach(verbs::detach::DetachArgs),
    VhostUser(verbs::vhost_user::VhostUserArgs),
    Switch(verbs::switch::SwitchArgs),
    Upgrade(verbs::upgrade::UpgradeArgs),
    Run(verbs::run::RunArgs),
    Stop(verbs::stop::StopArgs),
    Config(verbs::config::ConfigArgs),
    Bench(verbs::bench::BenchArgs),
    #[command(hide = true)]
    Completions(verbs::completions::CompletionsArgs),
    #[command(hide = true)]
    Man(verbs::man::ManArgs),
    #[command(hide = true)]
    DeviceLinks(verbs::device_links::DeviceLinksArgs),
    #[command(hide = true)]
    HoldFrozen(verbs::hold_frozen::HoldFrozenArgs),
    #[command(hide = true)]
    Keeper(verbs::keeper::KeeperArgs),
    #[command(hide = true)]
    OnMount(verbs::on_mount::OnMountArgs),
    #[command(hide = true)]
    OnRun(verbs::run::OnRunArgs),
    #[command(hide = true)]
    WithParent(verbs::with_parent::WithParentArgs),
}

impl Cli {
    /// Returns the complete definition of the command line.
    pub fn definition() -> Command {
        command::complete(Cli::command())
    }

    /// Builds the command line from the parser's matches.
    pub fn read(matches: &ArgMatches) -> Result<Cli, clap::Error> {
        let mut cli = Cli::from_arg_matches(matches)?;
        cli.global.verb = matches.subcommand_name().unwrap_or_default().to_string();
        Ok(cli)
    }

    /// Returns whether the user wants JSON.
    pub fn json(&self) -> bool {
        self.global.output.json()
    }

    /// Merges the command line, the environment and the file into the configuration.
    pub fn configure(&mut self) -> Result<()> {
        let serve = match &mut self.verb {
            Verb::Serve(args) => std::mem::take(&mut args.given),
            Verb::Config(args) => std::mem::take(&mut args.given),
            // These act on behalf of another process, whatever the file says by now.
            Verb::HoldFrozen(_) | Verb::Keeper(_) | Verb::OnMount(_) | Verb::OnRun(_) | Verb::WithParent(_) => {
                return Ok(());
            }
            _ => Given::default(),
        };
        let file = self.global.config.as_deref().filter(|path| !path.as_os_str().is_empty());
        self.global.settings = Settings::load(std::mem::take(&mut self.global.given), serve, file)?;
        Ok(())
    }

    /// Returns the logging options: those configured, else the verb's defaults.
    pub fn logging(&self) -> Result<Logging> {
        let is_server = matches!(self.verb, Verb::Serve(_) | Verb::Mount(_) | Verb::VhostUser(_));
        let settings = &self.global.settings;
        let level = settings.word(&key::LOG).unwrap_or(if is_server { "info" } else { "warn" });
        let level = level.parse().with_context(|| format!("the log level {level}"))?;
        let burst = is_server.then(|| settings.count(&key::LOG_BURST)).transpose()?;
        Ok(Logging { level, json: settings.word(&key::LOG_FORMAT) == Some("json"), burst })
    }

    /// Runs the verb.
    pub fn run(self) -> Result<ExitCode> {
        let global = &self.global;
        match self.verb {
            Verb::Check(args) => return verbs::check::run(args, global),
            Verb::Repair(args) => return verbs::repair::run(args, global),
            Verb::Serve(args) => return verbs::serve::run(args, global),
            Verb::Mount(args) => return verbs::mount::run(args, global),
            Verb::VhostUser(args) => return verbs::vhost_user::run(args, global),
            Verb::Init(args) => verbs::init::run(args, global),
            Verb::Create(args) => verbs::create::run(args, global),
            Verb::Import(args) => verbs::import::run(args, global),
            Verb::Export(args) => verbs::export::run(args, global),
            Verb::Snapshot(args) => verbs::snapshot::run(args, global),
            Verb::Clone(args) => verbs::clone::run(args, global),
            Verb::Fork(args) => verbs::fork::run(args, global),
            Verb::Rollback(args) => verbs::rollback::run(args, global),
            Verb::List(args) => verbs::list::run(args, global),
            Verb::Du(args) => verbs::du::run(args, global),
            Verb::Diff(args) => verbs::diff::run(args, global),
            Verb::Map(args) => verbs::map::run(args, global),
            Verb::Rename(args) => verbs::rename::run(args, global),
            Verb::Swap(args) => verbs::swap::run(args, global),
            Verb::Resize(args) => verbs::resize::run(args, global),
            Verb::Set(args) => verbs::set::run(args, global),
            Verb::Defrag(args) => verbs::defrag::run(args, global),
            Verb::Flatten(args) => verbs::flatten::run(args, global),
            Verb::Copier(args) => verbs::copier::run(args, global),
            Verb::Delete(args) => verbs::delete::run(args, global),
            Verb::Protect(args) => verbs::protect::run(args, global),
            Verb::Unprotect(args) => verbs::protect::run_unprotect(args, global),
            Verb::Grow(args) => verbs::grow::run(args, global),
            Verb::Stats(args) => verbs::stats::run(args, global),
            Verb::Top(args) => verbs::top::run(args, global),
            Verb::Attach(args) => verbs::attach::run(args, global),
            Verb::Detach(args) => verbs::detach::run(args, global),
            Verb::Switch(args) => verbs::switch::run(args, global),
            Verb::Upgrade(args) => verbs::upgrade::run(args, global),
            Verb::Stop(args) => verbs::stop::run(args, global),
            Verb::Config(_) => verbs::config::run(global),

            Verb::Umount(args) => verbs::umount::run(args, global),
            Verb::Bench(args) => verbs::bench::run(args, global),
            Verb::Completions(args) => verbs::completions::run(args, command::without_hidden_verbs(Cli::definition())),
            Verb::Man(args) => verbs::man::run(args, command::without_hidden_verbs(Cli::definition())),
            Verb::DeviceLinks(args) => verbs::device_links::run(args),
            Verb::HoldFrozen(args) => verbs::hold_frozen::run(args),
            Verb::Keeper(args) => verbs::keeper::run(&args),
            Verb::OnMount(args) => verbs::on_mount::run(args),
            Verb::OnRun(args) => verbs::run::run_on(args),
            Verb::Run(args) => verbs::run::run(args),
            Verb::WithParent(args) => verbs::with_parent::run(args),
        }?;
        Ok(ExitCode::SUCCESS)
    }
}
