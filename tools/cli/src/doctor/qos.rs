//! What the NIC of a port does with each DSCP: by the kernel (dcbnl), else by `mlnx_qos` (OFED) and
//! `dcb` (iproute2), whose output is parsed here.
//!
//! Both tools print text. `dcb -j` prints JSON, with stray strings of one blank between numbers.

use std::cell::Cell;

use laxity_nic::{DcbError, PRIORITIES, PriorityMap, Selection, Trust, map_of};
use serde_json::Value;

use super::fabric::Tool;
use super::root::Root;

const DSCPS: usize = 64;

/// Asks the kernel for the settings of an interface, as [`laxity_nic::query`] does.
pub(crate) type Query<'a> = &'a dyn Fn(&str) -> Result<PriorityMap, DcbError>;

/// The settings of the NICs behind an interface, and their source.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct NicQos {
    /// One map, or one for each interface below a bond. Empty if no source has the settings.
    pub(crate) maps: Vec<PriorityMap>,
    pub(crate) source: &'static str,
}

/// Returns the settings of the NICs behind `interface`. The kernel's values take precedence, and
/// values of tools fill its gaps.
pub(crate) fn settings(root: &Root, interface: &str, query: Query<'_>, tool: Tool<'_>) -> NicQos {
    let source = Cell::new("unknown");
    let of_nic = |interface: &str| {
        let kernel = query(interface);
        if kernel.as_ref().is_ok_and(|map| map.trust.is_some() && map.pfc.is_some()) {
            source.set("dcbnl");
            return kernel;
        }
        match said(interface, tool) {
            None => kernel,
            Some((map, by)) => {
                source.set(by);
                Ok(filled(&kernel.unwrap_or_default(), &map))
            }
        }
    };
    let maps = map_of(root.path(), interface, &of_nic).unwrap_or_default();
    NicQos { maps, source: source.get() }
}

/// Returns the settings of an interface that the tools report, and the first tool that reports any.
fn said(interface: &str, tool: Tool<'_>) -> Option<(PriorityMap, &'static str)> {
    let nothing = PriorityMap::default();
    let text = tool("mlnx_qos", &["-i", interface]);
    let (mut said, mut source) = (text.map_or(nothing.clone(), |text| mlnx_qos(&text)), "mlnx_qos");
    for object in ["apptrust", "app", "ets", "pfc"] {
        if let Some(text) = tool("dcb", &["-j", "-N", object, "show", "dev", interface]) {
            source = if said == nothing { "dcb" } else { source };
            said = filled(&said, &dcb_output(&text));
        }
    }
    // A driver without apptrust (mlx5) trusts DSCP as soon as one is mapped.
    if said.trust.is_none() && said.priority_of_dscp.is_some() {
        said.trust = Some(Trust::Dscp);
    }
    (said != nothing).then_some((said, source))
}

fn filled(known: &PriorityMap, more: &PriorityMap) -> PriorityMap {
    PriorityMap {
        trust: known.trust.or(more.trust),
        priority_of_dscp: known.priority_of_dscp.or(more.priority_of_dscp),
        class_of_priority: known.class_of_priority.or(more.class_of_priority),
        selection: known.selection.or(more.selection),
        pfc: known.pfc.or(more.pfc),
        ecn: known.ecn.or(more.ecn),
    }
}

