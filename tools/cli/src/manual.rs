//! Shell completions and manual pages, which are generated from the definitions of the flags.

use std::fs;
use std::path::Path;

use clap::Command;

use crate::output::{OutputError, put};

/// Writes the completion script of `shell` to standard output.
pub fn completions(mut command: Command, shell: clap_complete::Shell) -> Result<(), OutputError> {
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut script);
    put(&script)
}

/// Writes the program's page to standard output, or one page per command into `folder`.
pub fn pages(command: Command, folder: Option<&Path>) -> Result<(), OutputError> {
    match folder {
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(command).render(&mut page).map_err(OutputError::Stdout)?;
            put(&page)
        }
        Some(folder) => fs::create_dir_all(folder)
            .and_then(|()| clap_mangen::generate_to(command, folder))
            .map_err(|cause| OutputError::File { path: folder.to_owned(), cause }),
    }
}
