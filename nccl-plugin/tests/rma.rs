//! NCCL's one-sided interface by its tables, as NCCL calls them. The ranks are threads over
//! loopback. No daemon runs, so nothing is held: `rma_permits.rs` has the permits.

mod ranks;
mod standin;

use core::ffi::c_void;
use core::ptr::null_mut;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Once;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread;
use std::time::{Duration, Instant};

use nccl_net_laxity::abi::rma_table::{
    Rma, RmaConfig, RmaProperties, RmaVersion, V14, V15, V16, ncclRmaPlugin_v14, ncclRmaPlugin_v15,
    ncclRmaPlugin_v16,
};
use nccl_net_laxity::backend::Memory;
use nccl_net_laxity::handle::{HANDLE_BYTES, Handle};
use nccl_net_laxity::rma::{Frame, HEAD_BYTES, RmaGroup, RmaHello, RmaListener};
use proptest::prelude::*;
use proptest::test_runner::Config;
use ranks::{REGISTRATION_BYTES, Words, lo, stranger, until, words};
use standin::passes_over_rdma;

type Opaque = *mut c_void;
const INC: u32 = 1;
const ADD: u32 = 2;
const HOST: i32 = 1;
/// Number of words in a region for the data of each rank.
const SHARE: usize = 2000;

/// A table with the calls of v15. Tests keep the memory of regions until all requests are done.
trait Api: RmaVersion + Sized {
    const TABLE: &'static Rma<Self>;

    fn put(to: &Target, from: (u64, Opaque), bytes: usize) -> Called;
    fn put_signal(to: &Target, from: (u64, Opaque), bytes: usize, signal: Signal) -> Called;
    fn get(from: &Target, bytes: usize, to: (u64, Opaque)) -> Called;
}

/// A request, or NCCL's code of an error.
type Called = Result<Opaque, i32>;
/// Offset and region of a signal, its value and operation, and whether it is strong.
type Signal = (u64, Opaque, u64, u32, bool);

/// A place at a rank, and the context by which it is reached.
#[derive(Clone, Copy)]
struct Target {
    rma: Opaque,
    context: i32,
    rank: u32,
    at: (u64, Opaque),
}

macro_rules! api {
    ($version:ty, $table:expr $(, $flags:literal)?) => {
        impl Api for $version {
            const TABLE: &'static Rma<Self> = &$table;

            fn put(to: &Target, from: (u64, Opaque), bytes: usize) -> Called {
                let Target { rma, context, rank, at } = *to;
                // SAFETY: the regions' memory is alive until the request is done.
                called(|out| unsafe {
                    ($table.iput)(
                        rma, context, from.0, from.1, bytes, at.0, at.1, rank, $($flags,)? out,
                    )
                })
            }

            fn put_signal(to: &Target, from: (u64, Opaque), bytes: usize, by: Signal) -> Called {
                let Target { rma, context, rank, at } = *to;
                let (offset, region, value, op, strong) = by;
                // SAFETY: the regions' memory is alive until the request is done.
                called(|out| unsafe {
                    ($table.iput_signal)(
                        rma, context, from.0, from.1, bytes, at.0, at.1, rank, offset, region,
                        value, op, strong, $($flags,)? out,
                    )
                })
            }

            fn get(from: &Target, bytes: usize, to: (u64, Opaque)) -> Called {
                let Target { rma, context, rank, at } = *from;
                // SAFETY: the regions' memory is alive until the request is done.
                called(|out| unsafe {
                    ($table.iget)(
                        rma, context, at.0, at.1, bytes, to.0, to.1, rank, $($flags,)? out,
                    )
                })
            }
        }
    };
}
api!(V14, ncclRmaPlugin_v14);
api!(V15, ncclRmaPlugin_v15, 1);
api!(V16, ncclRmaPlugin_v16, 0);

/// The configuration of a context, with the stride that some versions have.
#[repr(C)]
struct Config3 {
    config: RmaConfig,
    rank_stride: i32,
}

/// A rank of a group.
struct Rank {
    rank: usize,
    ranks: usize,
    comm: Opaque,
    rma: Opaque,
}

// SAFETY: the pointers are numbers that the plugin takes in any thread.
unsafe impl Send for Rank {}
// SAFETY: the pointers are numbers that the plugin takes in several threads at once.
unsafe impl Sync for Rank {}

