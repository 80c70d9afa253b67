//! The file format: what may stand in it, and where a mistake is.

use std::time::Duration;

use laxity_quantity::Nanos;
use laxity_shm::layout::Mode;
use laxity_shm::record::Stage;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use crate::{Origin, Profile, ProfileError, QueuePairs, Stages};

/// The file as it is written. A key that is left out has the value of `Profile::default`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    #[serde(default)]
    description: String,
    #[serde(default, deserialize_with = "objective")]
    slo_ttft: Option<Duration>,
    #[serde(default, deserialize_with = "mode")]
    mode: Option<Mode>,
    #[serde(default)]
    stage: WrittenStages,
    #[serde(default)]
    qp: WrittenQueuePairs,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenStages {
    #[serde(default, deserialize_with = "stage")]
    write: Option<Stage>,
    #[serde(default, deserialize_with = "stage")]
    read: Option<Stage>,
    #[serde(default, deserialize_with = "stage")]
    send: Option<Stage>,
    #[serde(default, deserialize_with = "stage")]
    atomic: Option<Stage>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenQueuePairs {
    #[serde(default, deserialize_with = "stage")]
    stage: Option<Stage>,
    #[serde(default, deserialize_with = "traffic_class")]
    default_traffic_class: Option<u8>,
    #[serde(default, deserialize_with = "variables")]
    pin_variables: Option<Vec<String>>,
}

fn stage<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Stage>, D::Error> {
    let name = String::deserialize(d)?;
    let known = || Stage::ALL.map(Stage::name).join(", ");
    let unknown = || D::Error::custom(format!("no stage is called `{name}`; write {}", known()));
    Stage::from_name(&name).map(Some).ok_or_else(unknown)
}

fn mode<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Mode>, D::Error> {
    let name = String::deserialize(d)?;
    let unknown = || {
        D::Error::custom(format!(
            "no mode is called `{name}`; write off, observe or enforce"
        ))
    };
    Mode::from_name(&name).map(Some).ok_or_else(unknown)
}

fn objective<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Duration>, D::Error> {
    let nanos = Nanos::deserialize(d)?;
    if nanos == Nanos(0) {
        let problem = "an objective of zero is missed by every request; leave it out for none";
        return Err(D::Error::custom(problem));
    }
    Ok(Some(nanos.into()))
}

fn traffic_class<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u8>, D::Error> {
    let number = i64::deserialize(d)?;
    u8::try_from(number).map(Some).map_err(|_| {
        D::Error::custom(format!(
            "{number} is no traffic class; write 0 to 255 (DSCP times 4, plus the ECN bits)"
        ))
    })
}

fn variables<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Vec<String>>, D::Error> {
    let names = Vec::<String>::deserialize(d)?;
    for name in &names {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(D::Error::custom(format!(
                "`{name}` is no name of an environment variable; write the name alone, such \
                 as \"MC_IB_TC\""
            )));
        }
    }
    Ok(Some(names))
}

/// The profile that `text` says.
pub(crate) fn parse(name: &str, origin: Origin, text: &str) -> Result<Profile, ProfileError> {
    let written: Written = match toml::from_str(text) {
        Ok(written) => written,
        Err(error) => {
            let at = error.span().map_or(0, |span| span.start);
            let (line, key) = place(text, at);
            return Err(ProfileError::Malformed {
                origin,
                line,
                key,
                problem: error.message().replace('\n', "; "),
            });
        }
    };
    let (stages, qp) = (Stages::default(), QueuePairs::default());
    Ok(Profile {
        name: name.to_owned(),
        origin,
        description: written.description,
        slo_ttft: written.slo_ttft,
        mode: written.mode,
        stage: Stages {
            write: written.stage.write.unwrap_or(stages.write),
            read: written.stage.read.unwrap_or(stages.read),
            send: written.stage.send.unwrap_or(stages.send),
            atomic: written.stage.atomic.unwrap_or(stages.atomic),
        },
        qp: QueuePairs {
            stage: written.qp.stage.unwrap_or(qp.stage),
            default_traffic_class: written
                .qp
                .default_traffic_class
                .unwrap_or(qp.default_traffic_class),
            pin_variables: written.qp.pin_variables.unwrap_or(qp.pin_variables),
        },
    })
}

/// The line of byte `at`, from 1, and the key that it is about, with its table.
fn place(text: &str, at: usize) -> (usize, String) {
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
