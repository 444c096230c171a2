//! Rounds as rows: growth of the costliest round over the first, and space in use.

use super::label;
use super::rounds::{Round, Step};
use crate::model::Label;
use crate::rows::{Row, Samples};

/// A part of a round: its name, and its accessor.
pub type Part = (&'static str, fn(&Round) -> Step);

/// The parts of a round whose cost is constant.
pub const CONSTANT: [Part; 2] = [("clone", |r| r.clone), ("remove", |r| r.remove)];
/// The parts with a cost proportional to the distinct pages written.
const PER_PAGE: [Part; 2] = [("write", |r| r.write), ("sync", |r| r.sync)];

/// A unit of cost: its name, and its count in a round.
type Unit = (&'static str, fn(&Round) -> u64);

/// Units of their cost: distinct pages written, and the same plus the pages that must be read for
/// it, of which the coded incremental mode has more with every round, on any file system.
const UNITS: [Unit; 2] = [("page", |r| r.pages), ("page_moved", |r| r.pages + r.read)];

/// Returns growth, times and counts of every part.
pub fn rows(name: &str, suffix: &str, target: &str, rounds: &[Round]) -> Vec<Row> {
    let mut rows = Vec::new();
    for (part, step) in CONSTANT {
        let case = format!("{name}/{part}{suffix}");
        let label = Label { target, ..label(&case) };
        let steps: Vec<Step> = rounds.iter().map(step).collect();
        let count = |of: fn(&Step) -> u64| steps.iter().map(|s| of(s) as f64).collect::<Vec<f64>>();
        rows.extend(growth(&label, "requests", &count(|s| s.counts.requests)));
        rows.extend(growth(&label, "bytes", &count(|s| s.counts.bytes)));
        rows.extend(growth(&label, "map_pages", &count(|s| s.counts.map_pages)));
        rows.extend(trend(&label, "cpu", &steps.iter().map(|s| s.cpu).collect::<Vec<f64>>()));
        let all_cpu: Samples = steps.iter().filter_map(|s| s.all_cpu).collect();
        if all_cpu.len() == steps.len() {
            rows.push(label.rows("all_cpu", "s", &all_cpu));
        }
        rows.push(label.rows("seconds", "s", &steps.iter().map(|s| s.wall).collect()));
        rows.push(label.rows("seconds_settled", "s", &steps.iter().map(|s| s.settled).collect()));
    }
    for (part, step) in PER_PAGE {
        let case = format!("{name}/{part}{suffix}");
        let label = Label { target, ..label(&case) };
        for (unit, pages) in UNITS {
            let per = |of: fn(&Step) -> f64| -> Vec<f64> {
                rounds.iter().map(|r| of(&step(r)) / pages(r).max(1) as f64).collect()
            };
            rows.extend(growth(&label, &format!("requests_per_{unit}"), &per(|s| s.counts.requests as f64)));
            rows.extend(growth(&label, &format!("bytes_per_{unit}"), &per(|s| s.counts.bytes as f64)));
            rows.extend(trend(&label, &format!("cpu_per_{unit}"), &per(|s| s.cpu)));
        }
        rows.push(label.rows("seconds", "s", &rounds.iter().map(|r| step(r).wall).collect()));
    }
    rows
}

/// Returns the figure itself, and that of the costliest round ÷ that of the first.
fn growth(label: &Label<'_>, metric: &str, of_rounds: &[f64]) -> Vec<Row> {
    let most = of_rounds.iter().skip(1).copied().fold(0.0, f64::max);
    let first = of_rounds.first().copied().unwrap_or(0.0);
    // 0 ÷ 0 counts as no growth.
    let grown = if most == first { 1.0 } else { most / first };
    vec![
        label.rows(metric, "count", &of_rounds.iter().copied().collect()),
        label.row(&format!("{metric}_growth"), "ratio", grown),
    ]
}

/// For noisy figures: returns the median of the last quarter of the rounds ÷ that of the first.
fn trend(label: &Label<'_>, metric: &str, of_rounds: &[f64]) -> Vec<Row> {
    let quarter = of_rounds.len().div_ceil(4);
    let median = |part: &[f64]| part.iter().copied().collect::<Samples>().median().unwrap_or(0.0);
    let (first, last) = (&of_rounds[..quarter], &of_rounds[of_rounds.len() - quarter..]);
    vec![
        label.rows(metric, "s", &of_rounds.iter().copied().collect()),
        label.row(&format!("{metric}_growth"), "ratio", median(last) / median(first)),
    ]
}

/// Returns the space in use after every round, per page of the file: contents in pages, and all metadata.
pub fn space(name: &str, suffix: &str, rounds: &[Round]) -> Vec<Row> {
    let case = format!("{name}/space{suffix}");
    let label = label(&case);
    let held = |r: &Round| (r.held * 4096) as f64;
    let used = |r: &Round| r.used.unwrap_or_default();
    let contents: Vec<f64> = rounds.iter().map(|r| used(r).0 as f64 / held(r)).collect();
    let worst = contents.iter().copied().map(|ratio| (ratio - 1.0).abs()).fold(0.0, f64::max);
    vec![
        label.row("contents_off_distinct_pages", "ratio", worst),
        label.rows("used_over_distinct_pages", "ratio", &rounds.iter().map(|r| used(r).1 as f64 / held(r)).collect()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(rows: &[Row], metric: &str) -> f64 {
        rows.iter().find(|row| row.metric == metric).and_then(|row| row.median).unwrap()
    }

    #[test]
    fn growth_is_that_of_the_costliest_round_and_a_trend_that_of_the_last() {
        let label = label("random-coded/clone");
        assert_eq!(value(&growth(&label, "requests", &[4.0, 5.0, 4.0]), "requests_growth"), 1.25);
        assert_eq!(value(&growth(&label, "requests", &[0.0, 0.0]), "requests_growth"), 1.0);
        assert!(value(&growth(&label, "requests", &[0.0, 1.0]), "requests_growth").is_infinite());
        let rounds = [1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.1, 1.1];
        assert_eq!(value(&trend(&label, "cpu", &rounds), "cpu_growth"), 1.1);
    }

    #[test]
    fn a_page_too_many_shows() {
        let round = |pages: u64| Round { held: 100, used: Some((pages * 4096, 110 * 4096)), ..Round::default() };
        let off = |pages: u64| value(&space("a", "", &[round(100), round(pages)]), "contents_off_distinct_pages");
        assert_eq!(off(100), 0.0);
        assert!(off(101) > 0.009 && off(99) > 0.009);
    }
}