impl Drop for Rank {
    fn drop(&mut self) {
        // The other ranks must not wait for one whose thread has failed.
        if thread::panicking() {
            // SAFETY: nothing is used afterwards.
            unsafe { (ncclRmaPlugin_v16.close_coll)(self.comm) };
        }
    }
}

fn switch_on() {
    static ON: Once = Once::new();
    ON.call_once(|| {
        for (name, value) in [
            ("LAXITY_RMA", "1"),
            ("LAXITY_NET", "tcp"),
            ("NCCL_SOCKET_IFNAME", "lo"),
            ("LAXITY_SOCKET", "/nonexistent/laxityd.sock"),
        ] {
            if std::env::var_os(name).is_none() {
                // SAFETY: every test calls this first, and nothing reads the environment before.
                unsafe { std::env::set_var(name, value) };
            }
        }
    });
}

fn called(call: impl FnOnce(*mut Opaque) -> i32) -> Called {
    let mut out = null_mut();
    let code = call(&raw mut out);
    assert_eq!(code == 0, !out.is_null(), "{code}");
    if code == 0 { Ok(out) } else { Err(code) }
}

fn made(make: impl FnOnce(*mut Opaque) -> i32) -> Opaque {
    called(make).expect("made")
}

impl Rank {
    fn try_register<V: Api>(&self, memory: &Words) -> Called {
        let (data, bytes) = (memory.as_ptr().cast_mut().cast(), memory.len() * 8);
        // SAFETY: the memory is alive until it is deregistered.
        called(|out| unsafe { (V::TABLE.reg_mr_sym)(self.comm, data, bytes, HOST, 0, out) })
    }

    /// Registers memory. Blocks until all ranks have.
    fn register<V: Api>(&self, memory: &Words) -> Opaque {
        self.try_register::<V>(memory).expect("registered")
    }

    /// Returns NCCL's code. The region is not used again.
    fn deregister<V: Api>(&self, region: Opaque) -> i32 {
        // SAFETY: the plugin refuses what is no region, or not any more.
        unsafe { (V::TABLE.dereg_mr_sym)(self.comm, region) }
    }

    /// Returns whether a request is done.
    fn test<V: Api>(&self, request: Opaque) -> Result<bool, i32> {
        let mut done = 0;
        // SAFETY: the plugin refuses what is no request, or not any more.
        let code = unsafe { (V::TABLE.test)(self.comm, request, &raw mut done) };
        if code == 0 { Ok(done != 0) } else { Err(code) }
    }

    fn at(&self, context: i32, rank: usize, word: usize, region: Opaque) -> Target {
        Target { rma: self.rma, context, rank: rank as u32, at: (word as u64 * 8, region) }
    }

    /// Tests requests until all are done, as NCCL's thread does.
    fn finish<V: Api>(&self, mut requests: Vec<Opaque>) {
        until("all requests are done", || {
            requests.retain(|request| !self.test::<V>(*request).expect("no error"));
            // SAFETY: the context is alive.
            assert_eq!(unsafe { (V::TABLE.rma_progress)(self.rma) }, 0);
            requests.is_empty()
        });
    }

    fn close<V: Api>(&self) {
        // SAFETY: nothing is used afterwards.
        unsafe {
            assert_eq!((V::TABLE.destroy_context)(self.rma), 0);
            assert_eq!((V::TABLE.close_coll)(self.comm), 0);
        }
    }
}

