//! stub to be replaced
use crate::cli::Global;
use anyhow::Result;
use clap::Args;
/// Serve
#[derive(Args)]
pub struct ServeArgs {
    /// p
    pool: Option<std::path::PathBuf>,
}
/// r
pub fn run(_args: ServeArgs, _global: &Global) -> Result<()> {
    Ok(())
}
