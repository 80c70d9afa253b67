//! Manual pages and completions of `laxityd`, from its flags and the sample configuration.

use std::io;

use clap::{CommandFactory, ValueEnum};
use laxity_files::manual::configuration_page;

use crate::Arguments;

/// The sample configuration, which explains every key.
const SAMPLE: &str = include_str!("../../dist/laxityd.toml");

/// The end of the program's page, which clap does not know.
const FILES: &str = concat!(
    ".SH FILES\n.TP\n/etc/laxity/laxityd.toml\nconfiguration; optional\n",
    ".TP\n/run/laxity/\nsockets, and the marker of a bypass that is on\n",
    ".SH \"SEE ALSO\"\nlaxityd.toml(5), laxity(1)\n",
);

/// A page of the manual.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Page {
    /// laxityd(8)
    #[value(name = "laxityd.8")]
    Program,
    /// laxityd.toml(5)
    #[value(name = "laxityd.toml.5")]
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
            let see = "laxityd(8), laxity(1)";
            let page =
                configuration_page("laxityd", version, "/etc/laxity/laxityd.toml", SAMPLE, see);
            Ok(page.into_bytes())
        }
    }
}

/// Returns the completion script of `shell`.
pub(crate) fn completions(shell: clap_complete::Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "laxityd", &mut script);
    script
}