/// Connects `ranks` threads, and runs each of them.
fn with_ranks<V: Api>(ranks: usize, run: impl Fn(&Rank) + Sync) {
    switch_on();
    let table = V::TABLE;
    let mut handles = vec![[0_u8; HANDLE_BYTES]; ranks];
    // SAFETY: the arguments are this function's own. The context is one that no `init` returned,
    // as NCCL 2.30.7 passes it.
    let listeners: Vec<(usize, usize)> = unsafe {
        let one = |handle: &mut [u8; HANDLE_BYTES]| {
            let context = made(|out| (table.init)(out, 7, None));
            let foreign = 0xdead_0000_usize as Opaque;
            let at = handle.as_mut_ptr().cast();
            (made(|out| (table.listen)(foreign, 0, at, out)) as usize, context as usize)
        };
        handles.iter_mut().map(one).collect()
    };
    thread::scope(|scope| {
        for (rank, (listener, context)) in listeners.iter().copied().enumerate() {
            let (mut handles, run) = (handles.clone(), &run);
            scope.spawn(move || {
                let table = V::TABLE;
                let mut all: Vec<Opaque> =
                    handles.iter_mut().map(|handle| handle.as_mut_ptr().cast()).collect();
                let (context, listener) = (context as Opaque, listener as Opaque);
                let (n, at) = (ranks as i32, rank as i32);
                // SAFETY: the arrays are this thread's own.
                let rank = unsafe {
                    let all = all.as_mut_ptr();
                    let comm = made(|out| (table.connect)(context, all, n, at, listener, out));
                    assert_eq!((table.close_listen)(listener), 0);
                    let mut config = Config3 {
                        config: RmaConfig { contexts: 4, traffic_class: -1 },
                        rank_stride: 2,
                    };
                    let config = (&raw mut config).cast();
                    let rma = made(|out| (table.create_context)(comm, config, out));
                    Rank { rank, ranks, comm, rma }
                };
                run(&rank);
                // SAFETY: the context is not used again.
                assert_eq!(unsafe { (table.finalize)(context) }, 0);
            });
        }
    });
}

fn value(from: usize, word: usize) -> u64 {
    ((from as u64) << 32 | word as u64) + 1
}

/// Every rank puts to all ranks, signals, and reads back what it wrote.
fn everything<V: Api>() {
    with_ranks::<V>(3, |own| {
        let (source, target) = (words(SHARE), words(SHARE * own.ranks));
        let (back, signals) = (words(SHARE * own.ranks), words(8));
        for (at, word) in source.iter().enumerate() {
            word.store(value(own.rank, at), Release);
        }
        let [from, to, read, counts] =
            [&source, &target, &back, &signals].map(|memory| own.register::<V>(memory));
        let mut requests = Vec::new();
        for rank in 0..own.ranks {
            let context = rank as i32;
            let place = own.at(context, rank, own.rank * SHARE, to);
            // Half is put alone, and half with a strong signal behind both.
            let half = SHARE / 2 * 8;
            let second = own.at(context, rank, own.rank * SHARE + SHARE / 2, to);
            let nothing = Target { at: (0, null_mut()), ..place };
            let calls = [
                V::put(&place, (0, from), half),
                V::put_signal(&second, (half as u64, from), half, (0, counts, 0, INC, true)),
                V::put_signal(&place, (0, from), 16, (8, counts, 5, ADD, false)),
                // A signal by address has no source and no target.
                V::put_signal(&nothing, (0, null_mut()), 0, (16, counts, 1 << 40, ADD, true)),
                V::put(&nothing, (0, null_mut()), 0),
                V::put(&place, (8, from), 0),
            ];
            requests.extend(calls.map(|request| request.expect("taken")));
        }
        own.finish::<V>(requests);
        let n = own.ranks as u64;
        until("all signals are here", || {
            [signals[0].load(Acquire), signals[1].load(Acquire), signals[2].load(Acquire)]
                == [n, 5 * n, n << 40]
        });
        for from in 0..own.ranks {
            for at in 0..SHARE {
                assert_eq!(target[from * SHARE + at].load(Acquire), value(from, at));
            }
        }
        let gets = (0..own.ranks).map(|rank| {
            let place = own.at(1, rank, own.rank * SHARE, to);
            V::get(&place, SHARE * 8, ((rank * SHARE * 8) as u64, read)).expect("taken")
        });
        own.finish::<V>(gets.collect());
        // SAFETY: the region is alive until the request is done.
        let flush = |out| unsafe { (V::TABLE.iflush)(own.rma, 1, counts, 0, out) };
        own.finish::<V>(vec![made(flush)]);
        for rank in 0..own.ranks {
            for at in 0..SHARE {
                assert_eq!(back[rank * SHARE + at].load(Acquire), value(own.rank, at));
            }
        }
        barrier::<V>(own, counts, &signals);
        assert_eq!([from, to, read, counts].map(|region| own.deregister::<V>(region)), [0; 4]);
        own.close::<V>();
    });
}

