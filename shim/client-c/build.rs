//! Sets the shared library's name for the dynamic linker. Its number is the version of the C ABI
//! (`laxity.h`), so programs that were linked with another version don't load this library.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,liblaxity_client.so.0");
    println!("cargo:rerun-if-changed=build.rs");
}
