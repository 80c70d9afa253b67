//! Compiles `proto/laxity/v1` without `protoc`, and keeps the descriptors for reflection.

use std::path::PathBuf;

use prost::Message as _;

const FILES: [&str; 3] = [
    "laxity/v1/order.proto",
    "laxity/v1/coordination.proto",
    "laxity/v1/operator.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("laxity.v1.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