/// Parses the output of `mlnx_qos -i INTERFACE`. What it does not say stays unknown.
pub(crate) fn mlnx_qos(text: &str) -> PriorityMap {
    let mut map = PriorityMap::default();
    let (mut priorities, mut mapped) = ([0; DSCPS], false);
    let (mut classes, mut classed) = ([0; PRIORITIES], 0);
    let mut selection = [Selection::Vendor; PRIORITIES];
    let mut class = None;
    for line in text.lines().map(str::trim) {
        if let Some((_, state)) = line.split_once("trust state:") {
            map.trust = match state.trim() {
                "dscp" | "both" => Some(Trust::Dscp),
                "pcp" => Some(Trust::Pcp),
                _ => None,
            };
        } else if let Some((priority, dscps)) = mapping(line) {
            for dscp in dscps.split(',').filter_map(|dscp| dscp.trim().parse::<usize>().ok()) {
                if let Some(cell) = priorities.get_mut(dscp) {
                    (*cell, mapped) = (priority, true);
                }
            }
        } else if let Some(bits) = line.strip_prefix("enabled") {
            map.pfc = mask(bits);
        } else if let Some(rest) = line.strip_prefix("tc:") {
            class = rest.split_whitespace().next().and_then(small);
            if let Some(class) = class {
                selection[usize::from(class)] = served(rest);
            }
        } else if let (Some(class), Some(priority)) = (class, line.strip_prefix("priority:"))
            && let Some(priority) = small(priority.trim())
        {
            classes[usize::from(priority)] = class;
            classed += 1;
        }
    }
    map.priority_of_dscp = mapped.then_some(priorities);
    if classed > 0 {
        map.class_of_priority = Some(classes);
        map.selection = Some(selection);
    }
    map
}

fn mapping(line: &str) -> Option<(u8, &str)> {
    let (priority, rest) = line.strip_prefix("prio:")?.split_once(char::is_whitespace)?;
    Some((small(priority)?, rest.trim().strip_prefix("dscp:")?))
}

/// Parses how `mlnx_qos` says that a traffic class is served, such as `tsa: ets, bw: 10%`.
fn served(text: &str) -> Selection {
    let after = |key: &str| text.split_once(key).map(|(_, rest)| rest.trim_start());
    match after("tsa:") {
        Some(tsa) if tsa.starts_with("strict") => Selection::Strict,
        Some(tsa) if tsa.starts_with("ets") => {
            let share = after("bw:").and_then(|share| share.split('%').next()?.trim().parse().ok());
            Selection::Ets(share.unwrap_or(0))
        }
        _ => Selection::Vendor,
    }
}

/// Parses the bits of eight priorities, the first of priority 0.
fn mask(text: &str) -> Option<u8> {
    let bits: Vec<&str> = text.split_whitespace().collect();
    if bits.len() != PRIORITIES || bits.iter().any(|bit| !matches!(*bit, "0" | "1")) {
        return None;
    }
    Some(bits.iter().rev().fold(0, |mask, bit| mask << 1 | u8::from(*bit == "1")))
}

fn small(text: &str) -> Option<u8> {
    text.parse().ok().filter(|number| usize::from(*number) < PRIORITIES)
}

pub(crate) fn dcb_output(text: &str) -> PriorityMap {
    let rows = match serde_json::from_str(text) {
        Ok(Value::Array(all)) => all.iter().flat_map(json_rows).collect(),
        Ok(value) => json_rows(&value),
        Err(_) => text_rows(text),
    };
    let mut map = PriorityMap::default();
    let mut shares = [0; PRIORITIES];
    let defaults = rows.iter().filter(|(key, _)| key == "default-prio");
    let defaults = defaults.flat_map(|(_, values)| values).filter_map(|(_, value)| small(value));
    let default = defaults.max().unwrap_or(0);
    for (key, values) in &rows {
        let numbers = || table(values, |value| value.parse().ok());
        match key.as_str() {
            "order" => {
                let trusts = values.iter().any(|(_, value)| value == "dscp");
                map.trust = Some(if trusts { Trust::Dscp } else { Trust::Pcp });
            }
            "dscp-prio" => map.priority_of_dscp = dscp_table(values, default),
            "prio-tc" => map.class_of_priority = numbers(),
            "tc-bw" => shares = numbers().unwrap_or(shares),
            "tc-tsa" => {
                map.selection = table(values, |value| {
                    Some(match value {
                        "strict" => Selection::Strict,
                        "ets" => Selection::Ets(0),
                        "cbs" | "credit-based" => Selection::CreditBased,
                        _ => Selection::Vendor,
                    })
                });
            }
            "prio-pfc" => {
                let bits = table(values, |value| Some(u8::from(matches!(value, "on" | "true"))));
                map.pfc = bits.map(|bits| bits.iter().rev().fold(0, |mask, bit| mask << 1 | bit));
            }
            _ => {}
        }
    }
    for (selection, share) in map.selection.iter_mut().flatten().zip(shares) {
        if let Selection::Ets(unknown) = selection {
            *unknown = share;
        }
    }
    map
}

