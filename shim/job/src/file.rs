//! The format of a profile's file, and the position of a mistake in it.

use std::time::Duration;

use laxity_quantity::Nanos;
use laxity_shm::layout::Mode;
use laxity_shm::record::Stage;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

pub(crate) fn stage<'de, D: Deserializer<'de>>(d: D) -> Result<Stage, D::Error> {
    let name = String::deserialize(d)?;
    let known = || Stage::ALL.map(Stage::name).join(", ");
    let unknown = || D::Error::custom(format!("no stage is called `{name}`; write {}", known()));
    Stage::from_name(&name).ok_or_else(unknown)
}

pub(crate) fn mode<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Mode>, D::Error> {
    let name = String::deserialize(d)?;
    let unknown =
        || D::Error::custom(format!("no mode is called `{name}`; write off, observe or enforce"));
    Mode::from_name(&name).map(Some).ok_or_else(unknown)
}

pub(crate) fn objective<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Duration>, D::Error> {
    let nanos = Nanos::deserialize(d)?;
    if nanos == Nanos(0) {
        let problem = "every request misses an objective of zero; leave it out if there is none";
        return Err(D::Error::custom(problem));
    }
    Ok(Some(nanos.into()))
}

pub(crate) fn traffic_class<'de, D: Deserializer<'de>>(d: D) -> Result<u8, D::Error> {
    let number = i64::deserialize(d)?;
    u8::try_from(number).map_err(|_| {
        D::Error::custom(format!(
            "{number} is no traffic class; write 0 to 255 (DSCP times 4, plus the ECN bits)"
        ))
    })
}

pub(crate) fn variables<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<String>, D::Error> {
    let names = Vec::<String>::deserialize(d)?;
    for name in &names {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(D::Error::custom(format!(
                "`{name}` is no name of an environment variable; write the name alone, such \
                 as \"MC_IB_TC\""
            )));
        }
    }
    Ok(names)
}

/// Returns the number of the line that contains byte `at`, from 1, and its key with its table.
pub(crate) fn place(text: &str, at: usize) -> (usize, String) {
    let mut table = "";
    let mut end = 0;
    for (index, line) in text.split_inclusive('\n').enumerate() {
        end += line.len();
        let trimmed = line.trim();
        if let Some(name) = trimmed.strip_prefix('[') {
            table = name.split(']').next().unwrap_or_default().trim();
        }
        if at < end || end == text.len() {
            let key = match trimmed.split_once('=') {
                Some((key, _)) if !trimmed.starts_with(['[', '#']) => key.trim(),
                _ => "",
            };
            let full = match (table, key) {
                ("", key) => key.to_owned(),
                (table, "") => table.to_owned(),
                (table, key) => format!("{table}.{key}"),
            };
            return (index + 1, full);
        }
    }
    (1, String::new())
}
