//! The cost of a hint from C. The benchmark calls the functions of `laxity.h` through their
//! addresses, as C does, and an empty function. A daemon takes every record. The budget is one
//! microsecond a hint.

#[path = "../tests/daemon/mod.rs"]
mod daemon;

use core::ffi::c_int;
use core::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use laxity_client::ffi::hints as c;

use daemon::TestDaemon;

extern "C" fn empty(batch: u64, layer: u16) -> c_int {
    black_box(batch as c_int + c_int::from(layer))
}

fn hints(criterion: &mut Criterion) {
    let daemon = TestDaemon::start();
    // SAFETY: the only other thread is the daemon's, which reads no environment.
    unsafe { std::env::set_var("LAXITY_SOCKET", &daemon.socket) };
    let mut group = criterion.benchmark_group("hint");
    let call: extern "C" fn(u64, u16) -> c_int = black_box(empty);
    group.bench_function("empty call", |b| b.iter(|| call(black_box(1), 3)));

    c::lax_batch_begin(1, 64, 2_000_000);
    // SAFETY: null is allowed.
    unsafe { c::lax_request_begin(1, core::ptr::null()) };
    let call: extern "C" fn(u64, u16) -> c_int = black_box(c::lax_layer_begin);
    group.bench_function("lax_layer_begin", |b| b.iter(|| call(black_box(1), 3)));
    let call: extern "C" fn(u64, u64) -> c_int = black_box(c::lax_batch_join);
    group.bench_function("lax_batch_join", |b| b.iter(|| call(black_box(1), 1)));
    let mut request = 1_u64;
    group.bench_function("lax_request_begin and lax_request_end", |b| {
        b.iter(|| {
            request += 1;
            // SAFETY: null is allowed.
            unsafe { c::lax_request_begin(black_box(request), core::ptr::null()) };
            c::lax_request_end(request)
        });
    });
    group.finish();
}

criterion_group!(benches, hints);
criterion_main!(benches);
