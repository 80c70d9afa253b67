//! How the shared library is linked.
//!
//! * Its name for the dynamic linker is the one that NCCL makes of `NCCL_NET_PLUGIN=laxity`.
//! * NCCL closes it with its last communicator, while the sweeper thread, the fork handler and
//!   thread-local state of it live on: `nodelete` keeps it mapped, and the next `dlopen` finds it
//!   as it was.
//! * What the libraries inside export (the C interface of `laxity.h`) must not leave it: a process
//!   may have another copy of that, of another version.

fn main() {
    for argument in [
        "-soname,libnccl-net-laxity.so",
        "-z,nodelete",
        "--exclude-libs,ALL",
    ] {
        println!("cargo:rustc-cdylib-link-arg=-Wl,{argument}");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
