//! The catalogue of the matrix: reads the programs, their arguments and their work requests from
//! `catalogue.toml`, which describes its settings.

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;

use super::daemon::TIGHT_SOCKET;
use super::program::{Launch, Posted, Program, Ready, Side, Through};
use super::{Lab, Programs};
use crate::error::LabError;
use crate::vm::network::{ADDRESSES, DEVICES};

pub(super) const MOONCAKE: &str = scratch!("transfer_engine.py");
pub(super) const MOONCAKE_PY: &str = include_str!("transfer_engine.py");

/// The secret of the job, for programs whose queue pairs get bundles.
pub(super) const SECRET: &str = scratch!("job.secret");

/// Programs that are not in the matrix: perftests that run for long.
pub(super) const LONG_WRITE: &str = "ib_write_bw";
pub(super) const LONG_BUNDLE: &str = "ib_read_bw_bundle";

#[derive(Deserialize)]
struct Catalogue {
    group: Vec<ProgramGroup>,
}

#[derive(Deserialize)]
struct ProgramGroup {
    programs: Vec<toml::Table>,
    #[serde(flatten)]
    common: toml::Table,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Entry {
    name: String,
    outside_matrix: bool,
    line: String,
    both: Option<String>,
    server: Option<String>,
    client: Option<String>,
    env: Vec<String>,
    run: bool,
    profile: Option<String>,
    limit_s: Option<u64>,
    port: Option<u16>,
    posts: Option<u64>,
    bytes: u64,
    both_post: bool,
    stated: bool,
    defers: bool,
    fails: bool,
    siblings: bool,
    datagrams_only: bool,
    dscp: Option<u8>,
    datagram_dscp: Option<u8>,
}

/// Returns all programs of the catalogue.
///
/// # Panics
/// Never: the catalogue is a part of this program, and a test reads it.
fn entries() -> impl Iterator<Item = Entry> {
    let text = include_str!("catalogue.toml");
    let catalogue: Catalogue = toml::from_str(text).expect("the catalogue has groups");
    catalogue.group.into_iter().flat_map(|group| {
        let common = group.common;
        group.programs.into_iter().map(move |own| {
            let mut all = common.clone();
            all.extend(own);
            all.try_into().expect("the settings of a program are right")
        })
    })
}

impl Entry {
    /// Makes a side of the program: 0 is the server, and 1 is the client.
    fn side(
        &self,
        command: &str,
        side: usize,
        posted: Posted,
        (gid, programs): (u32, &Programs),
    ) -> Side {
        let path = |path: &Path| path.display().to_string();
        let values = [
            ("{device}", DEVICES[side].to_owned()),
            ("{peer}", ["", ADDRESSES[0]][side].to_owned()),
            ("{gid}", gid.to_string()),
            ("{checks}", path(&programs.checks)),
            ("{python}", programs.python.as_deref().map_or_else(String::new, path)),
            ("{mooncake}", MOONCAKE.to_owned()),
            ("{tight}", TIGHT_SOCKET.to_owned()),
            ("{secret}", SECRET.to_owned()),
        ];
        let fill = |word: &str| {
            values.iter().fold(word.to_owned(), |word, (name, value)| word.replace(name, value))
        };
        let command = command.replace("{line}", &self.line);
        let argv = command.split_whitespace().map(fill).filter(|word| !word.is_empty());
        let set = self.env.iter().filter_map(|set| set.split_once('='));
        Side {
            argv: argv.collect(),
            env: set.map(|(name, value)| (name.to_owned(), fill(value))).collect(),
            posted,
        }
    }

    fn program(self, context: (u32, &Programs)) -> Program {
        let exactly = |count| Posted::Exactly { work_requests: count, bytes: count * self.bytes };
        let posted = match self.posts {
            Some(count) => exactly(count),
            None if self.stated => Posted::Stated,
            None => Posted::Wire,
        };
        let is_silent = self.posts.is_some() && !self.both_post;
        let by_server = if is_silent { exactly(0) } else { posted };
        let ready = self.port.map_or(Ready::Management, Ready::Port);
        let server = self.server.as_ref().or(self.both.as_ref());
        let client = self.client.as_ref().or(self.both.as_ref()).map_or("", String::as_str);
        Program {
            launch: Launch {
                through: if self.run { Through::Run } else { Through::Preload },
                profile: self.profile.clone().unwrap_or_else(|| "default".to_owned()),
                limit: Duration::from_secs(self.limit_s.unwrap_or(300)),
            },
            server: server.map(|command| (self.side(command, 0, by_server, context), ready)),
            client: self.side(client, 1, posted, context),
            must_defer: self.defers,
            dscp: self.dscp.filter(|_| !self.datagrams_only),
            datagram_dscp: self.datagram_dscp,
            // Barriers of bundles are messages, too.
            all_cross: !self.fails && !self.siblings,
            siblings: self.siblings,
            name: self.name,
        }
    }

    /// Reports whether the program needs what this run does not have.
    fn lacks_python(&self, programs: &Programs) -> bool {
        let of_mooncake = |command: &String| command.contains("{python}");
        programs.python.is_none() && self.client.as_ref().is_some_and(of_mooncake)
    }
}

pub(super) fn all(gid: u32, programs: &Programs) -> Vec<Program> {
    entries()
        .filter(|entry| !entry.outside_matrix && !entry.lacks_python(programs))
        .map(|entry| entry.program((gid, programs)))
        .collect()
}

/// Returns a program that is not in the matrix.
pub(super) fn find(name: &str, lab: &Lab<'_>) -> Result<Program, LabError> {
    entries()
        .find(|entry| entry.outside_matrix && entry.name == name)
        .filter(|entry| !entry.lacks_python(lab.programs))
        .map(|entry| entry.program((lab.guest.facts.gid_index, lab.programs)))
        .ok_or_else(|| {
            let next_step = "run without --without-mooncake";
            LabError::missing("the Mooncake Transfer Engine", next_step)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_programs_have_names_of_their_own_and_commands_without_gaps() {
        for entry in entries() {
            let program = entry.program((3, &Programs::default()));
            let sides = program.server.iter().map(|(side, _)| side).chain([&program.client]);
            let words: Vec<&String> = sides
                .flat_map(|side| side.argv.iter().chain(side.env.iter().map(|(_, value)| value)))
                .collect();
            assert!(!words.is_empty() && !words.iter().any(|word| word.contains('{')), "{words:?}");
        }
        let names = crate::vm::verbs::names(3);
        let different: std::collections::BTreeSet<&String> = names.iter().collect();
        assert_eq!(different.len(), names.len(), "{names:?}");
    }
}
