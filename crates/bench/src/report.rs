//! Rows as a table for people.

use crate::rows::Row;

/// Titles of the columns.
pub const HEAD: [&str; 8] = ["case", "target", "metric", "median", "min", "max", "goal", "met"];

/// Formats `rows` as an aligned table, one line each, with a heading.
pub fn table(rows: &[Row]) -> String {
    let lines: Vec<[String; 8]> = std::iter::once(HEAD.map(String::from)).chain(rows.iter().map(cells)).collect();
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEAD.len()).map(width).collect();
    let mut text = String::new();
    for line in &lines {
        let mut out = String::new();
        for (column, cell) in line.iter().enumerate() {
            let pad = " ".repeat(widths[column] - cell.chars().count());
            let left = !(3..=5).contains(&column);
            out += &if left { format!("{cell}{pad}  ") } else { format!("{pad}{cell}  ") };
        }
        text += out.trim_end();
        text.push('\n');
    }
    text
}

/// Returns the cells of a row.
pub fn cells(row: &Row) -> [String; 8] {
    let unit = if row.unit == "ratio" || row.unit.is_empty() { String::new() } else { format!(" [{}]", row.unit) };
    let goal = row.goal.zip(row.sense).map(|(goal, sense)| format!("{} {}", sense.sign(), figure(Some(goal))));
    let met = match (row.met, row.n) {
        (None, _) if row.goal.is_some() => "spread",
        (Some(true), _) => "yes",
        (Some(false), 0) => "MISSING",
        (Some(false), _) => "NO",
        (None, _) => "",
    };
    [
        row.case.clone(),
        row.target.clone(),
        row.metric.clone() + &unit,
        figure(row.median),
        figure(row.min),
        figure(row.max),
        goal.unwrap_or_default(),
        met.to_string(),
    ]
}

/// Formats a figure with four significant digits, or in full if it is a whole number.
fn figure(value: Option<f64>) -> String {
    match value {
        None => "-".to_string(),
        Some(v) if v == v.trunc() && v.abs() < 1e15 => format!("{v}"),
        Some(v) => {
            let digits = (3 - v.abs().log10().floor() as i32).clamp(0, 6);
            format!("{v:.*}", digits as usize)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::{Samples, Sense};

    #[test]
    fn columns_line_up_and_a_missing_row_says_so() {
        let met = Row::engine("counts/a", "requests_per_op", "ratio", &Samples::one(1.0));
        let missing = Row::engine("cpu/b", "cpu_ratio", "ratio", &Samples::default());
        let rows = [
            Row { goal: Some(1.0), sense: Some(Sense::AtMost), met: Some(true), ..met },
            Row { goal: Some(1.3), sense: Some(Sense::AtMost), met: Some(false), ..missing },
        ];
        let text = table(&rows);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].ends_with("<= 1      yes"), "{text}");
        assert!(lines[2].ends_with("<= 1.300  MISSING"), "{text}");
        assert_eq!(lines[0].find("metric"), lines[1].find("requests_per_op"));
    }

    #[test]
    fn figures_have_four_significant_digits() {
        let texts = [1234567.0, 0.97123, 123.456, 0.00012345].map(|v| figure(Some(v)));
        assert_eq!(texts, ["1234567", "0.9712", "123.5", "0.000123"]);
    }
}
