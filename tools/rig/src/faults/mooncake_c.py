"""Mooncake's C interface (`transfer_engine_c.h`), with the methods of its Python interface that mooncake.py uses.

The functions are those of the process, so `liblaxity_mooncake.so` gets the calls if it is preloaded. A transfer is a
batch here, with a request for each piece. `givenSources` is of the library that stands for Mooncake's, and says what
Mooncake was given of a batch: each request once, uncut, in the order and with the numbers of the program.
"""

import ctypes
import itertools
import threading
import time
from ctypes import c_char_p, c_int, c_int32, c_size_t, c_uint64, c_void_p

READ, WRITE = 0, 1
WAITING, PENDING, COMPLETED = 0, 1, 4
OVER, FAILED = 1, -1
INVALID = 2**64 - 1
BLOCK = 16 << 10
POLL_S, WATCH_S = 0.0005, 0.002


class Request(ctypes.Structure):
    _fields_ = (
        ("opcode", c_int),
        ("source", c_void_p),
        ("target", c_int32),
        ("offset", c_uint64),
        ("length", c_uint64),
    )


class Status(ctypes.Structure):
    _fields_ = (("status", c_int), ("transferred", c_uint64))


def function(name, result, *arguments):
    found = getattr(ctypes.CDLL(None), name)
    found.restype, found.argtypes = result, arguments
    return found


create_engine = function("createTransferEngine", c_void_p, c_char_p, c_char_p, c_char_p, c_uint64, c_int)
destroy_engine = function("destroyTransferEngine", None, c_void_p)
install_transport = function("installTransport", c_void_p, c_void_p, c_char_p, c_void_p)
open_segment = function("openSegment", c_int32, c_void_p, c_char_p)
register_memory = function("registerLocalMemory", c_int, c_void_p, c_void_p, c_size_t, c_char_p, c_int)
allocate_batch = function("allocateBatchID", c_uint64, c_void_p, c_size_t)
submit = function("submitTransfer", c_int, c_void_p, c_uint64, ctypes.POINTER(Request), c_size_t)
get_status = function("getTransferStatus", c_int, c_void_p, c_uint64, c_size_t, ctypes.POINTER(Status))
free_batch = function("freeBatchID", c_int, c_void_p, c_uint64)
given_sources = function("givenSources", c_size_t, c_uint64, ctypes.POINTER(c_void_p), c_size_t)


def requests_of(source, offset, length):
    """Cuts a piece, as programs do whose blocks are small."""
    cuts = range(0, length, BLOCK)
    return [source + at for at in cuts], [offset + at for at in cuts], [min(BLOCK, length - at) for at in cuts]


class Batch:
    def __init__(self, number, sources, wrong):
        self.id, self.sources, self.wrong = number, sources, wrong
        self.submitted = self.given = 0
        #: The status of each request that is over.
        self.ends = {}
        #: When the wait for the next permit began, and the time in which the process had not run by then.
        self.since = None

    def statuses(self, engine):
        """Returns whether all requests are over. What is over stays as it ended."""
        for task in range(len(self.sources)):
            answer = Status(-1)
            code = get_status(engine, self.id, task, answer)
            now = answer.status if code == 0 else code
            if code == 0 and now in (WAITING, PENDING):
                if task in self.ends:
                    self.wrong(f"request {task} ended with {self.ends[task]} and is under way again")
                continue
            if self.ends.setdefault(task, now) != now:
                self.wrong(f"request {task} ended with {self.ends[task]}, and then with {now}")
        return len(self.ends) == len(self.sources)

    def check_given(self):
        room = (c_void_p * len(self.sources))()
        count = given_sources(self.id, room, len(room))
        expected = self.sources if self.is_complete() else self.sources[:count]
        if count > len(room) or list(room)[:count] != expected:
            self.wrong(f"Mooncake was given {count} requests from {list(room)}, not {expected}")

    def is_complete(self):
        return all(status == COMPLETED for status in self.ends.values())


