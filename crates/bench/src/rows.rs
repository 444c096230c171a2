//! Results of a benchmark.

use serde::{Deserialize, Serialize};

/// Required side of the goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sense {
    /// At least the goal.
    #[serde(rename = ">=")]
    AtLeast,
    /// At most the goal.
    #[serde(rename = "<=")]
    AtMost,
}

impl Sense {
    /// Returns whether `value` meets `goal`.
    pub fn met(self, value: f64, goal: f64) -> bool {
        match self {
            Sense::AtLeast => value >= goal,
            Sense::AtMost => value <= goal,
        }
    }

    /// Returns it as written.
    pub fn sign(self) -> &'static str {
        match self {
            Sense::AtLeast => ">=",
            Sense::AtMost => "<=",
        }
    }
}

/// One figure of one case. A required row that was not measured has no figures and is not met.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The benchmark: `engine`, `w2`, …
    pub workload: String,
    /// The case.
    pub case: String,
    /// The measured program: `forkdisk`, or a peer.
    pub target: String,
    /// The metric.
    pub metric: String,
    /// Its unit; `ratio` for a quotient.
    pub unit: String,
    /// Median of all samples.
    pub median: Option<f64>,
    /// Smallest sample.
    pub min: Option<f64>,
    /// Largest sample.
    pub max: Option<f64>,
    /// Number of samples.
    pub n: usize,
    /// Goal of the median.
    pub goal: Option<f64>,
    /// Required side of the goal.
    pub sense: Option<Sense>,
    /// Whether the goal is met.
    pub met: Option<bool>,
}

impl Row {
    /// Creates a figure without a goal.
    pub fn new(workload: &str, case: &str, target: &str, metric: &str, unit: &str, samples: &Samples) -> Row {
        Row {
            workload: workload.into(),
            case: case.into(),
            target: target.into(),
            metric: metric.into(),
            unit: unit.into(),
            median: samples.median(),
            min: samples.min(),
            max: samples.max(),
            n: samples.len(),
            goal: None,
            sense: None,
            met: None,
        }
    }

    /// Returns (max - min) / median, which shows how reliable the median is.
    pub fn spread(&self) -> Option<f64> {
        Some((self.max? - self.min?) / self.median?)
    }

    /// Creates a figure of forkdisk in the workload `engine`.
    pub fn engine(case: &str, metric: &str, unit: &str, samples: &Samples) -> Row {
        Row::new("engine", case, "forkdisk", metric, unit, samples)
    }
}

/// Repeated measurements of one figure.
#[derive(Clone, Debug, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// Creates samples from one measurement or exact count.
    pub fn one(value: f64) -> Samples {
        Samples(vec![value])
    }

    /// Adds a measurement.
    pub fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// Returns the number of measurements.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the middle value, or the mean of the two middle values.
    pub fn median(&self) -> Option<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let (low, high) = (sorted.get(sorted.len().wrapping_sub(1) / 2)?, sorted.get(sorted.len() / 2)?);
        Some((low + high) / 2.0)
    }

    /// Returns the smallest value that at least `percent` of all values do not exceed.
    pub fn percentile(&self, percent: f64) -> Option<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
        sorted.get(rank.max(1) - 1).copied()
    }

    fn min(&self) -> Option<f64> {
        self.0.iter().copied().min_by(f64::total_cmp)
    }

    /// Returns the largest value.
    pub fn max(&self) -> Option<f64> {
        self.0.iter().copied().max_by(f64::total_cmp)
    }
}

impl FromIterator<f64> for Samples {
    fn from_iter<I: IntoIterator<Item = f64>>(values: I) -> Samples {
        Samples(values.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(Samples::default().median(), None);
        assert_eq!(Samples::one(3.0).median(), Some(3.0));
        assert_eq!([5.0, 1.0, 3.0].into_iter().collect::<Samples>().median(), Some(3.0));
        assert_eq!([5.0, 1.0, 3.0, 4.0].into_iter().collect::<Samples>().median(), Some(3.5));
    }

    #[test]
    fn a_percentile_is_a_value_that_was_measured() {
        let hundred: Samples = (1..=100).rev().map(f64::from).collect();
        assert_eq!([0.0, 50.0, 99.0, 100.0].map(|p| hundred.percentile(p)), [1.0, 50.0, 99.0, 100.0].map(Some));
        assert_eq!(Samples::one(3.0).percentile(99.0), Some(3.0));
        assert_eq!(Samples::default().percentile(99.0), None);
    }

    #[test]
    fn a_row_is_written_with_every_field() {
        let row = Row::engine("a", "b", "ratio", &Samples::one(0.5));
        let json =
            serde_json::to_string(&Row { goal: Some(0.9), sense: Some(Sense::AtLeast), met: Some(false), ..row });
        assert_eq!(
            json.unwrap(),
            concat!(
                r#"{"workload":"engine","case":"a","target":"forkdisk","metric":"b","unit":"ratio","median":0.5,"#,
                r#""min":0.5,"max":0.5,"n":1,"goal":0.9,"sense":">=","met":false}"#
            )
        );
    }
}
