//! `laxity top`: what this host's daemon does, as a screen that follows it.
//!
//! This file has the arguments, the terminal and the keys. [`rows`] turns two answers of the daemon
//! into rows, [`flows`] has the flows of one job or client, and [`screen`] draws them. Only this
//! file asks the daemon or reads a clock.

mod flows;
mod rows;
mod screen;
#[cfg(test)]
mod tests;

use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum as _};
use laxity_cli::output::{OutputError, say};
use laxity_wire::explain::Explanation;
use laxity_wire::{ControlClient, ControlError, Status};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use thiserror::Error;

use self::flows::{FlowList, FlowsOwner};
use self::rows::{Line, View, arrange, rows};
use crate::host::Endpoint;

pub(crate) const HELP: &str = "\
Views: jobs, clients, stages, levels and ports. The column `why` says what a row waits for. Rates \
are those since the last refresh. Those of jobs and clients include bytes that are only observed.

Keys: 1 to 5 or Tab change the view; arrows select; Enter opens the flows of a job or a client, \
with the explanation of the selected flow, or the details of a port; d shows a job's clients, or \
the details of a client; Esc goes back; s sorts by the next column, r reverses the order; / \
filters by text; + and - change the interval; p pauses; q ends.

`laxity top --once` prints one screen and exits, for scripts and logs.";

const INTERVAL_S: std::ops::RangeInclusive<u64> = 1..=60;

#[derive(Args)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    endpoint: Endpoint,
    /// Seconds between refreshes
    #[arg(long, short, value_name = "N", default_value_t = 1)]
    interval: u64,
    /// The first view
    #[arg(long, value_enum, default_value_t)]
    view: View,
    /// Print one screen and exit
    #[arg(long)]
    once: bool,
    /// Size of the screen that --once prints
    #[arg(long, value_names = ["COLUMNS", "LINES"], num_args = 2, default_values_t = [80, 24])]
    size: Vec<u16>,
}