type QosRows = Vec<(String, Vec<(String, String)>)>;

/// Splits `tc-bw 0:33 1:33 dscp-prio CS3:3` into keys and `(index, value)` pairs. A word without a
/// colon is a key, or a value of `order:` or `default-prio`.
fn text_rows(text: &str) -> QosRows {
    let mut rows: QosRows = Vec::new();
    for word in text.split_whitespace() {
        let is_number = word.parse::<u8>().is_ok();
        match word.split_once(':') {
            Some(("order", "")) => rows.push(("order".to_owned(), Vec::new())),
            Some((index, value)) => {
                if let Some((_, values)) = rows.last_mut() {
                    values.push((index.to_owned(), value.to_owned()));
                }
            }
            None => match rows.last_mut() {
                Some((key, values)) if key == "order" || key == "default-prio" && is_number => {
                    values.push((values.len().to_string(), word.to_owned()));
                }
                _ => rows.push((word.to_owned(), Vec::new())),
            },
        }
    }
    rows
}

/// Returns the arrays of a JSON object. An element is a value, or an array of index and value.
/// Strings of blanks are no elements.
fn json_rows(value: &Value) -> QosRows {
    let text = |value: &Value| match value {
        Value::String(text) => text.trim().to_owned(),
        Value::Number(number) => number.to_string(),
        Value::Bool(on) => on.to_string(),
        _ => String::new(),
    };
    let arrays = value.as_object().into_iter().flatten().filter_map(|(key, value)| {
        let mut values = Vec::new();
        for element in value.as_array()? {
            match element {
                Value::Array(pair) if pair.len() >= 2 => {
                    values.push((text(&pair[0]), text(&pair[1])));
                }
                other if !text(other).is_empty() => {
                    values.push((values.len().to_string(), text(other)));
                }
                _ => {}
            }
        }
        Some((key.replace('_', "-"), values))
    });
    arrays.collect()
}

/// Returns a table of eight values, if each of them is there and can be read.
fn table<T: Copy>(
    values: &[(String, String)],
    parse: impl Fn(&str) -> Option<T>,
) -> Option<[T; PRIORITIES]> {
    let mut cells = [None; PRIORITIES];
    for (index, value) in values {
        *cells.get_mut(index.parse::<usize>().ok()?)? = Some(parse(value)?);
    }
    let complete: Option<Vec<T>> = cells.into_iter().collect();
    complete?.try_into().ok()
}

/// Returns the priority of each DSCP, which is `default` for those that are not mapped. Of several
/// priorities of one DSCP, the highest counts.
fn dscp_table(values: &[(String, String)], default: u8) -> Option<[u8; DSCPS]> {
    let mut priorities = [None; DSCPS];
    for (dscp, priority) in values {
        let cell = priorities.get_mut(dscp_number(dscp)?)?;
        *cell = Some(small(priority)?).max(*cell);
    }
    (!values.is_empty()).then_some(priorities.map(|priority| priority.unwrap_or(default)))
}

/// Parses a DSCP as a number, or by the names of iproute2: `CS3`, `AF31`, `EF`, `default`.
fn dscp_number(text: &str) -> Option<usize> {
    let digit =
        |at: usize| text.as_bytes().get(at).map(|byte| usize::from(byte.wrapping_sub(b'0')));
    match text {
        "default" => Some(0),
        "EF" => Some(46),
        "VA" => Some(44),
        "LE" => Some(1),
        _ if text.starts_with("CS") => digit(2).filter(|class| *class < 8).map(|class| class << 3),
        _ if text.starts_with("AF") => {
            let (class, drop) = (digit(2)?, digit(3)?);
            (class < 8 && drop < 4).then_some((class << 3) + (drop << 1))
        }
        _ => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests;
