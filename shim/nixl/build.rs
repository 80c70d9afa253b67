//! Keeps the symbols of linked libraries (the C interface of `laxity.h`) out of the shared
//! library's exports. A program's hints belong to the copy that schedules its work requests, or to
//! the one that it links. `hints::said_of` reads them there.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    println!("cargo:rerun-if-changed=build.rs");
}
