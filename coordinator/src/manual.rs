//! Manual pages and completions of `laxity-coordinator`, generated from its flags and the sample
//! configuration.

use std::io;

use clap::{CommandFactory, ValueEnum};
use laxity_files::manual::configuration_page;

use crate::Arguments;

/// The sample configuration, which explains every key.
const SAMPLE: &str = include_str!("../../dist/laxity-coordinator.toml");

/// The end of the program's page, which clap does not know.
const FILES: &str = concat!(
    ".SH FILES\n.TP\n/etc/laxity/coordinator.toml\nconfiguration; optional\n",
    ".SH \"SEE ALSO\"\nlaxity-coordinator.toml(5), laxity(1), laxityd(8)\n",
);

/// A page of the manual.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Page {
    /// laxity-coordinator(8)
    #[value(name = "laxity-coordinator.8")]
    Program,
    /// laxity-coordinator.toml(5)
    #[value(name = "laxity-coordinator.toml.5")]
    Configuration,
}

/// Returns the roff source of a page.
pub(crate) fn page(page: Page) -> io::Result<Vec<u8>> {
    match page {
        Page::Program => {
            let mut text = Vec::new();
            clap_mangen::Man::new(Arguments::command()).section("8").render(&mut text)?;
            text.extend_from_slice(FILES.as_bytes());
            Ok(text)
        }
        Page::Configuration => {
            let version = env!("CARGO_PKG_VERSION");
            let see = "laxity-coordinator(8), laxity(1)";
            let page = configuration_page(
                "laxity-coordinator", version, "/etc/laxity/coordinator.toml", SAMPLE, see,
            );
            Ok(page.into_bytes())
        }
    }
}

pub(crate) fn completions(shell: clap_complete::Shell) -> Vec<u8> {
    let mut script = Vec::new();
    let program = "laxity-coordinator";
    clap_complete::generate(shell, &mut Arguments::command(), program, &mut script);
    script
}