/// Waits until all ranks have called it. Word 7 of the signals counts them.
fn barrier<V: Api>(own: &Rank, counts: Opaque, signals: &Words) {
    let one = |rank| {
        let nothing = own.at(0, rank, 0, null_mut());
        let signal = (7 * 8, counts, 0, INC, true);
        V::put_signal(&nothing, (0, null_mut()), 0, signal).expect("taken")
    };
    own.finish::<V>((0..own.ranks).map(one).collect());
    until("all ranks are here", || signals[7].load(Acquire) >= own.ranks as u64);
}

#[test]
fn puts_gets_and_signals_of_every_version_arrive_at_all_ranks_and_at_the_own() {
    everything::<V14>();
    everything::<V15>();
    everything::<V16>();
}

#[test]
fn properties_are_those_of_a_proxy_and_a_signal_flushes_its_own_rank_only() {
    with_ranks::<V16>(1, |own| {
        let table = V16::TABLE;
        let (mut count, mut properties) = (0, [0_u32; 32]);
        let mut rma = RmaProperties { flushes_all_puts_on_any_signal: true };
        // SAFETY: the results are this function's own. The properties have 128 bytes.
        unsafe {
            assert_eq!((table.devices)(&raw mut count), 0);
            assert_eq!((table.get_properties)(0, (&raw mut properties).cast()), 0);
            assert_eq!((table.get_rma_properties)(own.comm, &raw mut rma), 0);
        }
        assert_eq!((count, rma.flushes_all_puts_on_any_signal), (1, false));
        // Host memory only, 8 receives (32 requests each), and a proxy device of version 100.
        assert_eq!([properties[6], properties[13], properties[14], properties[15]], [1, 8, 2, 100]);
        own.close::<V16>();
    });
}

#[test]
fn regions_are_registered_while_puts_are_under_way() {
    with_ranks::<V15>(2, |own| {
        let (source, target, signals) = (words(1000), words(1000), words(8));
        let [from, to, counts] =
            [&source, &target, &signals].map(|memory| own.register::<V15>(memory));
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..20 {
                    let memory = words(100);
                    let region = own.register::<V15>(&memory);
                    assert_eq!(own.deregister::<V15>(region), 0);
                }
            });
            for _ in 0..200 {
                let place = own.at(0, 1 - own.rank, 0, to);
                let put = V15::put_signal(&place, (0, from), 8000, (0, counts, 0, INC, true));
                own.finish::<V15>(vec![put.expect("taken")]);
            }
        });
        until("all signals are here", || signals[0].load(Acquire) == 200);
        barrier::<V15>(own, counts, &signals);
        own.close::<V15>();
    });
}

#[test]
fn gets_that_are_called_while_hundreds_wait_for_their_data_are_answered_too() {
    with_ranks::<V16>(2, |own| {
        let (stock, back, signals) = (words(1 << 16), words(1 << 16), words(8));
        let [from, to, counts] =
            [&stock, &back, &signals].map(|memory| own.register::<V16>(memory));
        let place = own.at(0, 1 - own.rank, 0, from);
        let get = |at: usize| {
            // Later ones come while data arrive.
            thread::sleep(Duration::from_micros(if at < 300 { 0 } else { 100 }));
            V16::get(&place, 1 << 19, (0, to)).expect("taken")
        };
        own.finish::<V16>((0..900).map(get).collect());
        barrier::<V16>(own, counts, &signals);
        own.close::<V16>();
    });
}

#[test]
fn a_context_is_destroyed_with_requests_outstanding_and_its_memory_is_left_alone() {
    with_ranks::<V16>(2, |own| {
        let (big, signals) = (words(1 << 20), words(8));
        let [region, counts] = [&big, &signals].map(|memory| own.register::<V16>(memory));
        barrier::<V16>(own, counts, &signals);
        let place = own.at(0, 1 - own.rank, 0, region);
        let requests = [(); 8].map(|()| V16::put(&place, (0, region), 8 << 20).expect("taken"));
        // SAFETY: nothing is used afterwards, but to see that it is unknown.
        unsafe {
            assert_eq!((V16::TABLE.destroy_context)(own.rma), 0);
            own.test::<V16>(requests[0]).expect_err("unknown");
            assert_ne!((V16::TABLE.rma_progress)(own.rma), 0);
            let _ = own.deregister::<V16>(region);
            drop(big);
            assert_eq!((V16::TABLE.close_coll)(own.comm), 0);
        }
    });
}