#[derive(Debug, Error)]
pub(crate) enum TopError {
    #[error(transparent)]
    Daemon(#[from] ControlError),
    #[error("`laxity top` needs a terminal; `laxity top --once` prints one screen without")]
    NoTerminal,
    #[error("the terminal failed: {0}")]
    Terminal(#[from] io::Error),
    #[error(transparent)]
    Output(#[from] OutputError),
}

#[derive(Debug, Default)]
struct Top {
    view: View,
    /// The column that rows are sorted by, and whether the smallest comes first.
    sort: usize,
    ascending: bool,
    filter: String,
    typing: bool,
    selected: usize,
    detail: Option<String>,
    /// The flows of the row that was opened, in front of the view.
    flows: Option<FlowList>,
    paused: bool,
    interval_s: u64,
    /// The last answer, the one before it, and the time between the two.
    now: Status,
    before: Option<(Status, Duration)>,
    /// Why the daemon did not answer last.
    problem: Option<String>,
}

impl Top {
    fn new(view: View, interval_s: u64, now: Status) -> Self {
        let interval_s = interval_s.clamp(*INTERVAL_S.start(), *INTERVAL_S.end());
        Self { view, sort: view.first_sort(), interval_s, now, ..Self::default() }
    }

    fn take(&mut self, answer: Result<Status, ControlError>, elapsed: Duration) {
        match answer {
            Ok(status) => {
                let old = std::mem::replace(&mut self.now, status);
                // Counters of another daemon begin at zero.
                self.before = (old.pid == self.now.pid).then_some((old, elapsed));
                self.problem = None;
            }
            Err(error) => self.problem = Some(error.to_string()),
        }
    }

    fn rows(&self) -> Vec<Line> {
        let mut rows = rows(self.view, &self.now, self.before.as_ref());
        arrange(&mut rows, &self.filter, self.sort, self.ascending);
        rows
    }

    fn selected_row(&self) -> Option<Line> {
        let mut rows = self.rows();
        let last = rows.len().checked_sub(1)?;
        Some(rows.swap_remove(self.selected.min(last)))
    }

    fn show(&mut self, view: View) {
        (self.view, self.sort, self.ascending) = (view, view.first_sort(), false);
        (self.selected, self.detail, self.flows) = (0, None, None);
    }

    /// Handles a key. Returns false if it ends the program.
    fn key(&mut self, key: KeyEvent) -> bool {
        if key.kind == KeyEventKind::Release {
            return true;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return key.code != KeyCode::Char('c');
        }
        if self.typing {
            match key.code {
                KeyCode::Char(letter) => self.filter.push(letter),
                KeyCode::Backspace => drop(self.filter.pop()),
                KeyCode::Esc => (self.typing, self.filter) = (false, String::new()),
                KeyCode::Enter => self.typing = false,
                _ => {}
            }
            self.selected = 0;
            return true;
        }
        if self.flow_key(key.code) {
            return true;
        }
        let last = self.rows().len().saturating_sub(1);
        match key.code {
            KeyCode::Char('q') => return false,
            KeyCode::Char(digit @ '1'..='5') => {
                self.show(View::value_variants()[digit as usize - '1' as usize]);
            }
            KeyCode::Tab => self.show(self.view.next()),
            KeyCode::Down => self.selected = (self.selected + 1).min(last),
            KeyCode::Up => self.selected = self.selected.min(last).saturating_sub(1),
            KeyCode::Char('s') => self.sort = (self.sort + 1) % self.view.header().len(),
            KeyCode::Char('r') => self.ascending = !self.ascending,
            KeyCode::Char('/') => (self.typing, self.detail) = (true, None),
            KeyCode::Char('p') => self.paused = !self.paused,
            KeyCode::Char('+') => self.interval_s = (self.interval_s + 1).min(*INTERVAL_S.end()),
            KeyCode::Char('-') => self.interval_s = (self.interval_s - 1).max(*INTERVAL_S.start()),
            KeyCode::Enter => self.open(),
            KeyCode::Char('d') => self.open_details(),
            KeyCode::Esc if self.detail.is_some() => self.detail = None,
            KeyCode::Esc => self.filter.clear(),
            _ => {}
        }
        true
    }

    /// Handles a key that means something else while flows are shown. Returns false for others.
    fn flow_key(&mut self, code: KeyCode) -> bool {
        let Some(flows) = &mut self.flows else { return false };
        match code {
            KeyCode::Down | KeyCode::Up => flows.step(code == KeyCode::Down),
            KeyCode::Enter => flows.is_open = !flows.flows().is_empty(),
            KeyCode::Esc if flows.is_open => flows.is_open = false,
            KeyCode::Esc => self.flows = None,
            // These act on the rows behind.
            KeyCode::Char('s' | 'r' | '/' | 'd') => {}
            _ => return false,
        }
        true
    }

    /// Opens the selected row: the flows of a job or a client, or the details of a port.
    fn open(&mut self) {
        let Some(line) = self.selected_row() else { return };
        let owner = match self.view {
            View::Jobs => FlowsOwner::Job(line.key),
            View::Clients => {
                FlowsOwner::Client(line.key.parse().unwrap_or(0), line.cells[0].text.clone())
            }
            View::Ports => return self.detail = Some(line.key),
            View::Stages | View::Levels => return,
        };
        (self.detail, self.flows) = (None, Some(FlowList::new(owner)));
    }

    /// Opens more about the selected row: a job's clients, or the details of a client or a port.
    fn open_details(&mut self) {
        let Some(line) = self.selected_row() else { return };
        match self.view {
            View::Jobs => {
                self.show(View::Clients);
                self.filter = line.key;
            }
            View::Clients | View::Ports => self.detail = Some(line.key),
            View::Stages | View::Levels => {}
        }
    }

    /// Asks about the flows that are shown, if any are.
    fn ask_flows(&mut self, daemon: &mut DaemonConnection<'_>) {
        let Some(flows) = &mut self.flows else { return };
        let answers: Result<Vec<Explanation>, ControlError> =
            (flows.queries(&self.now).into_iter())
                .map(|wanted| daemon.ask(|client| client.explain(wanted)))
                .collect();
        match answers {
            Ok(answers) => flows.take(&self.now, answers),
            Err(error) => self.problem = Some(error.to_string()),
        }
    }
}

/// The daemon of this host. It connects again after a failure.
struct DaemonConnection<'a> {
    endpoint: &'a Endpoint,
    client: Option<ControlClient>,
}

impl DaemonConnection<'_> {
    fn ask<T>(
        &mut self,
        question: impl FnOnce(&mut ControlClient) -> Result<T, ControlError>,
    ) -> Result<T, ControlError> {
        let mut client = match self.client.take() {
            Some(client) => client,
            None => self.endpoint.connect()?,
        };
        let answer = question(&mut client)?;
        self.client = Some(client);
        Ok(answer)
    }
}

/// Shows the screen until somebody ends it.
pub(crate) fn top(args: &TopArgs) -> Result<(), TopError> {
    let mut daemon = DaemonConnection { endpoint: &args.endpoint, client: None };
    let mut top = Top::new(args.view, args.interval, daemon.ask(ControlClient::status)?);
    if args.once {
        let asked = Instant::now();
        std::thread::sleep(Duration::from_secs(top.interval_s));
        top.take(daemon.ask(ControlClient::status), asked.elapsed());
        return Ok(say(once(&top, args.size[0], args.size[1]))?);
    }
    if !io::stdout().is_terminal() {
        return Err(TopError::NoTerminal);
    }
    let mut terminal = ratatui::init();
    let result = (|| {
        let mut asked = Instant::now();
        loop {
            terminal.draw(|frame| screen::draw(frame, &top))?;
            let left = Duration::from_secs(top.interval_s).saturating_sub(asked.elapsed());
            if event::poll(left)? {
                if let Event::Key(key) = event::read()? {
                    let showed = top.flows.is_some();
                    if !top.key(key) {
                        return Ok(());
                    }
                    if !showed {
                        // The flows of a row that was just opened must not wait for a refresh.
                        top.ask_flows(&mut daemon);
                    }
                }
            } else if top.paused {
                asked = Instant::now();
            } else {
                let answer = daemon.ask(ControlClient::status);
                top.take(answer, asked.elapsed());
                top.ask_flows(&mut daemon);
                asked = Instant::now();
            }
        }
    })();
    ratatui::restore();
    result
}

fn once(top: &Top, columns: u16, lines: u16) -> String {
    let mut terminal = match Terminal::new(TestBackend::new(columns, lines)) {
        Ok(terminal) => terminal,
        Err(never) => match never {},
    };
    let drawn = terminal.draw(|frame| screen::draw(frame, top));
    let Ok(drawn) = drawn;
    let cells = drawn.buffer.content().chunks(usize::from(columns).max(1));
    let line = |cells: &[ratatui::buffer::Cell]| {
        let text: String = cells.iter().map(ratatui::buffer::Cell::symbol).collect();
        text.trim_end().to_owned()
    };
    cells.map(line).collect::<Vec<_>>().join("\n").trim_end().to_owned()
}
