//! Operations on volumes as a whole: which one an operation stands for, and its start.

use crate::model::Properties;

use super::*;

/// Names of a large verb.
const MANY_NAMES_COUNT: u64 = 80;

/// Returns properties, with quotas that no volume reaches.
fn properties(rng: &mut Rng) -> Properties {
    let quota = if rng.one_in(2) { 0 } else { (1 + rng.below(4)) << 30 };
    Properties { chunk: 4096 << rng.below(8), copies: rng.one_in(3), quota, gathers: rng.one_in(2) }
}

impl Run {
    /// Returns the control operation that `op` stands for now, if it makes sense.
    pub(super) fn choose_control(&mut self, op: &Op) -> Option<Control> {
        let volumes = place::volumes(&self.known.model);
        let crowded = self.known.model.volumes().count() >= self.setup.crowd;
        let volume = place::choose(&volumes, op.draws[0]);
        let mut rng = Rng::new(op.draws[1]);
        let transacts = self.setup.profile == Profile::Transactions;
        Some(match op.kind {
            Kind::CreateAll | Kind::Create if !crowded && (transacts || op.kind == Kind::CreateAll) => {
                let size = place::size(&self.setup, op.draws[2]);
                Control::CreateAll(self.names_of_one("v", &mut rng), size, properties(&mut rng))
            }
            Kind::CloneAll if !crowded => {
                let mut from = volumes;
                from.extend(place::snapshots(&self.known.model, None));
                Control::CloneAll(place::choose(&from, op.draws[0])?, self.names_of_one("c", &mut rng))
            }
            Kind::SetAll => Control::Set(volume?, properties(&mut rng)),
            Kind::Create if !crowded => Control::Create(self.name("v"), place::size(&self.setup, op.draws[2])),
            Kind::Snapshot if !crowded => Control::Snapshot(vec![(volume?, self.name("s"))]),
            Kind::Group if !crowded => {
                let name = self.name("g");
                let mut sources = volumes;
                rng.shuffle(&mut sources);
                sources.truncate(2 + rng.index(2));
                Control::Snapshot(sources.into_iter().map(|key| (key, name.clone())).collect())
            }
            Kind::Clone if !crowded => {
                let snapshots = place::snapshots(&self.known.model, None);
                let from = if rng.one_in(3) || snapshots.is_empty() { volumes } else { snapshots };
                Control::Clone(place::choose(&from, op.draws[0])?, self.name("c"))
            }
            Kind::Rollback => {
                let snapshot = place::choose(&place::snapshots(&self.known.model, None), op.draws[0])?;
                Control::Rollback(self.known.model.get(snapshot)?.of?, snapshot)
            }
            Kind::Replace => {
                let mut from = volumes;
                from.extend(place::snapshots(&self.known.model, None));
                let source = place::choose(&from, op.draws[3])?;
                Control::Replace(volume.filter(|&v| v != source)?, source)
            }
            Kind::Usurp => {
                let has_none = |key: &Key| place::snapshots(&self.known.model, Some(*key)).is_empty();
                let free: Vec<Key> = volumes.iter().copied().filter(has_none).collect();
                let victim = place::choose(&free, op.draws[3])?;
                Control::Usurp(volume.filter(|&v| v != victim)?, victim)
            }
            Kind::Rename => Control::Rename(volume?, self.name("r")),
            Kind::Resize => Control::Resize(volume?, place::resized(&self.setup, self.size(volume?), op.draws[2])),
            Kind::Delete => {
                let snapshots = place::snapshots(&self.known.model, None);
                if rng.one_in(2) && !snapshots.is_empty() {
                    Control::Delete(vec![*rng.pick(&snapshots)])
                } else {
                    let mut victims = place::snapshots(&self.known.model, volume);
                    if volumes.len() < 2 && victims.is_empty() {
                        return None;
                    }
                    victims.push(volume?);
                    Control::Delete(victims)
                }
            }
            _ => return None,
        })
    }

    pub(in super::super) fn name(&mut self, letter: &str) -> String {
        self.world.names += 1;
        let folder = if letter != "s" && letter != "g" && self.world.names.is_multiple_of(4) { "f/" } else { "" };
        format!("{folder}{letter}{}", self.world.names)
    }

    /// Returns the names of one verb: a few, and sometimes so many that they do not fit into the volatile log.
    fn names_of_one(&mut self, letter: &str, rng: &mut Rng) -> Vec<String> {
        let (count, longest) = if rng.one_in(24) { (MANY_NAMES_COUNT, 220) } else { (1 + rng.below(8), 40) };
        let length = rng.below(longest) as usize;
        (0..count).map(|_| format!("{}{}", self.name(letter), "-".repeat(length))).collect()
    }