#[test]
fn calls_outside_of_a_region_and_unknown_signals_are_errors_and_change_nothing() {
    with_ranks::<V16>(2, |own| {
        let (memory, signals) = (words(100), words(8));
        let [region, counts] = [&memory, &signals].map(|memory| own.register::<V16>(memory));
        let place = own.at(0, 1 - own.rank, 0, region);
        let far = own.at(0, 1 - own.rank, 99, region);
        let (third, fifth) = (Target { rank: 2, ..place }, Target { context: 4, ..place });
        let nowhere = Target { at: (0, null_mut()), ..place };
        let calls = [
            V16::put(&far, (0, region), 16),
            V16::put(&place, (u64::MAX, region), 16),
            V16::put(&place, (0, region), 808),
            V16::put(&third, (0, region), 8),
            V16::put(&fifth, (0, region), 8),
            V16::put(&nowhere, (0, region), 8),
            V16::get(&far, 16, (0, region)),
            V16::put_signal(&place, (0, region), 8, (64, counts, 1, INC, true)),
            V16::put_signal(&place, (0, region), 8, (0, counts, 1, 3, true)),
        ];
        assert_eq!(calls, [Err(4); 9]);
        barrier::<V16>(own, counts, &signals);
        own.close::<V16>();
    });
}

/// A group of two, of which the second rank is `other`, by a socket of its own.
fn with_stranger(other: impl FnOnce(TcpStream) + Send, own: impl FnOnce(&RmaGroup)) {
    let listener = RmaListener::new(0, lo(), 0).expect("a port");
    let handle = listener.handle();
    thread::scope(|scope| {
        scope.spawn(move || other(stranger(&handle, 1, 2)));
        let group = RmaGroup::connect(&listener, &[handle, handle], 0).expect("connects");
        own(&group);
        group.close();
    });
}

/// Returns a rank's contribution to its first registration.
fn registration(bytes: u64) -> Vec<u8> {
    let size = REGISTRATION_BYTES as u64;
    let mut data = Frame::Exchange { number: 0, bytes: size }.encode().to_vec();
    data.extend([0; 8]);
    data.extend(bytes.to_le_bytes());
    data.extend([0; 12]);
    data
}

/// Sends frames to a rank with a region in the middle of its memory. Returns whether it hung up.
fn attacked(frames: &[u8]) -> bool {
    let memory = words(96);
    let before = words(96);
    let mut refused = false;
    with_stranger(
        |mut stream| {
            stream.write_all(&registration(256)).expect("sent");
            let mut theirs = [0; HEAD_BYTES + REGISTRATION_BYTES];
            stream.read_exact(&mut theirs).expect("a contribution");
            let _ = stream.write_all(frames);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        },
        |group| {
            let address = memory[32..].as_ptr() as usize;
            let middle = Memory { address, bytes: 256, kind: HOST, dma_buf: None };
            let region = group.register(middle).expect("registered");
            until("the end of the stranger", || group.fault(1).is_some());
            let text = group.fault(1).expect("a fault").to_string();
            refused = text.contains("garbled");
            group.deregister(&region);
        },
    );
    for at in (0..32).chain(64..96) {
        assert_eq!(memory[at].load(Acquire), before[at].load(Acquire), "beyond the region");
    }
    refused
}

#[test]
fn hostile_frames_are_refused_and_nothing_beyond_the_region_is_written() {
    let put = |region, offset, bytes| {
        let mut frame = Frame::Put { region, offset, bytes }.encode().to_vec();
        frame.extend([0xff; 512]);
        frame
    };
    let mut far = put(0, 0, 0);
    far[0] = 99;
    for frame in [
        put(0, 0, 257),
        put(0, 256, 1),
        put(0, u64::MAX, 2),
        put(0, 1, u64::MAX),
        put(1, 0, 1),
        far,
        Frame::Signal { region: 0, offset: 252, value: 1 }.encode().to_vec(),
        Frame::Signal { region: 0, offset: 4, value: 1 }.encode().to_vec(),
        Frame::Signal { region: 7, offset: 0, value: 1 }.encode().to_vec(),
        Frame::Get { region: 0, offset: 0, bytes: 257, number: 0 }.encode().to_vec(),
        Frame::Reply { number: 0, bytes: 1 }.encode().to_vec(),
        Frame::Exchange { number: 5, bytes: 0 }.encode().to_vec(),
        [Frame::Bye.encode(), Frame::Bye.encode()].concat(),
    ] {
        assert!(attacked(&frame), "{:?}", &frame[..HEAD_BYTES]);
    }
    assert!(!attacked(&Frame::Signal { region: 0, offset: 248, value: 1 }.encode()));
}

