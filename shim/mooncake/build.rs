//! Keeps the symbols of linked libraries (the C interface of `laxity.h`) out of the shared
//! library's exports. A program gives its hints to the copy that schedules its work requests, or to
//! the copy that the program links. `hints::said_of` reads them there.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    println!("cargo:rerun-if-changed=build.rs");
}
