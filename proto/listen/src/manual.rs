//! The manual pages and the completions of a service, from its flags and its sample configuration.

use std::io;

use clap::{Args, Command};
use clap_complete::Shell;

/// Flags for installing a service, which print something and end.
#[derive(Debug, Args)]
pub struct InstallArgs {
    /// Prints a manual page and exits (for installing)
    #[arg(long, value_name = "PAGE", hide = true)]
    manual: Option<String>,
    /// Prints a shell's completion script and exits (for installing)
    #[arg(long, value_name = "SHELL", hide = true)]
    completions: Option<Shell>,
}

/// What the pages of a service say besides its flags.
#[derive(Clone, Copy, Debug)]
pub struct ServicePages {
    /// The end of the program's page, in roff.
    pub end: &'static str,
    /// The path of the configuration file.
    pub path: &'static str,
    /// The sample configuration, which has all keys with their defaults.
    pub sample: &'static str,
    /// The other pages that the configuration's page names.
    pub see: &'static str,
}

impl InstallArgs {
    /// Returns what to print, if one of the flags is given. A service has the pages `NAME.8` and
    /// `NAME.toml.5`.
    pub fn text(&self, mut command: Command, pages: &ServicePages) -> io::Result<Option<Vec<u8>>> {
        let name = command.get_name().to_owned();
        let mut text = Vec::new();
        if let Some(shell) = self.completions {
            clap_complete::generate(shell, &mut command, name, &mut text);
            return Ok(Some(text));
        }
        let Some(page) = &self.manual else { return Ok(None) };
        match page.strip_prefix(&name) {
            Some(".8") => {
                clap_mangen::Man::new(command).section("8").render(&mut text)?;
                text.extend_from_slice(pages.end.as_bytes());
            }
            Some(".toml.5") => text = configuration_page(&name, pages).into_bytes(),
            _ => return Err(io::Error::other(format!("{name} has no page {page}"))),
        }
        Ok(Some(text))
    }
}

/// Returns the roff source of a configuration file's page.
fn configuration_page(program: &str, pages: &ServicePages) -> String {
    let ServicePages { path, sample, see, .. } = pages;
    let version = env!("CARGO_PKG_VERSION");
    format!(
        ".TH {program}.toml 5 \"\" \"{program} {version}\"\n\
         .SH NAME\n{program}.toml \\- configuration of {program}\n\
         .SH SYNOPSIS\n{path}\n\
         .SH DESCRIPTION\nA TOML file; optional, as every key in it. \
         This is all of it, with the defaults:\n.PP\n.nf\n{}.fi\n\
         .SH \"SEE ALSO\"\n{see}\n",
        verbatim(sample)
    )
}

/// Escapes text so that roff shows it unchanged.
fn verbatim(text: &str) -> String {
    text.lines()
        .map(|line| {
            let line = line.replace('\\', "\\e").replace('-', "\\-");
            // `\&` keeps roff from taking the line for a roff request.
            let mark = if line.starts_with(['.', '\'']) { "\\&" } else { "" };
            format!("{mark}{line}\n")
        })
        .collect()
}
