//! A view on a terminal, until a key ends it.

use std::time::{Duration, Instant};

use anyhow::Result;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::widgets::{Paragraph, Row, Table, Wrap};
use ratatui::{DefaultTerminal, Frame};

use super::rates::{COLUMNS, View};

/// Text of the last line.
const KEYS: &str = "q, Esc, Ctrl-C: end";

/// Shows one view after the other, each for about `interval`, until a key ends it. `next` computes them.
pub fn run(interval: Duration, mut next: impl FnMut() -> Result<View>) -> Result<()> {
    let mut terminal = ratatui::try_init()?;
    let outcome = show(&mut terminal, interval, &mut next);
    ratatui::restore();
    outcome
}

fn show(terminal: &mut DefaultTerminal, interval: Duration, next: &mut impl FnMut() -> Result<View>) -> Result<()> {
    loop {
        let view = next()?;
        terminal.draw(|frame| draw(frame, &view))?;
        let end = Instant::now() + interval;
        while let Some(left) = end.checked_duration_since(Instant::now()) {
            if !event::poll(left)? {
                break;
            }
            match event::read()? {
                Event::Key(key) if key.kind == KeyEventKind::Press && ends(key.code, key.modifiers) => return Ok(()),
                Event::Resize(..) => {
                    terminal.draw(|frame| draw(frame, &view))?;
                }
                _ => {}
            }
        }
    }
}

fn ends(code: KeyCode, modifiers: KeyModifiers) -> bool {
    matches!(code, KeyCode::Char('q') | KeyCode::Esc)
        || code == KeyCode::Char('c') && modifiers.contains(KeyModifiers::CONTROL)
}

/// Columns that a narrow terminal leaves out, as indices of [`COLUMNS`], in this order.
const SPARE: [usize; 5] = [8, 10, 7, 9, 11];
const SPACING_COLUMNS: u16 = 2;

fn draw(frame: &mut Frame<'_>, view: &View) {
    let width = frame.area().width;
    let lines: usize = view.head.iter().map(|line| line.len().div_ceil(width.max(1).into()).max(1)).sum();
    let head = u16::try_from(lines).unwrap_or(u16::MAX).saturating_add(1);
    let parts = [Constraint::Length(head), Constraint::Min(0), Constraint::Length(1)];
    let [above, below, foot] = Layout::vertical(parts).areas(frame.area());
    frame.render_widget(Paragraph::new(view.head.join("\n")).wrap(Wrap { trim: false }), above);
    let rows: Vec<[String; COLUMNS.len()]> =
        std::iter::once(&view.total).chain(&view.rows).map(|row| row.cells()).collect();
    let widths: [u16; COLUMNS.len()] = std::array::from_fn(|i| {
        rows.iter().map(|row| row[i].len()).chain([COLUMNS[i].len()]).max().unwrap_or(0) as u16
    });
    let shown = columns_for(width, &widths);
    let heading = Row::new(shown.iter().map(|&i| COLUMNS[i])).style(Style::new().add_modifier(Modifier::REVERSED));
    let cells = rows.iter().map(|row| Row::new(shown.iter().map(|&i| row[i].clone()).collect::<Vec<_>>()));
    let table = Table::new(cells, shown.iter().map(|&i| Constraint::Length(widths[i]))).header(heading);
    frame.render_widget(table.column_spacing(SPACING_COLUMNS), below);
    frame.render_widget(Paragraph::new(KEYS), foot);
}

/// Returns the columns that fit in `width`, as far as leaving out others suffices.
fn columns_for(width: u16, widths: &[u16]) -> Vec<usize> {
    let mut shown: Vec<usize> = (0..widths.len()).collect();
    for spare in SPARE {
        if shown.iter().map(|&i| widths[i] + SPACING_COLUMNS).sum::<u16>() <= width + SPACING_COLUMNS {
            break;
        }
        shown.retain(|&i| i != spare);
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;
    use forkdisk_monitor::Statistics;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    #[test]
    fn a_small_terminal_shows_what_fits() {
        let view = View::between(&Statistics::default(), &Statistics::default(), 1.0);
        for (width, height) in [(120, 30), (20, 3), (1, 1)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
            terminal.draw(|frame| draw(frame, &view)).unwrap();
            let text: String = terminal.backend().buffer().content().iter().map(|cell| cell.symbol()).collect();
            assert_eq!(text.contains("WRITE/S"), width == 120, "{width}x{height}");
        }
    }

    #[test]
    fn figures_and_lines_are_whole_on_80_columns() {
        let mut view = View::between(&Statistics::default(), &Statistics::default(), 1.0);
        (view.total.read_latency, view.total.write_latency) = ([262.0, 16_400.0], [999.0, 123_400.0]);
        let last = format!("{}end", "x".repeat(150));
        view.head.push(last);
        let mut terminal = Terminal::new(TestBackend::new(80, 30)).unwrap();
        terminal.draw(|frame| draw(frame, &view)).unwrap();
        let text: String = terminal.backend().buffer().content().iter().map(|cell| cell.symbol()).collect();
        for part in [view.total.cells()[3].as_str(), view.total.cells()[6].as_str(), "xend", KEYS] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn q_escape_and_control_c_end_it() {
        let none = KeyModifiers::NONE;
        assert!(ends(KeyCode::Char('q'), none) && ends(KeyCode::Esc, none));
        assert!(ends(KeyCode::Char('c'), KeyModifiers::CONTROL) && !ends(KeyCode::Char('c'), none));
    }
}
