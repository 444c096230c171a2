//! Goals for figures. They are in `goals.toml`, which is compiled into the program.

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::rows::{Row, Samples, Sense};
use crate::runner::Scale;

const GOALS: &str = include_str!("goals.toml");

/// Goal for one figure of forkdisk.
#[derive(Clone, Debug, PartialEq)]
pub struct Goal {
    /// The benchmark it belongs to.
    pub workload: String,
    /// The case.
    pub case: String,
    /// The metric.
    pub metric: String,
    /// Value to compare with.
    pub goal: f64,
    /// Required side of the goal.
    pub sense: Sense,
    /// Whether it is a comparison with a peer, which a run without peers does not have.
    pub peers: bool,
    /// Largest (max - min) / median with which it is judged: a wider spread proves nothing.
    pub spread: Option<f64>,
    /// Smallest scale that produces the figure.
    pub from: Scale,
    /// Whether a run may lack the figure: the goal is judged as soon as there is one.
    pub optional: bool,
}

/// All goals of all benchmarks.
#[derive(Clone, Debug)]
pub struct Goals(Vec<Goal>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tables {
    goal: Vec<Table>,
}

/// Goals for every combination of case and metric.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    workload: String,
    cases: Vec<String>,
    metrics: Vec<String>,
    sense: Sense,
    goal: f64,
    #[serde(default)]
    peers: bool,
    spread: Option<f64>,
    #[serde(default)]
    from: Scale,
    #[serde(default)]
    optional: bool,
}

impl Goals {
    /// Returns the project's own goals.
    pub fn built_in() -> Result<Goals> {
        Goals::parse(GOALS).context("goals.toml")
    }

    /// Parses the text of a `goals.toml`.
    pub fn parse(text: &str) -> Result<Goals> {
        let tables: Tables = toml::from_str(text)?;
        let expand = |table: Table| {
            let pairs = table.cases.iter().flat_map(|c| table.metrics.iter().map(move |m| (c.clone(), m.clone())));
            let Table { goal, sense, peers, spread, from, optional, .. } = table;
            let goal = |(case, metric)| Goal {
                workload: table.workload.clone(),
                case,
                metric,
                goal,
                sense,
                peers,
                spread,
                from,
                optional,
            };
            pairs.map(goal).collect::<Vec<_>>()
        };
        Ok(Goals(tables.goal.into_iter().flat_map(expand).collect()))
    }

    /// Returns all goals.
    pub fn all(&self) -> &[Goal] {
        &self.0
    }

    /// Compares `rows` with the goals of `workload`, and adds an unmet row for every goal
    /// that is `wanted` and not optional, and has no figure.
    pub fn judge(&self, rows: &mut Vec<Row>, workload: &str, wanted: impl Fn(&Goal) -> bool) {
        for goal in self.0.iter().filter(|g| g.workload == workload) {
            let fits = |row: &&mut Row| {
                row.workload == workload
                    && row.case == goal.case
                    && row.metric == goal.metric
                    && row.target == "forkdisk"
            };
            if let Some(row) = rows.iter_mut().find(fits) {
                (row.goal, row.sense) = (Some(goal.goal), Some(goal.sense));
                let judged = goal.spread.is_none_or(|most| row.spread().is_none_or(|spread| spread <= most));
                row.met = judged.then(|| row.median.is_some_and(|value| goal.sense.met(value, goal.goal)));
            } else if !goal.optional && wanted(goal) {
                let missing = Row::new(workload, &goal.case, "forkdisk", &goal.metric, "", &Samples::default());
                let (goal, sense) = (Some(goal.goal), Some(goal.sense));
                rows.push(Row { goal, sense, met: Some(false), ..missing });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = r#"
        [[goal]]
        workload = "engine"
        cases = ["a/x", "b/x"]
        metrics = ["m"]
        sense = "<="
        goal = 2.0
    "#;

    #[test]
    fn the_built_in_goals_can_be_read_and_none_is_set_twice() {
        let goals = Goals::built_in().unwrap();
        let mut names: Vec<_> = goals.all().iter().map(|g| (&g.workload, &g.case, &g.metric)).collect();
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all);
        for workload in ["engine", "serve", "w1", "w2", "w3", "w4", "w5", "doors", "fleet"] {
            assert!(goals.all().iter().any(|g| g.workload == workload), "{workload} has no goals");
        }
    }

    #[test]
    fn a_required_row_that_is_missing_is_not_met() {
        let mut rows = vec![Row::engine("a/x", "m", "ratio", &Samples::one(2.0))];
        Goals::parse(TWO).unwrap().judge(&mut rows, "engine", |_| true);
        assert_eq!((rows[0].goal, rows[0].met), (Some(2.0), Some(true)));
        assert_eq!((rows[1].case.as_str(), rows[1].median, rows[1].met), ("b/x", None, Some(false)));
        Goals::parse(TWO).unwrap().judge(&mut rows, "w2", |_| true);
        assert_eq!(rows.len(), 2, "other benchmarks have goals of their own");
    }

    #[test]
    fn what_was_not_asked_for_is_not_missing() {
        let mut rows = vec![Row::engine("a/x", "m", "ratio", &Samples::one(2.5))];
        Goals::parse(TWO).unwrap().judge(&mut rows, "engine", |goal| goal.case.starts_with("a/"));
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].met, Some(false));
    }

    #[test]
    fn an_optional_figure_is_judged_only_if_there_is_one() {
        let goals = Goals::parse(&(TWO.to_string() + "optional = true")).unwrap();
        let mut rows = vec![Row::engine("a/x", "m", "ratio", &Samples::one(2.5))];
        goals.judge(&mut rows, "engine", |_| true);
        assert_eq!((rows.len(), rows[0].met), (1, Some(false)));
    }

    #[test]
    fn a_peer_is_not_held_against_our_goals() {
        let mut rows = vec![Row::new("engine", "a/x", "qemu-nbd", "m", "ratio", &Samples::one(9.0))];
        Goals::parse(TWO).unwrap().judge(&mut rows, "engine", |goal| goal.case == "a/x");
        assert_eq!((rows[0].met, rows[1].met), (None, Some(false)));
    }

    #[test]
    fn what_varies_too_much_is_not_judged() {
        let timed = TWO.to_string() + "spread = 0.2";
        let near = [2.5, 2.4, 2.6].into_iter().collect();
        let wide = [2.5, 1.0, 2.6].into_iter().collect();
        let mut rows = vec![Row::engine("a/x", "m", "ratio", &near), Row::engine("b/x", "m", "ratio", &wide)];
        Goals::parse(&timed).unwrap().judge(&mut rows, "engine", |_| true);
        assert_eq!((rows[0].goal, rows[0].met), (Some(2.0), Some(false)));
        assert_eq!((rows[1].goal, rows[1].met), (Some(2.0), None));
    }
}
