//! Compiles `proto/laxity/v1` without `protoc`, and keeps the descriptors for reflection.

use std::path::PathBuf;

use prost::Message as _;

const FILES: [&str; 3] =
    ["laxity/v1/order.proto", "laxity/v1/coordination.proto", "laxity/v1/operator.proto"];

/// Messages that are shown to operators as JSON (`src/view.rs`).
const SERIALIZED: [&str; 20] = [
    "BatchStatus", "DrainNote", "Epoch", "ExplainResponse", "GetPolicyResponse", "HostChanged",
    "HostSettings", "HostStatus", "ListBatchesResponse", "ListHostsResponse", "Neighbour",
    "Policy", "PolicyRevision", "PortName", "PortStatus", "PrunedRequest", "RunSummary",
    "TenantStatus", "WatchEvent", "WatchEvent.event",
];

/// Fields whose JSON form differs from their type, with the function that converts them.
const FIELDS: [(&str, &str); 10] = [
    ("BatchStatus.batch", "id"),
    ("ExplainResponse.sort_key", "optional_id"),
    ("Neighbour.batch", "id"),
    ("PortName.direction", "direction_name"),
    ("PortStatus.direction", "direction_name"),
    ("PortStatus.queued_level_bytes", "queued_by_level"),
    ("PortStatus.queued_stage_bytes", "queued_by_stage"),
    ("PrunedRequest.for_batch", "id"),
    ("PrunedRequest.request", "id"),
    ("WatchEvent.event.missed", "missed"),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("laxity.v1.bin"), descriptors.encode_to_vec())?;
    let mut config = tonic_prost_build::configure();
    for message in SERIALIZED {
        config = config.type_attribute(message, "#[derive(serde::Serialize)]");
    }
    for (field, function) in FIELDS {
        let with = format!("#[serde(serialize_with = \"crate::view::{function}\")]");
        config = config.field_attribute(field, with);
    }
    let event = "#[serde(tag = \"event\", rename_all = \"snake_case\")]";
    let config = config
        .type_attribute("WatchEvent.event", event)
        .type_attribute("Policy", "#[derive(serde::Deserialize)]")
        .field_attribute("PortStatus.queued_level_bytes", "#[serde(rename = \"queued_by_level\")]")
        .field_attribute("PortStatus.queued_stage_bytes", "#[serde(rename = \"queued_by_stage\")]");
    config.compile_fds(descriptors)?;
    Ok(())
}
