//! The published table with breaks that copy the chunk, beside dm-thin.

use anyhow::Result;

use crate::rows::Row;
use crate::runner::Context;

use super::thin;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    if context.options.peers {
        rows.extend(thin::table(context, &context.lab()?)?);
    }
    Ok(rows)
}
