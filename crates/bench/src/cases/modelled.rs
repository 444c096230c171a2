//! Time computed for three kinds of device: raw requests ÷ pool.

use anyhow::Result;
use forkdisk::testing::DeviceModel;

use crate::rows::{Row, Samples};
use crate::runner::Context;

use super::ram::WORKS;

pub fn run(context: &Context<'_>) -> Result<Vec<Row>> {
    let span = context.scale.pick(1 << 30, 4 << 30, 16 << 30);
    let mut rows = Vec::new();
    for work in &WORKS {
        let (ours, raw) = (work.record(span)?, work.raw(span));
        for model in &DeviceModel::ALL {
            let ratio = model.time(&raw, work.depth).as_secs_f64() / model.time(&ours, work.depth).as_secs_f64();
            let case = format!("modelled/{}", work.name);
            rows.push(Row::engine(&case, &format!("{}_ratio", model.name), "ratio", &Samples::one(ratio)));
        }
    }
    Ok(rows)
}
