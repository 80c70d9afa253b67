//! Compiles the one function that Rust can't define: NCCL's logger, which is variadic like
//! `printf`.

fn main() {
    println!("cargo:rerun-if-changed=src/logger.c");
    cc::Build::new()
        .file("src/logger.c")
        .std("c11")
        .warnings(true)
        .extra_warnings(true)
        .warnings_into_errors(true)
        .compile("laxity_nccl_host_logger");
}