proptest! {
    #![proptest_config(Config { cases: 32, ..Config::default() })]

    #[test]
    fn arbitrary_bytes_of_a_peer_write_nothing_beyond_the_region(
        frames in prop::collection::vec(
            (0..8_u8, 0..3_u32, 0..300_u64, 0..300_u64, 0..3_u64), 1..9,
        ),
    ) {
        let mut bytes = Vec::new();
        for (kind, region, offset, length, number) in frames {
            let mut head = Frame::Put { region, offset, bytes: length }.encode();
            head[0] = kind;
            head[24] = number as u8;
            bytes.extend(head);
            bytes.extend(vec![0xaa; length as usize]);
        }
        attacked(&bytes);
    }
}

#[test]
fn a_rank_that_dies_is_an_error_of_its_requests_and_of_query_last_error() {
    switch_on();
    let table = V16::TABLE;
    // SAFETY: the arguments are this function's own.
    unsafe {
        let mut handle = [0_u8; HANDLE_BYTES];
        let at = handle.as_mut_ptr().cast();
        let context = made(|out| (table.init)(out, 7, None));
        let listener = made(|out| (table.listen)(context, 0, at, out));
        let other = thread::spawn(move || {
            let mut stream = stranger(&handle, 1, 2);
            stream.write_all(&registration(8 << 20)).expect("sent");
            let mut theirs = [0; HEAD_BYTES + REGISTRATION_BYTES];
            stream.read_exact(&mut theirs).expect("a contribution");
        });
        let mut handles = [at, at];
        let all = handles.as_mut_ptr();
        let comm = made(|out| (table.connect)(context, all, 2, 0, listener, out));
        let mut config = RmaConfig { contexts: 1, traffic_class: -1 };
        let rma = made(|out| (table.create_context)(comm, &raw mut config, out));
        let rank = Rank { rank: 0, ranks: 2, comm, rma };
        let memory = words(1 << 20);
        let region = rank.register::<V16>(&memory);
        let place = rank.at(0, 1, 0, region);
        // More than the sockets' buffers hold, so the peer's end is noticed before this is done.
        let puts = [(); 16].map(|()| V16::put(&place, (0, region), 8 << 20).expect("taken"));
        let get = V16::get(&place, 64, (0, region)).expect("taken");
        other.join().expect("no panic");
        for request in puts.into_iter().skip(8).chain([get]) {
            let mut tested = Ok(false);
            until("the request fails", || {
                tested = rank.test::<V16>(request);
                tested != Ok(false)
            });
            assert_eq!(tested, Err(6));
        }
        let mut failed = false;
        assert_eq!((table.query_last_error)(rma, &raw mut failed), 0);
        assert!(failed);
        // Nothing hangs afterwards: the operation passes the gate, and fails.
        let late = V16::put(&place, (0, region), 4096).expect("taken");
        assert_eq!(rank.test::<V16>(late), Err(6));
        rank.try_register::<V16>(&memory).expect_err("a rank is lost");
        rank.close::<V16>();
    }
}

#[test]
fn a_strangers_connection_does_not_get_in_and_the_group_connects_without_it() {
    let listener = RmaListener::new(0, lo(), 0).expect("a port");
    let handle = listener.handle();
    let there = Handle::decode(&handle).expect("its own");
    let strangers: Vec<TcpStream> = [
        RmaHello { nonce: there.nonce + 1, rank: 1, ranks: 2 }.encode().to_vec(),
        RmaHello { nonce: there.nonce, rank: 0, ranks: 2 }.encode().to_vec(),
        RmaHello { nonce: there.nonce, rank: 2, ranks: 2 }.encode().to_vec(),
        b"GET / HTTP/1.1\r\nHost: example\r\n\r\n".to_vec(),
        Vec::new(),
    ]
    .into_iter()
    .map(|hello| {
        let mut stream = TcpStream::connect(there.address).expect("connects");
        stream.write_all(&hello).expect("sent");
        stream
    })
    .collect();
    let group = thread::scope(|scope| {
        scope.spawn(move || {
            stranger(&handle, 1, 2).write_all(&Frame::Bye.encode()).expect("sent");
        });
        RmaGroup::connect(&listener, &[handle, handle], 0).expect("connects")
    });
    until("the end of the rank", || group.fault(1).is_some());
    assert!(group.fault(1).expect("a fault").to_string().contains("has closed its group"));
    drop(strangers);
}

