//! Shell completions and manual pages, made from the same definitions as the flags.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use clap::CommandFactory;

use crate::Cli;
use crate::output::put;

/// Writes the completion script of `shell` to standard output.
pub(crate) fn completions(shell: clap_complete::Shell) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "laxity", &mut script);
    put(&script)
}

/// Writes `laxity(1)` to standard output, or all pages into `folder`.
pub(crate) fn pages(folder: Option<&Path>) -> Result<()> {
    let command = Cli::command();
    match folder {
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(command).render(&mut page)?;
            put(&page)
        }
        Some(folder) => fs::create_dir_all(folder)
            .and_then(|()| clap_mangen::generate_to(command, folder))
            .with_context(|| format!("cannot write manual pages into {}", folder.display())),
    }
}
