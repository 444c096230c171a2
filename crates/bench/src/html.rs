//! Rows as a page for people: a bar chart for each group of cases and each ratio, forkdisk's next to its
//! peers', and all figures in a table below. The page is one file, without scripts and external resources.

use std::fmt::Write;

use crate::report::{HEAD, cells};
use crate::rows::{Row, Sense};

/// Ratios that are drawn even without a goal.
const DRAWN: [&str; 3] = ["spindle_ratio", "ssd_ratio", "cloud_ratio"];
/// Start of the bars and length of the axis, in pixels.
const LEFT: f64 = 230.0;
const AXIS: f64 = 440.0;
const WIDTH: f64 = 760.0;
/// Height of a bar, and distance between two cases, in pixels.
const BAR: f64 = 11.0;
const GAP: f64 = 7.0;
/// Largest value of the axis: a longer bar is cut off, with its figure next to it.
const LONGEST: f64 = 2.0;
/// Colours of the targets, forkdisk first.
const COLOURS: [&str; 6] = ["#1f6fb4", "#e08214", "#4d9a4a", "#8c62aa", "#9a6a4f", "#888888"];

const STYLE: &str = "body{font:14px/1.4 system-ui,sans-serif;margin:2em auto;max-width:60em;padding:0 \
    1em;color:#222;background:#fff}\
h1{font-size:1.4em}h2{font-size:1.2em;margin-top:2em;border-bottom:1px solid #ccc}h3{font-size:1em;margin-bottom:.2em}\
svg{max-width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#222}svg .no{fill:#b00020;font-weight:bold}\
table{border-collapse:collapse;font-size:12px}td,th{padding:1px 8px;text-align:left;border-bottom:1px solid #eee}\
.figure{text-align:right;font-variant-numeric:tabular-nums}.no td{color:#b00020}.key span{margin-right:1.2em}";

/// Returns a page with all of `rows`.
pub fn page(title: &str, rows: &[Row]) -> String {
    let judged = rows.iter().filter(|row| row.met.is_some()).count();
    let met = rows.iter().filter(|row| row.met == Some(true)).count();
    let title = escape(title);
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta \
         charset=\"utf-8\"><title>{title}</title><style>{STYLE}</style></head>\n\
         <body><h1>{title}</h1>\n<p>{met} of {judged} goals met. Bars are ratios: 1 is as if nothing had happened, \
         longer is \
         better; a red figure misses its goal, which the mark on its bar shows.</p>\n"
    );
    for group in distinct(rows, |row| group_of(row)) {
        let of_group: Vec<&Row> = rows.iter().filter(|row| group_of(row) == group).collect();
        let _ = writeln!(out, "<h2>{}</h2>", escape(group));
        for metric in distinct_of(&of_group, |row| &row.metric) {
            let drawn: Vec<&Row> = of_group.iter().copied().filter(|row| row.metric == metric).collect();
            if drawn.iter().any(|row| is_drawn(row)) {
                chart(&mut out, metric, &drawn);
            }
        }
        figures(&mut out, &of_group);
    }
    out.push_str("</body></html>\n");
    out
}

fn group_of(row: &Row) -> &str {
    row.case.split('/').next().unwrap_or(&row.case)
}

/// Returns whether the row is a ratio for which more is better.
fn is_drawn(row: &Row) -> bool {
    let goal = row.unit == "ratio" && row.sense == Some(Sense::AtLeast);
    row.median.is_some() && (goal || DRAWN.contains(&row.metric.as_str()))
}

fn distinct<'a>(rows: &'a [Row], key: impl Fn(&'a Row) -> &'a str) -> Vec<&'a str> {
    let all: Vec<&Row> = rows.iter().collect();
    distinct_of(&all, key)
}

/// Returns every key once, in the order of the rows.
fn distinct_of<'a>(rows: &[&'a Row], key: impl Fn(&'a Row) -> &'a str) -> Vec<&'a str> {
    let mut out = Vec::new();
    for key in rows.iter().map(|row| key(row)) {
        if !out.contains(&key) {
            out.push(key);
        }
    }
    out
}

/// Draws the bars of one metric: cases from top to bottom, and the targets within each.
fn chart(out: &mut String, metric: &str, rows: &[&Row]) {
    let targets = distinct_of(rows, |row| &row.target);
    let longest = rows.iter().filter_map(|row| row.median).fold(1.1, f64::max).min(LONGEST);
    let scale = AXIS / longest;
    let _ = writeln!(out, "<h3>{}</h3>", escape(metric));
    if targets.len() > 1 {
        let key =
            |(i, target): (usize, &&str)| format!("<span style=\"color:{}\">■ {}</span>", colour(i), escape(target));
        let keys: String = targets.iter().enumerate().map(key).collect();
        let _ = writeln!(out, "<p class=\"key\">{keys}</p>");
    }
    let (mut y, mut bars) = (GAP, String::new());
    for case in distinct_of(rows, |row| &row.case) {
        let of_case: Vec<&&Row> = rows.iter().filter(|row| row.case == case).collect();
        let middle = y + of_case.len() as f64 * BAR / 2.0 + 4.0;
        let name = case.split_once('/').map_or(case, |(_, name)| name);
        let _ = writeln!(bars, "<text x=\"{}\" y=\"{middle}\" text-anchor=\"end\">{}</text>", LEFT - 8.0, escape(name));
        for row in of_case {
            let target = targets.iter().position(|t| *t == row.target).unwrap_or(0);
            bar(&mut bars, row, colour(target), y, scale);
            y += BAR;
        }
        y += GAP;
    }
    let _ = writeln!(out, "<svg viewBox=\"0 0 {WIDTH} {}\" width=\"{WIDTH}\" role=\"img\">", y + 18.0);
    for tick in (0..=(longest * 4.0) as usize).map(|i| i as f64 / 4.0) {
        let (x, dark) = (LEFT + tick * scale, if tick == 1.0 { "#555" } else { "#ddd" });
        let _ = writeln!(out, "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"0\" y2=\"{y}\" stroke=\"{dark}\"/>");
        let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{tick}</text>", y + 13.0);
    }
    out.push_str(&bars);
    out.push_str("</svg>\n");
}

