//! `liblaxity_client.so` and `liblaxity_client.a`: the functions of `laxity.h`, defined in
//! [`client::ffi`].

#![forbid(unsafe_code)]

pub use client::ffi;