    /// Returns the volumes whose family a control operation concerns.
    pub(super) fn touched(&self, control: &Control) -> Vec<Key> {
        let keys = match control {
            Control::Create(..) | Control::CreateAll(..) => Vec::new(),
            Control::CloneAll(key, _) | Control::Set(key, _) => vec![*key],
            Control::Snapshot(sources) => sources.iter().map(|s| s.0).collect(),
            Control::Clone(key, _) | Control::Rename(key, _) | Control::Resize(key, _) => {
                vec![*key]
            }
            Control::Rollback(a, b) | Control::Replace(a, b) | Control::Usurp(a, b) => vec![*a, *b],
            Control::Delete(keys) => keys.clone(),
        };
        let mut all: Vec<Key> = keys.iter().flat_map(|&key| [key, self.family(key)]).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Starts a control operation once nothing blocks it.
    pub(in super::super) fn control(&mut self, control: Control) -> Result<(), Violation> {
        let keys = self.touched(&control);
        let rough = !matches!(
            control,
            Control::Create(..)
                | Control::Snapshot(_)
                | Control::Clone(..)
                | Control::Rollback(..)
                | Control::CreateAll(..)
                | Control::CloneAll(..)
                | Control::Set(..)
        );
        let rollback = matches!(control, Control::Rollback(..));
        self.wait(|o| {
            let near = o.keys.iter().any(|key| keys.contains(key));
            let shares = o.text.starts_with("share");
            near && (rough || o.class.is_control() || (rollback && shares))
        })?;
        let exists = |key: &Key| self.known.model.get(*key).is_some();
        if !keys.iter().all(exists) || keys.iter().any(|&key| self.is_unsure(key)) {
            return Ok(());
        }
        let victims = match &control {
            Control::Delete(victims) => victims.clone(),
            Control::Usurp(_, victim) => vec![*victim],
            _ => Vec::new(),
        };
        if !victims.is_empty() {
            // A snapshot may have been taken while this had to wait.
            let left =
                |(key, v): (Key, &Volume)| v.of.is_some_and(|of| victims.contains(&of)) && !victims.contains(&key);
            if self.known.model.volumes().any(left) {
                return Ok(());
            }
        }
        if let Control::Rollback(volume, _) = control {
            self.forgive_quota(volume);
            for o in self.inflight.values_mut().filter(|o| o.keys.contains(&volume)) {
                if let Class::Read { vague } = &mut o.class {
                    *vague = true;
                }
            }
        }
        self.start_control(control, keys);
        Ok(())
    }

    pub(super) fn start_control(&mut self, control: Control, keys: Vec<Key>) {
        let text = self.describe(&control);
        let pool = self.session.pool.clone();
        let verb = Verb::of(&control, |key| self.known.model.name(*key));
        let needs_space = !matches!(control, Control::Delete(_));
        let pending = self.known.model.begin(control);
        let copies = self.setup.profile == Profile::Copies;
        self.submit_control(
            (pending, needs_space),
            keys,
            text,
            async move { verb.carry_out(&pool, copies).await.into() },
        );
    }

    pub(super) fn describe(&self, control: &Control) -> String {
        let name = |key: &Key| self.known.model.name(*key);
        match control {
            Control::Create(new, size) => format!("create {new}, {size} bytes"),
            Control::Snapshot(all) => {
                let names: Vec<String> = all.iter().map(|(key, s)| format!("{}@{s}", name(key))).collect();
                format!("snapshot {}", names.join(" "))
            }
            Control::Clone(source, new) => format!("clone {} to {new}", name(source)),
            Control::CreateAll(all, size, properties) => {
                format!("create {}, {size} bytes, {properties:?}", all.join(" "))
            }
            Control::CloneAll(source, all) => format!("clone {} to {}", name(source), all.join(" ")),
            Control::Set(key, properties) => format!("set {} {properties:?}", name(key)),
            Control::Rollback(_, snapshot) => format!("roll back to {}", name(snapshot)),
            Control::Rename(key, new) => format!("rename {} to {new}", name(key)),
            Control::Resize(key, size) => format!("resize {} to {size} bytes", name(key)),
            Control::Replace(key, source) => format!("replace {} by {}", name(key), name(source)),
            Control::Usurp(key, victim) => format!("rename {} over {}", name(key), name(victim)),
            Control::Delete(keys) => format!("delete {}", keys.iter().map(name).collect::<Vec<_>>().join(" ")),
        }
    }
}