class Engine:
    """`worker` knows how long the process did not run, and reports waits."""

    def __init__(self, worker):
        self.worker, self.wrong, self.lock = worker, worker.outlet.end_wrong, threading.Lock()
        self.batches, self.numbers, self.segments = {}, itertools.count(1), {}

    def initialize(self, local, metadata, protocol, _devices):
        self.engine = create_engine(metadata.encode(), f"{local}:1".encode(), local.encode(), 0, 0)
        if not self.engine or not install_transport(self.engine, protocol.encode(), None):
            return FAILED
        # For children, which must not use a batch that a thread of their parent frees.
        self.empty = allocate_batch(self.engine, 1)
        return 0

    def register_memory(self, address, size):
        return register_memory(self.engine, address, size, b"cpu:0", 1)

    def destroy(self):
        with self.lock:
            self.batches.clear()
        destroy_engine(self.engine)

    def ask_in_child(self):
        answer = Status()
        if get_status(self.engine, self.empty, 0, answer) == 0:
            raise RuntimeError("an empty batch has a request")

    def segment(self, peer):
        with self.lock:
            if peer not in self.segments:
                self.segments[peer] = open_segment(self.engine, peer.encode())
            return self.segments[peer]

    def submit(self, opcode, peer, sources, offsets, lengths):
        """Returns the transfer's number, or that of a failure. An eighth of the batches is filled by several calls, and
        half of them have room for more."""
        number, target, count = next(self.numbers), self.segment(peer), len(sources)
        batch = Batch(allocate_batch(self.engine, count + 2 * (number % 2)), sources, self.wrong)
        if target < 0 or batch.id == INVALID:
            return FAILED
        requests = (Request * count)(*(
            Request(opcode, *piece, length) for *piece, length in
            zip(sources, itertools.repeat(target), offsets, lengths)
        ))
        with self.lock:
            self.batches[number] = batch
        at_once = 1 if number % 8 == 0 else count
        for at in range(0, count, at_once):
            with self.lock:
                batch.since = batch.since or (time.monotonic_ns(), self.worker.starved)
                batch.submitted += at_once
            part = ctypes.cast(ctypes.byref(requests, at * ctypes.sizeof(Request)), ctypes.POINTER(Request))
            if submit(self.engine, batch.id, part, at_once) != 0:
                # What Mooncake has of it goes on, and its memory is not used again.
                with self.lock:
                    del self.batches[number]
                return FAILED
        return number

    def transfer_check_status(self, number):
        """1 once all requests are complete, -1 if one failed or the transfer's end was reported before."""
        with self.lock:
            batch = self.batches.get(number)
        if batch is None:
            return FAILED
        if not batch.statuses(self.engine):
            return 0
        with self.lock:
            del self.batches[number]
            waited = self.observe(batch)
        batch.check_given()
        if free_batch(self.engine, batch.id) != 0:
            self.wrong("a batch that is over is not freed")
        self.report(waited)
        return OVER if batch.is_complete() else FAILED

    def get_batch_transfer_status(self, numbers):
        result = 0
        for number in numbers:
            while (status := self.transfer_check_status(number)) == 0:
                time.sleep(POLL_S)
            if status != OVER:
                result = FAILED
        return result

    def observe(self, batch):
        """Looks for permits since the last look. Returns the wait that ended with one. Mooncake's answers can't tell:
        it says "waiting" of a request that it moves."""
        given, now, waited = given_sources(batch.id, None, 0), time.monotonic_ns(), None
        if given > batch.given:
            waited, batch.given = batch.since and (*batch.since, now), given
            batch.since = None if given >= batch.submitted else (now, self.worker.starved)
        return waited

    def watch(self):
        """Reports waits between permits, soon after they end."""
        while True:
            time.sleep(WATCH_S)
            with self.lock:
                waits = [self.observe(batch) for batch in self.batches.values()]
            for waited in waits:
                self.report(waited)

    def report(self, waited):
        if waited:
            self.worker.report_wait(*waited)

    def batch_transfer_async_write(self, peer, *pieces):
        return self.submit(WRITE, peer, *pieces)

    def batch_transfer_async_read(self, peer, *pieces):
        return self.submit(READ, peer, *pieces)

    def batch_transfer_sync_write(self, peer, *pieces):
        return self.get_batch_transfer_status([self.submit(WRITE, peer, *pieces)])

    def batch_transfer_sync_read(self, peer, *pieces):
        return self.get_batch_transfer_status([self.submit(READ, peer, *pieces)])

    def transfer_submit_write(self, peer, *piece):
        return self.submit(WRITE, peer, *requests_of(*piece))

    def transfer_sync_write(self, peer, *piece):
        return self.batch_transfer_sync_write(peer, *requests_of(*piece))

    def transfer_sync_read(self, peer, *piece):
        return self.batch_transfer_sync_read(peer, *requests_of(*piece))
