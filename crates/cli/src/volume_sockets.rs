//! Mode and group of the data socket of each volume.

use anyhow::{Context, Result, bail};
use forkdisk_uring::SocketAccess;

use crate::group;

/// The default mode and group, and the rules for single volumes.
#[derive(Clone, Debug)]
pub struct VolumeSockets {
    /// For volumes without a rule.
    usual: SocketAccess,
    rules: Vec<Rule>,
}

#[derive(Clone, Debug)]
struct Rule {
    /// Name of a volume, or a prefix of names.
    name: String,
    is_prefix: bool,
    access: SocketAccess,
}

impl VolumeSockets {
    /// Creates the rules from `rules`, as for [`parse`]; `usual` applies to all other volumes.
    pub fn new(usual: SocketAccess, rules: &str) -> Result<VolumeSockets> {
        let rules = parse(rules)?.into_iter().map(|(name, mode, group)| {
            let group = group.map(group::number).transpose()?;
            let (name, is_prefix) = name.strip_suffix('*').map_or((name, false), |prefix| (prefix, true));
            let access = SocketAccess { mode, group };
            Ok(Rule { name: name.to_string(), is_prefix, access })
        });
        Ok(VolumeSockets { usual, rules: rules.collect::<Result<_>>()? })
    }

    /// Returns mode and group of a volume's socket: those of the first rule that matches its name.
    pub fn of(&self, volume: &str) -> SocketAccess {
        let matches = |rule: &&Rule| match rule.is_prefix {
            true => volume.starts_with(&rule.name),
            false => volume == rule.name,
        };
        self.rules.iter().find(matches).map_or(self.usual, |rule| rule.access)
    }

    /// Returns mode and group for volumes without a rule.
    pub fn usual(&self) -> SocketAccess {
        self.usual
    }

    /// Returns whether a rule lets users connect that the default mode and group exclude.
    pub fn has_others(&self) -> bool {
        let others = |access: SocketAccess| access.mode & 0o022 != 0 && access.group != self.usual.group;
        self.rules.iter().any(|rule| others(rule.access) || rule.access.mode & !self.usual.mode & 0o022 != 0)
    }
}

/// Parses permissions of a file, such as `0660`.
pub fn mode(text: &str) -> Result<u32> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 && mode & 0o600 == 0o600 => Ok(mode),
        _ => bail!("'{text}' is not a mode from 0600 to 0777, such as 0660"),
    }
}

/// Parses `NAME=MODE[:GROUP]`, separated by commas.
pub fn parse(text: &str) -> Result<Vec<(&str, u32, Option<&str>)>> {
    text.split(',').filter(|rule| !rule.is_empty()).map(parse_rule).collect()
}

fn parse_rule(text: &str) -> Result<(&str, u32, Option<&str>)> {
    let Some((name, access)) = text.rsplit_once('=').filter(|(name, _)| !name.is_empty()) else {
        bail!("'{text}' is not VOLUME=MODE or VOLUME=MODE:GROUP, such as vm1=0660:kvm; VOLUME may end in '*'");
    };
    let (mode, group) = access.split_once(':').map_or((access, None), |(mode, group)| (mode, Some(group)));
    if group == Some("") {
        bail!("'{text}' names no group behind ':'");
    }
    Ok((name, self::mode(mode).with_context(|| format!("'{text}'"))?, group))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rule_about_a_volume_counts() {
        let usual = SocketAccess { mode: 0o660, group: Some(7) };
        let sockets = VolumeSockets::new(usual, "lab/1=0600,lab/*=0660:4711,a=b=0666").unwrap();
        let of = |name: &str| (sockets.of(name).mode, sockets.of(name).group);
        assert_eq!((of("lab/1"), of("lab/2")), ((0o600, None), (0o660, Some(4711))));
        assert_eq!((of("a=b"), of("a")), ((0o666, None), (0o660, Some(7))));
    }

    #[test]
    fn a_folder_has_to_let_in_whom_a_socket_lets_in() {
        let has = |rules: &str| VolumeSockets::new(SocketAccess::OWNER, rules).unwrap().has_others();
        assert!(has("a=0660:4711") && has("*=0666") && !has("a=0600:4711") && !has("") && !has("a=0644"));
    }

    #[test]
    fn what_is_no_rule_is_refused() {
        let message = format!("{:#}", parse("a=66").unwrap_err());
        assert!(message.contains("from 0600 to 0777"), "{message}");
        for text in ["a", "=0660", "a=", "a=0060", "a=0660:", "a=0660:kvm,b"] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert_eq!(parse("").unwrap(), []);
    }

    #[test]
    fn modes_are_octal_and_let_the_owner_in() {
        assert_eq!((mode("0660").unwrap(), mode("600").unwrap(), mode("0777").unwrap()), (0o660, 0o600, 0o777));
        for text in ["", "0", "0060", "1777", "0o660", "rw", "0888", "-660"] {
            assert!(mode(text).is_err(), "{text}");
        }
    }
}
