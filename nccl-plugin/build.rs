//! Linker options of the shared library.
//!
//! * The library's name for the dynamic linker follows from `NCCL_NET_PLUGIN=laxity`.
//! * NCCL closes the library with its last communicator, while the sweeper thread, the fork handler
//!   and thread-local state still use it. `nodelete` keeps it mapped, and the next `dlopen` finds
//!   it unchanged.
//! * The C interface of `laxity.h`, which is linked in, isn't exported. A process may
//!   have loaded another version.

fn main() {
    for argument in ["-soname,libnccl-net-laxity.so", "-z,nodelete", "--exclude-libs,ALL"] {
        println!("cargo:rustc-cdylib-link-arg=-Wl,{argument}");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