fn colour(target: usize) -> &'static str {
    COLOURS[target.min(COLOURS.len() - 1)]
}

/// Draws one bar with its figure, the range of the samples, and its goal.
fn bar(out: &mut String, row: &Row, colour: &str, y: f64, scale: f64) {
    let place = |value: f64| LEFT + (value * scale).clamp(0.0, AXIS);
    let class = if row.met == Some(false) { " class=\"no\"" } else { "" };
    let Some(median) = row.median else {
        let _ = writeln!(out, "<text x=\"{}\" y=\"{}\"{class}>missing</text>", LEFT + 4.0, y + BAR - 2.0);
        return;
    };
    let (end, height, middle) = (place(median), BAR - 1.0, y + BAR / 2.0);
    let width = end - LEFT;
    let _ = writeln!(
        out,
        "<rect x=\"{LEFT}\" y=\"{y}\" width=\"{width:.1}\" height=\"{height}\" fill=\"{colour}\"><title>{} {}: \
         {median}</title></rect>",
        escape(&row.case),
        escape(&row.target)
    );
    let mut text = end;
    if let (Some(min), Some(max)) = (row.min, row.max)
        && min < max
    {
        text = text.max(place(max));
        let (from, to) = (place(min), place(max));
        let _ =
            writeln!(out, "<line x1=\"{from:.1}\" x2=\"{to:.1}\" y1=\"{middle}\" y2=\"{middle}\" stroke=\"#222\"/>");
    }
    if let Some(goal) = row.goal {
        let x = place(goal);
        text = text.max(x);
        let _ = writeln!(
            out,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{y}\" y2=\"{}\" stroke=\"#000\" stroke-width=\"2\"/>",
            y + BAR
        );
    }
    let [.., figure, _, _, _, _] = cells(row);
    let _ = writeln!(out, "<text x=\"{:.1}\" y=\"{}\"{class}>{figure}</text>", text + 4.0, y + BAR - 2.0);
}

/// Writes all rows as a collapsed table.
fn figures(out: &mut String, rows: &[&Row]) {
    let head: String = HEAD.iter().map(|h| format!("<th>{h}</th>")).collect();
    let _ = writeln!(out, "<details><summary>{} figures</summary><table><tr>{head}</tr>", rows.len());
    for row in rows {
        let cell = |(column, text): (usize, &String)| {
            let class = if (3..=5).contains(&column) { " class=\"figure\"" } else { "" };
            format!("<td{class}>{}</td>", escape(text))
        };
        let line: String = cells(row).iter().enumerate().map(cell).collect();
        let class = if row.met == Some(false) { " class=\"no\"" } else { "" };
        let _ = writeln!(out, "<tr{class}>{line}</tr>");
    }
    out.push_str("</table></details>\n");
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::Samples;

    fn row(case: &str, target: &str, metric: &str, value: Option<f64>) -> Row {
        let samples: Samples = value.into_iter().collect();
        Row::new("w2", case, target, metric, "ratio", &samples)
    }

    fn count(page: &str, what: &str) -> usize {
        page.matches(what).count()
    }

    #[test]
    fn every_ratio_is_a_bar_and_every_row_a_line() {
        let rows = [
            row("copy/a", "forkdisk", "spindle_ratio", Some(0.5)),
            row("copy/a", "dm-thin", "spindle_ratio", Some(0.25)),
            row("copy/a", "forkdisk", "read_bytes_per_byte", Some(1.0)),
            row("random/b", "forkdisk", "ssd_ratio", Some(9.0)),
        ];
        let page = page("w2", &rows);
        assert_eq!((count(&page, "<h2>"), count(&page, "<svg"), count(&page, "<rect")), (2, 2, 3));
        assert_eq!(count(&page, "<tr>"), 2 + 4);
        // Half of 1.1, a quarter of it, and cut off.
        for width in ["200.0", "100.0", "440.0"] {
            assert_eq!(count(&page, &format!("width=\"{width}\"")), 1, "{width}: {page}");
        }
    }

    #[test]
    fn what_misses_its_goal_is_red_and_what_is_missing_says_so() {
        let goal = |row: Row, met| Row { goal: Some(0.95), sense: Some(Sense::AtLeast), met: Some(met), ..row };
        let rows = [
            goal(row("split/a", "forkdisk", "ssd_ratio", Some(0.99)), true),
            goal(row("split/b", "forkdisk", "ssd_ratio", Some(0.90)), false),
            goal(row("split/c", "forkdisk", "ssd_ratio", None), false),
        ];
        let page = page("w2", &rows);
        assert!(page.contains("1 of 3 goals met"), "{page}");
        assert!(page.contains("class=\"no\">0.9000</text>") && page.contains("class=\"no\">missing</text>"), "{page}");
        assert_eq!((count(&page, "class=\"no\""), count(&page, "stroke-width")), (4, 2));
    }

    #[test]
    fn names_cannot_end_a_tag() {
        let page = page("a & <b>", &[row("x/<script>\"", "f<", "ssd_ratio", Some(1.0))]);
        assert!(page.contains("a &amp; &lt;b&gt;") && !page.contains("<script>") && !page.contains("f<:"), "{page}");
    }
}
