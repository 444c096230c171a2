//! Arguments about lifetimes and labels: of what a verb makes, and of what it selects.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Args;
use forkdisk_control::Method;

use crate::config::keys;
use crate::dates;
use crate::session::Caller;
use crate::verbs::set::{self, Property};

/// Lifetime and labels of what the verb makes.
#[derive(Args, Clone)]
pub struct NewArgs {
    /// Properties of what is made: expires and label.KEY, separated by commas; can be given several times
    #[arg(long, value_name = "PROPERTY=VALUE", value_parser = parse_new_property, value_delimiter = ',')]
    set: Vec<Property>,
}

/// The same, and the bound of new volumes.
#[derive(Args, Clone)]
pub struct NewVolumeArgs {
    /// Properties of the new volumes: diverge, reserve, expires and label.KEY, separated by commas; can be given
    /// several times
    #[arg(long, value_name = "PROPERTY=VALUE", value_parser = parse_volume_property, value_delimiter = ',')]
    set: Vec<Property>,
}

/// What the new volumes are deleted after.
#[derive(Args, Clone)]
pub struct LeaseArg {
    #[arg(long, value_name = "connection|PID")]
    pub lease: Option<String>,
}

/// Which volumes and snapshots the verb is for.
#[derive(Args, Clone)]
pub struct SelectArgs {
    #[arg(long, value_name = "KEY[=VALUE]")]
    pub label: Vec<String>,

    #[arg(long = "match", value_name = "PATTERN")]
    pub pattern: Option<String>,

    #[arg(long, value_name = "TIME", value_parser = age)]
    pub older_than: Option<u64>,

    #[arg(long, value_name = "TIME|DATE", value_parser = moment)]
    pub expires_before: Option<u64>,
}

/// Properties that are described by the parameters of the method.
pub const PROPERTIES: [(&str, &str); 2] = [("expires=TIME|DATE|none", "expires"), ("label.KEY=VALUE", "labels")];

/// Properties of new volumes that are described by the parameters of the method.
pub const VOLUME_PROPERTIES: [(&str, &str); 4] = [
    ("diverge=SIZE|none", "diverge"),
    ("reserve=SIZE|none", "reserve"),
    ("expires=TIME|DATE|none", "expires"),
    ("label.KEY=VALUE", "labels"),
];

impl NewVolumeArgs {
    /// When they expire, their labels and their bounds: `diverge` and `reserve`.
    pub fn given(self) -> (Option<u64>, Vec<String>, [Option<u64>; 2]) {
        let mut bounds = [None; 2];
        for property in &self.set {
            match property {
                Property::Diverge(bytes) => bounds[0] = Some(*bytes),
                Property::Reserve(bytes) => bounds[1] = Some(*bytes),
                _ => {}
            }
        }
        let (expires, labels) = NewArgs { set: self.set }.given();
        (expires, labels, bounds)
    }
}

impl NewArgs {
    /// When it expires, and its labels.
    pub fn given(self) -> (Option<u64>, Vec<String>) {
        let (mut expires, mut labels) = (None, Vec::new());
        for property in self.set {
            match property {
                Property::Expires(time) => expires = Some(time),
                Property::Label(label) => labels.push(label),
                _ => {}
            }
        }
        (expires, labels)
    }
}

impl LeaseArg {
    /// With a lease of the connection: waits until the daemon closes that, or a signal ends this process.
    pub fn hold(&self, caller: &Caller) {
        if let (Some("connection"), Caller::Served(client)) = (self.lease.as_deref(), caller) {
            client.borrow_mut().wait_for_end();
        }
    }
}

impl SelectArgs {
    /// Whether anything is selected.
    pub fn is_given(&self) -> bool {
        let SelectArgs { label, pattern, older_than, expires_before } = self;
        !label.is_empty() || pattern.is_some() || older_than.is_some() || expires_before.is_some()
    }
}

/// Calls a method that makes volumes; with a lease of the connection, returns when that has ended.
pub async fn make<M: Method>(
    caller: &Caller,
    method: M,
    lease: &LeaseArg,
    show: impl FnOnce(&M::Reply) -> Result<()>,
) -> Result<()> {
    let made = caller.call(method, None).await?;
    show(&made)?;
    lease.hold(caller);
    Ok(())
}

/// What makes a volume: this program, for its user.
pub fn created_by() -> Option<String> {
    Some(format!("cli:uid={}", rustix::process::getuid().as_raw()))
}

fn parse_new_property(text: &str) -> Result<Property> {
    match text.split(['=', '.']).next().unwrap_or_default() {
        "expires" | "label" => set::parse_property(text),
        name => bail!("there is no property '{name}' that --set takes here: expires and label.KEY are"),
    }
}

fn parse_volume_property(text: &str) -> Result<Property> {
    match text.split(['=', '.']).next().unwrap_or_default() {
        "diverge" | "reserve" | "expires" | "label" => set::parse_property(text),
        name => {
            bail!("there is no property '{name}' that --set takes here: diverge, reserve, expires and label.KEY are")
        }
    }
}

/// Parses an age: a number and `s`, `m`, `h`, `d` or `w`; in seconds.
pub fn age(text: &str) -> Result<u64> {
    let day = |unit: char, seconds: u64| {
        let number = text.trim().strip_suffix(unit)?;
        Some(number.parse::<u64>().ok().and_then(|number| number.checked_mul(seconds)))
    };
    match day('d', 86_400).or_else(|| day('w', 7 * 86_400)) {
        Some(seconds) => seconds.with_context(|| format!("'{text}' is not a time: write a number and a unit: 7d")),
        None => Ok(keys::time(text).with_context(|| format!("'{text}'; days are 7d, weeks 2w"))?.as_secs()),
    }
}

/// Parses a moment: a date, or a time from now; in seconds since 1970.
pub fn moment(text: &str) -> Result<u64> {
    if let Some(seconds) = dates::parse(text) {
        return Ok(seconds);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock shows a time before 1970")?.as_secs();
    let wrong = || format!("'{text}' is no time from now, such as 10m or 7d, and no date in UTC: 2026-12-31T18:00:00Z");
    age(text).ok().and_then(|age| now.checked_add(age)).with_context(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_have_units_up_to_weeks() {
        for (text, seconds) in [("90", 90), ("10m", 600), ("2h", 7200), ("7d", 604_800), ("2w", 1_209_600)] {
            assert_eq!(age(text).unwrap(), seconds, "{text}");
        }
        for bad in ["", "d", "1.5d", "-1d", "1y", "99999999999999999999d"] {
            assert!(age(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_moment_is_a_date_or_a_time_from_now() {
        assert_eq!(moment("2026-12-31T00:00:00Z").unwrap(), 1_798_675_200);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        assert!((now + 600..now + 700).contains(&moment("10m").unwrap()));
        assert!(moment("tomorrow").unwrap_err().to_string().contains("no date in UTC"));
    }
}
