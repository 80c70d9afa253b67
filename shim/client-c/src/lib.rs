//! `liblaxity_client.so` and `.a`: the functions of `laxity.h`, which are [`client::ffi`].

#![forbid(unsafe_code)]

pub use client::ffi;
