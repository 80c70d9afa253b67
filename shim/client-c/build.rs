//! Gives the shared library its name for the dynamic linker. The number is that of its C ABI
//! (`laxity.h`): a program that was linked against another one must not load this.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,liblaxity_client.so.0");
    println!("cargo:rerun-if-changed=build.rs");
}