#[test]
fn an_operation_for_a_rank_that_has_left_is_an_error() {
    with_ranks::<V15>(2, |own| {
        let memory = words(1024);
        let region = own.register::<V15>(&memory);
        if own.rank == 1 {
            return own.close::<V15>();
        }
        let place = own.at(3, 1, 0, region);
        until("the operation fails", || {
            let request = V15::put(&place, (0, region), 4096).expect("taken");
            let mut tested = Ok(false);
            until("the request ends", || {
                tested = own.test::<V15>(request);
                tested != Ok(false)
            });
            tested == Err(6)
        });
        own.close::<V15>();
    });
}

#[test]
fn a_rank_that_another_one_lost_learns_that() {
    if std::env::var_os("LAXITY_NET").is_none_or(|net| net != "verbs") {
        return;
    }
    let learned = AtomicBool::new(false);
    with_ranks::<V16>(2, |own| {
        let (memory, signals) = (words(64), words(8));
        let [region, counts] = [&memory, &signals].map(|memory| own.register::<V16>(memory));
        if own.rank == 1 {
            assert_eq!(own.deregister::<V16>(region), 0);
        }
        barrier::<V16>(own, counts, &signals);
        if own.rank == 0 {
            let place = own.at(0, 1, 0, region);
            let put = V16::put(&place, (0, region), 512).expect("taken");
            until("it fails", || own.test::<V16>(put).is_err());
            until("the other rank learns it", || learned.load(Acquire));
        } else {
            assert_eq!(own.try_register::<V16>(&memory), Err(6));
            learned.store(true, Release);
        }
        own.close::<V16>();
    });
}

#[test]
fn a_region_ends_after_its_group_and_nothing_ends_twice() {
    with_ranks::<V16>(2, |own| {
        let (memory, signals) = (words(64), words(8));
        let [region, counts] = [&memory, &signals].map(|memory| own.register::<V16>(memory));
        barrier::<V16>(own, counts, &signals);
        own.close::<V16>();
        let table = V16::TABLE;
        // SAFETY: the plugin refuses what was closed.
        unsafe {
            assert_eq!([0, 1].map(|_| own.deregister::<V16>(region)), [0, 4]);
            assert_eq!((table.destroy_context)(own.rma), 4);
            assert_eq!((table.close_coll)(own.comm), 4);
            assert_eq!((table.rma_progress)(own.rma), 4);
        }
    });
}

#[test]
fn closing_the_listener_ends_a_connect_that_waits_for_a_rank() {
    switch_on();
    let table = V16::TABLE;
    // SAFETY: the arguments are this function's own.
    unsafe {
        let mut handle = [0_u8; HANDLE_BYTES];
        let at = handle.as_mut_ptr().cast();
        let context = made(|out| (table.init)(out, 7, None));
        let listener = made(|out| (table.listen)(context, 0, at, out)) as usize;
        let closing = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            (table.close_listen)(listener as Opaque)
        });
        let (mut handles, mut comm) = ([at, at], null_mut());
        let all = handles.as_mut_ptr();
        let began = Instant::now();
        assert_eq!((table.connect)(context, all, 2, 0, listener as Opaque, &raw mut comm), 4);
        assert!(began.elapsed() < Duration::from_secs(20) && comm.is_null());
        assert_eq!(closing.join().expect("no panic"), 0);
    }
}

#[test]
fn all_of_it_holds_over_rdma() {
    passes_over_rdma(&[
        "puts_gets_and_signals_of_every_version_arrive_at_all_ranks_and_at_the_own",
        "regions_are_registered_while_puts_are_under_way",
        "a_context_is_destroyed_with_requests_outstanding_and_its_memory_is_left_alone",
        "calls_outside_of_a_region_and_unknown_signals_are_errors_and_change_nothing",
        "an_operation_for_a_rank_that_has_left_is_an_error",
        "a_rank_that_another_one_lost_learns_that",
        "a_region_ends_after_its_group_and_nothing_ends_twice",
    ]);
}
