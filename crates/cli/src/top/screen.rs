//! A view on a terminal, until somebody presses q.

use std::time::{Duration, Instant};

use anyhow::Result;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::widgets::{Paragraph, Row, Table};
use ratatui::{DefaultTerminal, Frame};

use super::rates::{COLUMNS, View};

/// Shows one view after the other, each for about `interval`, until a key ends it. `next` makes them.
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

fn draw(frame: &mut Frame<'_>, view: &View) {
    let head = view.head.len() as u16 + 1;
    let [above, below] = Layout::vertical([Constraint::Length(head), Constraint::Min(0)]).areas(frame.area());
    frame.render_widget(Paragraph::new(view.head.join("\n")), above);
    let rows: Vec<[String; COLUMNS.len()]> =
        std::iter::once(&view.total).chain(&view.rows).map(|row| row.cells()).collect();
    let width = |i: usize| rows.iter().map(|row| row[i].len()).chain([COLUMNS[i].len()]).max().unwrap_or(0) as u16;
    let widths = (0..COLUMNS.len()).map(|i| Constraint::Length(width(i)));
    let heading = Row::new(COLUMNS).style(Style::new().add_modifier(Modifier::REVERSED));
    let table = Table::new(rows.iter().map(|row| Row::new(row.iter().cloned())), widths).header(heading);
    frame.render_widget(table.column_spacing(2), below);
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
    fn q_escape_and_control_c_end_it() {
        let none = KeyModifiers::NONE;
        assert!(ends(KeyCode::Char('q'), none) && ends(KeyCode::Esc, none));
        assert!(ends(KeyCode::Char('c'), KeyModifiers::CONTROL) && !ends(KeyCode::Char('c'), none));
    }
}
