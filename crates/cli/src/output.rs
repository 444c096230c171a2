//! Output on stdout: tables for people, tab-separated lines for scripts, JSON for programs.

use std::fmt;
use std::io::{self, Write};

use anyhow::Result;
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::dates;
use crate::size::human;

/// Format of results: tables for people, JSON for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Text,
    Json,
}

impl Format {
    /// Name of JSON on the command line.
    pub const JSON: &str = "json";
}

/// Options of every verb.
#[derive(Args, Clone, Debug)]
pub struct OutputArgs {
    /// Write JSON, sizes in bytes and times in seconds since 1970
    #[arg(long, global = true)]
    json: bool,

    /// Write results as text or JSON
    #[arg(long, global = true, value_enum, default_value = "text", hide_default_value = true, value_name = "FORMAT")]
    output: Format,
}

impl OutputArgs {
    /// Returns whether the user wants JSON.
    pub fn json(&self) -> bool {
        self.json || self.output == Format::Json
    }
}

/// Options of the verbs that print tables.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct TableArgs {
    /// No header, columns separated by one tab
    #[arg(short = 'H', long = "no-header")]
    scripted: bool,

    /// Exact figures: bytes, seconds since 1970
    #[arg(short = 'p', long = "exact")]
    exact: bool,
}

impl TableArgs {
    /// Formats `bytes` as the options say.
    pub fn size(&self, bytes: u64) -> String {
        if self.exact { bytes.to_string() } else { human(bytes) }
    }

    /// Formats `seconds` since 1970 as the options say.
    pub fn time(&self, seconds: u64) -> String {
        if self.exact { seconds.to_string() } else { dates::utc(seconds) }
    }

    /// Returns whether headers and remarks may be printed.
    pub fn is_for_people(&self) -> bool {
        !self.scripted
    }

    /// Writes `rows`, one cell per column, below `header`.
    pub fn print(&self, header: &[Column], rows: &[Vec<String>]) -> Result<()> {
        self.print_fitting(header, rows, &[])
    }

    /// As [`print`](Self::print); on a terminal that is too narrow, drops as many of the columns
    /// `spare` as needed, in their order.
    pub fn print_fitting(&self, header: &[Column], rows: &[Vec<String>], spare: &[&str]) -> Result<()> {
        let text = match (self.scripted, terminal_width()) {
            (true, _) => rows.iter().map(|row| row.join("\t") + "\n").collect(),
            (false, Some(most)) => fit(header, rows, spare, most),
            (false, None) => layout(header, rows),
        };
        print(text.as_bytes())
    }
}

/// Heading and alignment of a column.
#[derive(Clone, Copy, Debug)]
pub enum Column {
    /// Text, aligned to the left.
    Left(&'static str),
    /// Numbers, aligned to the right.
    Right(&'static str),
}

impl Column {
    fn title(&self) -> &'static str {
        match self {
            Column::Left(title) | Column::Right(title) => title,
        }
    }
}

/// Returns the width of the terminal on standard output; `None` if it is not a terminal.
fn terminal_width() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    (size.ws_col > 0).then_some(size.ws_col.into())
}

/// Formats the table in lines of at most `most` columns, if dropping all of `spare` suffices for that.
fn fit(header: &[Column], rows: &[Vec<String>], spare: &[&str], most: usize) -> String {
    let mut left: Vec<usize> = (0..header.len()).collect();
    let mut spare = spare.iter();
    loop {
        let cells = |row: &Vec<String>| left.iter().map(|&i| row[i].clone()).collect();
        let heading: Vec<Column> = left.iter().map(|&i| header[i]).collect();
        let text = layout(&heading, &rows.iter().map(cells).collect::<Vec<_>>());
        let is_wide = text.lines().any(|line| line.chars().count() > most);
        match spare.next().filter(|_| is_wide) {
            Some(title) => left.retain(|&i| header[i].title() != *title),
            None => return text,
        }
    }
}

fn layout(header: &[Column], rows: &[Vec<String>]) -> String {
    let width = |i: usize| rows.iter().map(|r| r[i].len()).max().unwrap_or(0).max(header[i].title().len());
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let titles: Vec<String> = header.iter().map(|c| c.title().to_string()).collect();
    let mut text = String::new();
    for row in std::iter::once(&titles).chain(rows) {
        let cells: Vec<String> = row
            .iter()
            .enumerate()
            .map(|(i, cell)| match header[i] {
                Column::Left(_) => format!("{cell:<width$}", width = widths[i]),
                Column::Right(_) => format!("{cell:>width$}", width = widths[i]),
            })
            .collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Writes `value` as JSON, indented.
pub fn print_json(value: &impl Serialize) -> Result<()> {
    print_line(&serde_json::to_string_pretty(value)?)
}

/// Writes `value` as JSON on one line.
pub fn print_json_line(value: &impl Serialize) -> Result<()> {
    print_line(&serde_json::to_string(value)?)
}

/// Writes one line.
pub fn print_line(line: &str) -> Result<()> {
    print(format!("{line}\n").as_bytes())
}

/// Standard output was closed by its reader. Not a failure: the verb has done its work.
#[derive(Debug)]
pub struct ReaderGone;

impl fmt::Display for ReaderGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output was closed by its reader")
    }
}

impl std::error::Error for ReaderGone {}

/// Writes to standard output. Only here does a closed pipe become [`ReaderGone`]; for an export or
/// a connection it stays a failure.
pub fn print(bytes: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Err(ReaderGone.into()),
        outcome => Ok(outcome?),
    }
}

/// Formats a part of a whole in percent.
pub fn percent_of(part: u64, whole: u64) -> String {
    format!("{:.1}%", if whole == 0 { 0.0 } else { 100.0 * part as f64 / whole as f64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_narrow_terminal_shows_the_columns_that_matter_most() {
        let header = [Column::Left("NAME"), Column::Right("SIZE"), Column::Left("MORE"), Column::Left("MOST")];
        let rows = vec![vec!["a".into(), "1K".into(), "long text".into(), "b".into()]];
        let shown = |most| fit(&header, &rows, &["MORE", "MOST"], most).lines().next().unwrap().to_string();
        assert_eq!(shown(27), "NAME  SIZE  MORE       MOST");
        assert_eq!(shown(26), "NAME  SIZE  MOST");
        assert_eq!(shown(15), "NAME  SIZE");
        assert_eq!(shown(3), "NAME  SIZE", "what is left stays");
    }

    #[test]
    fn figures_line_up_on_the_right() {
        let rows = vec![vec!["a".into(), "1K".into()], vec!["longer".into(), "20.5G".into()]];
        let text = layout(&[Column::Left("NAME"), Column::Right("SIZE")], &rows);
        assert_eq!(text, "NAME     SIZE\na          1K\nlonger  20.5G\n");
    }
}
