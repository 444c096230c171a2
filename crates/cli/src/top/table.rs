//! A view as text, for programs and for simple terminals.

use super::rates::{COLUMNS, View};

/// Returns the lines of the view, each without trailing blanks.
pub fn lines(view: &View) -> Vec<String> {
    let mut table = vec![COLUMNS.map(str::to_owned), view.total.cells()];
    table.extend(view.rows.iter().map(|row| row.cells()));
    let widths: Vec<usize> =
        (0..COLUMNS.len()).map(|i| table.iter().map(|row| row[i].len()).max().unwrap_or(0)).collect();
    let line = |row: &[String; COLUMNS.len()]| {
        let cells = row.iter().zip(&widths).enumerate();
        let cells =
            cells.map(|(i, (cell, &width))| if i == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    view.head.iter().cloned().chain([String::new()]).chain(table.iter().map(line)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use forkdisk_monitor::Statistics;

    #[test]
    fn columns_stand_below_their_headings() {
        let view = View::between(&Statistics::default(), &Statistics::default(), 1.0);
        let lines = lines(&view);
        let (heading, total) = (&lines[7], &lines[8]);
        assert!(heading.starts_with("VOLUME") && total.starts_with("all"));
        assert_eq!(heading.len(), total.len(), "{heading}\n{total}");
    }
}
