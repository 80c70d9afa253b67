"""The Mooncake Transfer Engine between two processes, every byte verified at both ends.

  transfer_engine.py target    DEVICE PORT
  transfer_engine.py initiator DEVICE PORT all|long

The target serves its address and, on demand, fills or checks its memory. Each prints one line of JSON:
what it posted, one work request per slice of 64 KiB. Nothing here knows of Laxity.
"""

import ctypes
import json
import mmap
import random
import socket
import sys
import time

from mooncake.engine import TransferEngine

SLICE = 65536
SIZE = 64 << 20


def engine_on(device):
    engine = TransferEngine()
    # Only the handshake uses this address; the data go where the device is.
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", device) != 0:
        sys.exit("cannot initialise the engine on " + device)
    memory = mmap.mmap(-1, SIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if engine.register_memory(address, SIZE) != 0:
        sys.exit("cannot register memory")
    return engine, memory, address


def pattern(seed, length):
    return random.Random(seed).randbytes(length)


def target(device, port):
    engine, memory, address = engine_on(device)
    listener = socket.create_server(("127.0.0.1", port))
    connection, _ = listener.accept()
    stream = connection.makefile("rw")
    session = "127.0.0.1:%d" % engine.get_rpc_port()
    print(json.dumps({"session": session, "address": address}), file=stream, flush=True)
    for line in stream:
        what, place, length, seed = json.loads(line)
        if what == "fill":
            memory[place : place + length] = pattern(seed, length)
            answer = True
        else:
            answer = memory[place : place + length] == pattern(seed, length)
        print(json.dumps(answer), file=stream, flush=True)
    print(json.dumps({"test": "target", "passed": True}), flush=True)


class Initiator:
    def __init__(self, device, port):
        self.engine, self.memory, self.address = engine_on(device)
        connection = socket.create_connection(("127.0.0.1", port))
        self.stream = connection.makefile("rw")
        peer = json.loads(self.stream.readline())
        self.session, self.peer = peer["session"], peer["address"]
        self.seed = 0

    def ask(self, what, place, length, seed):
        print(json.dumps([what, place, length, seed]), file=self.stream, flush=True)
        return json.loads(self.stream.readline())

    def run(self, test, layout, write, transfer):
        """`layout`: places here and there, and lengths."""
        seeds = [self.seed + i for i in range(len(layout))]
        self.seed += len(layout)
        for seed, (here, there, length) in zip(seeds, layout):
            if write:
                self.memory[here : here + length] = pattern(seed, length)
            else:
                self.ask("fill", there, length, seed)
        heres = [self.address + here for here, _, _ in layout]
        theres = [self.peer + there for _, there, _ in layout]
        lengths = [length for _, _, length in layout]
        failed = transfer(heres, theres, lengths)
        wrong = []
        for seed, (here, there, length) in zip(seeds, layout):
            if write:
                good = self.ask("check", there, length, seed)
            else:
                good = self.memory[here : here + length] == pattern(seed, length)
            if not good:
                wrong.append(there)
        result = {
            "test": test,
            "passed": failed == 0 and not wrong,
            "work_requests": sum(slices(length) for length in lengths),
            "bytes": sum(lengths),
            "detail": "status %d, wrong at %s" % (failed, wrong[:4]),
        }
        print(json.dumps(result), flush=True)
        return result["passed"]

    def one(self, function):
        return lambda heres, theres, lengths: function(
            self.session, heres[0], theres[0], lengths[0]
        )

    def batch(self, function):
        return lambda heres, theres, lengths: function(self.session, heres, theres, lengths)

    def wait(self, function):
        def transfer(heres, theres, lengths):
            batch = function(self.session, heres, theres, lengths)
            if batch == 0:
                return -1
            return self.engine.get_batch_transfer_status([batch])

        return transfer

    def polled(self, heres, theres, lengths):
        batch = self.engine.transfer_submit_write(self.session, heres[0], theres[0], lengths[0])
        while True:
            status = self.engine.transfer_check_status(batch)
            if status != 0:
                return 0 if status == 1 else status
            time.sleep(0.001)


def slices(length):
    """A rest below a quarter of a slice goes with the slice before it (MC_FRAGMENT_RATIO)."""
    whole, rest = divmod(length, SLICE)
    return max(1, whole + (1 if rest >= SLICE // 4 else 0))


def layouts():
    whole = [(0, 0, 4 << 20)]
    rows = [(i * 131072, i * 65536, 65536) for i in range(48)]
    odd = [(i * 300000, i * 200000 + 777, 65536 + 20000 + i) for i in range(32)]
    return {"whole": whole, "rows": rows, "odd": odd}


def initiator(device, port, what):
    peer = Initiator(device, port)
    engine = peer.engine
    if what == "long":
        layout = [(i * (1 << 20), i * (1 << 20), 1 << 20) for i in range(48)]
        good = True
        for turn in range(2):
            write = peer.batch(engine.batch_transfer_sync_write)
            good &= peer.run("long %d" % turn, layout, True, write)
        return good
    good = peer.run("write", [(0, 1 << 20, 2 << 20)], True, peer.one(engine.transfer_sync_write))
    good &= peer.run("read", [(1 << 20, 0, 2 << 20)], False, peer.one(engine.transfer_sync_read))
    good &= peer.run("submit", [(0, 0, 1 << 20)], True, peer.polled)
    for name, layout in layouts().items():
        write, read = engine.batch_transfer_sync_write, engine.batch_transfer_sync_read
        good &= peer.run("batch write " + name, layout, True, peer.batch(write))
        good &= peer.run("batch read " + name, layout, False, peer.batch(read))
        write, read = engine.batch_transfer_async_write, engine.batch_transfer_async_read
        good &= peer.run("async write " + name, layout, True, peer.wait(write))
        good &= peer.run("async read " + name, layout, False, peer.wait(read))
    return good


if __name__ == "__main__":
    role, device, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if role == "target":
        target(device, port)
    elif not initiator(device, port, sys.argv[4]):
        sys.exit(1)
